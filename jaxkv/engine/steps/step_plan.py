"""The plan of one step: which requests take part, with which tokens, and what the cache needs before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.engine.request_state import RequestState


class Part(NamedTuple):
    """The part of one request in a step. A tuple, because each row of each step makes one.

    Attributes:
        sequence: the request.
        start, count: its new tokens are [start, start + count). The count is 0 if all tokens are computed and the step
            only samples the next one. In a plan of several decode steps it is the number of steps that the request
            takes part in.
        emits: sampled tokens that count: 1 for a decode step or a last prefill chunk, 0 for any other chunk. In a plan
            of several steps it equals `count`; with drafts too, although those that are not accepted count for nothing.
        carry: its new token was sampled by the step before and is read on the device, not from the host, which may
            have read it too if there are drafts.
        drafts: drafted tokens behind its new token, which are among its `count` tokens. It emits 1 to `count` tokens.
            With `carry` the device has them, and the numbers are 0; `start` is then the last place where it can be.
    """

    sequence: RequestState
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - hides `tuple.count`, which is not used
    emits: int
    carry: bool
    drafts: tuple[int, ...] = ()


class PartColumns(NamedTuple):
    """The parts of a step as columns, see `Part`."""

    sequences: tuple[RequestState, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    emits: tuple[int, ...]
    carry: tuple[bool, ...]
    drafts: tuple[tuple[int, ...], ...]


def columns_of(parts: Sequence[Part]) -> PartColumns:
    """Returns the columns of one or more parts."""
    return PartColumns(*zip(*parts, strict=True))


@dataclass(frozen=True)
class StepPlan:
    """What the next step computes, and what the cache needs before it.

    Attributes:
        parts: the requests that take part; may be empty.
        new_entries: requests that were given an entry of the sampling group, each with the id of the entry.
        copies: copies of shared pages and states before they are written, each with the request that gets the copy.
        preempted: requests that lost their pages for this plan.
        steps: decode steps that are sent as one program; from the second on, each row takes the token that it sampled
            in the step before.
    """

    parts: tuple[Part, ...]
    new_entries: tuple[tuple[RequestState, int], ...]
    copies: tuple[tuple[RequestState, PageCopy], ...]
    preempted: tuple[RequestState, ...]
    steps: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not (self.parts or self.new_entries or self.copies)


def part_of(sequence: RequestState, count: int) -> Part:
    """Returns the part of a request that computes its next `count` tokens."""
    pages, known = sequence.pages, len(sequence.tokens)
    assert pages is not None, "only a request with pages is planned"
    start = pages.computed
    stop = start + count
    assert stop <= pages.reserved, "the scheduler reserves pages before it plans tokens"
    emits = stop == known + sequence.pending and not sequence.other_samples
    return _new_tuple(Part, (sequence, start, count, int(emits), count > 0 and start >= known, ()))


def next_decode_part(sequence: RequestState) -> Part | None:
    """Returns the decode part of a running request that has a page for it; `None` for any other request.

    It decides most rows of most steps in one call; `part_of` makes the same part.
    """
    pages = sequence.pages
    if pages is None or sequence.other_samples:
        return None
    start, known = pages.computed, len(sequence.tokens)
    stop = start + 1
    if stop != known + sequence.pending or stop >= sequence.longest or stop > pages.writable:
        return None
    return _new_tuple(Part, (sequence, start, 1, 1, start >= known, ()))


_new_tuple = tuple.__new__
"""Makes a part in half the time of its constructor, which is a function in Python."""


def token_masks_of(columns: PartColumns) -> list[np.ndarray | None]:
    """Returns the mask of the token that each part samples; `None` without a grammar, or if the token is not used."""
    return [
        None if sequence.constraint is None or not emits else sequence.constraint.mask
        for sequence, emits in zip(columns.sequences, columns.emits, strict=True)
    ]


def extended(part: Part, steps: int) -> Part:
    """Returns a decode part extended to `steps` steps, or fewer if the request has fewer tokens left."""
    sequence = part.sequence
    left = min(steps, sequence.longest - len(sequence.tokens) - sequence.pending)
    return part._replace(count=left, emits=left)


def drafted(part: Part, drafts: tuple[int, ...]) -> Part:
    """Returns a decode part that verifies drafts behind its new token."""
    return part._replace(count=1 + len(drafts), emits=1 + len(drafts), drafts=drafts)


def first_step(part: Part) -> Part:
    """Returns the first step of a part of several steps, or a part without its drafts."""
    return part._replace(count=1, emits=1, drafts=())


def trim(wanted: list[tuple[RequestState, int]], excess: int) -> None:
    """Removes `excess` tokens from the end of the list; these prompts continue in a later step."""
    while excess:
        sequence, count = wanted.pop()
        if count > excess:
            wanted.append((sequence, count - excess))
        excess -= min(count, excess)


def align(
    wanted: list[tuple[RequestState, int]], before: Sequence[tuple[RequestState, int]], chunk: int
) -> None:
    """Shortens prefill chunks to end at a multiple of `chunk`, so that states do not depend on where prompts are cut.

    A prompt's last chunk keeps its end. A prompt with no token left waits for a later step. The first prompt always
    makes progress: it is extended to the next multiple, or to what it had before it was trimmed if that is less.

    Args:
        wanted: requests with their numbers of tokens; changed in place.
        before: `wanted` as it was before `trim`.
        chunk: tokens per chunk of the recurrent layers.
    """
    for index in reversed(range(len(wanted))):
        sequence, count = wanted[index]
        stop = sequence.computed + count
        if stop == sequence.goal or stop % chunk == 0:
            continue
        if count > stop % chunk:
            wanted[index] = sequence, count - stop % chunk
        elif index:
            del wanted[index]
        else:
            wanted[0] = sequence, min(before[0][1], chunk - sequence.computed % chunk)
