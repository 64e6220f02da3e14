"""Computes the masks of requests with a grammar, and appends the tokens that a grammar forces.

A mask needs the last token on the host. The request's next step may be in flight then, as far as it needs no mask.
"""

from collections.abc import Sequence

import numpy as np

from jaxkv.engine.finish import Finisher
from jaxkv.engine.request_state import RequestState
from jaxkv.errors import STEP_FAILURES

_LEAST_SAVED = 0.5
"""Least tokens per running row that a step with forced tokens as chunks computes in addition, to be worth its time."""


def update_masks(running: Sequence[RequestState], finisher: Finisher) -> None:
    """Readies the running requests whose last token was read since their last mask; ends those that can only end.

    A request ends with the reason "stop" if no token is left and its text is complete, and with an error if it is not,
    or if a limit of llguidance was exceeded. Other requests continue.

    Tokens that a grammar forces are appended as if they were sampled. A step in flight emits no token for such a
    request: it would be the first of them. The next step computes all of them as a chunk, like those of a prompt, if
    that saves its request enough steps: the step takes longer for all rows. If it does not, each step computes the next
    one of them, as a decode step does.

    Args:
        running: requests that hold pages.
        finisher: ends requests.
    """
    due = {
        one: forced
        for one in running
        if one.constraint is not None
        and not one.constraint.is_ready(one.generated)
        and (forced := _forced(one, finisher)) is not None
    }
    # Where the step of the last token was sent, the first forced one needs a step of its own in either way.
    saved = sum(
        len(forced) - (one.computed >= len(one.tokens)) for one, forced in due.items() if forced
    )
    most = None if saved >= _LEAST_SAVED * len(running) else 1
    _fill_masks(
        [one for one, forced in due.items() if _take(one, forced, most, finisher)], finisher
    )


def _forced(sequence: RequestState, finisher: Finisher) -> list[int] | None:
    """Returns the tokens that the grammar forces next; `None` if nothing is due: before the form, or if it failed."""
    constraint, answer = sequence.constraint, sequence.answer
    assert constraint is not None
    try:
        return None if constraint.stays_free(answer) else constraint.forced(answer)
    except STEP_FAILURES as error:
        finisher.fail(sequence, error)
        return None


def _take(
    sequence: RequestState, forced: Sequence[int], most: int | None, finisher: Finisher
) -> bool:
    """Appends the first `most` forced tokens, all if `None`; returns whether a mask is to be computed after them.

    None is for a request that ends, nor where further tokens are known to be forced. None of those is appended before
    the step of the last token was sent: the two would be a chunk.
    """
    if most is not None and forced and sequence.computed < len(sequence.tokens):
        return False
    try:
        for token in forced[:most]:
            sequence.accept(token, None)
            sequence.pending = 0
            if sequence.reason is not None:
                finisher.release(sequence)
                return False
    except STEP_FAILURES as error:
        finisher.fail(sequence, error)
        return False
    return most is None or len(forced) <= most


def _fill_masks(sequences: Sequence[RequestState], finisher: Finisher) -> None:
    """Computes the masks of requests whose next token is not forced; ends those that can only end."""
    constraints = [one.constraint for one in sequences if one.constraint is not None]
    if not constraints:
        return
    grammar = constraints[0].grammar
    masks = np.zeros((len(constraints), grammar.forbidden.size), np.uint32)
    # Any grammar fills the masks of all: they have one vocabulary.
    grammar.fill([constraint.matcher for constraint in constraints], masks)
    for sequence, constraint, mask in zip(sequences, constraints, masks, strict=True):
        try:
            complete = constraint.settle(mask, sequence.answer)
        except STEP_FAILURES as error:
            finisher.fail(sequence, error)
            continue
        if complete:
            finisher.finish(sequence, "stop")
