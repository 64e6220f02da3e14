"""Decode steps and prompts of a model on one device and on several: milliseconds, and microseconds of a sum over them.

    python -m benchmarks.tensor_parallel --shape llama-3.1-8b --batch 1,8,64 --devices 1,2
    python -m benchmarks.tensor_parallel --shape llama-3.1-70b --batch 1,8 --devices 4 --context 512
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.tensor_parallel --shape tiny --batch 1,2 --context 16 --new-tokens 4

Weights are random; no device ever holds more than its part of the model and one whole parameter. All run in one process
through the engine's programs, fed from the host and overlapped as in `benchmarks.generate`; programs are compiled, and
run once, before any is timed. A sum is that of the hidden states of one step, as each block ends with one. The speedup
is that over the first number of devices. Record: tensor-parallel-SHAPE.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.decode_start import decode_parser, parse
from benchmarks.generate import Setting, make_requests, make_sequence_runner, time_steps
from benchmarks.record import load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig
from jaxkv.models.registry import build_model, rules_for
from jaxkv.models.tensor_parallel import AXIS, TensorParallel, tensor_mesh
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.weights.load import expected_shapes
from jaxkv.weights.quantised.rounding import ROUNDINGS

_SUMS = 64
"""Sums of the shorter of two launches, each of the result of the one before; the longer one has four times as many."""


def time_sums(mesh: Mesh, tokens: int, width: int, trials: int = 9) -> float:
    """Returns the microseconds of one sum over the devices of bfloat16 `[tokens, width]`, the median of `trials`.

    It is the difference of two launches, so what a launch costs counts nothing.
    """
    everywhere = PartitionSpec()

    def chain(count: int) -> Callable[[jax.Array], jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(count):
                # The next sum needs this one, and the numbers stay small.
                x = jax.lax.psum(x, AXIS) * jnp.bfloat16(1 / mesh.size)
            return x

        specs = {"mesh": mesh, "in_specs": everywhere, "out_specs": everywhere}
        return jax.jit(jax.shard_map(run, **specs, check_vma=False))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, width)), jnp.bfloat16)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, everywhere))

    def seconds(run: Callable[[jax.Array], jax.Array]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        return time.perf_counter() - start

    short, long = chain(_SUMS), chain(4 * _SUMS)
    for run in (short, long):
        seconds(run)
    apart = [seconds(long) - seconds(short) for _ in range(trials)]
    return statistics.median(apart) / (3 * _SUMS) * 1e6


def measure(runner: SequenceRunner, config: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds of one runner per decode step, per prompt, and of the host to send a step."""
    requests = make_requests(config, setting)
    with ExitStack() as held:
        places = [held.enter_context(runner.reserved(one.tokens_held)) for one in requests]
        rows = [one.row(place) for one, place in zip(requests, places, strict=True)]
        timed = time_steps(runner, rows, requests, setting, overlapped=True)
    return {name: timed[name] for name in ("ms_per_token", "prompt_ms", "enqueue_ms")}


def measured(
    config: ModelConfig,
    settings: Sequence[Setting],
    count: int,
    dtype: str,
    quantization: str | None,
) -> list[dict[str, Any]]:
    """Returns a row for each setting on `count` devices. The weights are drawn once, and freed at the end."""
    mesh = None if count == 1 else tensor_mesh(count)
    whole = build_model(config)
    model = whole if mesh is None else TensorParallel(whole, mesh)
    rules = rules_for(config)
    types = expected_shapes(whole, rules, dtype=dtype, scheme=None, quantization=quantization)
    params = jax.block_until_ready(model.init_params_like(jax.random.key(0), types))
    rows = []
    for setting in settings:
        runner = make_sequence_runner(config, setting, params, None, mesh=mesh)
        measure(runner, config, replace(setting, repeats=1))
        row = asdict(setting) | {"devices": count, "quantization": quantization}
        row |= measure(runner, config, setting)
        row["implementation"] = str(runner.runner.implementation)
        row["us_per_sum"] = mesh and time_sums(mesh, setting.batch, config.hidden_size)
        rows.append(row)
        del runner
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all batch sizes and writes the record `tensor-parallel-SHAPE` after each number of devices."""
    parser = decode_parser(
        "Times tensor parallelism.", record="tensor-parallel", new_tokens=64, repeats=3
    )
    parser.add_argument("--devices", default="1,2", help="comma-separated numbers of devices")
    parser.add_argument("--quantization", choices=sorted(ROUNDINGS), help="weights in 8 or 4 bits")
    options = parse(parser, arguments, record="tensor-parallel")
    refuse_profilers()
    settings = [
        Setting(int(size), options.context, options.new_tokens, options.repeats)
        for size in options.batch.split(",")
    ]
    rows: list[dict[str, Any]] = []
    for count in (int(number) for number in options.devices.split(",")):
        config = SHAPES[options.shape]
        rows += measured(config, settings, count, options.dtype, options.quantization)
        for at, row in enumerate(rows):
            row["speedup"] = rows[at % len(settings)]["ms_per_token"] / row["ms_per_token"]
        path = save_record(options.record, rows, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
