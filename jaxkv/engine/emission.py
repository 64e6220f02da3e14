"""What becomes of a token once the host has read it: text, log-probabilities, and whether its sequence ends."""

from jaxkv.engine.request import Piece
from jaxkv.engine.request_state import RequestState


def accept(sequence: RequestState, token: int, logprobs: dict[int, float] | None) -> None:
    """Appends a generated token, and sets `reason` if it is the last."""
    if logprobs is not None:
        sequence.logprobs.append(logprobs)
    sequence.tokens.append(token)
    sequence.reason = why_over(sequence)
    if sequence.stream is not None or sequence.pieces is not None:
        _hand_out(sequence, token, logprobs)


def why_over(sequence: RequestState) -> str | None:
    """Returns why the last token of a sequence that generates ends it; `None` if it does not."""
    tokens = sequence.tokens
    if tokens[-1] in sequence.request.stop_ids and sequence.generated:
        return "stop"
    return "length" if len(tokens) == sequence.longest else None


def end(sequence: RequestState, reason: str) -> None:
    """Ends a sequence whose last token was accepted already, or that never had one."""
    sequence.reason = reason
    text = ""
    if sequence.stream is not None:
        text, _ = sequence.stream.finish(may_stop=False)
        sequence.text += text
    if sequence.pieces is not None:
        sequence.pieces.append(Piece(text=text, token_id=None, finish_reason=reason))


def _hand_out(sequence: RequestState, token: int, logprobs: dict[int, float] | None) -> None:
    """Turns the token into text, which may end the sequence too."""
    text = ""
    if sequence.stream is not None:
        may_stop = sequence.generated >= sequence.request.params.min_tokens
        text, met = sequence.stream.push(token, may_stop=may_stop)
        if not met and sequence.reason is not None:
            rest, met = sequence.stream.finish(may_stop=may_stop)
            text += rest
        if met:
            sequence.reason = "stop"
        sequence.text += text
    if sequence.pieces is not None:
        reason = sequence.reason
        sequence.pieces.append(
            Piece(text=text, token_id=token, finish_reason=reason, logprobs=logprobs)
        )
