"""The programs between cache and host compiled for an H200 without a GPU: in-place updates."""

from tests.engine.h200_host import LAYERS
from tests.engine.test_h200_hybrid import compiled

UNIT = LAYERS * 2 * 64 * 4 * 128 * 2
"""Bytes of one page over all layers."""


def test_what_moves_pages_reads_and_writes_them_where_they_lie():
    names = ["swap_out", "swap_in", "states_out", "states_in"]
    reports = compiled(names, "h200_host.py")
    for name in names:
        report = reports[name]
        assert report["backend"] == "gpu"
        assert report["problems"] == []
        assert report["copies"] == []
        assert report["alias_bytes"] == report["cache_bytes"], name
        assert (report["cache_bytes"] > 0) == name.endswith("_in")
    # No more than the pages that move, once, and a few ids.
    assert reports["swap_out"]["temp_bytes"] <= 16 * UNIT + 4096
    assert reports["swap_in"]["temp_bytes"] <= 16 * UNIT
    # One launch for all copies, and few of them: a part for each layer of each page took 40 s to compile.
    assert reports["swap_out"]["command_buffers"] == reports["swap_in"]["command_buffers"] == 1
    assert reports["swap_out"]["captured"] <= 2 * 16 + 2
