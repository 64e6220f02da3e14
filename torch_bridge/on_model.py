"""`OnModel`: something that is put on a model for its first user and taken back with its last, in any threads."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class _Put[T]:
    what: T
    num_users: int


class OnModel[T]:
    """Counts the users of something on models. Models are referred to weakly.

    Args:
        put: puts it on a model and returns what `take` needs, which must not refer to the model strongly.
        take: takes it back from a model.
    """

    def __init__(
        self,
        put: Callable[[torch.nn.Module], T],
        take: Callable[[torch.nn.Module, T], None],
    ) -> None:
        self._put, self._take = put, take
        self._found: weakref.WeakKeyDictionary[torch.nn.Module, _Put[T]] = (
            weakref.WeakKeyDictionary()
        )
        # The garbage collector may end a user inside these functions, in the thread that holds the lock.
        self._lock = threading.RLock()

    def use(self, model: torch.nn.Module) -> Callable[[], None]:
        """Begins a use, and returns the function that ends it; call that once."""
        with self._lock:
            found = self._found.get(model)
            if found is not None:
                found.num_users += 1
            # The last of the others may have ended between the two statements.
            if found is None or self._found.get(model) is not found:
                self._found[model] = _Put(self._put(model), 1)
        where = weakref.ref(model)
        return lambda: self._end(where())

    def _end(self, model: torch.nn.Module | None) -> None:
        if model is None:
            return
        with self._lock:
            found = self._found[model]
            found.num_users -= 1
            if not found.num_users:
                del self._found[model]
                self._take(model, found.what)
