"""One request, one compiled step per token, each token handed out as it comes.

The next step is dispatched before the last token is read: the device already has that token, so the host's
reading, detokenising and printing hide behind its work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Array

from jaxkv.engine.executor import Executor
from jaxkv.engine.fields import StepShape
from jaxkv.engine.offline import new_row, report_logprobs, reserve
from jaxkv.engine.request import Request
from jaxkv.engine.results import SampledRows, unpack_sampled
from jaxkv.engine.rows import Row
from jaxkv.engine.shapes import PREFILL_CHUNK


@dataclass(frozen=True)
class StreamedToken:
    """One generated token; `reason` is set on the last one. An "error" carries no token."""

    token_id: int | None
    logprobs: dict[int, float] | None
    reason: str | None


def stream_request(executor: Executor, request: Request) -> Iterator[StreamedToken]:
    """Yields the request's tokens until it stops; closing the iterator early gives its pages back.

    Raises:
        OutOfPages: the request needs more pages than are free; nothing was consumed.
    """
    total = len(request.prompt) + request.params.max_tokens - 1
    row = new_row(request)
    reserve(executor, row, total)
    try:
        if row.params.uses_penalties or row.params.logit_bias:
            executor.admit(row, request.prompt)
        pending = _prefill(executor, row, total)
        shape = executor.shapes.shape([_decode_row(row, 0)], total_tokens=total, decode=True)
        for generated in range(1, request.params.max_tokens + 1):
            arrived = pending
            # The step that follows a stop is wasted; it writes only into this request's own pages.
            if generated < request.params.max_tokens:
                pending = executor.step(shape, [_decode_row(row, generated)])
            token = _read(arrived, shape, request, generated)
            yield token
            if token.reason is not None:
                return
    finally:
        executor.accounts.release(row.sequence)


def _prefill(executor: Executor, row: Row, total: int) -> Array:
    """Runs the prompt in chunks and returns the packed first token."""
    packed = None
    for start in range(0, len(row.tokens), PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, len(row.tokens))
        chunk = replace(
            row, tokens=row.tokens[start:stop], start=start, emits=stop == len(row.tokens)
        )
        packed = executor.step(executor.shapes.shape([chunk], total_tokens=total), [chunk])
        executor.accounts.commit(row.sequence, stop)
    assert packed is not None
    return packed


def _decode_row(row: Row, generated: int) -> Row:
    """Describes the step that follows the `generated`-th token, which the device feeds back itself."""
    start = len(row.tokens) + max(generated - 1, 0)
    return replace(row, tokens=(0,), start=start, carry=True, generated=generated)


def _read(packed: Array, shape: StepShape, request: Request, generated: int) -> StreamedToken:
    sampled: SampledRows = unpack_sampled(np.asarray(packed), shape.features)
    if not sampled.finite[0]:
        return StreamedToken(None, None, "error")
    token = int(sampled.tokens[0])
    reason = None
    if token in request.stop_ids:
        reason = "stop"
    elif generated == request.params.max_tokens:
        reason = "length"
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = report_logprobs(
            token, float(sampled.logprob[0]), sampled.top_ids[0], sampled.top_logprobs[0]
        )
    return StreamedToken(token, logprobs, reason)
