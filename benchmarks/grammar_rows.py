"""Measures what requests with a grammar cost the requests beside them: milliseconds per step, with and without.

    python -m benchmarks.grammar_rows --model Qwen/Qwen3-0.6B --rows 64 --constrained 0,1,8,64
    python -m benchmarks.grammar_rows --rows 2 --constrained 0,1 --tokens 16 --dtype float32    # to try it on a CPU

`rows` free requests generate `tokens` tokens each, while `constrained` more requests write JSON of a schema and never
end. Each row of the record has the time per step until the free requests have ended, the same with as many more free
requests in place of the constrained ones, and how much longer a step takes. Prompts are computed and programs compiled
before the clock starts.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.config.cache import CacheConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.structured_outputs import StructuredOutputs
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
_PROMPT_TOKENS = 32


def measure(
    llm: LLM, rows: int, beside: int, tokens: int, *, constrained: bool
) -> tuple[float, int]:
    """Returns the milliseconds per step and the number of steps of `rows` free requests.

    Args:
        llm: serves them.
        rows: number of requests that are waited for.
        beside: number of further requests, which do not end.
        tokens: that each of the first ones generates.
        constrained: whether the further ones have a grammar.
    """
    free = SamplingParams(temperature=0.0, max_tokens=tokens + 8, ignore_eos=True)
    bound = replace(
        free, max_tokens=None, structured_outputs=StructuredOutputs(json=_SCHEMA), ignore_eos=False
    )
    draw = np.random.default_rng(0)
    states: list[RequestState] = []
    engine = llm.engine
    with llm.lock.held():
        further = bound if constrained else replace(free, max_tokens=None)
        for params in [free] * rows + [further] * beside:
            prompt = draw.integers(1, llm.model.vocab_size, _PROMPT_TOKENS).tolist()
            states += engine.add(llm.requests(prompt, params))
        first = states[:rows]
        while min(one.generated for one in states) < 4:
            engine.step()
        steps, start = engine.steps, time.perf_counter()
        while any(one.status != FINISHED for one in first):
            engine.step()
        seconds, taken = time.perf_counter() - start, engine.steps - steps
        for one in states:
            engine.abort(one)
        while engine.has_work:
            engine.step()
    return seconds / taken * 1e3, taken


def run(llm: LLM, rows: int, constrained: Sequence[int], tokens: int, repeats: int) -> list[Any]:
    """Returns the rows of the record."""
    made = []
    for count in constrained:
        ways = (False, True) if count else (False,)
        times: dict[bool, list[tuple[float, int]]] = {way: [] for way in ways}
        for repeat in range(repeats + 1):
            for way in ways:
                measured = measure(llm, rows, count, tokens, constrained=way)
                # The first round compiles.
                times[way] += [measured] * (repeat > 0)
        alone = statistics.median(ms for ms, _ in times[False])
        ms = statistics.median(ms for ms, _ in times[bool(count)])
        made.append(
            {
                "free_rows": rows,
                "constrained_rows": count,
                "vocab_size": llm.model.vocab_size,
                "ms_per_step": ms,
                "ms_per_step_all_free": alone,
                "steps": times[bool(count)][0][1],
                "overhead_percent": 100 * (ms / alone - 1),
            }
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes the record `grammar-rows`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="a model directory or a name on the hub")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="dummy draws random weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--constrained", default="0,1,8,64")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    refuse_profilers()
    counts = [int(one) for one in options.constrained.split(",")]
    cache = CacheConfig(max_sequences=options.rows + max(counts))
    with LLM(
        options.model,
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        cache=cache,
        progress=False,
    ) as llm:
        rows = run(llm, options.rows, counts, options.tokens, options.repeats)
    path = save_record("grammar-rows", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
