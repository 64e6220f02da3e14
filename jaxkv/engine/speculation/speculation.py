"""`Speculation`: which rows of a step get drafts, and how many of them are accepted. Imports no JAX.

A request whose drafts are being verified has an unknown length until the step is read, so the host can draft only for
requests whose tokens it has all read. Where the step itself ends with the next drafts, the next step may follow before:
the device then knows tokens and positions, and the host the most that they can be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.speculation.drafter import Drafter, FollowingDrafter
from jaxkv.engine.speculation.pace import Pace
from jaxkv.engine.steps.step_plan import Part, drafted


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """How many drafts were accepted.

    Attributes:
        drafted: per position behind a row's next token, how many drafts were verified.
        accepted: per position, how many of them were accepted.
        steps: steps for which drafts were asked.
        overlapped: how many of them were sent before the step before was read, with drafts that the device made.
        steps_by_drafts: steps that were read, by the most drafts of a row, from one on.
        pauses: how often drafting paused because a token took longer with drafts than without.
        is_paused: whether it pauses now.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int
    overlapped: int
    steps_by_drafts: tuple[int, ...]
    pauses: int
    is_paused: bool

    def __str__(self) -> str:
        """Returns the share of accepted drafts at each position, in one line."""
        shares = [
            f"{accepted / drafted:.0%}" if drafted else "-"
            for drafted, accepted in zip(self.drafted, self.accepted, strict=True)
        ]
        used = ", ".join(
            f"{steps:,} with {drafts}"
            for drafts, steps in enumerate(self.steps_by_drafts, 1)
            if steps
        )
        state = "paused" if self.is_paused else "on"
        return (
            f"drafts are {state}: {sum(self.accepted):,} of {sum(self.drafted):,} accepted, by position "
            f"{', '.join(shares)}; {self.steps:,} steps, {self.overlapped:,} overlapped, by drafts of a row "
            f"{used or '-'}; {self.pauses:,} pauses"
        )


