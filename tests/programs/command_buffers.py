"""`read_command_buffers`: the command buffers of a compiled GPU program, from XLA's dump of its thunks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandBuffers:
    """The command buffers of a GPU program, from XLA's dump of its thunks.

    Attributes:
        count: number of command buffers (CUDA graphs).
        captured: number of thunks inside them.
        outside: kinds of the thunks outside of them, in order.
    """

    count: int
    captured: int
    outside: tuple[str, ...]


def read_command_buffers(lines: Sequence[str]) -> CommandBuffers:
    """Parses the lines of `*.thunk_sequence_after_thunk_passes.txt`, in which indentation is nesting.

    XLA writes the file with `--xla_dump_to` in `XLA_FLAGS`. Of sequences only the contents are counted.
    """
    count, captured, outside = 0, 0, []
    graph_depth = None
    for line in lines:
        found = re.match(r"( *)\d+: (k\w+)", line)
        if found is None:
            continue
        depth, kind = len(found.group(1)), found.group(2)
        if graph_depth is not None and depth <= graph_depth:
            graph_depth = None
        if graph_depth is not None:
            captured += 1
        elif kind == "kCommandBuffer":
            count += 1
            graph_depth = depth
        elif kind != "kSequential":
            outside.append(kind)
    return CommandBuffers(count, captured, tuple(outside))
