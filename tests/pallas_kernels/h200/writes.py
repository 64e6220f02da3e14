"""Compiles the writing kernels for an H200 on a machine without a GPU and prints what became of them, as JSON.

Run as a program, because it must set up JAX before anything imports it: `python writes.py`. It prints
{"skipped": reason} where JAX's CUDA plugin is not installed. Nothing is executed.
"""

import json
import os
import re
import tempfile
from functools import partial
from pathlib import Path

from tests.engine.h200 import device, has_plugin
from tests.shape_checks import check_shapes

LAYERS = 6  # as many kernels as XLA wants to see before it makes a graph
PAGES, PAGE_SIZE = 2**16 + 1, 64


def page_write(tokens, dtype, pools, values, slots):
    from pallas_kernels.page_write import mosaic_gpu

    return [mosaic_gpu.page_write(pool, values, slots) for pool in pools]


def rotary_write(norm, pools, qkv, cos, sin, slots, weights):
    from pallas_kernels.rotary_write import mosaic_gpu

    weights = weights if norm else None
    return [mosaic_gpu.rotary_write(pool, qkv, cos, sin, slots, norm=weights) for pool in pools]


def programs():
    """Returns, by name, a function whose first argument is the donated pools, and its arguments."""
    import jax

    def arrays(lead, dtype, kv_heads, head_dim):
        shapes = [((kv_heads, head_dim), dtype)] * 2
        shapes += [((kv_heads,), "float32")] * 2 if dtype != "bfloat16" else []
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), of) for shape, of in shapes)

    def write(tokens, dtype="bfloat16"):
        pools = [arrays((PAGES, PAGE_SIZE), dtype, 8, 128)] * LAYERS
        slots = jax.ShapeDtypeStruct((tokens,), "int32")
        return partial(page_write, tokens, dtype), (pools, arrays((tokens,), dtype, 8, 128), slots)

    def rotate(tokens, dtype="bfloat16", heads=32, kv_heads=8, head_dim=128, half=64, norm=False):
        pools = [arrays((PAGES, PAGE_SIZE), dtype, kv_heads, head_dim)] * LAYERS
        qkv = jax.ShapeDtypeStruct((tokens, heads + 2 * kv_heads, head_dim), "bfloat16")
        angle = jax.ShapeDtypeStruct((tokens, half), "float32")
        slots = jax.ShapeDtypeStruct((tokens,), "int32")
        weights = jax.ShapeDtypeStruct((2, head_dim), "bfloat16")
        return partial(rotary_write, norm), (pools, qkv, angle, angle, slots, weights)

    return {
        "page_write": write(64),
        "page_write many": write(8192),
        "page_write fp8": write(64, "float8_e4m3fn"),
        "rotary_write": rotate(1),
        "rotary_write many": rotate(8192),
        "rotary_write norm int8": rotate(64, "int8", norm=True),
        "rotary_write 64 heads": rotate(64, "float8_e4m3fn", heads=64, norm=True),
        "rotary_write 256 wide": rotate(8, "int8", 8, 1, 256, 128, norm=True),
        "rotary_write odd": rotate(8, "float8_e4m3fn", 15, 5, 80, 40, norm=True),
    }


def report(function, arguments, dump):
    """Compiles one program and returns the facts about it."""
    import jax

    from jaxkv.programs.audit import read_command_buffers

    for old in dump.glob("*/*"):
        old.unlink()
    place = jax.sharding.SingleDeviceSharding(device())
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), arguments
    )
    with jax.default_device(device()):
        traced = jax.jit(function, donate_argnums=0).trace(*arguments)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    thunks = sorted((dump / "xla").glob("*thunk_sequence*.txt"))[-1]
    buffers = read_command_buffers(thunks.read_text().splitlines())
    memory = compiled.memory_analysis()
    assembled = "".join(file.read_text() for file in (dump / "mosaic").glob("*.ptxas"))
    return {
        "registers": [int(found) for found in re.findall(r"Used (\d+) registers", assembled)],
        "spilled": sum(int(found) for found in re.findall(r"(\d+) bytes spill", assembled)),
        "pool_bytes": sum(
            array.size * array.dtype.itemsize for array in jax.tree.leaves(arguments[0])
        ),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copies": re.findall(rf"= \w+\[{PAGES},\S* copy\(.*", compiled.as_text()),
        "command_buffers": buffers.count,
        "captured": buffers.captured,
        "outside": buffers.outside,
    }


def main(described=programs, look=report):
    """Prints what `look` finds of the programs that `described` returns."""
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which compile for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        for part in ("xla", "mosaic"):
            (dump / part).mkdir()
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump / 'xla'}"
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump / "mosaic")
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        check_shapes()
        print(json.dumps({name: look(*what, dump) for name, what in described().items()}))


if __name__ == "__main__":
    main()
