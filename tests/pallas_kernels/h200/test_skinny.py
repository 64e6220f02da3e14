"""What becomes of `skinny_matmul` on an H200, seen without a GPU: its registers, and that no weight is copied."""

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX
from tests.pallas_kernels.h200.reports import reports_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)


@pytest.fixture(scope="module")
def reports():
    """Compiles all of them in one process: about 10 seconds on two idle cores."""
    found = reports_of("skinny.py")
    assert len(found) > 5
    return found


def test_it_spills_no_register(reports):
    for name, report in reports.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name


def test_no_weight_is_copied(reports):
    """The least of them has 6 MiB; what splits found is smaller."""
    for name, report in reports.items():
        assert report["temp_bytes"] < 5 * 2**20, name
