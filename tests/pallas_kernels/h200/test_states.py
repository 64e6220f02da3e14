"""What becomes of the kernels with recurrent states on an H200, seen without a GPU."""

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX
from tests.pallas_kernels.h200.reports import reports_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)


@pytest.fixture(scope="module")
def reports():
    """Compiles all of them in one process: about 15 seconds on two idle cores."""
    return reports_of("states.py")


def test_they_spill_no_register_to_speak_of(reports):
    """But for the scan of a state of 256 columns, which fills the registers (NOTES.md)."""
    for name, report in reports.items():
        assert report["registers"], name
        limit = 512 if name == "ssd_scan 256" else 0
        assert report["spilled"] <= limit, name
    for name in ("causal_conv", "ssd_update"):
        assert max(reports[name]["registers"]) <= 160, name


def test_the_scans_fit_their_warpgroups_and_no_products_are_serialised(reports):
    """Two consumers and a producer start with 168 registers a thread, one consumer with 240."""
    for name, registers in (("ssd_scan", 168), ("ssd_scan 256", 240)):
        assert max(reports[name]["registers"]) <= registers, name
        assert not reports[name]["serialised"], name


def test_donated_pools_are_neither_copied_nor_returned_elsewhere(reports):
    """The pools have up to 26 billion elements."""
    for name, report in reports.items():
        assert report["alias_bytes"] == report["pool_bytes"], name
        assert report["copies"] == [], name
        assert report["temp_bytes"] < 1_000_000, name


def test_they_join_one_command_buffer(reports):
    for name, report in reports.items():
        assert report["command_buffers"] == 1, name
        assert report["outside"] == [], name
    # Six layers of two kernels; the tables of packed rows are made once for all of them.
    assert 12 <= reports["ssd_scan"]["captured"] < 2 * 12
