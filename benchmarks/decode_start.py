"""Shared setup of the decode benchmarks: options, random weights, and the read bandwidth of the floor."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.record import RECORDS
from benchmarks.timing import Chain, Effort, refuse_profilers, time_chain
from jaxkv.bench.shapes import SHAPES
from jaxkv.layers.linear import project
from jaxkv.models.protocol import Params
from jaxkv.models.registry import build_model


def decode_parser(
    description: str, *, record: str, new_tokens: int, repeats: int
) -> argparse.ArgumentParser:
    """Returns the argument parser of a benchmark, to which the caller may add options.

    Args:
        description: description of the benchmark.
        record: prefix of the record's default name, before the shape.
        new_tokens: default of `--new-tokens`.
        repeats: default of `--repeats`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", default="1,8,64", help="comma-separated batch sizes")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens")
    parser.add_argument(
        "--new-tokens", type=int, default=new_tokens, help="of each sequence; at least 2"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--implementation", help="of the ops; the best that can run if not given")
    parser.add_argument("--record", help=f"name of the record; {record}-SHAPE if not given")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, record: str
) -> argparse.Namespace:
    """Returns the options, with the record's full name in `record`; exits for options out of range."""
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error(
            f"--new-tokens must be at least 2, since tokens after the first are timed, got {options.new_tokens}"
        )
    options.record = options.record or f"{record}-{options.shape}"
    return options


def draw_weights(options: argparse.Namespace) -> tuple[Params, float]:
    """Returns random weights, and the read bandwidth of the floor in bytes per second."""
    refuse_profilers()
    bandwidth = measure_read_bandwidth()
    print(f"a matrix-vector product reads {bandwidth / 1e12:.3g} TB/s here", flush=True)
    # Not in one program, which would take 40 s to compile.
    params = build_model(SHAPES[options.shape]).init_params(jax.random.key(0), options.dtype)
    return jax.block_until_ready(params), bandwidth


def measure_read_bandwidth() -> float:
    """Returns the bytes per second at which products of a bfloat16 matrix and one vector read the matrix.

    On a GPU the matrices hold 4 GiB, which no L2 cache can keep from one launch to the next.
    """
    size, count = (16384, 8) if jax.default_backend() == "gpu" else (1024, 2)
    draw = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.bfloat16))
    matrices = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    vector = jnp.ones((1, size), jnp.bfloat16)
    chain = Chain(lambda x, weight: (x, project(weight, x)), vector, matrices)
    timing = time_chain(chain, Effort(trials=5))
    return matrices[0].nbytes / timing.us * 1e6
