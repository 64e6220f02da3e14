"""`ServedSample`: a request of the HTTP process, and how many of its tokens were sent; `take_news` for all calls."""

from jaxkv.engine.drive import error_of, timing_of, usage_of
from jaxkv.engine.request_state import RequestState
from jaxkv.serve.wire import GENERATION_FAILED, NUMERICAL_ERROR, Ended, Tokens


class ServedSample:
    """One sample of a call. It reads new tokens from the request's state, which is faster than a `Piece` for each.

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

    def take(self, call: int, index: int) -> Tokens | None:
        """Returns the tokens and the end that were not sent yet, and counts them as sent; `None` if there are none.

        Args:
            call: number of its call.
            index: its index in the call.
        """
        state, first = self.state, self._num_sent
        tokens, reason = state.tokens, state.reason
        count = len(tokens)
        if (count == first and reason is None) or self.is_over:
            return None
        self._num_sent = count
        logprobs = None
        if state.logprobs and count > first:
            logprobs = state.logprobs[first - state.prompt_tokens :]
        ended = None
        if reason is not None:
            self.is_over = True
            ended = _ended(state, reason)
        return Tokens(call, index, tokens[first:], logprobs, ended)


def take_news(calls: dict[int, list[ServedSample]]) -> list[Tokens]:
    """Returns the tokens and ends of all calls that were not sent yet, and counts them as sent.

    Args:
        calls: number of a call -> its samples. A call whose samples all ended is removed.
    """
    found: list[Tokens] = []
    over: list[int] = []
    for call, samples in calls.items():
        for index, sample in enumerate(samples):
            news = sample.take(call, index)
            if news is None:
                continue
            found.append(news)
            if news.ended is not None and all(each.is_over for each in samples):
                over.append(call)
    for call in over:
        del calls[call]
    return found


def _ended(state: RequestState, reason: str) -> Ended:
    usage = usage_of([state])
    queue_seconds = timing_of(state).queue_seconds
    # Without an error of its own, its logits were not finite.
    code = NUMERICAL_ERROR if state.error is None else GENERATION_FAILED
    counts = (usage.cached_tokens, usage.preemptions, queue_seconds)
    return Ended(reason, error_of(state), *counts, code)
