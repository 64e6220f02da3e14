"""Seeded defects by name: each patches the code under test, and states the error that must find it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Defect:
    """A fault of the code under test, and the one error that counts as its discovery.

    Attributes:
        put: puts it in, with pytest's `monkeypatch`.
        kind: class of the error that must find it, exactly.
        message: pattern that the error's message holds; `None` for any.
        scene: the test that must find it; `None` for the random programs of its registry.
    """

    put: Callable[[Any], None]
    kind: type[Exception]
    message: str | None = None
    scene: Callable[[], None] | None = None

    def assert_found(self, patch: pytest.MonkeyPatch, programs: Callable[[], None]) -> None:
        """Puts the defect in and runs its scene or the programs, which must raise the stated error.

        Other errors pass on: a defect that only makes the code crash is not found.
        """
        self.put(patch)
        with pytest.raises(self.kind, match=self.message) as found:
            (self.scene or programs)()
        assert found.type is self.kind


class Defects(dict[str, Defect]):
    """Defects by name."""

    def __call__(
        self,
        kind: type[Exception] = AssertionError,
        message: str | None = None,
        *,
        scene: Callable[[], None] | None = None,
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Returns a decorator that adds a function as a defect.

        Args:
            kind: class of the error that must find it.
            message: pattern of its message; required for classes that an accident raises as well.
            scene: the test that must find it, instead of random programs.
        """
        if not message and scene is None and kind.__module__ == "builtins":
            raise ValueError(f"{kind.__name__} may have any cause; state a pattern of its message")

        def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
            self[function.__name__] = Defect(function, kind, message, scene)
            return function

        return add


def wrap(patch, owner, name, make):
    """Replaces a function by what `make` builds around it."""
    patch.setattr(owner, name, make(getattr(owner, name)))
