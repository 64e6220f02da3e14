"""What becomes of the choosing kernels on an H200, seen without a GPU: registers, copies, one graph."""

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX
from tests.pallas_kernels.h200.reports import reports_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)


@pytest.fixture(scope="module")
def reports():
    found = reports_of("choices.py")
    assert len(found) == 4
    return found


def test_they_spill_no_register_and_fit_their_blocks(reports):
    """A multiprocessor's registers are 128 for each thread of four warpgroups, and 168 of three: packed scores."""
    for name, report in reports.items():
        assert report["spilled"] == 0, name
        largest, *others = sorted(report["registers"], reverse=True)
        assert 0 < largest <= (168 if name == "index_topk packed" else 128), name
        assert all(0 < registers <= 128 for registers in others), name


def test_the_pool_of_keys_is_read_where_it_lies(reports):
    """Two views of it, by numbers and by bytes, cost nothing."""
    for name, report in reports.items():
        assert report["copies"] == [], name
        if name.startswith("index_topk"):
            assert report["temp_bytes"] < report["pool_bytes"], name


def test_they_join_one_command_buffer(reports):
    for name, report in reports.items():
        assert report["command_buffers"] == 1, name
        assert report["outside"] == [], name
