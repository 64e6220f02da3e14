"""Tunes the schedules of the ops' kernels on this machine's GPU and writes the fastest ones to a file.

    python -m pallas_kernels.workbench.tune
    python -m pallas_kernels.workbench.tune paged_attention --case llama-b64-ctx4096 --all

By default the search is a hill climb: it starts at the schedule of the op's own rules and times the candidates that
differ from the fastest one in a single field, until none is faster. With --all it times every candidate, which takes
some minutes per case.

A schedule is timed only after its result was compared with the reference's. The fastest schedule is chosen per shape
class, over the cases of that class. The file is tuned/<device>.json in this package; entries of other classes and ops
in it are kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device

from pallas_kernels.tuning import TIME, load_tuned, trying, tuned_path
from pallas_kernels.workbench.op_benchmark import BenchInputs, WrongResult, load_cases, prepare
from pallas_kernels.workbench.search_space import TUNED_OPS, Fields, Space, find_space
from pallas_kernels.workbench.timing import (
    ROTATION_BYTES,
    Chain,
    Effort,
    refuse_profilers,
    time_chain,
)

KERNEL = "mosaic_gpu"
# A schedule replaces that of the op's rules only if it is faster by more than this share, the noise of the timings.
_MARGIN = 0.02


@dataclass(frozen=True)
class Trial:
    """The time of one schedule on one case in microseconds; if it failed, `us` is `None` and `problem` the error."""

    case: str
    space: Space
    fields: Fields
    us: float | None
    problem: str = ""


def time_schedules(
    bench: BenchInputs, candidates: Sequence[Fields], seconds: float
) -> Iterator[tuple[float | None, str]]:
    """Yields for each schedule the microseconds of one call and "", or `None` and the error.

    Programs are compiled in parallel threads and run one after the other on the same memory.
    """
    chains = [_chain(bench, fields) for fields in candidates]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        compiling = [threads.submit(chain.compile) for chain in chains]
    shared = jax.tree.map(jnp.copy, bench.shared)
    for chain, compiled in zip(chains, compiling, strict=True):
        try:
            compiled.result()
            chain.shared = shared
            # Only results are compared: the pool of an op that writes has the writes of every call of the launch.
            bench.compare(chain.launch()[0])
            timing = time_chain(chain, Effort(seconds=seconds))
            shared = chain.shared
            yield timing.us, ""
        except (WrongResult, ValueError, jax.errors.JaxRuntimeError) as error:
            shared = jax.tree.map(jnp.copy, bench.shared)
            yield None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _chain(bench: BenchInputs, fields: Fields) -> Chain:
    """Returns the chain of the op's calls under one schedule."""
    call = bench.call(KERNEL)

    def run(shared: Any, own: Any) -> tuple[Any, Any]:  # noqa: ANN401 - trees of arrays
        with trying(bench.op, fields):
            return call(shared, own)

    return Chain(run, bench.shared, bench.own)


def try_schedules(
    op: str,
    case: Any,  # noqa: ANN401 - each op has its own Case
    *,
    dtype: str = "bfloat16",
    seconds: float = 0.01,
    rotation_bytes: int = ROTATION_BYTES,
    everything: bool = False,
) -> list[Trial]:
    """Times schedules for a case and prints each result at once, so that an interrupted run shows what it measured."""
    bench = prepare(op, case, dtype, rotation_bytes)
    space = find_space(op, {**bench.inputs, **bench.shared, **bench.own[0]})
    trials: list[Trial] = []
    pending = space.candidates if everything else space.candidates[:1]
    while pending:
        times = time_schedules(bench, pending, seconds)
        for fields, (us, problem) in zip(pending, times, strict=True):
            trials.append(Trial(case.name, space, fields, us, problem))
            print(_line(op, trials[-1]), flush=True)
        pending = _next_to_the_best(trials)
    return trials


