"""Measures what requests with a grammar cost the requests beside them: milliseconds per token, with and without.

    python -m benchmarks.grammar_rows --model Qwen/Qwen3-0.6B --rows 64 --constrained 0,1,8,64
    python -m benchmarks.grammar_rows --rows 2 --constrained 0,1 --tokens 16 --dtype float32    # to try it on a CPU

`rows` free requests generate `tokens` tokens each, while `constrained` more requests write JSON of a schema and never
end. Each row of the record has the time until the free requests have ended, divided by the tokens that each of them
generated in it; the same with as many more free requests in place of the constrained ones; how much longer a token
takes; and the time divided by the tokens that each constrained request generated, forced ones included. Engine steps
are no measure: a free request takes part in almost every step, but not in all. All programs are compiled, and run once,
before; prompts are computed before the clock starts. The repeats go over all counts in turn, and the record is saved
after each.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.structured_outputs import StructuredOutputs
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.llm import LLM

_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
    },
    "minItems": 100_000,
}
_PROMPT_TOKENS = 4
"""Prompts are so short that all requests begin within a few steps."""
_BEFORE = 32
"""Tokens that the free requests have in addition; they generate some of them before all requests have begun."""
_FREE = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
_FORM = StructuredOutputs(json=_SCHEMA)
_BOUND = SamplingParams(temperature=0.0, max_tokens=None, structured_outputs=_FORM)


class Measured(NamedTuple):
    """One measurement.

    Attributes:
        ms: milliseconds per token of a free request.
        tokens: tokens of each free request that were timed, on average.
        ms_beside: milliseconds per token of a request beside them; 0 if there was none.
    """

    ms: float
    tokens: float
    ms_beside: float


def measure(llm: LLM, rows: int, beside: int, tokens: int, *, constrained: bool) -> Measured:
    """Returns the time of the tokens of `rows` free requests, and of the requests beside them.

    Args:
        llm: serves them.
        rows: number of requests that are waited for.
        beside: number of further requests, which do not end.
        tokens: least tokens of each of the first ones that are timed.
        constrained: whether the further ones have a grammar.
    """
    draw = np.random.default_rng(0)
    states: list[RequestState] = []
    engine = llm.engine
    with llm.lock.held():
        first = replace(_FREE, max_tokens=tokens + _BEFORE)
        for params in [first] * rows + [_BOUND if constrained else _FREE] * beside:
            prompt = draw.integers(1, llm.model.vocab_size, _PROMPT_TOKENS).tolist()
            states += engine.add(llm.requests(prompt, params))
        waited_for = states[:rows]
        while min(one.generated for one in states) == 0:
            engine.step()
        left = [tokens + _BEFORE - one.generated for one in waited_for]
        if min(left) < tokens:
            raise RuntimeError(
                f"a free request had {min(left)} tokens left when the last request began, fewer than {tokens}; the "
                f"engine's token budget holds too few prompts"
            )
        before = sum(one.generated for one in states[rows:])
        start = time.perf_counter()
        while any(one.status != FINISHED for one in waited_for):
            engine.step()
        seconds = time.perf_counter() - start
        others = sum(one.generated for one in states[rows:]) - before
        for one in states:
            engine.abort(one)
        while engine.has_work:
            engine.step()
    timed = sum(left) / rows
    ms_beside = seconds * beside / others * 1e3 if others else 0.0
    return Measured(seconds / timed * 1e3, timed, ms_beside)


def prepare(llm: LLM, rows: int, most: int) -> None:
    """Compiles the programs of `rows` free requests and up to `most` more of either kind, and runs each."""
    for params in (_FREE, _BOUND):
        print(
            llm.warm_up(batch=rows + most, prompt_tokens=_PROMPT_TOKENS, sampling=params),
            flush=True,
        )
    with llm.lock.held():
        run_steps(llm.engine, [program.spec for program in llm.engine.runner.programs.manifest()])


def run(
    llm: LLM, rows: int, constrained: Sequence[int], tokens: int, repeats: int
) -> Iterator[list[Any]]:
    """Yields the rows of the record after each repeat, from the medians so far."""
    ways = [(count, way) for count in constrained for way in ((False, True) if count else (False,))]
    found: dict[tuple[int, bool], list[Measured]] = {way: [] for way in ways}
    for count, way in ways:
        # The first requests are slower: threads start, and masks are computed for the first time.
        measure(llm, rows, count, tokens, constrained=way)
    for _ in range(repeats):
        for count, way in ways:
            found[count, way].append(measure(llm, rows, count, tokens, constrained=way))
        yield [_row(llm, rows, count, found) for count in constrained]


def _row(
    llm: LLM, rows: int, count: int, found: Mapping[tuple[int, bool], list[Measured]]
) -> dict[str, Any]:
    alone = statistics.median(one.ms for one in found[count, False])
    with_grammar = found[count, bool(count)]
    ms = statistics.median(one.ms for one in with_grammar)
    return {
        "free_rows": rows,
        "constrained_rows": count,
        "vocab_size": llm.model.vocab_size,
        "ms_per_token": ms,
        "ms_per_token_all_free": alone,
        "ms_per_token_constrained": statistics.median(one.ms_beside for one in with_grammar),
        "timed_tokens": with_grammar[0].tokens,
        "repeats": len(with_grammar),
        "overhead_percent": 100 * (ms / alone - 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes the record `grammar-rows`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="a model directory or a name on the hub")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="dummy draws random weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--constrained", default="0,1,8,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    counts = [int(one) for one in options.constrained.split(",")]
    most = max(counts)
    with LLM(
        options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        cache=CacheConfig(max_sequences=options.rows + most),
        # All prompts begin within a few steps, beside the rows that have begun; more only adds programs to compile.
        engine=EngineConfig(token_budget=max(128, 2 * (options.rows + most))),
        progress=False,
    ) as llm:
        prepare(llm, options.rows, most)
        late = llm.stats().compiled_late
        for rows in run(llm, options.rows, counts, options.tokens, options.repeats):
            path = save_record("grammar-rows", rows, folder=options.folder)
            print(render(load_record(path)), flush=True)
        if llm.stats().compiled_late > late:
            raise RuntimeError("a program was compiled while it was measured; the record is wrong")


if __name__ == "__main__":
    main()
