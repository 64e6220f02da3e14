"""A fixed list of requests, served in waves: each wave gets its pages, runs in one executable, and returns them.

It knows nothing of text. Requests do not join or leave a wave; continuous batching is the scheduler's work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import jax
import numpy as np

from jaxkv.config import SamplingParams
from jaxkv.engine.executor import Executor
from jaxkv.engine.request import Request
from jaxkv.engine.rows import Row, features_of
from jaxkv.errors import OutOfPages, OutOfStates
from jaxkv.step.loop import ERROR, LENGTH, STOP, Generated

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}
_NUMBERS = count()

WAVE_TOKENS = 16384
"""Prompt tokens of one wave, unless a single prompt is longer: they bound the memory of its activations."""


class Finished:
    """What one request produced: ids, the reason it ended, and log-probabilities if asked for."""

    def __init__(
        self, token_ids: Sequence[int], reason: str, logprobs: list[dict[int, float]] | None
    ) -> None:
        self.token_ids = tuple(token_ids)
        self.reason = reason
        self.logprobs = logprobs


def generate_waves(
    executor: Executor, requests: Sequence[Request]
) -> Iterator[tuple[int, Finished]]:
    """Yields (index, result) of each request, in order, wave after wave.

    Raises:
        OutOfPages: a single request needs more pages than the cache has; nothing was consumed.
    """
    done = 0
    while done < len(requests):
        with _admitted(executor, requests[done:]) as rows:
            total = max(len(row.tokens) + row.max_tokens for row in rows)
            shape = executor.shapes.shape(rows, total_tokens=total, loop=True)
            out = jax.device_get(executor.loop(shape, rows))
        for index in range(len(rows)):
            yield done + index, _finished(out, index, requests[done + index])
        done += len(rows)


@contextmanager
def _admitted(executor: Executor, requests: Sequence[Request]) -> Iterator[list[Row]]:
    """Takes pages for as many requests as fit, in order, and gives them back whatever happens."""
    rows: list[Row] = []
    tokens = 0
    try:
        for request in requests[: executor.shapes.max_rows]:
            tokens += len(request.prompt)
            if rows and tokens > WAVE_TOKENS:
                break
            row = new_row(request)
            try:
                reserve(executor, row, len(request.prompt) + request.params.max_tokens - 1)
            except (OutOfPages, OutOfStates):
                if not rows:
                    raise
                break
            rows.append(row)
        # In a program with penalties every row reads its entry, so every row needs a clean one.
        if features_of(rows).penalties:
            for row in rows:
                executor.admit(row, row.tokens)
        yield rows
    finally:
        for row in rows:
            executor.accounts.release(row.sequence)


def new_row(request: Request) -> Row:
    """Describes a request's whole prompt as one row, under a new sequence number."""
    return Row(
        sequence=next(_NUMBERS),
        tokens=request.prompt,
        start=0,
        params=request.params,
        seed=request.seed,
        max_tokens=request.params.max_tokens,
        stop_ids=request.stop_ids,
    )


def reserve(executor: Executor, row: Row, num_tokens: int) -> None:
    """Opens a sequence and takes all it will need, or leaves nothing behind."""
    executor.accounts.open(row.sequence)
    try:
        executor.accounts.reserve(row.sequence, num_tokens)
    except (OutOfPages, OutOfStates):
        executor.accounts.release(row.sequence)
        raise


def _finished(out: Generated, index: int, request: Request) -> Finished:
    """Reads one row of a loop's output, which is NumPy by now."""
    length = int(out.lengths[index])
    tokens = out.tokens[index, :length].tolist()
    reason = REASONS[int(out.reasons[index])]
    top = request.params.logprobs
    if top is None or out.logprobs is None or out.top_ids is None or out.top_logprobs is None:
        return Finished(tokens, reason, None)
    logprobs = [
        report_logprobs(
            tokens[column],
            float(out.logprobs[index, column]),
            np.asarray(out.top_ids[index, column, :top]),
            np.asarray(out.top_logprobs[index, column, :top]),
        )
        for column in range(length)
    ]
    return Finished(tokens, reason, logprobs)


def report_logprobs(
    token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, float]:
    """Returns token id -> log-probability, the most likely first, the chosen one included."""
    report = dict(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return report | {token: logprob}


def score_waves(executor: Executor, prompts: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yields, per prompt, the log-probability of each token after the first, given those before it."""
    for prompt in prompts:
        row = Row(next(_NUMBERS), prompt, 0, SamplingParams(temperature=0.0), emits=False)
        reserve(executor, row, len(prompt))
        try:
            shape = executor.shapes.shape([row], total_tokens=len(prompt))
            scores = np.asarray(executor.score(shape, [row]))
        finally:
            executor.accounts.release(row.sequence)
        yield scores[: len(prompt) - 1]
