"""What becomes of a token once the host has read it: text, log-probabilities, and whether its sequence ends."""

from jaxkv.engine.request import Piece
from jaxkv.engine.sequence import Sequence


def accept(sequence: Sequence, token: int, logprobs: dict[int, float] | None) -> None:
    """Appends a generated token, and sets `reason` if it is the last."""
    request = sequence.request
    sequence.tokens.append(token)
    if logprobs is not None:
        sequence.logprobs.append(logprobs)
    ended = sequence.generated == request.params.max_tokens
    if token in request.stop_ids:
        sequence.reason = "stop"
    elif ended:
        sequence.reason = "length"
    _hand_out(sequence, token, logprobs)


def end(sequence: Sequence, reason: str) -> None:
    """Ends a sequence whose last token was accepted already, or that never had one."""
    sequence.reason = reason
    text = ""
    if sequence.stream is not None:
        text, _ = sequence.stream.finish(may_stop=False)
        sequence.text += text
    _offer(sequence, Piece(text=text, token_id=None, finish_reason=reason))


def _hand_out(sequence: Sequence, token: int, logprobs: dict[int, float] | None) -> None:
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
    piece = Piece(text=text, token_id=token, finish_reason=sequence.reason, logprobs=logprobs)
    _offer(sequence, piece)


def _offer(sequence: Sequence, piece: Piece) -> None:
    if sequence.pieces is not None:
        sequence.pieces.append(piece)
