"""Compiles what moves pages and states for an H200, as h200.py does: `python h200_host.py swap_in ...`."""

import sys

from tests.engine import h200
from tests.engine.h200_hybrid import _executor as hybrid_executor

LAYERS = 32


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.engine.host_programs import BUCKETS, SWAP_IN, SWAP_OUT, declare

    def paged(kind):
        executor = h200.executor("xla", pages=64, layers=LAYERS)
        return executor.program(declare(kind, executor.layout.group("gqa"), BUCKETS[-1]))

    def states(kind):
        pattern = ("mamba2", "gated"), ("attention", "gated")
        executor = hybrid_executor("xla", *pattern, keeps_outputs=True)
        return executor.program(declare(kind, executor.layout.group("mamba2"), BUCKETS[0]))

    return {
        "swap_out": lambda: paged(SWAP_OUT),
        "swap_in": lambda: paged(SWAP_IN),
        "states_out": lambda: states(SWAP_OUT),
        "states_in": lambda: states(SWAP_IN),
    }


if __name__ == "__main__":
    h200.main(sys.argv[1:], lowerings)
