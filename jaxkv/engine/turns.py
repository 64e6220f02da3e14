"""Whose turn it is to use an engine: threads wait for one another, or one borrower has it alone. Knows no engine."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LENT = (
    "an AsyncLLM serves this LLM, whose cache and engine only its thread may use; close it first, "
    "or send it the request"
)


class Turns:
    """Lets one thread at a time have a turn, in no particular order.

    A thread that asks for a turn in the middle of its own gets it, as an interrupt could otherwise leave behind a turn
    that nobody ends.
    """

    def __init__(self) -> None:
        # Its lock can be taken twice by one thread, since a finalizer may come in the middle of any line.
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._lent = False
        self._errands: deque[Callable[[], None]] = deque()

    @property
    def lent(self) -> bool:
        """Whether a borrower has all turns."""
        return self._lent

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits until no other thread has a turn, and holds it.

        Raises:
            RuntimeError: all turns are lent.
        """
        me = threading.get_ident()
        with self._changed:
            self.refuse_if_lent()
            while self._thread not in (None, me):
                self._changed.wait()
                self.refuse_if_lent()
            self._thread = me
        try:
            yield
        finally:
            self._end()

    def lend(self) -> None:
        """Gives all turns away until `take_back`, which any thread may call.

        Raises:
            RuntimeError: they are lent already, or another thread has one.
        """
        with self._changed:
            self.refuse_if_lent()
            if self._thread not in (None, threading.get_ident()):
                raise RuntimeError(
                    "another thread is in the middle of a call to this LLM; wait for it, then serve the LLM"
                )
            self._lent = True

    def take_back(self) -> None:
        """Ends what `lend` began."""
        with self._changed:
            self._end()
            self._lent = False

    def refuse_if_lent(self) -> None:
        """Raises `RuntimeError` if all turns are lent."""
        if self._lent:
            raise RuntimeError(LENT)

    def when_free(self, errand: Callable[[], None]) -> None:
        """Does something now if nobody has a turn, and else when the turn ends; for finalizers, which must not wait."""
        with self._changed:
            self._errands.append(errand)
            if self._thread is None and not self._lent:
                self._thread = threading.get_ident()
                self._end()

    def run_errands(self) -> None:
        """Does what waits for the end of the turn; for whoever has it, at a moment that suits."""
        while self._errands:
            self._errands.popleft()()

    def _end(self) -> None:
        with self._changed:
            try:
                self.run_errands()
            finally:
                self._thread = None
                self._changed.notify_all()
