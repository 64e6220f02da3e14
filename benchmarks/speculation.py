"""Decode with drafts of a set acceptance beside decode without: milliseconds per token of each sequence.

    python -m benchmarks.speculation --shape llama-3.1-8b --batch 1,8 --drafts 1,2,3,4,5 --acceptance 0.5,0.7,0.9
    python -m benchmarks.speculation --shape tiny --batch 1,2 --drafts 2 --acceptance 0.7 --tokens 16   # on a CPU

No real drafter is needed: the tokens of a first run, through the same programs, are the answers, and each draft is one
of them with the set probability. Where rounding leads a sequence to another token than in the first run, all drafts
behind it are wrong, so the measured acceptance stands beside the set one. `expected_ms_per_token` is the measured time
of a step by the tokens that steps of the set acceptance have. "adaptive" rows have drafts that are never right, and an
engine that may pause them. All programs are compiled, and run once, before.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.serving import Served
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.warm_up import compile_all, declare_served

Row = dict[str, Any]
Answers = Mapping[tuple[int, ...], Sequence[int]]

_PROMPT_TOKENS = 64
_SETTLING_TOKENS = 16
"""Generated before the clock starts."""

_BUDGET = 128
"""Most tokens of a step. A larger one only adds programs to compile: prompts are short here."""


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
        return [self._of(one, count) for one, count in zip(sequences, most, strict=True)]

    def _of(self, sequence: RequestState, most: int) -> tuple[int, ...]:
        answer = self._answers.get(sequence.request.prompt, ())
        rest = answer[sequence.generated : sequence.generated + most]
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


def _row(
    about: Mapping[str, Any], drafts: int, way: str, seconds: float, made: float, wanted: float
) -> Row:
    """Returns a row: `seconds` per step with `made` tokens per sequence, of which `wanted` were to be expected."""
    return {
        "batch": about["batch"],
        "drafts": drafts,
        "acceptance": way,
        "step_ms": seconds * 1e3,
        "tokens_per_step": made,
        "expected_tokens": wanted,
        "ms_per_token": seconds / made * 1e3,
        "expected_ms_per_token": seconds / wanted * 1e3,
        "speedup": about["plain"] * made / seconds,
    }


def run(
    served: Served,
    batches: Sequence[int],
    drafts: Sequence[int],
    acceptances: Sequence[float],
    tokens: int,
) -> Iterator[Row]:
    """Yields a row for each batch and number of drafts, without drafts first."""
    plain = served.build()
    sequence_runner, vocab_size = plain.sequence_runner, plain.runner.model.vocab_size
    engines = {count: Engine(sequence_runner, None, _config(count)) for count in drafts}
    adaptive = Engine(sequence_runner, None, _config(max(drafts), adaptive=True))
    for engine in (plain, *engines.values()):
        _compile(engine, batches, tokens)
    for batch in batches:
        requests = requests_of(batch, tokens, vocab_size)
        plain_seconds, _, _ = generate(plain, requests, tokens)

        about = {"batch": batch, "plain": plain_seconds}
        yield _row(about, 0, "none", plain_seconds, 1.0, 1.0)
        for count, engine in engines.items():
            assert engine.speculation is not None, "this engine drafts"
            engine.speculation.drafter = SetAcceptance({}, 0.0, vocab_size)
            _, _, found = generate(engine, requests, 2 * tokens)
            answers = {one.prompt: ids for one, ids in zip(requests, found, strict=True)}
            for acceptance in acceptances:
                drafter = SetAcceptance(answers, acceptance, vocab_size)
                engine.speculation.drafter = drafter
                seconds, made, _ = generate(engine, requests, tokens)
                wanted = sum(acceptance**position for position in range(count + 1))
                yield _row(about, count, f"{acceptance:g}", seconds, made, wanted)
        assert adaptive.speculation is not None, "this engine drafts"
        adaptive.speculation.drafter = SetAcceptance({}, 0.0, vocab_size)
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
    parser.add_argument("--tokens", type=int, default=96, help="timed tokens of each sequence")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    batches = [int(one) for one in options.batch.split(",")]
    served = Served(
        shape=options.shape,
        dtype=options.dtype,
        max_model_len=_longest(2 * options.tokens),
        cache=CacheConfig(max_sequences=max(batches)),
        engine=replace(_config(0), token_budget=max(_BUDGET, *batches)),
    )
    rows: list[Row] = []
    drafts = [int(one) for one in options.drafts.split(",")]
    acceptances = [float(one) for one in options.acceptance.split(",")]
    for row in run(served, batches, drafts, acceptances, options.tokens):
        rows.append(row)
        print(row, flush=True)
        save_record(f"speculation-{options.shape}", rows, folder=options.folder)
    print(render(load_record(options.folder / f"speculation-{options.shape}.json")))


if __name__ == "__main__":
    main()
