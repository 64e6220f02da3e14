"""The command buffers of XLA's thunk sequences are counted."""

from tests.programs.command_buffers import read_command_buffers


def test_command_buffers_and_what_runs_outside_them_are_read_from_the_thunks():
    lines = [
        "000: kCustomKernel [source] loop_gather_fusion",
        "001: kWhile [prev=000 (1)]",
        "  002: kCommandBuffer [source]",
        "    003: kCustomKernel [source] fusion_1",
        "    004: kCustomKernel [prev=003 (1)] fusion_2",
        "  005: kCopy [sink] copy",
        "",
        "006: kSequential [source]",
        "    007: kCommandBuffer [source]",
        "        008: kGemm [source]",
    ]
    found = read_command_buffers(lines)
    assert (found.count, found.captured) == (2, 3)
    assert found.inside == ("kCustomKernel", "kCustomKernel", "kGemm")
    assert found.outside == ("kCustomKernel", "kWhile", "kCopy")
