"""Times generation with random weights of a real model's shape: the whole loop, and one program per token.

    python -m benchmarks.generate --shape llama-3.1-8b --batch 1,8,64

The loop is `jaxkv.generate`, with a static cache of its own. The per-step form runs the engine's programs over the
engine's cache and is fed from the host (packed metadata) at every step: "overlapped" reads each step's tokens one step
late, "in turn" reads them before the next step is sent. The floor of a decode step is its bytes over the read bandwidth
that a matrix-vector product reached on the same device a moment earlier.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.decode_start import decode_parser, draw_weights, parse
from benchmarks.record import save_record
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.generation import generate
from jaxkv.models.protocol import Params
from jaxkv.models.registry import build_model
from jaxkv.models.tensor_parallel import TensorParallel
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.rows import Row
from jaxkv.runner.sampled_rows import unpack_sampled
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.step_shapes import StepShapes, clamp_token_budget, grain_of

KNOWN_BYTES_PER_SECOND = 4.3e12
"""Bytes per second that a matrix-vector product read on an H200; older records compare with this floor."""


@dataclass(frozen=True)
class Setting:
    """Sizes of one measurement: sequences, tokens and repeats."""

    batch: int
    context: int
    new_tokens: int
    repeats: int


def decode_bytes(config: ModelConfig, params: Params, setting: Setting, itemsize: int) -> float:
    """Returns the bytes that a step reads: the weights, and each sequence's keys and values at mid-generation."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        # One row of it is read per token.
        weights -= config.vocab_size * config.hidden_size * itemsize
    tokens = setting.batch * (setting.context + setting.new_tokens / 2)
    cache = tokens * config.num_layers * 2 * config.kv_heads * config.head_dim * itemsize
    return weights + cache


def make_requests(
    config: ModelConfig,
    setting: Setting,
    **sampling: Any,  # noqa: ANN401 - options of SamplingParams
) -> list[Request]:
    """Returns requests of random prompts; greedy if `sampling` is not given."""
    draw = np.random.default_rng(0)
    options = {"temperature": 0.0, "max_tokens": setting.new_tokens, "ignore_eos": True, **sampling}
    params = SamplingParams(**options)
    return [
        Request(
            prompt=tuple(draw.integers(0, config.vocab_size, setting.context).tolist()),
            params=params,
            seed=0,
            stop_ids=(),
        )
        for _ in range(setting.batch)
    ]


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _time_packing(pack: Callable[[], Any], repeats: int) -> float:
    """Returns the host's time to pack one step, in milliseconds."""
    durations = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        pack()
        durations.append(time.perf_counter() - start)
    return _median_ms(durations[1:])


def time_loop(
    sequence_runner: SequenceRunner,
    rows: Sequence[Row],
    requests: Sequence[Request],
    setting: Setting,
) -> dict[str, float]:
    """Times `jaxkv.generate`; the time of the prompt is that of a run of one token."""
    del rows
    prompts = np.asarray([request.prompt for request in requests], np.int32)

    def run(tokens: int) -> float:
        sampling = [replace(request.params, max_tokens=tokens) for request in requests]
        start = time.perf_counter()
        out = generate(
            sequence_runner.runner.params, sequence_runner.runner.model, prompts, sampling=sampling
        )
        lengths = np.asarray(out.lengths)
        seconds = time.perf_counter() - start
        assert (lengths == tokens).all(), "a row ended early"
        return seconds

    run(1)
    run(setting.new_tokens)
    prompt = [run(1) for _ in range(setting.repeats)]
    whole = [run(setting.new_tokens) for _ in range(setting.repeats)]
    steps = setting.new_tokens - 1
    return {
        "prompt_ms": _median_ms(prompt),
        "ms_per_token": (_median_ms(whole) - _median_ms(prompt)) / steps,
        "spread_ms": (max(whole) - min(whole)) / steps * 1e3,
    }


def time_steps(
    sequence_runner: SequenceRunner,
    rows: Sequence[Row],
    requests: Sequence[Request],
    setting: Setting,
    *,
    overlapped: bool,
) -> dict[str, float]:
    """Times the per-step form, for which the host packs and sends the metadata of every step."""
    total = max(request.tokens_held for request in requests)
    sizes = {"max_tokens": sequence_runner.length_buckets[-1], "max_rows": setting.batch}
    runner = sequence_runner.runner
    shapes = StepShapes(
        runner.layout,
        max_tokens=sizes["max_tokens"],
        max_rows=sizes["max_rows"],
        token_budget=clamp_token_budget(setting.batch * setting.context, **sizes),
        whole_prompts=True,
        grain=grain_of(runner.layout, runner.implementation.name),
    )
    prefill = shapes.declare(rows, total_tokens=total)
    one = [replace(row, tokens=(0,), carry=True) for row in rows]
    decode = shapes.declare(one, total_tokens=total)
    steps = setting.new_tokens - 1

    def next_rows(done: int) -> list[Row]:
        return [replace(row, start=setting.context + done, generated=done + 1) for row in one]

    def generate() -> tuple[float, float, float]:
        """Returns the seconds of the prompt, and per token in total and in sending alone."""
        start = time.perf_counter()
        packed = sequence_runner.step(prefill, rows)
        sequence_runner.runner.read(packed)
        sending, begin = 0.0, time.perf_counter()
        for done in range(steps):
            before = time.perf_counter()
            following = sequence_runner.step(decode, next_rows(done))
            sending += time.perf_counter() - before
            unpack_sampled(
                sequence_runner.runner.read(packed if overlapped else following), decode.features
            )
            packed = following
        sequence_runner.runner.read(packed)
        return begin - start, (time.perf_counter() - begin) / steps, sending / steps

    generate()
    prompt, per_token, enqueue = zip(*(generate() for _ in range(setting.repeats)), strict=True)
    last = next_rows(steps - 1)
    return {
        "prompt_ms": _median_ms(prompt),
        "ms_per_token": _median_ms(per_token),
        "spread_ms": (max(per_token) - min(per_token)) * 1e3,
        "enqueue_ms": _median_ms(enqueue),
        "pack_ms": _time_packing(
            lambda: sequence_runner.packer.pack(decode, last, sequence_runner.allocator),
            20 * setting.repeats,
        ),
    }


