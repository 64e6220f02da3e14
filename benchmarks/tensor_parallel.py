"""Decode steps and prompts of a model on one device and on several: milliseconds, and microseconds of a sum over them.

    python -m benchmarks.tensor_parallel --shape llama-3.1-8b --batch 1,8,64 --devices 1,2
    python -m benchmarks.tensor_parallel --shape llama-3.1-70b --batch 1,8 --devices 4 --steps-per-launch 1,8
    python -m benchmarks.tensor_parallel --config deepseek-v3/config.json --layers 3:7 --record deepseek-v3-layers
    python -m benchmarks.tensor_parallel --shape qwen3-0.6b --batch 8 --context 64 --new-tokens 10000 --compare
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.tensor_parallel --shape tiny --batch 1,2 --context 16 --new-tokens 4

Weights are random; no device ever holds more than its part of the model and one whole parameter. All run in one process
through the engine's programs, which are compiled, and run once, before any is timed. With one step per launch, steps
are fed from the host and overlapped as in `benchmarks.generate`; with more, an `LLM` generates, and a token's time is
the difference of a long and a short generation. `--layers` takes some of a model's layers, with embedding and head. A
sum is that of the hidden states of one step, as each block ends with one: "us_per_sum" by XLA, "us_per_peer_sum" by our
kernel. The speedup is that over the first number of devices. Record: tensor-parallel-SHAPE.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.decode_start import decode_parser, parse
from benchmarks.generate import Setting, make_requests, make_sequence_runner, time_steps
from benchmarks.record import load_record, save_record
from benchmarks.report import render
from benchmarks.stopwatch import count_steps, watch_steps
from benchmarks.timing import refuse_profilers
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.layers.shards import Shards
from jaxkv.llm import LLM
from jaxkv.models.protocol import Model, Params
from jaxkv.models.registry import build_model, read_config, rules_for
from jaxkv.models.tensor_parallel import AXIS, TensorParallel, tensor_mesh
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.weights.load import expected_shapes
from jaxkv.weights.quantised.rounding import ROUNDINGS
from pallas_kernels.peer_sum.api import make_mailboxes, why_not_mailboxes

_SUMS = 64
"""Sums of the shorter of two launches, each of the result of the one before; the longer one has four times as many."""

_LAUNCHES = 16
"""Launches that are sent one after the other."""


def time_sums(
    mesh: Mesh, tokens: int, width: int, *, peers: jax.Array | None = None, trials: int = 9
) -> float:
    """Returns the microseconds of one sum over the devices of bfloat16 `[tokens, width]`, the median of `trials`.

    It is the difference of short and long launches. Several are sent before the first is waited for, so that what the
    host does to send them counts nothing either. A product with a number after each sum counts.

    Args:
        mesh: the devices.
        tokens: rows of the array.
        width: columns of the array.
        peers: `Mailboxes.peers`, for sums by our kernel where it can; `None` for XLA's.
        trials: number of measurements.
    """
    everywhere = PartitionSpec()
    shards = Shards(AXIS, mesh.size, splits_vocab=False)
    table = PartitionSpec(AXIS) if peers is not None else everywhere

    def chain(count: int) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
        def run(x: jax.Array, peers: jax.Array | None) -> jax.Array:
            for _ in range(count):
                # The next sum needs this one, and the numbers stay small.
                x = shards.summed(x, peers) * jnp.bfloat16(1 / mesh.size)
            return x

        specs = {"mesh": mesh, "in_specs": (everywhere, table), "out_specs": everywhere}
        return jax.jit(jax.shard_map(run, **specs, check_vma=False))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, width)), jnp.bfloat16)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, everywhere))

    def seconds(run: Callable[[jax.Array, jax.Array | None], jax.Array]) -> float:
        out, start = x, time.perf_counter()
        for _ in range(_LAUNCHES):
            out = run(out, peers)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / _LAUNCHES

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


def measure_launches(model: Model, params: Params, setting: Setting, steps: int) -> dict[str, Any]:
    """Returns the milliseconds per decode step of an engine whose launches have several steps each, and of its host."""
    prompts = np.random.default_rng(0).integers(
        1, model.vocab_size, (setting.batch, setting.context)
    )
    cache = CacheConfig(max_sequences=setting.batch)
    engine = EngineConfig(steps_per_launch=steps)
    short = max(1, setting.new_tokens // 4)
    longest = setting.context + setting.new_tokens
    with LLM.from_parts(
        model, params, max_model_len=longest, cache=cache, engine=engine, eos_ids=(), progress=False
    ) as llm:

        def seconds(tokens: int) -> float:
            start = time.perf_counter()
            llm.generate(prompts.tolist(), SamplingParams(temperature=0.0, max_tokens=tokens))
            return time.perf_counter() - start

        for tokens in (short, setting.new_tokens):
            seconds(tokens)
        apart = [seconds(setting.new_tokens) - seconds(short) for _ in range(setting.repeats)]
        watch = watch_steps(llm.engine)
        sent = count_steps(llm.engine)

        def host_seconds(tokens: int) -> float:
            before = dict(watch.seconds)
            seconds(tokens)
            spent = {name: now - before.get(name, 0.0) for name, now in watch.seconds.items()}
            return sum(spent.values()) - 2 * spent["wait"]

        # The steps of the prompts are in both.
        host_apart = host_seconds(setting.new_tokens) - host_seconds(short)
    if sent[steps] * steps <= sent[1]:
        raise RuntimeError(
            f"the engine sent {sent[1]} steps alone and {sent[steps]} launches of {steps}, so their time is not this"
        )
    count = setting.new_tokens - short
    return {
        "ms_per_token": statistics.median(apart) / count * 1e3,
        "host_ms": host_apart / count * 1e3,
    }


class Comparison:
    """Counts the results of a runner's steps, and those whose bits are not the same on all devices."""

    def __init__(self, runner: SequenceRunner) -> None:
        self.results, self.different = 0, 0
        self._read = runner.runner.read
        runner.runner.read = self._compared

    def _compared(self, out: jax.Array) -> Any:  # noqa: ANN401 - as `ModelRunner.read`
        first, *others = (np.asarray(shard.data).tobytes() for shard in out.addressable_shards)
        self.results += 1
        self.different += any(other != first for other in others)
        return self._read(out)


