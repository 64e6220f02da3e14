"""Computes the masks of requests with a grammar, and appends the tokens that a grammar forces.

A mask needs the last token on the host. The request's next step may be in flight then, as far as it needs no mask.
"""

from collections.abc import Sequence

import numpy as np

from jaxkv.engine.finish import Finisher
from jaxkv.engine.request_state import RequestState
from jaxkv.errors import STEP_FAILURES


def update_masks(running: Sequence[RequestState], finisher: Finisher) -> None:
    """Readies the running requests whose last token was read since their last mask; ends those that can only end.

    A request ends with the reason "stop" if no token is left and its text is complete, and with an error if it is not,
    or if a limit of llguidance was exceeded. Other requests continue.

    Args:
        running: requests that hold pages.
        finisher: ends requests.
    """
    due = [
        one
        for one in running
        if one.constraint is not None and not one.constraint.is_ready(one.generated)
    ]
    left = [one for one in due if _needs_mask(one, finisher)]
    constraints = [one.constraint for one in left if one.constraint is not None]
    if not constraints:
        return
    grammar = constraints[0].grammar
    masks = np.zeros((len(constraints), grammar.forbidden.size), np.uint32)
    # Any grammar fills the masks of all: they have one vocabulary.
    grammar.fill([constraint.matcher for constraint in constraints], masks)
    for sequence, constraint, mask in zip(left, constraints, masks, strict=True):
        try:
            complete = constraint.settle(mask, sequence.answer)
        except STEP_FAILURES as error:
            finisher.fail(sequence, error)
            continue
        if complete:
            finisher.finish(sequence, "stop")


def _needs_mask(sequence: RequestState, finisher: Finisher) -> bool:
    """Appends the tokens that the grammar forces, as if they were sampled; returns whether a mask is to be computed.

    None is for a request that ends, nor for one whose form has not begun. The next step computes the keys and values of
    forced tokens as a chunk, like those of a prompt. A step in flight emits no token then: it would be the first of
    them.
    """
    constraint, answer = sequence.constraint, sequence.answer
    assert constraint is not None
    try:
        if constraint.stays_free(answer):
            return False
        for token in constraint.forced(answer):
            sequence.accept(token, None)
            sequence.pending = 0
            if sequence.reason is not None:
                finisher.release(sequence)
                return False
    except STEP_FAILURES as error:
        finisher.fail(sequence, error)
        return False
    return True
