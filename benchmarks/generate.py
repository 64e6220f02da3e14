"""Times generation with random weights of a real model's shape: the whole loop, and one program per token.

    python -m benchmarks.generate --shape llama-3.1-8b --batch 1,8,64

Both forms run the package's own programs over the package's own cache. The per-step form is fed from the host
(packed metadata) at every step; "overlapped" reads each step's tokens one step late, "in turn" reads them
before the next step is sent.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import jax
import numpy as np

from benchmarks.record import save_record
from jaxkv.config import CacheConfig, ModelConfig, RopeConfig, SamplingParams
from jaxkv.engine.executor import Executor
from jaxkv.engine.offline import new_row, reserve
from jaxkv.engine.programs import Programs
from jaxkv.engine.request import Request
from jaxkv.engine.results import unpack_sampled
from jaxkv.engine.rows import Row
from jaxkv.models.registry import build_model
from jaxkv.plan import plan_cache

MATVEC_BYTES_PER_SECOND = 4.3e12
"""What a matrix-vector product reads on an H200; the floor of a decode step is its bytes over this."""


def _llama_8b() -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        max_positions=131072,
        rope=RopeConfig(
            theta=500000.0,
            rotary_dim=128,
            kind="llama3",
            factor=8.0,
            original_max_positions=8192,
        ),
        windows=(None,) * 32,
        norm_eps=1e-5,
    )


def _qwen3_600m() -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        num_layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn_size=3072,
        max_positions=40960,
        rope=RopeConfig(theta=1000000.0, rotary_dim=128),
        windows=(None,) * 28,
        qk_norm=True,
        tie_embeddings=True,
    )


def _tiny() -> ModelConfig:
    """A shape for trying the benchmark on a CPU."""
    return ModelConfig(
        family="llama",
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=128,
        max_positions=2048,
        rope=RopeConfig(rotary_dim=16),
        windows=(None,) * 2,
    )


SHAPES = {"llama-3.1-8b": _llama_8b, "qwen3-0.6b": _qwen3_600m, "tiny": _tiny}


@dataclass(frozen=True)
class Setting:
    """One row of the table: how many sequences, how long."""

    batch: int
    context: int
    new_tokens: int


def decode_floor_ms(config: ModelConfig, params: object, setting: Setting, itemsize: int) -> float:
    """Returns the time to read the weights once and each sequence's keys and values at mid-generation."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= (
            config.vocab_size * config.hidden_size * itemsize
        )  # One row of it is read per token.
    tokens = setting.batch * (setting.context + setting.new_tokens / 2)
    cache = tokens * config.num_layers * 2 * config.kv_heads * config.head_dim * itemsize
    return (weights + cache) / MATVEC_BYTES_PER_SECOND * 1e3


def _requests(config: ModelConfig, setting: Setting) -> list[Request]:
    draw = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=setting.new_tokens, ignore_eos=True)
    return [
        Request(
            prompt=tuple(draw.integers(0, config.vocab_size, setting.context).tolist()),
            params=sampling,
            seed=0,
            stop_ids=(),
        )
        for _ in range(setting.batch)
    ]


def _rows(executor: Executor, config: ModelConfig, setting: Setting) -> list[Row]:
    rows = [new_row(request) for request in _requests(config, setting)]
    for row in rows:
        reserve(executor, row, setting.context + setting.new_tokens)
    return rows


def time_loop(executor: Executor, rows: list[Row], setting: Setting, repeats: int) -> dict:
    """Times the one-executable form; a run that stops after one token is the prompt's share."""
    total = setting.context + setting.new_tokens
    shape = executor.shapes.shape(rows, total_tokens=total, loop=True)

    def run(tokens: int) -> float:
        limited = [replace(row, max_tokens=tokens) for row in rows]
        start = time.perf_counter()
        out = executor.loop(shape, limited)
        lengths = np.asarray(out.lengths)
        seconds = time.perf_counter() - start
        assert (lengths[: setting.batch] == tokens).all(), "a row ended early"
        return seconds

    run(1)
    run(setting.new_tokens)
    prompt = [run(1) for _ in range(repeats)]
    whole = [run(setting.new_tokens) for _ in range(repeats)]
    per_token = (statistics.median(whole) - statistics.median(prompt)) / (setting.new_tokens - 1)
    return {"prompt_ms": statistics.median(prompt) * 1e3, "ms_per_token": per_token * 1e3}


