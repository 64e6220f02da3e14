"""What becomes of the writing kernels on an H200, seen without a GPU: registers, copies, donation, one graph."""

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
    found = reports_of("writes.py")
    assert len(found) > 8
    return found


def test_they_spill_no_register_and_leave_room_for_several_blocks(reports):
    for name, report in reports.items():
        assert report["spilled"] == 0, name
        assert report["registers"], name
        assert max(report["registers"]) <= 170, name
    for name in ("rotary_write many", "page_write many"):
        assert max(reports[name]["registers"]) <= 80, name


def test_donated_pools_are_neither_copied_nor_returned_elsewhere(reports):
    """The pools have 4.3 billion elements."""
    for name, report in reports.items():
        assert report["alias_bytes"] == report["pool_bytes"], name
        assert report["copies"] == [], name
        assert report["temp_bytes"] < 10_000, name


def test_they_join_one_command_buffer(reports):
    """The launches of six layers are nodes of one graph."""
    for name, report in reports.items():
        assert (report["command_buffers"], report["captured"]) == (1, 6), name
        assert report["outside"] == [], name
