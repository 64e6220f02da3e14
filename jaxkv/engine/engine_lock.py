"""Whose turn it is to use an engine: threads wait for one another, or one borrower has it alone. Knows no engine."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LENT = (
    "an AsyncLLM serves this LLM, whose cache and engine only its thread may use; close it first, "
    "or send it the request"
)
CLOSED = "this LLM was closed and its memory freed; make another one"

_users: list[int] = []
"""The process that made the first `LLM`; in a forked child that is another one."""


def refuse_forked_user() -> None:
    """Notes that this process uses JAX.

    Raises:
        RuntimeError: it was forked from a process that does, so JAX would wait for threads that it does not have.
    """
    _users[:] = _users or [os.getpid()]
    _refuse_child_of(_users[0])


def _refuse_child_of(process: int) -> None:
    if os.getpid() != process:
        raise RuntimeError(
            f"process {os.getpid()} was forked from {process}, which has made an LLM; JAX's threads do not run in a "
            'forked child, where an LLM would hang. Start the child by multiprocessing\'s "spawn" method and make '
            "its LLM there, or fork before the first LLM is made"
        )


class EngineLock:
    """Lets one thread at a time have a turn, in no particular order.

    A thread that asks for a turn in the middle of its own gets it, as an interrupt could otherwise leave behind a turn
    that nobody ends.
    """

    def __init__(self) -> None:
        # Its lock can be taken twice by one thread, since a finalizer may come in the middle of any line.
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._lent = False
        self._ended = False
        self._process = os.getpid()
        self._deferred: deque[Callable[[], None]] = deque()

    @property
    def lent(self) -> bool:
        """Whether a borrower has all turns."""
        return self._lent

    @property
    def is_over(self) -> bool:
        """Whether nobody gets a turn any more: they were ended, or this process is a forked child."""
        return self._ended or self._process != os.getpid()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits until no other thread has a turn, and holds it.

        Raises:
            RuntimeError: all turns are lent, they were ended, or this process is a forked child.
        """
        # In a forked child the lock may be held by a thread that does not exist there.
        self.refuse_if_over()
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
            RuntimeError: they are lent already or were ended, another thread has one, or this is a forked child.
        """
        self.refuse_if_over()
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

    def end(self) -> None:
        """Lets nobody have another turn; for the thread that has one now."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def refuse_if_over(self) -> None:
        """Raises `RuntimeError` if turns were ended, or this process is a forked child."""
        _refuse_child_of(self._process)
        if self._ended:
            raise RuntimeError(CLOSED)

    def refuse_if_lent(self) -> None:
        """Raises `RuntimeError` if all turns are lent or over."""
        self.refuse_if_over()
        if self._lent:
            raise RuntimeError(LENT)

    def defer(self, errand: Callable[[], None]) -> None:
        """Does something now if nobody has a turn, and else when the turn ends; for finalizers, which must not wait.

        Nothing is done any more when turns are over.
        """
        if self.is_over:
            return
        with self._changed:
            self._deferred.append(errand)
            if self._thread is None and not self._lent:
                self._thread = threading.get_ident()
                self._end()

    def run_deferred(self) -> None:
        """Does what waits for the end of the turn; for whoever has it, at a moment that suits."""
        while self._deferred:
            self._deferred.popleft()()

    def _end(self) -> None:
        with self._changed:
            try:
                self.run_deferred()
            finally:
                self._thread = None
                self._changed.notify_all()
