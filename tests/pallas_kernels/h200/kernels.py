"""Compiles kernels for an H200 on a machine without a GPU and prints what became of them, as JSON.

Run as a program, because it must set up JAX before anything imports it: `python kernels.py few`, or `rest` for those
that are not among the few. It prints {"skipped": reason} where JAX's CUDA plugin is not installed. Nothing is executed.
One process compiles the programs of all modules beside it, since a start of JAX and of the plugin takes seconds.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

from tests.engine.h200 import device, has_plugin
from tests.pallas_kernels.h200 import choices, decode, grouped, ragged, skinny, states, sums, writes
from tests.pallas_kernels.h200.assembler import assembled
from tests.pallas_kernels.h200.writes import PAGES
from tests.programs.command_buffers import read_command_buffers

MODULES = {
    "choices": choices,
    "decode": decode,
    "grouped": grouped,
    "ragged": ragged,
    "skinny": skinny,
    "states": states,
    "sums": sums,
    "writes": writes,
}
# Each kernel, with most ways in which it is compiled that another size of it does not show.
FEW = {
    "choices": ("index_topk", "row_topk and group_rows"),
    "decode": ("batch 64",),
    "grouped": ("gpt-oss-up-t8", "gpt-oss-down-t2048", "gathered e4m3 by 128"),
    # Of pages of 8 bits, the same kernel reads what XLA has unpacked.
    "ragged": ("llama",),
    "skinny": (
        "8b-o-b64",
        "8b-gate-up-b1",
        "8b-logits-b64",
        "8b-down-b64, 37 rows",
        "8b-gate-up-b64 int4 by 128, zeros",
    ),
    "states": (
        "causal_conv",
        "causal_conv one token each",
        "ssd_update",
        "delta_update",
        "ssd_scan",
    ),
    "sums": ("2 devices, 1 row", "2 devices, 64 rows joined"),
    "writes": (
        "page_write",
        "page_write many",
        "rotary_write",
        "rotary_write many",
        "rotary_write norm int8",
        "rotary_write 256 wide",
    ),
}


def report(function, arguments, dump):
    """Compiles one program and returns the facts about it."""
    import jax

    for old in dump.glob("*"):
        old.unlink()
    place = jax.sharding.SingleDeviceSharding(device())
    arguments = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place), arguments
    )
    with jax.default_device(device()), assembled(dump) as found:
        traced = jax.jit(function, donate_argnums=0).trace(*arguments)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    thunks = sorted(dump.glob("*thunk_sequence*.txt"))[-1]
    buffers = read_command_buffers(thunks.read_text().splitlines())
    memory = compiled.memory_analysis()
    return {
        **found,
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


def main(part):
    """Prints the reports of the few programs of each module, or of the rest."""
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
        found = {
            module: {
                name: report(*what, dump)
                for name, what in described.programs().items()
                if (name in FEW[module]) == (part == "few")
            }
            for module, described in MODULES.items()
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
