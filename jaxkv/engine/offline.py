"""A fixed list of requests, served in waves: each wave gets its pages, runs in one executable, and returns them.

It knows nothing of text. Requests do not join or leave a wave; continuous batching is the scheduler's work.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from jaxkv.config import SamplingParams
from jaxkv.engine.executor import Executor
from jaxkv.engine.request import Request
from jaxkv.engine.rows import Row
from jaxkv.engine.shapes import row_of, tokens_held
from jaxkv.errors import OutOfPages, OutOfStates
from jaxkv.step.loop import ERROR, LENGTH, STOP, Generated

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@dataclass(frozen=True)
class Finished:
    """What one request produced.

    Attributes:
        token_ids: generated ids.
        reason: why it ended.
        logprobs: token id -> log-probability for each generated token, if asked for.
    """

    token_ids: tuple[int, ...]
    reason: str
    logprobs: tuple[dict[int, float], ...] | None


def generate_waves(executor: Executor, requests: Sequence[Request]) -> Iterator[Finished]:
    """Yields the result of each request, in order, wave after wave.

    Raises:
        OutOfPages: one request alone needs more pages than are free; it and those after it were not begun.
    """
    done = 0
    while done < len(requests):
        with _admitted(executor, requests[done:]) as rows:
            wave = requests[done : done + len(rows)]
            declared = executor.fit(executor.shapes.loop(rows, wave))
            # In a program with penalties every row reads its entry, so every row needs a clean one.
            if declared.shape.features.penalties:
                executor.admit(rows)
            out = executor.read(executor.loop(declared, rows))
        yield from (_finished(out, index, request) for index, request in enumerate(wave))
        done += len(rows)


@contextmanager
def _admitted(executor: Executor, requests: Sequence[Request]) -> Iterator[list[Row]]:
    """Holds pages for as many of the first requests as fit, and gives them back whatever happens."""
    rows: list[Row] = []
    with ExitStack() as held:
        for request in executor.shapes.wave(requests):
            try:
                sequence = held.enter_context(executor.reserved(tokens_held(request)))
            except (OutOfPages, OutOfStates):
                if not rows:
                    raise
                break
            rows.append(row_of(request, sequence))
        yield rows


def _finished(out: Generated, index: int, request: Request) -> Finished:
    """Reads one row of a loop's output, which is NumPy by now."""
    length = int(out.lengths[index])
    tokens = tuple(out.tokens[index, :length].tolist())
    reason = REASONS[int(out.reasons[index])]
    top = request.params.logprobs
    if top is None or out.logprobs is None or out.top_ids is None or out.top_logprobs is None:
        return Finished(tokens, reason, None)
    logprobs = tuple(
        report_logprobs(
            tokens[column],
            float(out.logprobs[index, column]),
            np.asarray(out.top_ids[index, column, :top]),
            np.asarray(out.top_logprobs[index, column, :top]),
        )
        for column in range(length)
    )
    return Finished(tokens, reason, logprobs)


def report_logprobs(
    token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, float]:
    """Returns token id -> log-probability, the most likely first, the chosen one included."""
    report = dict(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return report | {token: logprob}


def score_texts(executor: Executor, texts: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yields, per text, the log-probability of each token after the first, given those before it.

    One text at a time, in one step.
    """
    for text in texts:
        with executor.reserved(len(text)) as sequence:
            row = Row(sequence, text, 0, SamplingParams(temperature=0.0), emits=False)
            declared = executor.fit(executor.shapes.score(row))
            scores = executor.read(executor.score(declared, [row]))
        yield scores[: len(text) - 1]
