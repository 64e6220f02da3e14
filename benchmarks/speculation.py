"""Decode with drafts of a set acceptance beside decode without: milliseconds per token of each sequence.

    python -m benchmarks.speculation --shape llama-3.1-8b --batch 1,8 --drafts 1,2,3,4,5 --acceptance 0.5,0.7,0.9
    python -m benchmarks.speculation --shape llama-3.1-8b --batch 1 --drafts 5 --acceptance 0.7 --drafter device,host
    python -m benchmarks.speculation --shape tiny --batch 1,2 --drafts 2 --acceptance 0.7 --tokens 16   # on a CPU

No real drafter is needed: the tokens of a first run, through the same programs, are the answers, and each draft is one
of them with the set probability. With the drafter "device", each step ends with the drafts of the next one, so steps
overlap; with "host" each is read before the next one is sent. Where rounding leads a sequence to another token than in
the first run, all drafts behind it are wrong, so the measured acceptance stands beside the set one.
`expected_ms_per_token` is the measured time of a step by the tokens that steps of the set acceptance have. "adaptive"
rows have drafts that are never right, and an engine that may pause them. All programs are compiled, and run once,
before.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.serving import Served
from jaxkv.bench.shapes import SHAPES
from jaxkv.cache.state import Cache
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.warm_up import compile_all, declare_served
from jaxkv.runner.sequence_runner import SequenceRunner

Row = dict[str, Any]
Answers = Mapping[tuple[int, ...], Sequence[int]]

_PROMPT_TOKENS = 64
_SETTLING_TOKENS = 16
"""Generated before the clock starts."""

DRAFTERS = ("device", "host")

_BUDGET = 128
"""Most tokens of a step. A larger one only adds programs to compile: prompts are short here."""


@dataclass(frozen=True)
class BehindText:
    """Drafts, on the device, what stands behind each text in the cache: `write_drafts` puts it there.

    So the drafts of every acceptance are data of one program.

    Attributes:
        vocab_size: number of token ids.
    """

    vocab_size: int

    def draft(
        self, texts: Int[Array, "rows max_tokens"], lengths: Int[Array, " rows"], most: int, /
    ) -> Int[Array, "rows most"]:
        """Returns the guesses, see `TextDrafter.draft`."""
        places = lengths[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
        found = jnp.take_along_axis(texts, jnp.minimum(places, texts.shape[1] - 1), axis=1)
        return jnp.clip(found, 0, self.vocab_size - 1)


class SetAcceptance:
    """Drafts each token rightly with a set probability.

    Args:
        answers: prompt -> the tokens that follow it.
        acceptance: probability of each draft to be right, if those before it are.
        vocab_size: number of token ids.
    """

    def __init__(self, answers: Answers, acceptance: float, vocab_size: int) -> None:
        self._answers, self._acceptance, self._vocab_size = answers, acceptance, vocab_size
        self._draw = random.Random(0)

    def draft(
        self, sequences: Sequence[RequestState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Returns `most` tokens for each request."""
        return [
            self._of(one, one.generated, count) for one, count in zip(sequences, most, strict=True)
        ]

    def write_drafts(self, engine: Engine, states: Sequence[RequestState]) -> None:
        """Writes drafts of all further tokens behind the texts that the cache keeps, for `BehindText`."""
        runner, allocator = engine.runner, engine.sequence_runner.allocator
        layer, owner = runner.model.num_layers, runner.owner
        choices = owner.handle().cache.layer(layer)
        texts, lengths = np.array(choices["token_history"]), np.asarray(choices["text_length"])
        for state in states:
            _, entry = allocator.states(state.number, "sampling")
            start = int(lengths[entry])
            generated = start - len(state.request.prompt)
            texts[entry, start:] = self._of(state, generated, texts.shape[1] - start)

        def replaced(cache: Cache) -> tuple[Cache, None]:
            choices = cache.layer(layer)
            old = choices["token_history"]
            new = jax.device_put(texts, old.sharding)
            return cache.with_layer(layer, {**choices, "token_history": new}), None

        owner.run(replaced)

    def _of(self, sequence: RequestState, generated: int, most: int) -> tuple[int, ...]:
        answer = self._answers.get(sequence.request.prompt, ())
        rest = answer[generated : generated + most]
        guesses = [*rest, *[0] * (most - len(rest))]
        return tuple(
            guess if self._draw.random() < self._acceptance else (guess + 1) % self._vocab_size
            for guess in guesses
        )


