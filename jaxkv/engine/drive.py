"""Drives the engine for blocking callers: runs a batch of requests to their end, or streams one; builds the outputs."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock
from jaxkv.engine.progress import Progress
from jaxkv.engine.request import Piece, Request, RequestOutput, SampleOutput, Timing, Usage
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.runner.scoring import score_program
from jaxkv.sampling.fields import features_of
from jaxkv.text.detokenize import text_after
from jaxkv.text.tokenizer import Tokenizer


def check_compiled(engine: Engine, request: Request) -> None:
    """Raises `ProgramRefused`, with the differences, if strict mode has no program that can run a request alone."""
    runner = engine.runner
    if not runner.programs.is_closed:
        return
    row, total = request.row(0), request.tokens_held
    chunk = replace(row, tokens=row.tokens[: engine.shapes.token_buckets[-1]])
    for part in (chunk, replace(row, tokens=(0,))):
        step = runner.fit(engine.shapes.declare([part], total_tokens=total))
        if step.forward_only:
            runner.program(runner.fit(engine.shapes.sampler(step, features_of([row]), 1)))
        runner.program(step)
    if features_of([row]).needs_admission or engine.sequence_runner.keeps_texts:
        runner.program(runner.fit(engine.sequence_runner.admit_spec([row])))
    for spec in [] if engine.experts is None else engine.experts.declare(total):
        runner.program(spec)
    if (top := request.params.prompt_logprobs) is not None:
        scored = score_program(
            engine.sequence_runner, request.prompt, top, adapter_slot=request.adapter_slot
        )
        runner.program(runner.fit(scored))


def serve_all(
    engine: Engine,
    prompts: Sequence[Sequence[Request]],
    *,
    progress: bool = False,
    ended: Callable[[list[RequestState]], None] | None = None,
) -> list[list[RequestState]]:
    """Runs requests until all have ended; returns their states. A request that failed alone has the reason "error".

    Streams in progress continue meanwhile.

    Args:
        engine: serves them; the caller holds its lock.
        prompts: the samples of each prompt.
        progress: show a progress bar on stderr.
        ended: called after a step, while the device computes the next one, with the samples of the first prompt for
            which it was not called yet, if all of them have ended; so at most once per step.

    Raises:
        ValueError: a request can never be served.
    """
    bar = None
    try:
        _abort_unread(engine)
        results = [engine.add(samples) for samples in prompts]
        flat = [sample for samples in results for sample in samples]
        left = deque(results)

        def after_step() -> None:
            if bar is not None:
                bar()
            if ended is not None and left and all(one.status == FINISHED for one in left[0]):
                ended(left.popleft())

        if not progress:
            engine.run(flat, after_step)
            return results
        bar = Progress(flat)
        with engine.runner.programs.watched(bar.compiling):
            engine.run(flat, after_step)
        return results
    finally:
        _abort_unread(engine)
        if bar is not None:
            bar.close()


def _abort_unread(engine: Engine) -> None:
    """Aborts requests without a caller: an interrupt can leave them in the engine. Streams are kept."""
    scheduler = engine.scheduler
    while left := [s for s in (*scheduler.waiting, *scheduler.running) if s.pieces is None]:
        for sample in left:
            engine.abort(sample)


def serve_stream(lock: EngineLock, engine: Engine, request: Request) -> Generator[Piece]:
    """Yields the pieces of one request; its steps serve all other requests too. Closing it early aborts the request.

    It holds the engine lock during each step, and not while its caller handles a piece.

    Raises:
        Exception: the error that ended the request, if it failed alone.
    """
    with lock.held():
        [sample] = engine.add([request], streamed=True)
    assert sample.pieces is not None, "a streamed sequence keeps its pieces"
    try:
        while True:
            while not sample.pieces:
                with lock.held():
                    engine.step()
            piece = with_figures(sample.pieces.popleft(), sample)
            if piece.finish_reason == "error" and sample.error is not None:
                raise sample.error
            yield piece
            if piece.finish_reason is not None:
                # The text is complete; another thread may have the engine by now.
                with lock.held_if_free() as is_free:
                    if is_free:
                        engine.check_if_idle()
                return
    finally:
        lock.defer(lambda: engine.abort(sample))


def output_of(samples: Sequence[RequestState], tokenizer: Tokenizer | None) -> RequestOutput:
    """Returns the output for the ended samples of one prompt."""
    request = samples[0].request
    return RequestOutput(
        request_id=str(samples[0].number),
        outputs=[_sample_output(sample, tokenizer) for sample in samples],
        usage=usage_of(samples),
        prompt=request.text,
        prompt_token_ids=list(request.prompt),
        prompt_logprobs=samples[0].prompt_logprobs,
    )


def with_figures(piece: Piece, sample: RequestState) -> Piece:
    """Returns a piece as the user gets it: usage, timing and error are added to the last piece of a sample."""
    if piece.finish_reason is None:
        return piece
    return replace(
        piece, usage=usage_of([sample]), timing=timing_of(sample), error=error_of(sample)
    )


def error_of(sample: RequestState) -> str | None:
    """Returns the error message of a sample in one line; `None` if its reason is not "error"."""
    if sample.reason != "error":
        return None
    if sample.error is None:
        return "the model's logits were not finite"
    return f"{type(sample.error).__name__}: {' '.join(str(sample.error).split())}"


def usage_of(samples: Sequence[RequestState]) -> Usage:
    """Returns the token counts of the samples of one prompt."""
    return Usage(
        prompt_tokens=len(samples[0].request.prompt),
        cached_tokens=samples[0].cached or 0,
        output_tokens=sum(sample.generated for sample in samples),
        preemptions=sum(sample.preemptions for sample in samples),
    )


def timing_of(sample: RequestState) -> Timing:
    """Returns the times of an ended sample."""
    assert sample.ended is not None, "an ended sample has an end time"
    return Timing(
        arrived=sample.arrived,
        admitted=sample.admitted,
        first_token=sample.started,
        finished=sample.ended,
        output_tokens=sample.generated,
    )


def _sample_output(sample: RequestState, tokenizer: Tokenizer | None) -> SampleOutput:
    text, request = sample.text, sample.request
    if sample.stream is None and tokenizer is not None:
        skip = request.params.skip_special_tokens
        text = text_after(tokenizer, request.prompt, sample.token_ids, skip_special_tokens=skip)
    assert sample.reason is not None, "an ended sample has a reason"
    logprobs = None if request.params.logprobs is None else list(sample.logprobs)
    return SampleOutput(
        text=text,
        token_ids=sample.token_ids,
        finish_reason=sample.reason,
        stop_reason=_stop_reason(sample) if sample.reason == "stop" else None,
        error=error_of(sample),
        cumulative_logprob=None if logprobs is None else _sum_logprobs(sample.token_ids, logprobs),
        logprobs=logprobs,
        weight_versions=sample.weight_versions,
        adapter=None if request.adapter is None else request.adapter.version,
        routed_experts=sample.experts_on_host(),
        timing=timing_of(sample),
    )


def _stop_reason(sample: RequestState) -> str | int | None:
    """Returns the stop string or the id of `stop_token_ids` that ended a sample; `None` for the model's end ids."""
    if sample.stream is not None and sample.stream.stop_string is not None:
        return sample.stream.stop_string
    last = sample.tokens[-1] if sample.generated else None
    return last if last in sample.request.params.stop_token_ids else None


def _sum_logprobs(token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]) -> float:
    return sum((table[token] for token, table in zip(token_ids, logprobs, strict=True)), 0.0)
