"""Defects by name, each a function that puts itself into the code under test with pytest's `monkeypatch`."""

from collections.abc import Callable
from typing import Any

type Defect = Callable[[Any], None]


class Defects(dict[str, Defect]):
    """Defects by name; as a decorator it takes one more."""

    def __call__(self, function: Defect) -> Defect:
        self[function.__name__] = function
        return function


def wrap(patch, owner, name, make):
    """Replaces a function by what `make` builds around it."""
    patch.setattr(owner, name, make(getattr(owner, name)))
