"""Whole requests over the engine, for callers that wait: all answers at once, or one stream."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from jaxkv.engine.engine import Engine
from jaxkv.engine.progress import Progress
from jaxkv.engine.request import Piece, Request, RequestOutput, SampleOutput, Timing, Usage
from jaxkv.engine.rows import features_of
from jaxkv.engine.sequence import Sequence as Sample
from jaxkv.engine.shapes import row_of, tokens_held
from jaxkv.engine.turns import Turns
from jaxkv.tokenizer import Tokenizer


def check_compiled(engine: Engine, request: Request) -> None:
    """Raises `ProgramRefused`, with what differs, if strict mode has no program to run a request even alone."""
    executor = engine.executor
    if not executor.programs.is_closed:
        return
    row, total = row_of(request, 0), tokens_held(request)
    chunk = replace(row, tokens=row.tokens[: engine.shapes.token_buckets[-1]])
    for part in (chunk, replace(row, tokens=(0,))):
        executor.program(executor.fit(engine.shapes.declare([part], total_tokens=total)))
    if features_of([row]).penalties:
        executor.program(executor.fit(executor.shapes.admit([row])))


def serve_all(
    engine: Engine, prompts: Sequence[Sequence[Request]], *, progress: bool = False
) -> list[list[Sample]]:
    """Returns the samples of each prompt when all have ended; one that failed alone has the reason "error".

    The engine has logged why. Streams that are under way go on meanwhile.

    Args:
        engine: serves them; it is the caller's turn to use it.
        prompts: the samples of each.
        progress: show a bar on stderr.

    Raises:
        ValueError: a request can never be served.
    """
    bar = None
    try:
        _abort_unread(engine)
        made = [engine.add(samples) for samples in prompts]
        flat = [sample for samples in made for sample in samples]
        bar = Progress(flat) if progress else None
        engine.run(flat, after_step=bar)
        return made
    finally:
        _abort_unread(engine)
        if bar is not None:
            bar.close()


def _abort_unread(engine: Engine) -> None:
    """Aborts whoever is nobody's: added just before an interrupt, or left by one that broke off the clearing up.

    Streams stay: somebody takes their pieces.
    """
    scheduler = engine.scheduler
    while left := [s for s in (*scheduler.waiting, *scheduler.running) if s.pieces is None]:
        for sample in left:
            engine.abort(sample)


def serve_stream(turns: Turns, engine: Engine, request: Request) -> Generator[Piece]:
    """Yields the pieces of one request, while everybody else's go on too; closing it early aborts the request.

    It takes a turn for each step, and none while its caller works.

    Raises:
        Exception: what the request failed with, if its own part in a step failed.
    """
    with turns.turn():
        [sample] = engine.add([request], streamed=True)
    assert sample.pieces is not None, "a streamed sequence keeps its pieces"
    try:
        while True:
            while not sample.pieces:
                with turns.turn():
                    engine.step()
            piece = with_figures(sample.pieces.popleft(), sample)
            if piece.finish_reason == "error" and sample.error is not None:
                raise sample.error
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        turns.when_free(lambda: engine.abort(sample))


def output_of(samples: Sequence[Sample], tokenizer: Tokenizer | None) -> RequestOutput:
    """Returns what a user gets for the ended samples of one prompt."""
    return RequestOutput(
        prompt_token_ids=list(samples[0].request.prompt),
        outputs=[_sample_output(sample, tokenizer) for sample in samples],
        usage=usage_of(samples),
    )


def with_figures(piece: Piece, sample: Sample) -> Piece:
    """Returns a piece as its user gets it: the last one of a sample that has ended says what that took."""
    if piece.finish_reason is None:
        return piece
    return replace(piece, usage=usage_of([sample]), timing=timing_of(sample))


def usage_of(samples: Sequence[Sample]) -> Usage:
    """Returns what the samples of one prompt took."""
    return Usage(
        prompt_tokens=len(samples[0].request.prompt),
        cached_tokens=samples[0].cached or 0,
        output_tokens=sum(sample.generated for sample in samples),
        preemptions=sum(sample.preemptions for sample in samples),
    )


def timing_of(sample: Sample) -> Timing:
    """Returns when an ended sample did what."""
    assert sample.ended is not None, "a sample that has ended knows when"
    return Timing(
        arrived=sample.arrived,
        admitted=sample.admitted,
        first_token=sample.started,
        finished=sample.ended,
        output_tokens=sample.generated,
    )


def _sample_output(sample: Sample, tokenizer: Tokenizer | None) -> SampleOutput:
    text = sample.text
    if sample.stream is None and tokenizer is not None:
        text = tokenizer.decode(sample.token_ids)
    assert sample.reason is not None, "a sample that has ended has a reason"
    asked = sample.request.params.logprobs is not None
    return SampleOutput(
        text=text,
        token_ids=sample.token_ids,
        finish_reason=sample.reason,
        logprobs=list(sample.logprobs) if asked else None,
        timing=timing_of(sample),
    )
