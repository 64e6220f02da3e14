"""`Drafter`: guesses the next tokens of requests. Imports no JAX."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxkv.engine.request_state import RequestState


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
