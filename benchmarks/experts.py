"""A layer of routed experts on our two kernels, and in plain XLA, for the layers of published models.

    python -m benchmarks.experts --models gpt-oss-20b-mxfp4,qwen3-next --tokens 1,16,64
    python -m benchmarks.experts --models tiny,tiny-mxfp4 --tokens 1,4    # to try it on a CPU

A call is `mixture_of_experts` with its router, timed as in `benchmarks.ops`: calls in one CUDA graph over rotating
random inputs, which ask for different experts of the same layer. Tokens read the experts that they choose
(`gathered_matmul`, with at most as many choices as experts), or are sorted by expert (`grouped_matmul`). "way" is that
of a model. The floor is the time to read as many experts as are asked for on average; calls of one token find some of
theirs in the L2 cache. The results of all ways are compared. Record: experts.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.few_bits_products import draw
from benchmarks.record import RECORDS, device_name, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import CEILINGS, Chain, Effort, refuse_profilers, time_chain
from jaxkv.config.blocks import MixtureConfig
from jaxkv.layers.mixture import grouped_for, mixture_of_experts, route
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.formats.few_bits import FewBits

Params = dict[str, Any]

WAYS = {
    "gathered": {"grouped": None, "gathered": "mosaic_gpu"},
    "grouped": {"grouped": "mosaic_gpu"},
    "plain": {"grouped": None, "gathered": "xla"},
}
"""How a layer's experts run: the columns of a row, and the arguments of `mixture_of_experts`."""

_INPUTS = 8
"""Inputs that the calls rotate through."""


@dataclass(frozen=True)
class Layer:
    """A model's layer of experts: width, sizes, and the experts' form in `few_bits_products.FORMS`, or `None`."""

    width: int
    mixture: MixtureConfig
    form: str | None = None


def _gated(experts: int, top_k: int, size: int, **options: Any) -> MixtureConfig:  # noqa: ANN401
    return MixtureConfig(experts=experts, top_k=top_k, size=size, gated=True, **options)


LAYERS = {
    "gpt-oss-20b-mxfp4": Layer(2880, _gated(32, 4, 2880), "mxfp4"),
    "gpt-oss-20b": Layer(2880, _gated(32, 4, 2880)),
    "qwen3-next": Layer(2048, _gated(512, 10, 512)),
    "qwen3-next-fp8": Layer(2048, _gated(512, 10, 512), "fp8 by row"),
    "qwen3-30b-a3b": Layer(2048, _gated(128, 8, 768)),
    "qwen3-30b-a3b-fp8": Layer(2048, _gated(128, 8, 768), "fp8 by 128"),
    "qwen3-30b-a3b-int4": Layer(2048, _gated(128, 8, 768), "int4 by 128"),
    "deepseek-v3": Layer(7168, _gated(256, 8, 2048, scoring="sigmoid", groups=8, top_groups=4)),
    "tiny": Layer(64, _gated(8, 2, 64)),
    "tiny-mxfp4": Layer(64, _gated(8, 2, 64), "mxfp4"),
}


def draw_experts(key: jax.Array, shape: tuple[int, ...], form: str | None) -> jax.Array | FewBits:
    """Returns random experts `[*lead, out, inner]`, whose products have magnitudes around 1."""
    if form is None:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)
    return draw(form, shape, key)


def draw_layer(layer: Layer) -> Params:
    """Returns random parameters of a layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    experts, size, width = layer.mixture.experts, layer.mixture.size, layer.width
    made = jax.jit(draw_experts, static_argnums=(1, 2))
    return {
        "router": made(keys[0], (experts, width), None),
        "experts_up": made(keys[1], (experts, 2 * size, width), layer.form),
        "experts_down": made(keys[2], (width, experts, size), layer.form),
    }


def measure(name: str, tokens: int, effort: Effort) -> dict[str, Any]:
    """Returns the row of a layer and a number of tokens: microseconds of each way, and the floor."""
    layer = LAYERS[name]
    params, mixture = draw_layer(layer), layer.mixture
    weights = {key: params[key] for key in ("experts_up", "experts_down")}
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    inputs = [
        jax.random.normal(key, (tokens, layer.width), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(1), _INPUTS)
    ]
    chosen = [route(params, x, mixture=mixture)[0] for x in inputs]
    asked = float(np.mean([len(np.unique(np.asarray(each))) for each in chosen]))
    ceilings = CEILINGS.get(device_name())
    read = num_bytes * asked / mixture.experts
    row = {"layer": name, "tokens": tokens, "experts_asked": asked}
    run = partial(mixture_of_experts, mixture=mixture, activation="silu")
    ours = grouped_for(params, inputs[0], mixture=mixture, implementation="mosaic_gpu")
    few = "gathered" if tokens * mixture.top_k <= mixture.experts else "plain"
    row["way"] = few if ours is None else "grouped"
    results = {}
    for way, options in WAYS.items():
        if way == "gathered" and tokens * mixture.top_k > mixture.experts:
            continue

        def call(
            params: Params, x: jax.Array, options: Mapping[str, Any] = options
        ) -> tuple[Params, Any]:
            # As in models: the router is the same, whichever way its experts run.
            routing = route(params, x, mixture=mixture)
            return params, run(params, x, routing=routing, **options)

        column = f"us_{way}"
        row |= {column: None, f"spread_{column}": None}
        try:
            results[way] = np.asarray(jax.jit(call)(params, inputs[0])[1], np.float32)
        except Unsupported as reason:
            print(f"{name}: {reason}")
            continue
        # Each launch is given the parameters and gives them back.
        chain = Chain(call, params, inputs)
        timing = time_chain(chain, effort)
        params = chain.shared
        row |= {column: timing.us, f"spread_{column}": timing.spread}
    plain = results["plain"]
    for way, result in results.items():
        error = np.abs(result - plain).max()
        if not error <= 0.03 * np.abs(plain).max():
            raise RuntimeError(f"the results of {name}, {way}, differ by {error:.3g}")
    return row | {"floor_us": ceilings and read / ceilings.stream * 1e6}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all layers and writes the record `experts`."""
    parser = argparse.ArgumentParser(description="Times layers of routed experts.")
    known = ", ".join(LAYERS)
    parser.add_argument("--models", default="gpt-oss-20b-mxfp4,gpt-oss-20b", help=f"of {known}")
    parser.add_argument("--tokens", default="1,16,64", help="comma-separated numbers of tokens")
    parser.add_argument("--record", default="experts")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    found: list[dict[str, Any]] = []
    for name in options.models.split(","):
        for tokens in (int(count) for count in options.tokens.split(",")):
            found.append(measure(name, tokens, Effort()))
        # An interrupted run leaves the layers before.
        path = save_record(options.record, found, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