def _next_to_the_best(trials: Sequence[Trial]) -> tuple[Fields, ...]:
    """Returns the untried candidates that differ from the fastest schedule in a single field."""
    ran = [trial for trial in trials if trial.us is not None]
    if not ran:
        return ()
    best = min(ran, key=lambda trial: trial.us or 0.0).fields
    tried = [trial.fields for trial in trials]
    return tuple(
        fields
        for fields in trials[0].space.candidates
        if fields not in tried and sum(fields[name] != best[name] for name in best) == 1
    )


def fastest(trials: Iterable[Trial]) -> dict[str, dict[str, Any]]:
    """Returns for each shape class the fields of the best schedule over its cases, and its time.

    The time is that of the class's first case. A class without a schedule that ran on all its cases is left out.
    """
    classes: dict[str, list[Trial]] = {}
    for trial in trials:
        classes.setdefault(trial.space.shape_class, []).append(trial)
    found = {name: _best(of_class) for name, of_class in sorted(classes.items())}
    return {name: best for name, best in found.items() if best is not None}


def _best(trials: list[Trial]) -> dict[str, Any] | None:
    """Returns the schedule with the least geometric mean of its times on the cases of one class."""
    cases = dict.fromkeys(trial.case for trial in trials)
    by_rule = [trial.space.candidates[0] for trial in trials]
    costs: list[tuple[float, float, Fields]] = []
    for fields in _distinct(trial.fields for trial in trials):
        times = {trial.case: trial.us for trial in trials if trial.fields == fields}
        known = [us for us in times.values() if us is not None]
        if len(known) == len(cases):
            cost = 1.0
            for us in known:
                cost *= us ** (1 / len(known))
            favoured = cost * (1 - _MARGIN) if fields in by_rule else cost
            costs.append((favoured, known[0], fields))
    if not costs:
        return None
    _, us, fields = min(costs, key=lambda entry: entry[0])
    return {**fields, TIME: round(us, 2)}


def _distinct(all_fields: Iterable[Fields]) -> list[Fields]:
    found: list[Fields] = []
    for fields in all_fields:
        if fields not in found:
            found.append(fields)
    return found


def write_tuned(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Merges new entries into the file; other classes and ops keep theirs."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    for op, classes in found.items():
        known[op] = dict(sorted({**known.get(op, {}), **classes}.items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    load_tuned.cache_clear()


def _line(op: str, trial: Trial) -> str:
    settings = " ".join(f"{name}={value}" for name, value in trial.fields.items())
    first = "  (by rule)" if trial.fields == trial.space.candidates[0] else ""
    time = trial.problem if trial.us is None else f"{trial.us:9.2f} us"
    return f"{op} {trial.case:32s} {time}  {settings}{first}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command: times schedules, prints each result and writes the file after each case."""
    parser = argparse.ArgumentParser(description="Finds the fastest schedules on this GPU.")
    parser.add_argument("ops", nargs="*", metavar="op", help=", ".join(TUNED_OPS))
    parser.add_argument("--case", action="append", help="name of a case; default: all real shapes")
    parser.add_argument("--seconds", type=float, default=0.01, help="least duration of a trial")
    parser.add_argument("--all", action="store_true", help="time every candidate")
    parser.add_argument("--out", type=Path, help="the file; default: tuned/<device>.json")
    options = parser.parse_args(arguments)
    unknown = [op for op in options.ops if op not in TUNED_OPS]
    path = options.out or tuned_path(get_default_device())
    if unknown or path is None:
        parser.error(
            f"{unknown[0]} has no tuned schedules; choose from {', '.join(TUNED_OPS)}"
            if unknown
            else "tuning needs a GPU, and JAX's default device is none"
        )
    refuse_profilers()
    for op in options.ops or TUNED_OPS:
        trials: list[Trial] = []
        for case in load_cases(op).values():
            if case.name in options.case if options.case else not case.ci:
                trials += try_schedules(op, case, seconds=options.seconds, everything=options.all)
                # Write after each case, so that an interrupted run keeps its results.
                write_tuned(path, {op: fastest(trials)})
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
