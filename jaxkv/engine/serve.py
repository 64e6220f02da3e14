"""Whole requests over the engine, for callers that wait: all answers at once, or one stream."""

from collections.abc import Generator, Sequence

from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Piece, Request, RequestOutput, SampleOutput
from jaxkv.engine.sequence import Sequence as Sample
from jaxkv.tokenizer import Tokenizer


def serve_all(engine: Engine, prompts: Sequence[Sequence[Request]]) -> list[list[Sample]]:
    """Returns the samples of each prompt when all have ended; one that failed alone has the reason "error".

    The engine has logged why.

    Raises:
        ValueError: a request can never be served; none was begun.
    """
    for samples in prompts:
        for request in samples:
            engine.check(request)
    made = [engine.add(samples) for samples in prompts]
    engine.run([sample for samples in made for sample in samples])
    return made


def serve_stream(engine: Engine, request: Request) -> Generator[Piece]:
    """Yields the pieces of one request, while everybody else's go on too; closing it early aborts the request.

    Raises:
        Exception: what the request failed with, if its own part in a step failed.
    """
    [sample] = engine.add([request], streamed=True)
    assert sample.pieces is not None, "a streamed sequence keeps its pieces"
    try:
        while True:
            while not sample.pieces:
                engine.step()
            piece = sample.pieces.popleft()
            if piece.finish_reason == "error" and sample.error is not None:
                raise sample.error
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        engine.abort(sample)


def output_of(samples: Sequence[Sample], tokenizer: Tokenizer | None) -> RequestOutput:
    """Returns what a user gets for the ended samples of one prompt."""
    return RequestOutput(
        prompt_token_ids=list(samples[0].request.prompt),
        outputs=[_sample_output(sample, tokenizer) for sample in samples],
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
    )
