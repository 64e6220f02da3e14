"""Products of a weight in 8 and 4 bits, beside bfloat16 and what torch offers for the same bits.

    python -m benchmarks.few_bits_products --rows 1,8,16,64
    python -m benchmarks.few_bits_products --size 512 --rows 1,3    # to try it on a CPU

Each product is `size` x `size`, timed as in `benchmarks.ops`: calls over rotating copies of the weight in one CUDA
graph. The floor is the time to read codes and scales. Every result of ours is first compared with the product of the
widened weight in float32. torch's fp8 product (`_scaled_mm`) has x in fp8 too, with a scale per row; its 4-bit product
(`_weight_int4pack_mm`, tinygemm) has groups of 128 with zero points. Record: few-bits-products.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RECORDS, device_name, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import (
    CEILINGS,
    ROTATION_BYTES,
    Chain,
    Effort,
    refuse_profilers,
    time_chain,
    time_launches,
)
from pallas_kernels import skinny_matmul
from pallas_kernels.formats.few_bits import CODES, FewBits

FORMS: Mapping[str, tuple[str, int | None, Any]] = {
    "fp8 by row": ("float8_e4m3fn", None, jnp.float32),
    "fp8 by 128": ("float8_e4m3fn", 128, jnp.float32),
    "int8 by row": ("int8", None, jnp.bfloat16),
    "int4 by 128": ("int4", 128, jnp.bfloat16),
    "mxfp4": ("float4_e2m1fn", 32, jnp.float8_e8m0fnu),
}
"""Name -> code, columns of a scale (`None` for all), dtype of the scales."""


def draw(form: str, shape: tuple[int, ...], key: jax.Array) -> FewBits:
    """Returns a random weight `[*lead, out, inner]` of a form, whose products have magnitudes around 1."""
    code, group, dtype = FORMS[form]
    *lead, inner = shape
    if CODES[code].bits == 8:
        numbers = jnp.clip(jax.random.normal(key, shape, jnp.bfloat16) * 40, -127, 127)
        codes, unit = numbers.round().astype(CODES[code].stored), 40.0
    else:
        codes, unit = jax.random.bits(key, (*lead, inner // 2), jnp.uint8), 4.0
    scale = 2.0 ** -round(np.log2(unit * inner**0.5))
    scales = jnp.full((*lead, 1 if group is None else inner // group), scale, dtype)
    return FewBits(codes, scales, zeros=None, order=None, code=code)


def _copies(num_bytes: int) -> int:
    """Returns how many weights the calls rotate through, so that the L2 cache of a GPU holds few of them."""
    return 2 if jax.default_backend() == "cpu" else min(32, max(2, -(-ROTATION_BYTES // num_bytes)))


def time_ours(weight: jax.Array | FewBits, x: jax.Array, effort: Effort) -> dict[str, Any]:
    """Returns the microseconds of one product, their spread, and the bytes of the weight."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    copies = _copies(num_bytes)

    def call(shared: jax.Array, own: Any) -> tuple[jax.Array, Any]:  # noqa: ANN401 - a weight
        return shared, skinny_matmul(own, shared)

    chain = Chain(call, x, [jax.tree.map(jnp.copy, weight) for _ in range(copies)])
    wide = weight.widened() if isinstance(weight, FewBits) else weight.astype(jnp.float32)
    wanted = np.asarray(jnp.matmul(x.astype(jnp.float32), wide.T, precision="highest"))
    error = np.abs(np.asarray(chain.launch()[-1], np.float32) - wanted).max()
    if not error <= 0.02 * np.abs(wanted).max():
        raise RuntimeError(f"a result differs by {error:.3g} from the product in float32")
    timing = time_chain(chain, effort)
    return {"us": timing.us, "spread": timing.spread, "weight_bytes": num_bytes}


def torch_products(size: int, rows: int) -> Mapping[str, Callable[[], Callable[[], Any]]]:
    """Returns by form what draws a weight, and returns torch's product with it."""
    import torch

    halves = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, size, **halves)

    def plain() -> Callable[[], Any]:
        weight = torch.randn(size, size, **halves)
        return lambda: torch.nn.functional.linear(x, weight)

    def fp8() -> Callable[[], Any]:
        weight = torch.randn(size, size, **halves).to(torch.float8_e4m3fn)
        scales = torch.ones(1, size, device="cuda")
        own, narrow = torch.ones(rows, 1, device="cuda"), x.to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(narrow, weight.T, own, scales, out_dtype=torch.bfloat16)

    def int4() -> Callable[[], Any]:
        codes = torch.randint(0, 255, (size, size // 2), dtype=torch.uint8, device="cuda")
        packed = torch._convert_weight_to_int4pack(codes, 8)
        scales = torch.ones(size // 128, size, 2, **halves)
        return lambda: torch._weight_int4pack_mm(x, packed, 128, scales)

    return {"bfloat16": plain, "fp8 by row": fp8, "int4 by 128": int4}


def time_torch(make: Callable[[], Callable[[], Any]], num_bytes: int, effort: Effort) -> float:
    """Returns the microseconds of torch's product, in a CUDA graph over rotating weights."""
    import torch

    calls = [make() for _ in range(_copies(num_bytes))]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph, held = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(8):
            held = [call() for call in calls]
    timing = time_launches(
        graph.replay,
        calls=8 * len(calls),
        effort=effort,
        wait=lambda _: torch.cuda.synchronize(),
    )
    del held
    return timing.us


def measure(form: str, size: int, rows: int, effort: Effort) -> dict[str, Any]:
    """Returns the row of a form: our product, its floor, and torch's where it has one."""
    x = jax.random.normal(jax.random.key(1), (rows, size)).astype(jnp.bfloat16)
    if form == "bfloat16":
        weight = jax.random.normal(jax.random.key(0), (size, size)).astype(jnp.bfloat16)
        weight /= jnp.bfloat16(size**0.5)
    else:
        weight = draw(form, (size, size), jax.random.key(0))
    row = {"size": size, "rows": rows, "weight": form, **time_ours(weight, x, effort)}
    ceilings = CEILINGS.get(device_name())
    row["floor_us"] = ceilings and row["weight_bytes"] / ceilings.stream * 1e6
    row["gb_per_s"] = row["weight_bytes"] / row["us"] / 1e3
    row["torch_us"] = None
    if jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None:
        make = torch_products(size, rows).get(form)
        row["torch_us"] = make and time_torch(make, row["weight_bytes"], effort)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all forms and writes the record `few-bits-products`."""
    parser = argparse.ArgumentParser(description="Times products of weights in few bits.")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--rows", default="1,8,16,64", help="comma-separated rows of x")
    parser.add_argument("--record", default="few-bits-products")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    found: list[dict[str, Any]] = []
    for form in ("bfloat16", *FORMS):
        for rows in (int(count) for count in options.rows.split(",")):
            found.append(measure(form, options.size, rows, Effort()))
        # An interrupted run leaves the forms before.
        path = save_record(options.record, found, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
