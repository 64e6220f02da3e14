"""`ServedSample`: a request in the engine, and how much of it the HTTP process has."""

from jaxkv.engine.drive import error_of, timing_of, usage_of
from jaxkv.engine.request_state import RequestState
from jaxkv.serve.wire import GENERATION_FAILED, NUMERICAL_ERROR, Ended, Tokens


class ServedSample:
    """One sample of a call. It reads the tokens in the request's state, since a piece for each takes longer.

    Args:
        state: the request.

    Attributes:
        state: the request.
        is_over: whether its end was sent, or the HTTP process wants no more of it.
    """

    __slots__ = ("_num_sent", "is_over", "state")

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.is_over = False
        self._num_sent = state.prompt_tokens

    @property
    def has_news(self) -> bool:
        """Whether it has new tokens or an end."""
        state = self.state
        is_new = len(state.tokens) > self._num_sent or state.reason is not None
        return is_new and not self.is_over

    def take(self, call: int, index: int) -> Tokens:
        """Returns what is new, and counts it as sent.

        Args:
            call: number of its call.
            index: its index in the call.
        """
        state, first = self.state, self._num_sent
        ids = state.tokens[first:]
        self._num_sent = first + len(ids)
        logprobs = None
        if state.logprobs and ids:
            logprobs = state.logprobs[first - state.prompt_tokens :]
        ended = None
        if state.reason is not None:
            self.is_over = True
            ended = _ended(state, state.reason)
        return Tokens(call, index, ids, logprobs, ended)


def _ended(state: RequestState, reason: str) -> Ended:
    usage = usage_of([state])
    queue_seconds = timing_of(state).queue_seconds
    # Without an error of its own, its logits were not finite.
    code = NUMERICAL_ERROR if state.error is None else GENERATION_FAILED
    counts = (usage.cached_tokens, usage.preemptions, queue_seconds)
    return Ended(reason, error_of(state), *counts, code)
