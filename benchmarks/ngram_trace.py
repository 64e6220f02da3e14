"""N-gram drafts on edits of code, by a real model: how many tokens a step gives, and which drafts are accepted.

    python -m benchmarks.ngram_trace                      # the small model in the package, on any machine
    python -m benchmarks.ngram_trace --model Qwen/Qwen3-0.6B --dtype bfloat16

Each request has a function of this package and the first third of a copy, as an editor has them in which a user changes
the copy. The model goes on from there. Texts are greedy, and the same with and without drafts; the benchmark fails if
one differs in float32.
"""

import argparse
import ast
import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxkv.cache.page_allocator
import jaxkv.engine.collect
import jaxkv.engine.scheduler
from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig

_MODULES = (jaxkv.cache.page_allocator, jaxkv.engine.collect, jaxkv.engine.scheduler)


def edits(least: int, most: int) -> list[str]:
    """Returns a prompt for each function of some modules that has between `least` and `most` characters."""
    prompts = []
    for module in _MODULES:
        source = inspect.getsource(module)
        for node in ast.walk(ast.parse(source)):
            code = ast.get_source_segment(source, node) if isinstance(node, ast.FunctionDef) else ""
            if code and least <= len(code) <= most:
                prompts.append(f"{code}\n\n\n{code[: len(code) // 3]}")
    return prompts


def run(options: argparse.Namespace, drafts: int, prompts: Sequence[str]) -> dict[str, Any]:
    """Returns the row of one number of drafts, 0 for none; `texts` are the generated ids."""
    speculation = SpeculationConfig(tokens=drafts, adaptive=False) if drafts else None
    greedy = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    with LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        cache=CacheConfig(max_sequences=1),
        engine=EngineConfig(prefix_cache=False),
        speculation=speculation,
        progress=False,
    ) as llm:
        llm.generate(prompts[:1], greedy)
        steps, began, texts = llm.stats().steps, time.perf_counter(), []
        for prompt in prompts:
            texts += [one.token_ids for one in llm.generate([prompt], greedy)]
        seconds = time.perf_counter() - began
        stats = llm.stats()
    steps, tokens = stats.steps - steps, sum(map(len, texts))
    found = stats.speculation
    return {
        "drafts": drafts,
        "requests": len(prompts),
        "tokens": tokens,
        "tokens_per_step": tokens / steps,
        "accepted_percent": found
        and ", ".join(
            f"{100 * right / tried:.0f}" if tried else "-"
            for right, tried in zip(found.accepted, found.drafted, strict=True)
        ),
        "ms_per_token": 1e3 * seconds / tokens,
        "texts": texts,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all numbers of drafts and writes the record `ngram-trace-NAME`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", help="a model directory or a name on the hub")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafts", default="0,2,4,8")
    parser.add_argument("--tokens", type=int, default=96, help="of each request")
    parser.add_argument("--most-requests", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--characters", default="300:900", help="least:most of a function")
    parser.add_argument("--name", default="default-model", help="end of the record's name")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    prompts = edits(*map(int, options.characters.split(":")))[: options.most_requests]
    rows = [run(options, int(drafts), prompts) for drafts in options.drafts.split(",")]
    texts = [row.pop("texts") for row in rows]
    if options.dtype == "float32" and any(one != texts[0] for one in texts):
        raise RuntimeError("drafts have changed a text")
    path = save_record(f"ngram-trace-{options.name}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