def measured(
    config: ModelConfig, settings: Sequence[Setting], count: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns a row for each setting and number of steps on `count` devices.

    The weights are drawn once, and freed at the end.
    """
    mesh = None if count == 1 else tensor_mesh(count)
    whole, quantization = build_model(config), options.quantization
    model = whole if mesh is None else TensorParallel(whole, mesh)
    rules = rules_for(config)
    types = expected_shapes(
        whole, rules, dtype=options.dtype, scheme=None, quantization=quantization
    )
    params = jax.block_until_ready(model.init_params_like(jax.random.key(0), types))
    boxes = None
    if mesh is not None and why_not_mailboxes(mesh) is None:
        boxes = make_mailboxes(mesh)
    rows = []
    for steps in map(int, options.steps_per_launch.split(",")):
        for setting in settings:
            row = asdict(setting) | {"devices": count, "quantization": quantization}
            row |= {"layers": config.num_layers, "steps_per_launch": steps}
            if steps > 1:
                rows.append(row | measure_launches(model, params, setting, steps))
                continue
            runner = make_sequence_runner(config, setting, params, None, mesh=mesh)
            if not options.compare:
                measure(runner, config, replace(setting, repeats=1))
            comparison = Comparison(runner) if options.compare else None
            row |= measure(runner, config, setting)
            if comparison:
                row |= {"results": comparison.results, "different": comparison.different}
            row["implementation"] = str(runner.runner.implementation)
            if mesh is not None:
                size = setting.batch, config.hidden_size
                row["us_per_sum"] = time_sums(mesh, *size)
                ours = boxes and time_sums(mesh, *size, peers=boxes.peers)
                row["us_per_peer_sum"] = ours
            rows.append(row)
            del runner
    return rows


def _layers(text: str) -> slice:
    first, _, end = text.partition(":")
    return slice(int(first), int(end))


def chosen(options: argparse.Namespace) -> ModelConfig:
    """Returns the config of the shape or file, with the layers asked for."""
    config = SHAPES[options.shape]
    if options.config:
        config = read_config(json.loads(options.config.read_text()), warn=False)
    if options.layers is None:
        return config
    if config.owners:
        raise ValueError(
            f"layers of a {config.family} model share parameters, so none can be left out"
        )
    if options.layers.stop > config.num_layers:
        raise ValueError(f"the model has {config.num_layers} layers, got {options.layers.stop}")
    parts = {name: getattr(config, name)[options.layers] for name in ("windows", "pattern")}
    return replace(config, num_layers=len(parts["windows"]), **parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all batch sizes and writes the record `tensor-parallel-SHAPE` after each number of devices."""
    parser = decode_parser(
        "Times tensor parallelism.", record="tensor-parallel", new_tokens=64, repeats=3
    )
    parser.add_argument("--devices", default="1,2", help="comma-separated numbers of devices")
    parser.add_argument("--quantization", choices=sorted(ROUNDINGS), help="weights in 8 or 4 bits")
    parser.add_argument("--config", type=Path, help="a config.json, instead of a shape")
    parser.add_argument("--layers", type=_layers, help="FIRST:END, of the model's layers")
    parser.add_argument("--steps-per-launch", default="1", help="comma-separated")
    parser.add_argument(
        "--compare", action="store_true", help="compare each result between the devices; slower"
    )
    options = parse(parser, arguments, record="tensor-parallel")
    if (options.config or options.layers) and options.record == f"tensor-parallel-{options.shape}":
        parser.error("--config and --layers need a --record of another name than the whole shape's")
    refuse_profilers()
    enable_compile_cache()
    settings = [
        Setting(int(size), options.context, options.new_tokens, options.repeats)
        for size in options.batch.split(",")
    ]
    rows: list[dict[str, Any]] = []
    for count in (int(number) for number in options.devices.split(",")):
        found = measured(chosen(options), settings, count, options)
        rows += found
        for at, row in enumerate(rows):
            row["speedup"] = rows[at % len(found)]["ms_per_token"] / row["ms_per_token"]
        path = save_record(options.record, rows, folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
