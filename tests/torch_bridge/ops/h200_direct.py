"""Lowers what torch launches for an H200 that is not there, and prints what the launches would be told, as JSON.

Run as a program, because it must set up JAX before anything imports it. Nothing is compiled or executed.
"""

import json
import os

from tests.engine.h200 import device, has_plugin


def main():
    """Prints, by name, what a launch is given: results written in place, and shapes of new ones."""
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which lower for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    import torch

    from torch_bridge.ops import direct, launch

    class Described:
        def __init__(self, kernel, out, on):
            self.in_place = kernel.in_place
            self.out = [[list(one.shape), one.dtype.name] for one in out]

    h200 = device()
    launch.Launch = Described
    direct.jax_device = lambda on: h200
    torch.cuda.is_current_stream_capturing = lambda: False
    cuda, half, short = torch.device("cuda", 0), torch.bfloat16, torch.int32

    def tensors(rows, width, heads, kv_heads):
        pool = ((2048, 16, kv_heads, 128), half)
        return ((rows, heads, 128), half), pool, pool, ((rows, width), short), ((rows,), short)

    def decode(*sizes):
        # Where heads lie is kept on the device, and there is none.
        found = direct._decode(torch.device("cpu"), tensors(*sizes), 0.1, None, None)
        return found and {
            "in_place": found._launch.in_place,
            "out": found._launch.out,
            "missing": found._missing,
            "columns": None if found._columns is None else found._columns.tolist(),
        }

    def ragged(tokens):
        q, *others = tensors(1, 64, 32, 8)
        like = (((tokens, *q[0][1:]), half), *others, ((2,), short))
        found = direct._ragged(cuda, like, 0.1, None, None)
        return found and {"in_place": found[0].in_place, "out": found[0].out}

    def write():
        rows, pool = ((5, 8, 128), half), ((2048, 16, 8, 128), half)
        found = direct._write(cuda, (((5,), short), rows, rows, pool, pool))
        return found and {"in_place": found.in_place, "out": found.out}

    reports = {
        "decode": decode(8, 64, 32, 8),
        "decode split": decode(1, 2048, 32, 8),
        "decode odd group": decode(8, 64, 28, 4),
        "ragged": ragged(64),
        "ragged odd": ragged(63),
        "write": write(),
    }
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