class Speculation:
    """Drafts for the steps of one engine.

    Args:
        drafter: guesses the tokens.
        tokens: most drafts of a row.
        most_drafts: returns the most drafts of each row that a step of so many rows verifies; 0 for none.
        pace: decides how many drafts there are.
        drafts_next: returns whether such steps end with the next drafts, on the device.

    Attributes:
        drafter: guesses the tokens.
        pace: decides when there are drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        tokens: int,
        most_drafts: Callable[[int], int],
        pace: Pace,
        drafts_next: Callable[[], bool],
    ) -> None:
        self.drafter = drafter
        self._most_drafts, self._drafts_next = most_drafts, drafts_next
        self._drafted, self._accepted = [0] * tokens, [0] * tokens
        self._steps_by_drafts = [0] * tokens
        self._steps = self._overlapped = 0
        self.pace = pace

    @property
    def stats(self) -> SpeculationStats:
        """How many drafts were accepted so far."""
        return SpeculationStats(
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            steps=self._steps,
            overlapped=self._overlapped,
            steps_by_drafts=tuple(self._steps_by_drafts),
            pauses=self.pace.pauses,
            is_paused=self.pace.is_paused,
        )

    def is_active(self, running: Sequence[RequestState]) -> bool:
        """Whether the next step may verify drafts of these requests, so that it needs all their tokens on the host."""
        return self._count(running) > 0 and any(may_speculate(one) for one in running)

    def may_follow(self, running: Sequence[RequestState]) -> bool:
        """Whether the next step may take the drafts of these requests from the device, while it makes them.

        The requests all run, and steps that verify drafts of some of them are in flight.
        """
        return (
            self._drafts_next()
            and self._count(running) > 0
            and all(_may_follow(one) for one in running)
            and any(_known(one) + 1 < one.longest for one in running)
        )

    def draft(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts of the next step with their drafts: none unless all of them are decode parts.

        Drafts that the device has are 0, and their part has `carry`, whether or not the host has read its tokens.
        """
        made = list(parts)
        if any(part.count != 1 or not part.emits for part in parts):
            return made
        follows = any(part.sequence.unread_drafts for part in parts)
        # Behind drafts that are not read yet, only such a step can follow.
        most = self._count(parts) or int(follows)
        room = [min(most, self._room(part)) for part in parts]
        asked = [index for index, count in enumerate(room) if count > 0]
        if not asked:
            return made
        self._steps += 1
        self._overlapped += follows
        of_host = [index for index in asked if not parts[index].sequence.pending]
        guesses = self.drafter.draft(
            [parts[index].sequence for index in of_host], [room[index] for index in of_host]
        )
        guessed = dict(zip(of_host, guesses, strict=True))
        for index in asked:
            part, most = parts[index], room[index]
            if index not in guessed or self._has_drafts(part.sequence):
                made[index] = drafted(part, (0,) * most)._replace(carry=True)
            elif guessed[index]:
                made[index] = drafted(part, tuple(guessed[index][:most]))
        if self._drafts_next() and not any(part.drafts for part in made):
            # The last token again, so that the step ends with the next drafts, and that one need not wait for it.
            first = asked[0]
            made[first] = drafted(parts[first], (parts[first].sequence.tokens[-1],))
        return made

    def follow(self, parts: Sequence[Part]) -> None:
        """Lets a drafter with a model draft behind a step of these parts, which was sent and verifies drafts."""
        if isinstance(self.drafter, FollowingDrafter):
            self.drafter.follow(parts)

    def cache_lost(self) -> None:
        """Tells a drafter with a model that the verifying model's cache was lost."""
        if isinstance(self.drafter, FollowingDrafter):
            self.drafter.cache_lost()

    def drop_shared(self) -> None:
        """Lets a drafter drop the parameters that it has from the verifying model."""
        if isinstance(self.drafter, FollowingDrafter):
            self.drafter.drop_shared()

    def release(self) -> None:
        """Gives back the cache of a drafter with a model; the next draft takes the memory again."""
        if isinstance(self.drafter, FollowingDrafter):
            self.drafter.release()

    def close(self) -> None:
        """Gives back all memory of a drafter with a model."""
        if isinstance(self.drafter, FollowingDrafter):
            self.drafter.close()

    def note(self, drafted: int, accepted: int) -> None:
        """Records the drafts of one row of a step that was read.

        Args:
            drafted: number of its drafts.
            accepted: how many of them were accepted.
        """
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        self.pace.note(drafted, accepted)

    def read(self, parts: Sequence[Part]) -> None:
        """Measures a step of these parts, whose tokens were read."""
        most = max([len(part.drafts) for part in parts])
        if most:
            self._steps_by_drafts[most - 1] += 1
        if any(not part.count or part.emits != part.count for part in parts):
            self.pace.interrupt()
            return
        rows = [part.sequence.number for part in parts]
        length = sum([len(part.sequence.tokens) for part in parts])
        self.pace.read(rows, length, most)

    def _has_drafts(self, sequence: RequestState) -> bool:
        """Whether a drafter with a model left drafts on the device for a request whose tokens the host has read."""
        return isinstance(self.drafter, FollowingDrafter) and self.drafter.has_drafts(sequence)

    def _count(self, rows: Sequence[object]) -> int:
        """Returns how many drafts each row of the next step has."""
        return self.pace.choose(len(rows), self._most_drafts(len(rows)))

    def _room(self, part: Part) -> int:
        """Returns the most drafts of a part: the last token of a request follows no draft."""
        sequence = part.sequence
        if not may_speculate(sequence) or (sequence.pending and not sequence.drafts_on_device):
            return 0
        return sequence.longest - _known(sequence) - 1


def _may_follow(sequence: RequestState) -> bool:
    """Whether a request's next step needs nothing that depends on how many of its drafts are accepted.

    If the request may have ended by then, the step leaves it out.
    """
    return (
        may_speculate(sequence)
        and sequence.computed == _known(sequence) - 1
        and sequence.generated >= sequence.request.params.min_tokens
    )


def _known(sequence: RequestState) -> int:
    """Returns the tokens of a request with those in flight: the most that it can have once they are read."""
    return len(sequence.tokens) + sequence.pending


def may_speculate(sequence: RequestState) -> bool:
    """Whether a request takes drafts: not while a grammar allows some tokens only, nor if its tokens are given."""
    return sequence.constraint is None and not (sequence.request.given or sequence.other_samples)
