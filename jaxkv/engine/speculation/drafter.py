"""`Drafter`: guesses the next tokens of requests. Imports no JAX."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.step_plan import Part


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. A wrong guess costs time, and never a token."""

    def draft(
        self, sequences: Sequence[RequestState], most: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Returns up to `most` tokens for each request, which may follow its `tokens`; none where it has no guess.

        Args:
            sequences: requests whose sampled tokens the host has all read.
            most: most tokens for each of them, 1 or more.
        """
        ...


@runtime_checkable
class FollowingDrafter(Drafter, Protocol):
    """A drafter with memory on the device, which drafts behind steps that were sent and are not read."""

    def follow(self, parts: Sequence[Part]) -> None:
        """Drafts the tokens behind a step that verifies drafts, in the sampling group of the verifier's cache."""
        ...

    def has_drafts(self, sequence: RequestState) -> bool:
        """Returns whether it left drafts of the tokens behind the last one of a request in that group.

        The host has read all tokens of the request, and `draft` was called with it since.
        """
        ...

    def cache_lost(self) -> None:
        """Notes that the verifier's cache was lost, perhaps by drafts that could not be computed."""
        ...

    def drop_shared(self) -> None:
        """Drops parameters of the verifying model, which is given others; the next draft takes those."""
        ...

    def release(self) -> None:
        """Gives the memory of its cache back; the next draft takes it again."""
        ...

    def close(self) -> None:
        """Gives back all its memory; it cannot draft afterwards."""
        ...