def requests_of(batch: int, tokens: int, vocab_size: int) -> list[Request]:
    """Returns greedy requests of random prompts, which generate more tokens than are timed."""
    draw = np.random.default_rng(batch)
    params = SamplingParams(temperature=0.0, max_tokens=_longest(tokens) - _PROMPT_TOKENS)
    prompts = draw.integers(0, vocab_size, (batch, _PROMPT_TOKENS)).tolist()
    return [Request(prompt=tuple(prompt), params=params, seed=0, stop_ids=()) for prompt in prompts]


def generate(
    engine: Engine, requests: Sequence[Request], tokens: int
) -> tuple[float, float, list[list[int]]]:
    """Generates at least `tokens` tokens for each request.

    Returns:
        Seconds per step, tokens per sequence and step, and the tokens of each request.
    """
    states = [engine.add([one])[0] for one in requests]
    while min(state.generated for state in states) < 1:
        engine.step()
    if engine.shapes.drafter is not None:
        assert engine.speculation is not None, (
            "a drafter on the device is one of an engine with drafts"
        )
        drafter = engine.speculation.drafter
        assert isinstance(drafter, SetAcceptance), "every engine here has one"
        drafter.write_drafts(engine, states)
    while min(state.generated for state in states) < _SETTLING_TOKENS:
        engine.step()
    steps, start = engine.steps, time.perf_counter()
    before = sum(state.generated for state in states)
    while min(state.generated for state in states) < _SETTLING_TOKENS + tokens:
        engine.step()
    seconds, taken = time.perf_counter() - start, engine.steps - steps
    made = sum(state.generated for state in states) - before
    for state in states:
        engine.abort(state)
    while engine.has_work:
        engine.step()
    return seconds / taken, made / taken / len(states), [state.token_ids for state in states]


def _longest(tokens: int) -> int:
    """Returns the tokens of a sequence: one that is ahead of the others needs more than are timed."""
    return _PROMPT_TOKENS + 3 * (_SETTLING_TOKENS + tokens)


def _config(drafts: int, *, adaptive: bool = False) -> EngineConfig:
    speculation = SpeculationConfig(tokens=drafts, adaptive=adaptive) if drafts else None
    return EngineConfig(
        token_budget=_BUDGET, prefix_cache=False, steps_per_launch=1, speculation=speculation
    )


def _compile(engine: Engine, batches: Sequence[int], tokens: int) -> None:
    """Compiles the programs of all batches, and runs each."""
    vocab_size = engine.runner.model.vocab_size
    needed = [
        spec
        for batch in batches
        for spec in declare_served(engine, requests_of(batch, tokens, vocab_size)[0], batch)
    ]
    needed = list(dict.fromkeys(needed))
    compile_all(engine.runner, needed)
    run_steps(engine, needed)


def _engine(
    sequence_runner: SequenceRunner, where: str, drafts: int, *, adaptive: bool = False
) -> Engine:
    """Returns an engine whose drafts are made on the "device", or on the "host"."""
    engine = Engine(sequence_runner, None, _config(drafts, adaptive=adaptive))
    vocab_size = sequence_runner.runner.model.vocab_size
    engine.shapes.drafter = BehindText(vocab_size) if where == "device" else None
    return engine


def _row(
    about: Mapping[str, Any], drafts: int, way: str, seconds: float, made: float, wanted: float
) -> Row:
    """Returns a row: `seconds` per step with `made` tokens per sequence, of which `wanted` were to be expected."""
    return {
        "batch": about["batch"],
        "drafter": about["drafter"],
        "drafts": drafts,
        "acceptance": way,
        "step_ms": seconds * 1e3,
        "tokens_per_step": made,
        "expected_tokens": wanted,
        "ms_per_token": seconds / made * 1e3,
        "expected_ms_per_token": seconds / wanted * 1e3,
        "speedup": about["plain"] * made / seconds,
    }


