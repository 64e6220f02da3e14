"""Kernels in the form that they have where requests for registers are ignored, as on JAX 0.12; prints reports as JSON.

Run as a program, because it must set up JAX before anything imports it. It compiles for an H200 on a machine without a
GPU, with any JAX, and prints {"skipped": reason} where JAX's CUDA plugin is not installed. Nothing is executed.
"""

import json
import os
import tempfile
from functools import partial
from pathlib import Path

from tests.engine.h200 import device, has_plugin
from tests.pallas_kernels.h200 import grouped, latent, ragged
from tests.pallas_kernels.h200.assembler import assembled
from tests.pallas_kernels.h200.kernels import report

MODULES = {"ragged": ragged, "grouped": grouped}
# What requests registers where they are honoured. `kernels.py` and `latent.py` name the programs.
CHOSEN = {
    "ragged": ("llama", "gemma", "fp8"),
    "grouped": ("gpt-oss-down-t2048 mxfp4",),
    "latent": ("packed", "128 heads"),
    "sparse": ("bytes",),
}


def sparse_report(dump, name):
    """Compiles `sparse_attention` over records of one kind and returns what the assembler says."""
    import jax

    from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
    from pallas_kernels.sparse_attention import mosaic_gpu

    width, dtype = {"bytes": (656, "uint8"), "numbers": (576, "bfloat16")}[name]
    place = jax.sharding.SingleDeviceSharding(device())
    shape = partial(jax.ShapeDtypeStruct, sharding=place)
    arrays = SparseArrays(
        q=shape((32, 128, 576), "bfloat16"),
        records=shape((4096, 64, 1, width), dtype),
        slots=shape((32, 2048), "int32"),
        counts=shape((32,), "int32"),
    )
    run = partial(mosaic_gpu.sparse_attention, options=LatentOptions(512, 0.1))
    with jax.default_device(device()), assembled(dump) as found:
        jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).compile()
    return found


def main():
    """Prints the reports of the chosen programs."""
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
        from pallas_kernels.mosaic import jax_versions

        jax_versions.HONOURS_REGISTER_REQUESTS = False
        found = {
            f"{module} {name}": report(*described.programs()[name], dump)
            for module, described in MODULES.items()
            for name in CHOSEN[module]
        }
        for name in CHOSEN["latent"]:
            found[f"latent {name}"] = latent.report(dump, **latent.programs()[name])
        for name in CHOSEN["sparse"]:
            found[f"sparse {name}"] = sparse_report(dump, name)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