def time_steps(
    executor: Executor, rows: list[Row], setting: Setting, *, overlapped: bool, repeats: int
) -> dict:
    """Times the per-step form, whose metadata comes from the host at every step."""
    total = setting.context + setting.new_tokens
    prefill = executor.shapes.shape(rows, total_tokens=total)
    one = [replace(row, tokens=(0,), carry=True) for row in rows]
    decode = executor.shapes.shape(one, total_tokens=total, decode=True)
    per_step, enqueue, first_token = [], [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        packed = executor.step(prefill, rows)
        np.asarray(packed)
        first_token.append(time.perf_counter() - start)
        sending, begin = 0.0, time.perf_counter()
        for index in range(setting.new_tokens - 1):
            before = time.perf_counter()
            following = executor.step(
                decode, [replace(row, start=setting.context + index) for row in one]
            )
            sending += time.perf_counter() - before
            unpack_sampled(np.asarray(packed if overlapped else following), decode.features)
            packed = following
        np.asarray(packed)
        per_step.append((time.perf_counter() - begin) / (setting.new_tokens - 1))
        enqueue.append(sending / (setting.new_tokens - 1))
    return {
        "prompt_ms": statistics.median(first_token[1:]) * 1e3,
        "ms_per_token": statistics.median(per_step[1:]) * 1e3,
        "enqueue_ms": statistics.median(enqueue[1:]) * 1e3,
        "spread_ms": (max(per_step[1:]) - min(per_step[1:])) * 1e3,
    }


def measure(
    config: ModelConfig, setting: Setting, params: object, *, implementation: str | None, repeats: int
) -> list[dict]:
    """Returns one result per form for one batch size."""
    model = replace(build_model(config), implementation=implementation)
    dtype = str(jax.tree.leaves(params)[0].dtype)
    length = setting.context + setting.new_tokens
    cache = CacheConfig(max_sequences=setting.batch)
    layout, budget = plan_cache(model, cache, dtype=dtype, max_model_len=length, free_bytes=None)
    programs = Programs()
    executor = Executor(
        model,
        params,
        layout,
        budget.counts,
        max_tokens=length,
        max_rows=setting.batch,
        programs=programs,
    )
    rows = _rows(executor, config, setting)
    floor = decode_floor_ms(config, params, setting, np.dtype(dtype).itemsize)
    forms = {
        "loop": lambda: time_loop(executor, rows, setting, repeats),
        "step, overlapped": lambda: time_steps(
            executor, rows, setting, overlapped=True, repeats=repeats
        ),
        "step, in turn": lambda: time_steps(
            executor, rows, setting, overlapped=False, repeats=repeats
        ),
    }
    results = []
    for form, run in forms.items():
        timed = run()
        results.append(
            {
                "batch": setting.batch,
                "context": setting.context,
                "new_tokens": setting.new_tokens,
                "form": form,
                "floor_ms": floor,
                **timed,
                "ratio_to_floor": timed["ms_per_token"] / floor,
            }
        )
        print(
            f"batch {setting.batch:3d}  {form:17s} {timed['ms_per_token']:7.3f} ms/token  "
            f"floor {floor:6.3f}  x{timed['ms_per_token'] / floor:5.2f}  prompt {timed['prompt_ms']:8.1f} ms",
            flush=True,
        )
    return results


def main() -> None:
    """Measures the asked-for batches and saves one record."""
    parser = argparse.ArgumentParser(description="Times generation with random weights.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", default="1,8,64", help="comma-separated batch sizes")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--implementation", help="of the ops; the best that can run if not given")
    parser.add_argument("--record", help="name of the record; generate-SHAPE if not given")
    options = parser.parse_args()
    config = SHAPES[options.shape]()
    model = build_model(config)
    params = jax.jit(model.init_params, static_argnums=1)(jax.random.key(0), options.dtype)
    jax.block_until_ready(params)
    results = []
    for batch in (int(size) for size in options.batch.split(",")):
        setting = Setting(batch, options.context, options.new_tokens)
        results += measure(
            config,
            setting,
            params,
            implementation=options.implementation,
            repeats=options.repeats,
        )
    path = save_record(options.record or f"generate-{options.shape}", results)
    print(f"recorded in {path}")


if __name__ == "__main__":
    main()
