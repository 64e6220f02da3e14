"""Choice among the implementations of an op, with the reason for each refusal and a count of fallbacks."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

_LOG = logging.getLogger(__name__)
_FALLBACKS: Counter[tuple[str, str, str]] = Counter()


@dataclass(frozen=True)
class Question:
    """One choice of an implementation, recorded while an op was traced inside `asking()`.

    Attributes:
        op: the op's name.
        place: where in the model the op was traced, such as "layer 3"; empty outside of `at`.
        refusals: implementation name -> why it cannot run, `None` if it can; in the op's order of preference.
    """

    op: str
    place: str
    refusals: Mapping[str, str | None]


# Ops whose kernel sums each row in one order for calls of all sizes; "xla" does so for every op.
_FIXED_KERNELS = frozenset(
    {
        "filter_bounds",
        "gathered_matmul",
        "group_rows",
        "grouped_matmul",
        "page_write",
        "ragged_attention",
        "rotary_write",
        "row_topk",
        "skinny_matmul",
    }
)

_ASKED: ContextVar[list[Question] | None] = ContextVar("asked", default=None)
_PLACE: ContextVar[str] = ContextVar("place", default="")


@contextmanager
def asking() -> Iterator[list[Question]]:
    """Records the choice that each op traced inside would make.

    Discard the traces made inside: their ops take the most general implementation, and no fallback is counted. A
    function whose trace JAX has cached is not traced again, so its choices are not recorded.
    """
    questions: list[Question] = []
    token = _ASKED.set(questions)
    try:
        yield questions
    finally:
        _ASKED.reset(token)


@contextmanager
def unasked() -> Iterator[None]:
    """Keeps the choices of ops that are traced inside from being recorded: a caller has made them for every family."""
    token = _ASKED.set(None)
    try:
        yield
    finally:
        _ASKED.reset(token)


def is_asking() -> bool:
    """Returns whether ops that are traced now record their choices, see `asking`."""
    return _ASKED.get() is not None


@contextmanager
def at(place: str) -> Iterator[None]:
    """Sets `Question.place` for the ops traced inside; it has no other effect."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def fallbacks() -> dict[tuple[str, str, str], int]:
    """Returns how often each fallback happened: (op, implementation passed over, reason) -> number of traces."""
    return dict(_FALLBACKS)


class Unsupported(ValueError):
    """No implementation can run the given arguments; the message lists every reason."""


@contextmanager
def xla_if(refusal: str | None, *, op: str, implementation: str | None) -> Iterator[str | None]:
    """Yields the family of ops that one part of a model's layers runs in: XLA, in every family, if there is a refusal.

    Otherwise a model with a few such layers would run all of its layers on XLA.

    Args:
        refusal: why no kernel takes them; `None` if kernels may.
        op: what the fallback is counted as.
        implementation: the model's family; `None`, which is kept, if each op chooses for itself.
    """
    if refusal is None or implementation is None:
        yield implementation
        return
    if implementation != "xla" and not is_asking():
        note_fallback(op, implementation, refusal, "xla")
    with unasked():
        yield "xla"


def check_kernel(refusal: str | None) -> None:
    """Raises `ValueError` with the reason for which a Mosaic GPU kernel cannot run, unless it is `None`."""
    if refusal is not None:
        raise ValueError(f"the Mosaic GPU kernel cannot take this: {refusal}")


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
        reasons: implementation name -> function that returns why it cannot run, or `None` if it can; best first.
        implementation: the only implementation allowed, or `None` to take the best that can run.
        by_name: implementations that run only when `implementation` names them.

    Raises:
        Unsupported: the requested implementation, or every implementation, refuses; the message lists the reasons.
        ValueError: `implementation` is not one of this op's implementations.
    """
    if implementation is not None and implementation not in reasons:
        raise ValueError(
            f"{op} has no implementation {implementation!r}; choose one of {', '.join(reasons)}"
        )
    # Here, because files of the host import this one, and need no JAX.
    from pallas_kernels.fixed_order import is_fixed

    if is_fixed():
        reasons = {name: partial(_unless_unfixed, op, name, of) for name, of in reasons.items()}
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


def _unless_unfixed(op: str, name: str, why_not: Callable[[], str | None]) -> str | None:
    """Returns why an implementation cannot run under the fixed order of sums, or for its own reason."""
    if name != "xla" and op not in _FIXED_KERNELS:
        return "its order of sums depends on the call (batch_invariant)"
    return why_not()


def _answer(
    asked: list[Question],
    op: str,
    reasons: Mapping[str, Callable[[], str | None]],
    by_name: Collection[str],
) -> str:
    """Records every refusal and returns the last implementation that can run, which is the most general one."""
    refusals = {name: reason() for name, reason in reasons.items()}
    asked.append(Question(op, _PLACE.get(), refusals))
    able = [name for name, refusal in refusals.items() if refusal is None and name not in by_name]
    if not able:
        raise _unsupported(op, {name: refusal for name, refusal in refusals.items() if refusal})
    return able[-1]


def _unsupported(op: str, refusals: Mapping[str, str]) -> Unsupported:
    listed = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    return Unsupported(f"no implementation of {op} can run here: {listed}")


def note_fallback(op: str, passed_over: str, reason: str, chosen: str) -> None:
    """Counts a fallback and logs its first occurrence.

    An op whose implementation runs `chosen` for some calls reports those calls here.
    """
    key = (op, passed_over, reason)
    if not _FALLBACKS[key]:
        _LOG.info("%s runs as %s, since %s cannot: %s", op, chosen, passed_over, reason)
    _FALLBACKS[key] += 1
