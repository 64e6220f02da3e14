"""The lock of an engine: threads take turns, or one `AsyncLLM` borrows the engine and keeps all others out."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LENT = (
    "an AsyncLLM serves this LLM, and only its thread may use the engine; close the AsyncLLM first, "
    "or send it the request"
)
CLOSED = "this LLM was closed and its memory freed; make another LLM"

_first_process: list[int] = []
"""Id of the process that made the first `LLM`; a forked child inherits its parent's."""


def refuse_forked_user() -> None:
    """Records that this process uses JAX.

    Raises:
        RuntimeError: it was forked from a process that uses JAX; JAX would wait for threads that exist in the parent.
    """
    _first_process[:] = _first_process or [os.getpid()]
    _refuse_child_of(_first_process[0])


def _refuse_child_of(process: int) -> None:
    if os.getpid() != process:
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {process}, which had made an LLM; an LLM hangs in a forked "
            "child, because JAX's threads do not run there. Start the child with multiprocessing's \"spawn\" method "
            "and make its LLM there, or fork before the first LLM is made"
        )


class EngineLock:
    """A lock with three states: free, held by one thread, or lent to a borrower. Threads get it in no fixed order.

    A thread may acquire it again while it holds it; the first release frees it. So an interrupt cannot leave behind a
    lock that is never released.
    """

    def __init__(self) -> None:
        # `Condition` uses a reentrant lock: a finalizer may run on this thread at any line.
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._lent = False
        self._borrower: int | None = None
        self._why_closed = ""
        self._process = os.getpid()
        self._deferred: deque[Callable[[], None]] = deque()

    @property
    def lent(self) -> bool:
        """Whether the lock is lent to a borrower."""
        return self._lent

    @property
    def is_closed(self) -> bool:
        """Whether no thread can acquire it any more: it was closed, or this process is a forked child."""
        return bool(self._why_closed) or self._process != os.getpid()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquires the lock, waiting for another thread if necessary, and releases it at the end.

        Raises:
            RuntimeError: the lock is lent or closed, or this process is a forked child.
        """
        # In a forked child, a thread that exists only in the parent may hold the lock.
        self.refuse_if_closed()
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
            self._release()

    @contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Acquires the lock if it is free, and releases it at the end; yields whether it was free. It never waits."""
        # In a forked child, a thread that exists only in the parent may hold the lock.
        if self.is_closed:
            yield False
            return
        with self._changed:
            is_free = self._thread is None and not self._lent and not self._why_closed
            if is_free:
                self._thread = threading.get_ident()
        try:
            yield is_free
        finally:
            if is_free:
                self._release()

    def lend(self) -> None:
        """Lends the lock until `take_back`, which any thread may call.

        Raises:
            RuntimeError: the lock is lent or closed, another thread holds it, or this process is a forked child.
        """
        self.refuse_if_closed()
        with self._changed:
            self.refuse_if_lent()
            if self._thread not in (None, threading.get_ident()):
                raise RuntimeError(
                    "another thread is in the middle of a call to this LLM; wait until the call returns, then make "
                    "the AsyncLLM"
                )
            self._lent = True

    def let_in_borrower(self) -> None:
        """Lets the calling thread acquire the lock while it is lent: it is the borrower's own."""
        self._borrower = threading.get_ident()

    def take_back(self) -> None:
        """Ends a loan; see `lend`."""
        with self._changed:
            self._release()
            self._lent, self._borrower = False, None

    def close(self, why: str = CLOSED) -> None:
        """Closes the lock for good; the thread that holds it calls this.

        Args:
            why: the message of later calls.
        """
        with self._changed:
            self._why_closed = why
            self._changed.notify_all()

    def refuse_if_closed(self) -> None:
        """Raises `RuntimeError` if the lock is closed, or this process is a forked child."""
        _refuse_child_of(self._process)
        if self._why_closed:
            raise RuntimeError(self._why_closed)

    def refuse_if_lent(self) -> None:
        """Raises `RuntimeError` if the lock is lent to another thread or closed, or this process is a forked child."""
        self.refuse_if_closed()
        if self._lent and self._borrower != threading.get_ident():
            raise RuntimeError(LENT)

    def defer(self, action: Callable[[], None]) -> None:
        """Calls `action` now if the lock is free, or else when it is released; for finalizers, which must not wait.

        After `close`, actions are dropped.
        """
        if self.is_closed:
            return
        with self._changed:
            self._deferred.append(action)
            if self._thread is None and not self._lent:
                self._thread = threading.get_ident()
                self._release()

    def run_deferred(self) -> None:
        """Calls the deferred actions; the thread or borrower that has the lock may call this between two steps."""
        while self._deferred:
            self._deferred.popleft()()

    def _release(self) -> None:
        with self._changed:
            try:
                self.run_deferred()
            finally:
                self._thread = None
                self._changed.notify_all()
