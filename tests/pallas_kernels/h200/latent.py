"""Compiles the latent attention kernel for an H200 on a machine without a GPU and prints what became of it, as JSON.

Run as a program, because it must set up JAX before anything imports it: `python latent.py`. It prints
{"skipped": reason} where JAX's CUDA plugin is not installed. Nothing is executed.
"""

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from tests.engine.h200 import device, has_plugin
from tests.pallas_kernels.h200.assembler import assembled
from tests.shape_checks import check_shapes


def programs():
    """Returns, by name, the arguments of `report`."""
    return {
        "128 heads": {"rows": 64, "heads": 128, "keys": 4096},
        "16 heads, keys on the left": {"rows": 64, "heads": 16, "keys": 4096},
        "32 heads, keys on the left": {"rows": 64, "heads": 32, "keys": 4096},
        "64 heads in a cluster": {"rows": 64, "heads": 64, "keys": 4096, "page": 8},
        "packed": {"rows": 4, "heads": 16, "keys": 4096, "page": 16, "tokens": 512},
    }


def report(dump, rows, heads, keys, page=64, tokens=None):
    """Compiles one call and returns the facts about it."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
    from pallas_kernels.latent_attention import mosaic_gpu
    from pallas_kernels.latent_kernel.schedule import Geometry, Schedule

    shapes = {
        "q": ((tokens or rows, heads, 576), "bfloat16"),
        "latent_pages": ((rows * keys // page, page, 1, 576), "bfloat16"),
        "page_table": ((rows, keys // page), "int32"),
        "seq_lens": ((rows,), "int32"),
        "cu_q_lens": ((rows + 1,), "int32"),
    }
    place = jax.sharding.SingleDeviceSharding(device())
    given = {name: jax.ShapeDtypeStruct(*of, sharding=place) for name, of in shapes.items()}
    packed = tokens is not None
    given["cu_q_lens"] = given["cu_q_lens"] if packed else None
    q, pages = (
        jax.ShapeDtypeStruct(shapes[name][0], jnp.bfloat16) for name in ("q", "latent_pages")
    )
    geometry = Geometry.of(q, pages, 512, packed=packed)
    pieces = mosaic_gpu.pieces_of(geometry, tokens or rows, rows)
    chosen = Schedule.by_rule(geometry, pieces, keys)
    options = {"options": LatentOptions(512, 0.1), "schedule": chosen, "want_lse": packed}
    with jax.default_device(device()), assembled(dump) as found:
        traced = jax.jit(partial(mosaic_gpu.attend, **options)).trace(LatentArrays(**given))
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    return {
        **found,
        "schedule": [chosen.cluster, chosen.parts],
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main():
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which compile for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        check_shapes()
        dump = Path(folder)
        print(json.dumps({name: report(dump, **what) for name, what in programs().items()}))


if __name__ == "__main__":
    main()
