"""What becomes of the decode kernel on an H200, seen without a GPU: its registers."""

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
    found = reports_of("decode.py")
    assert len(found) > 5
    return found


def test_it_spills_no_register(reports):
    for name, report in reports.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name


def test_keys_of_8_bits_leave_room_for_four_blocks_on_a_multiprocessor(reports):
    """Which is what the rules of mosaic_schedule.py count on."""
    for name in ("fp8", "int8", "fp8 head_dim 64"):
        assert max(reports[name]["registers"]) <= 128, name


def test_no_pool_is_copied(reports):
    for name in ("batch 64", "fp8", "int8"):
        assert reports[name]["temp_bytes"] < 2**20, name
