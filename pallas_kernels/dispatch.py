"""Chooses one implementation of an op, or says why none can run. Knows no op in particular."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)
_FALLBACKS: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True)
class Question:
    """A choice that came up while ops were traced.

    Attributes:
        op: the op's name.
        place: where in a model, such as "layer 3"; empty outside of `at`.
        refusals: why each implementation cannot run, `None` if it can; the one that the op likes best comes first.
    """

    op: str
    place: str
    refusals: Mapping[str, str | None]


_ASKED: ContextVar[list[Question] | None] = ContextVar("asked", default=None)
_PLACE: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def asking() -> Iterator[list[Question]]:
    """Collects the choices that ops traced inside would make.

    What is traced inside serves to learn its choices: it takes whatever runs everywhere, and no fallback is
    counted. An op that JAX finds already traced is not asked.
    """
    questions: list[Question] = []
    token = _ASKED.set(questions)
    try:
        yield questions
    finally:
        _ASKED.reset(token)


@contextmanager
def at(place: str) -> Iterator[None]:
    """Names the place of the ops traced inside, for questions; it has no other effect."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def fallbacks() -> dict[tuple[str, str, str], int]:
    """Returns how often tracing an op passed over a better implementation: (op, implementation, reason) -> times."""
    return dict(_FALLBACKS)


class Unsupported(ValueError):
    """No implementation can run the given arguments; the message lists every reason."""


def choose(
    op: str,
    reasons: Mapping[str, Callable[[], str | None]],
    implementation: str | None,
    *,
    by_name: Collection[str] = (),
) -> str:
    """Returns the name of the first implementation whose reason is `None`.

    Args:
        op: the op's name, for the message.
        reasons: implementation name -> function giving why it cannot run (`None` if it can), best first.
        implementation: a name the caller insists on, or `None` to take the best that can run.
        by_name: implementations that run only when they are named.

    Raises:
        Unsupported: the named implementation, or every one, refuses; the message carries each reason.
        ValueError: the name is not one of this op's implementations.
    """
    if implementation is not None and implementation not in reasons:
        raise ValueError(
            f"{op} has no implementation {implementation!r}; choose one of {', '.join(reasons)}"
        )
    asked = _ASKED.get()
    if asked is not None:
        return _answer(asked, op, reasons, by_name)
    best = [name for name in reasons if name not in by_name]
    refusals = {}
    for name in best if implementation is None else [implementation]:
        refusal = reasons[name]()
        if refusal is None:
            for passed_over, reason in refusals.items():
                note_fallback(op, passed_over, reason, name)
            return name
        refusals[name] = refusal
    raise _unsupported(op, refusals)


def _answer(
    asked: list[Question],
    op: str,
    reasons: Mapping[str, Callable[[], str | None]],
    by_name: Collection[str],
) -> str:
    """Notes what each implementation says and returns the last one that can run, which is the plainest."""
    refusals = {name: reason() for name, reason in reasons.items()}
    asked.append(Question(op, _PLACE.get(), refusals))
    able = [name for name, refusal in refusals.items() if refusal is None and name not in by_name]
    if not able:
        raise _unsupported(op, {name: refusal for name, refusal in refusals.items() if refusal})
    return able[-1]


def _unsupported(op: str, refusals: Mapping[str, str]) -> Unsupported:
    told = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    return Unsupported(f"no implementation of {op} can run here: {told}")


def note_fallback(op: str, passed_over: str, reason: str, chosen: str) -> None:
    """Counts a fallback, and logs it the first time; ops tell of calls that their implementation hands on."""
    key = (op, passed_over, reason)
    if not _FALLBACKS[key]:
        _LOG.info("%s runs as %s, since %s cannot: %s", op, chosen, passed_over, reason)
    _FALLBACKS[key] += 1
