"""Decode steps and prompts of a model on one device and on several: milliseconds, and microseconds of a sum over them.

    python -m benchmarks.tensor_parallel --shape llama-3.1-8b --batch 1,8,64 --devices 2
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.tensor_parallel --shape tiny --batch 1,2 --context 16 --new-tokens 4

Weights are random and the same for every number of devices. All run in one process through the engine's programs, fed
from the host and overlapped as in `benchmarks.generate`; programs are compiled, and run once, before any is timed. A
sum is that of the hidden states of one step, as each block ends with one. Record: tensor-parallel-SHAPE.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.decode_start import decode_parser, draw_weights, parse
from benchmarks.generate import Setting, make_requests, make_sequence_runner, time_steps
from benchmarks.record import load_record, save_record
from benchmarks.report import render
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig
from jaxkv.models.protocol import Params
from jaxkv.models.registry import build_model
from jaxkv.models.tensor_parallel import AXIS, TensorParallel, tensor_mesh
from jaxkv.runner.sequence_runner import SequenceRunner

_SUMS = 64
"""Sums of one launch, each of the result of the one before."""


def time_sums(mesh: Mesh, tokens: int, width: int, trials: int = 9) -> float:
    """Returns the microseconds of one sum over the devices of bfloat16 `[tokens, width]`, the median of `trials`."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_SUMS):
            # The next sum needs this one, and the numbers stay small.
            x = jax.lax.psum(x, AXIS) * jnp.bfloat16(1 / mesh.size)
        return x

    everywhere = PartitionSpec()
    run = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, width)), jnp.bfloat16)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, everywhere))
    jax.block_until_ready(run(x))
    seconds = []
    for _ in range(trials):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / _SUMS * 1e6


def measure(runner: SequenceRunner, config: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds per decode step and per prompt of one runner."""
    requests = make_requests(config, setting)
    with ExitStack() as held:
        places = [held.enter_context(runner.reserved(one.tokens_held)) for one in requests]
        rows = [one.row(place) for one, place in zip(requests, places, strict=True)]
        timed = time_steps(runner, rows, requests, setting, overlapped=True)
    return {name: timed[name] for name in ("ms_per_token", "prompt_ms")}


def run(
    config: ModelConfig, setting: Setting, params: Params, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns a row for each number of devices, the first of which is 1."""
    found = []
    for count in counts:
        mesh = None if count == 1 else tensor_mesh(count)
        own = params
        if mesh is not None:
            own = TensorParallel(build_model(config), mesh).divided(params)
        runner = make_sequence_runner(config, setting, own, None, mesh=mesh)
        measure(runner, config, replace(setting, repeats=1))
        row = asdict(setting) | {"devices": count} | measure(runner, config, setting)
        row["implementation"] = str(runner.runner.implementation)
        if mesh is not None:
            row["us_per_sum"] = time_sums(mesh, setting.batch, config.hidden_size)
        row["speedup"] = (found[0] if found else row)["ms_per_token"] / row["ms_per_token"]
        found.append(row)
        del own, runner
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all batch sizes and writes the record `tensor-parallel-SHAPE` after each."""
    parser = decode_parser(
        "Times tensor parallelism.", record="tensor-parallel", new_tokens=64, repeats=3
    )
    parser.add_argument("--devices", default="2", help="comma-separated numbers beside one device")
    options = parse(parser, arguments, record="tensor-parallel")
    params, _ = draw_weights(options)
    counts = [1, *(int(count) for count in options.devices.split(","))]
    rows: list[dict[str, Any]] = []
    for batch in (int(size) for size in options.batch.split(",")):
        setting = Setting(batch, options.context, options.new_tokens, options.repeats)
        rows += run(SHAPES[options.shape], setting, params, counts)
        path = save_record(options.record, rows, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
