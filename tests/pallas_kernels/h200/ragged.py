"""Compiles the prefill kernel for an H200 on a machine without a GPU and prints what became of it, as JSON.

Run as a program, because it must set up JAX before anything imports it: `python ragged.py`. It prints
{"skipped": reason} where JAX's CUDA plugin is not installed. Nothing is executed.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.engine.h200 import device, has_plugin

LAYERS = 2


def programs():
    """Returns, by name, what differs from a Llama whose rows lie in pages of 16."""
    return {
        "llama": {},
        "gpt-oss": {"heads": 64, "head_dim": 64, "window": 128, "sinks": True, "lse": True},
        "gemma": {"heads": 8, "kv_heads": 4, "head_dim": 256, "window": 512, "soft_cap": 50.0},
        "fp8": {"stored": "float8_e4m3fn", "lse": True},
    }


def step(options, lse, q, pools, page_table, seq_lens, cu_q_lens, sinks, scales):
    from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
    from pallas_kernels.ragged_attention import mosaic_gpu

    tables, options = (page_table, seq_lens, cu_q_lens), ScoreOptions(0.1, **options)
    calls = [AttentionArrays(q, pool, pool, *tables, sinks, scales, scales) for pool in pools]
    return [mosaic_gpu.ragged_attention(call, options, return_lse=lse) for call in calls]


@contextlib.contextmanager
def printed(file):
    """Catches what ptxas says, which goes past Python; a folder for it would be filled with all else too."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with file.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield file
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def report(
    dump,
    heads=32,
    kv_heads=8,
    head_dim=128,
    page_size=16,
    stored="bfloat16",
    sinks=False,
    lse=False,
    **options,
):
    """Compiles one program of several layers and returns the facts about it."""
    import jax

    from jaxkv.programs.audit import read_command_buffers

    for old in dump.iterdir():
        old.unlink()
    shapes = {
        "q": ((2048, heads, head_dim), "bfloat16"),
        "pool": ((2**16 + 1, page_size, kv_heads, head_dim), stored),
        "scales": ((2**16 + 1, page_size, kv_heads), "float32"),
        "page_table": ((8, 4096 // page_size + 1), "int32"),
        "seq_lens": ((8,), "int32"),
        "cu_q_lens": ((9,), "int32"),
        "sinks": ((heads,), "float32"),
    }
    place = jax.sharding.SingleDeviceSharding(device())
    given = {name: jax.ShapeDtypeStruct(*of, sharding=place) for name, of in shapes.items()}
    pools = [given.pop("pool")] * LAYERS
    given["sinks"] = given["sinks"] if sinks else None
    given["scales"] = given["scales"] if stored != "bfloat16" else None
    with jax.default_device(device()), printed(dump / "assembled") as assembled:
        traced = jax.jit(partial(step, options, lse)).trace(pools=pools, **given)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    thunks = sorted(dump.glob("*thunk_sequence*.txt"))[-1]
    buffers = read_command_buffers(thunks.read_text().splitlines())
    assembled = assembled.read_text()
    return {
        "registers": [int(found) for found in re.findall(r"Used (\d+) registers", assembled)],
        "spilled": sum(int(found) for found in re.findall(r"(\d+) bytes spill", assembled)),
        "serialised": "serialized" in assembled,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "nodes": buffers.captured,
        "command_buffers": buffers.count,
        "outside": buffers.outside,
    }


def main():
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which compile for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        print(json.dumps({name: report(dump, **what) for name, what in programs().items()}))


if __name__ == "__main__":
    main()
