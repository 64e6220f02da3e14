"""A recorder for the CPU, whose replays can read nothing but tensors at fixed addresses, as those of a CUDA graph."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx


class Frozen:
    def __init__(self, program):
        self._program = program

    def replay(self, pools):
        return self._program(dict(pools))


class FrozenRecorder:
    """Traces a function to a program of tensor operations: each Python value that it reads becomes a constant."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, function, pools):
        # As in a capture, the function first runs on the pools themselves.
        function(pools)
        # The program would keep the pools, so it is traced with others.
        others = {name: torch.empty_like(pool) for name, pool in pools.items()}
        program = make_fx(function)(others)
        self.num_recorded += 1
        return Frozen(program)

    def num_bytes(self):
        return 5
