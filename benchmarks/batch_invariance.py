"""What equal bits in every batch cost: decode steps and prompts with `batch_invariant` beside those without.

    python -m benchmarks.batch_invariance --shape llama-3.1-8b --batch 1,8,64,256
    python -m benchmarks.batch_invariance --shape tiny --batch 1,2 --context 16 --new-tokens 4    # on a CPU

Weights are random. Both forms run in one process over the same weights, through the engine's programs, fed from the
host and overlapped as in `benchmarks.generate`. All programs are compiled, and run once, before any is timed.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from benchmarks.decode_start import decode_parser, draw_weights, parse
from benchmarks.generate import Setting, make_requests, make_sequence_runner, time_steps
from benchmarks.record import load_record, save_record
from benchmarks.report import render
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig
from jaxkv.models.protocol import Params
from jaxkv.runner.sequence_runner import SequenceRunner

Runners = Mapping[str, SequenceRunner]
"""Form ("default" or "invariant") -> its runner."""


def measure(runners: Runners, config: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Returns a row: milliseconds per decode step and per prompt of both forms, and their ratios."""
    row: dict[str, Any] = {"batch": setting.batch, "context": setting.context}
    requests = make_requests(config, setting)
    for form, runner in runners.items():
        with ExitStack() as held:
            places = [held.enter_context(runner.reserved(one.tokens_held)) for one in requests]
            rows = [one.row(place) for one, place in zip(requests, places, strict=True)]
            timed = time_steps(runner, rows, requests, setting, overlapped=True)
        row |= {f"{form}_{name}": timed[name] for name in ("ms_per_token", "prompt_ms")}
        row[f"{form}_implementation"] = str(runner.runner.implementation)
    for name in ("ms_per_token", "prompt_ms"):
        row[f"{name}_percent"] = 100 * (row[f"invariant_{name}"] / row[f"default_{name}"] - 1)
    return row


def prepare(config: ModelConfig, setting: Setting, params: Params) -> Runners:
    """Returns a runner of each form, whose programs have been compiled and run."""
    runners = {
        form: make_sequence_runner(config, setting, params, None, batch_invariant=invariant)
        for form, invariant in (("default", False), ("invariant", True))
    }
    measure(runners, config, replace(setting, repeats=1))
    return runners


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all batch sizes and writes the record `batch-invariance-SHAPE`."""
    parser = decode_parser(
        "Times batch_invariant.", record="batch-invariance", new_tokens=64, repeats=3
    )
    options = parse(parser, arguments, record="batch-invariance")
    params, _ = draw_weights(options)
    config, rows = SHAPES[options.shape], []
    for batch in (int(size) for size in options.batch.split(",")):
        setting = Setting(batch, options.context, options.new_tokens, options.repeats)
        row = measure(prepare(config, setting, params), config, setting)
        rows.append(asdict(setting) | row)
        save_record(options.record, rows, folder=options.folder)
    print(render(load_record(options.folder / f"{options.record}.json")))


if __name__ == "__main__":
    main()
