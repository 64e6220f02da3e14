"""The programs that move pages and states, which h200_programs.py compiles for an H200."""

from tests.engine import h200
from tests.engine.h200_hybrid import _sequence_runner as hybrid_sequence_runner

LAYERS = 8


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.offload.programs import BUCKETS, SwapSpec

    def paged(out):
        runner = h200.sequence_runner("xla", pages=64, layers=LAYERS).runner
        return runner.program(SwapSpec(out, runner.layout.group("gqa").index, BUCKETS[-1]))

    def states(out):
        pattern = ("mamba2", "gated"), ("attention", "gated")
        runner = hybrid_sequence_runner("xla", *pattern, keeps_outputs=True).runner
        return runner.program(SwapSpec(out, runner.layout.group("mamba2").index, BUCKETS[0]))

    return {
        "swap_out": lambda: paged(True),
        "swap_in": lambda: paged(False),
        "states_out": lambda: states(True),
        "states_in": lambda: states(False),
    }
