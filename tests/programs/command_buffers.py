"""`read_command_buffers`: the command buffers of a compiled GPU program, from XLA's dump of its thunks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandBuffers:
    """The command buffers of a GPU program, from XLA's dump of its thunks.

    Attributes:
        count: number of command buffers (CUDA graphs).
        inside: kinds of the thunks inside them, in order.
        outside: kinds of the thunks outside of them, in order.
    """

    count: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]

    @property
    def captured(self) -> int:
        """Number of thunks inside them."""
        return len(self.inside)


def read_command_buffers(lines: Sequence[str]) -> CommandBuffers:
    """Parses the lines of `*.thunk_sequence_after_thunk_passes.txt`, in which indentation is nesting.

    XLA writes the file with `--xla_dump_to` in `XLA_FLAGS`. Of sequences only the contents are counted.
    """
    count, inside, outside = 0, [], []
    graph_depth = None
    for line in lines:
        found = re.match(r"( *)\d+: (k\w+)", line)
        if found is None:
            continue
        depth, kind = len(found.group(1)), found.group(2)
        if graph_depth is not None and depth <= graph_depth:
            graph_depth = None
        if graph_depth is not None:
            inside.append(kind)
        elif kind == "kCommandBuffer":
            count += 1
            graph_depth = depth
        elif kind != "kSequential":
            outside.append(kind)
    return CommandBuffers(count, tuple(inside), tuple(outside))
