"""Compiles what moves pages and states for an H200, as h200.py does: `python h200_host.py swap_in ...`."""

import sys

from tests.engine import h200
from tests.engine.h200_hybrid import _executor as hybrid_executor

LAYERS = 32


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.offload.programs import BUCKETS, SwapSpec

    def paged(out):
        executor = h200.executor("xla", pages=64, layers=LAYERS)
        return executor.program(SwapSpec(out, executor.layout.group("gqa").index, BUCKETS[-1]))

    def states(out):
        pattern = ("mamba2", "gated"), ("attention", "gated")
        executor = hybrid_executor("xla", *pattern, keeps_outputs=True)
        return executor.program(SwapSpec(out, executor.layout.group("mamba2").index, BUCKETS[0]))

    return {
        "swap_out": lambda: paged(True),
        "swap_in": lambda: paged(False),
        "states_out": lambda: states(True),
        "states_in": lambda: states(False),
    }


if __name__ == "__main__":
    h200.main(sys.argv[1:], lowerings)
