"""One request, one compiled step per token, each token handed out as it comes.

The next step is dispatched before the last token is read: the device already has that token, so the host's
reading, detokenising and printing hide behind its work.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Array

from jaxkv.batch import Features
from jaxkv.engine.executor import Executor
from jaxkv.engine.offline import report_logprobs
from jaxkv.engine.request import Request
from jaxkv.engine.results import unpack_sampled
from jaxkv.engine.rows import Row
from jaxkv.engine.shapes import prefill_chunks, row_of, tokens_held
from jaxkv.errors import CachePoisoned


@dataclass(frozen=True)
class StreamedToken:
    """One generated token; `reason` is set on the last one. An "error" carries no token."""

    token_id: int | None
    logprobs: dict[int, float] | None
    reason: str | None


def stream_request(executor: Executor, request: Request) -> Generator[StreamedToken]:
    """Yields the request's tokens until it stops; closing the iterator early gives its pages back.

    Raises:
        OutOfPages: the request needs more pages than are free; nothing was consumed.
        CachePoisoned: the cache was lost or rebuilt meanwhile; start again.
    """
    begun = executor.owner.rebuilds
    with executor.reserved(tokens_held(request)) as sequence:
        row = row_of(request, sequence)
        one = [replace(row, tokens=(0,), carry=True)]
        shape = executor.step_shape(one, total_tokens=tokens_held(request), decode=True)
        if shape.features.penalties:
            executor.admit([row])
        pending, features = _prefill(executor, row, tokens_held(request))
        for generated in range(1, request.params.max_tokens + 1):
            if executor.owner.rebuilds != begun:
                raise CachePoisoned(
                    "the cache was rebuilt under this stream, which has lost its text; start it again"
                )
            arrived, told = pending, features
            # The step that follows a stop is wasted; it writes only into this request's own pages.
            if generated < request.params.max_tokens:
                pending = executor.step(shape, [_decode_row(row, generated)])
                features = shape.features
            token = _name(executor.read(arrived), told, request, generated)
            yield token
            if token.reason is not None:
                return


def _prefill(executor: Executor, row: Row, total: int) -> tuple[Array, Features]:
    """Runs the prompt in chunks; returns the packed first token, and what its program reports."""
    packed = shape = None
    for chunk in prefill_chunks(len(row.tokens), whole=executor.model.whole_prompts):
        part = replace(
            row,
            tokens=row.tokens[chunk.start : chunk.stop],
            start=chunk.start,
            emits=chunk.stop == len(row.tokens),
        )
        shape = executor.step_shape([part], total_tokens=total)
        packed = executor.step(shape, [part])
        executor.accounts.commit(row.sequence, chunk.stop)
    assert packed is not None
    assert shape is not None
    return packed, shape.features


def _decode_row(row: Row, generated: int) -> Row:
    """Describes the step that follows the `generated`-th token, which the device feeds back itself."""
    start = len(row.tokens) + generated - 1
    return replace(row, tokens=(0,), start=start, carry=True, generated=generated)


def _name(
    packed: np.ndarray, features: Features, request: Request, generated: int
) -> StreamedToken:
    sampled = unpack_sampled(packed, features)
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
        top = request.params.logprobs
        logprobs = report_logprobs(
            token,
            float(sampled.logprob[0]),
            sampled.top_ids[0, :top],
            sampled.top_logprobs[0, :top],
        )
    return StreamedToken(token, logprobs, reason)