def make_sequence_runner(
    config: ModelConfig,
    setting: Setting,
    params: Params,
    implementation: str | None,
    length: int | None = None,
    *,
    batch_invariant: bool = False,
    mesh: Mesh | None = None,
) -> SequenceRunner:
    """Returns a runner whose cache holds exactly the setting's sequences, or as many of `length` tokens.

    The devices of a `mesh` compute the model together; `params` are then divided among them.
    """
    whole = replace(
        build_model(config), implementation=implementation, batch_invariant=batch_invariant
    )
    model = whole if mesh is None else TensorParallel(whole, mesh)
    dtype = str(jax.tree.leaves(params)[0].dtype)
    length = length or setting.context + setting.new_tokens
    cache = CacheConfig(max_sequences=setting.batch)
    layout, budget = plan_cache(model, cache, dtype=dtype, max_model_len=length, free_bytes=None)
    limits = {"max_tokens": length, "max_rows": setting.batch}
    return SequenceRunner(ModelRunner(model, params, layout, budget.counts, Programs()), **limits)


def measure(
    config: ModelConfig,
    setting: Setting,
    params: Params,
    *,
    implementation: str | None,
    bandwidth: float,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows of the forms, and the rows of the programs that they run, for one batch size."""
    sequence_runner = make_sequence_runner(config, setting, params, implementation)
    requests = make_requests(config, setting)
    itemsize = jax.tree.leaves(params)[0].dtype.itemsize
    num_bytes = decode_bytes(config, params, setting, itemsize)
    floors = {
        "read_bandwidth_tb_s": bandwidth / 1e12,
        "floor_ms": num_bytes / bandwidth * 1e3,
        "floor_at_4300_gb_s_ms": num_bytes / KNOWN_BYTES_PER_SECOND * 1e3,
    }
    sizes = asdict(setting)
    results = []
    with ExitStack() as held:
        sequences = [held.enter_context(sequence_runner.reserved(r.tokens_held)) for r in requests]
        rows = [one.row(place) for one, place in zip(requests, sequences, strict=True)]
        work = (sequence_runner, rows, requests, setting)
        forms = {
            "loop": lambda: time_loop(*work),
            "step, overlapped": lambda: time_steps(*work, overlapped=True),
            "step, in turn": lambda: time_steps(*work, overlapped=False),
        }
        for form, run in forms.items():
            timed = run()
            ratio = {"ratio_to_floor": timed["ms_per_token"] / floors["floor_ms"]}
            results.append(sizes | {"form": form} | floors | timed | ratio)
            print(_line(results[-1]), flush=True)
    return results, [sizes | row for row in _program_rows(sequence_runner.runner.programs)]


def _program_rows(programs: Programs) -> list[dict[str, Any]]:
    return [
        {
            "program": str(program.spec),
            "compile_seconds": program.seconds,
            "loaded_from_cache": program.loaded,
            "temp_bytes": program.report.temp_bytes,
            "alias_bytes": program.report.alias_bytes,
            "cache_bytes": program.report.cache_bytes,
        }
        for program in programs.manifest()
    ]


def _line(row: dict[str, Any]) -> str:
    return (
        f"batch {row['batch']:3d}  {row['form']:17s} {row['ms_per_token']:7.3f} ms/token  "
        f"floor {row['floor_ms']:6.3f}  x{row['ratio_to_floor']:5.2f}  prompt {row['prompt_ms']:8.1f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all batch sizes and saves two records: of the forms, and of the programs (NAME-programs)."""
    parser = decode_parser(
        "Times generation with random weights.", record="generate", new_tokens=128, repeats=5
    )
    options = parse(parser, arguments, record="generate")
    params, bandwidth = draw_weights(options)
    config = SHAPES[options.shape]
    results, programs = [], []
    for batch in (int(size) for size in options.batch.split(",")):
        setting = Setting(batch, options.context, options.new_tokens, options.repeats)
        forms, needed = measure(
            config, setting, params, implementation=options.implementation, bandwidth=bandwidth
        )
        results += forms
        programs += needed
        # After each batch, so that a run that is cut short keeps what it has measured.
        for record, rows in ((options.record, results), (f"{options.record}-programs", programs)):
            print(f"recorded in {save_record(record, rows, folder=options.folder)}")


if __name__ == "__main__":
    main()