def _drafting(engine: Engine, answers: Answers, acceptance: float) -> None:
    """Gives an engine a drafter of a set acceptance."""
    assert engine.speculation is not None, "this engine drafts"
    vocab_size = engine.runner.model.vocab_size
    engine.speculation.drafter = SetAcceptance(answers, acceptance, vocab_size)


def _rows_of(
    engine: Engine,
    requests: Sequence[Request],
    count: int,
    acceptances: Sequence[float],
    tokens: int,
    about: Mapping[str, Any],
) -> Iterator[Row]:
    """Yields a row for each acceptance, with `count` drafts per row."""
    _drafting(engine, {}, 0.0)
    _, _, found = generate(engine, requests, 2 * tokens)
    answers = {one.prompt: ids for one, ids in zip(requests, found, strict=True)}
    for acceptance in acceptances:
        _drafting(engine, answers, acceptance)
        seconds, made, _ = generate(engine, requests, tokens)
        wanted = sum(acceptance**position for position in range(count + 1))
        yield _row(about, count, f"{acceptance:g}", seconds, made, wanted)


def run(
    served: Served,
    batches: Sequence[int],
    drafts: Sequence[int],
    acceptances: Sequence[float],
    tokens: int,
    drafters: Sequence[str] = DRAFTERS,
) -> Iterator[Row]:
    """Yields a row for each batch, drafter and number of drafts, without drafts first."""
    # The cache has room for drafts, so the engine without drafts keeps the texts too.
    sequence_runner = served.build().sequence_runner
    plain = Engine(sequence_runner, None, _config(0))
    engines = {
        (where, count): _engine(sequence_runner, where, count)
        for where in drafters
        for count in drafts
    }
    for engine in (plain, *engines.values()):
        _compile(engine, batches, tokens)
    for batch in batches:
        requests = requests_of(batch, tokens, plain.runner.model.vocab_size)
        plain_seconds, _, _ = generate(plain, requests, tokens)
        about = {"batch": batch, "drafter": "none", "plain": plain_seconds}
        yield _row(about, 0, "none", plain_seconds, 1.0, 1.0)
        for (where, count), engine in engines.items():
            about["drafter"] = where
            yield from _rows_of(engine, requests, count, acceptances, tokens, about)
        for where in drafters:
            about["drafter"] = where
            adaptive = _engine(sequence_runner, where, max(drafts), adaptive=True)
            _drafting(adaptive, {}, 0.0)
            seconds, made, _ = generate(adaptive, requests, 3 * tokens // 2)
            yield _row(about, max(drafts), "0, adaptive", seconds, made, made)
    assert plain.runner.programs.compiled_late == 0, "a program was compiled while it was measured"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes the record `speculation-SHAPE`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--drafts", default="1,2,3,4,5")
    parser.add_argument("--acceptance", default="0.5,0.7,0.9")
    parser.add_argument("--drafter", default="device", help="device, host, or both by a comma")
    parser.add_argument("--tokens", type=int, default=96, help="timed tokens of each sequence")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    batches = [int(one) for one in options.batch.split(",")]
    drafts = [int(one) for one in options.drafts.split(",")]
    drafters = options.drafter.split(",")
    if not {*drafters} <= {*DRAFTERS}:
        parser.error(f"--drafter must be of {', '.join(DRAFTERS)}, got {options.drafter!r}")
    served = Served(
        shape=options.shape,
        dtype=options.dtype,
        max_model_len=_longest(2 * options.tokens),
        cache=CacheConfig(max_sequences=max(batches)),
        engine=replace(_config(max(drafts)), token_budget=max(_BUDGET, *batches)),
    )
    rows: list[Row] = []
    acceptances = [float(one) for one in options.acceptance.split(",")]
    for row in run(served, batches, drafts, acceptances, options.tokens, drafters):
        rows.append(row)
        print(row, flush=True)
        save_record(f"speculation-{options.shape}", rows, folder=options.folder)
    print(render(load_record(options.folder / f"speculation-{options.shape}.json")))


if __name__ == "__main__":
    main()
