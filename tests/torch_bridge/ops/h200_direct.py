"""Compiles the kernels that torch launches, for an H200 without a GPU, and prints the launches' arguments as JSON.

Run as a program, because it must set up JAX before anything imports it: `python h200_direct.py few`, or `rest` for
those that are not among the few. Launches are made from shapes and dtypes, as torch's tensors have them, with the
checks of annotations switched on. Nothing is executed.
"""

import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from tests.engine.h200 import device, has_plugin
from tests.shape_checks import check_shapes


def main(part):
    """Prints, by name, what a launch is given: results written in place, and shapes of new ones; and what it runs."""
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which compile for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # Launches call nothing of jaxkv, and making the checks of all its functions takes seconds.
    check_shapes(["pallas_kernels"])
    # Nor do they need the rest of the package, which imports jaxkv and Transformers: five seconds more.
    package = sys.modules["torch_bridge"] = ModuleType("torch_bridge")
    package.__path__ = [str(Path(__file__).resolve().parents[3] / "torch_bridge")]
    import jax
    import torch

    from torch_bridge.ops import direct, launch

    class Described:
        def __init__(self, kernel, out, on):
            self.in_place = kernel.in_place
            self.out = [[list(one.shape), one.dtype.name] for one in out]

    h200 = device()
    place = jax.sharding.SingleDeviceSharding(h200)
    launch.Launch = Described
    direct.jax_device = lambda on: h200
    torch.cuda.is_current_stream_capturing = lambda: False
    cuda, half, short = torch.device("cuda", 0), torch.bfloat16, torch.int32
    compiled = []

    def load(kernel, structs, on):
        """Compiles the whole function too, and keeps the custom calls in it."""
        found = launch.load(kernel, structs, on)
        if found is not None:
            placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in structs]
            lowered = jax.jit(kernel).trace(*placed).lower(lowering_platforms=("cuda",))
            text = lowered.compile().as_text()
            compiled.append(re.findall(r'custom_call_target="([^"]+)"', text))
        return found

    direct.load = load

    def tensors(rows, width, heads=32, kv_heads=8, dtype=half):
        pool = ((2048, 16, kv_heads, 128), dtype)
        return ((rows, heads, 128), dtype), pool, pool, ((rows, width), short), ((rows,), short)

    def decode(*sizes, window=None, soft_cap=None, sinks=None, stored=None, **options):
        # Where heads lie is kept on the device, and there is none.
        like = tensors(*sizes, **options)
        if stored is not None:
            pool, scales = (like[1][0], stored), (like[1][0][:3], torch.float32)
            like = (like[0], pool, pool, *like[3:], scales, scales)
        given = None if sinks is None else ((like[0][0][1],), sinks)
        found = direct._decode(torch.device("cpu"), like, given, 0.1, window, soft_cap)
        return found and {
            "in_place": found._launch.in_place,
            "out": found._launch.out,
            "missing": found._missing,
            "columns": None if found._columns is None else found._columns.tolist(),
            "runs": compiled[-1],
        }

    def ragged(tokens, rows=1, width=64, window=None, soft_cap=None, sinks=None, stored=None):
        q, *others = tensors(rows, width)
        like = (((tokens, *q[0][1:]), half), *others, ((rows + 1,), short))
        if stored is not None:
            pool, scales = (like[1][0], stored), (like[1][0][:3], torch.float32)
            like = (like[0], pool, pool, *like[3:], scales, scales)
        given = None if sinks is None else ((32,), sinks)
        found = direct._ragged(cuda, like, given, 0.1, window, soft_cap)
        return found and {
            "in_place": found._launch.in_place, "out": found._launch.out, "runs": compiled[-1]
        }  # fmt: skip

    def write(tokens, dtype, pools=2):
        rows, pool = ((tokens, 8, 128), dtype), ((64, 16, 8, 128), dtype)
        found = direct._write(cuda, (((tokens,), short), *[rows] * pools, *[pool] * pools))
        return found and {"in_place": found.in_place, "out": found.out, "runs": compiled[-1]}

    few = {
        "decode": lambda: decode(8, 64),
        "decode float32": lambda: decode(8, 64, dtype=torch.float32),
        "ragged odd": lambda: ragged(63),
        "write": lambda: write(5, half),
        "write float64": lambda: write(5, torch.float64),
    }
    rest = {
        "ragged": lambda: ragged(64),
        "decode split": lambda: decode(1, 2048),
        "decode odd group": lambda: decode(8, 64, 28, 4),
        "decode split, odd group": lambda: decode(1, 512, 28, 4),
        "decode window": lambda: decode(64, 16, window=100),
        "decode wide window": lambda: decode(8, 64, window=2**20),
        "decode cap": lambda: decode(8, 64, soft_cap=30.0),
        "decode float16": lambda: decode(8, 64, dtype=torch.float16),
        "decode sinks": lambda: decode(8, 64, sinks=half),
        "ragged sinks": lambda: ragged(64, sinks=half),
        "decode split sinks": lambda: decode(1, 2048, sinks=torch.float32),
        "decode fp8": lambda: decode(8, 64, stored=torch.float8_e4m3fn),
        "decode int8 sinks": lambda: decode(8, 64, stored=torch.int8, sinks=half),
        "ragged window sinks": lambda: ragged(256, 3, 32, window=100, sinks=half),
        "ragged fp8": lambda: ragged(256, 3, 32, stored=torch.float8_e4m3fn),
        "ragged int8 window sinks": lambda: ragged(64, window=100, sinks=half, stored=torch.int8),
        "ragged rows": lambda: ragged(256, 3, 32),
        "ragged window": lambda: ragged(256, 3, 32, window=100),
        "ragged prompt": lambda: ragged(256, 8, 260),
        "write prompt": lambda: write(256, half),
        "write one": lambda: write(1, torch.float32),
        "write bytes": lambda: write(40, torch.uint8),
        "write one pool": lambda: write(40, half, pools=1),
    }
    chosen = {"few": few, "rest": rest}[part]
    print(json.dumps({name: make() for name, make in chosen.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
