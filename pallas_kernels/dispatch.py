"""Chooses one implementation of an op, or says why none can run. Knows no op in particular."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

_LOG = logging.getLogger(__name__)
_FALLBACKS: Counter[tuple[str, str, str]] = Counter()


def fallbacks() -> dict[tuple[str, str, str], int]:
    """Returns how often tracing an op passed over a better implementation: (op, implementation, reason) -> times."""
    return dict(_FALLBACKS)


class Unsupported(ValueError):
    """No implementation can run the given arguments; the message lists every reason."""


def choose(
    op: str,
    reasons: Mapping[str, Callable[[], str | None]],
    implementation: str | None,
) -> str:
    """Returns the name of the first implementation whose reason is `None`.

    Args:
        op: the op's name, for the message.
        reasons: implementation name -> function giving why it cannot run (`None` if it can), best first.
        implementation: a name the caller insists on, or `None` to take the best that can run.

    Raises:
        Unsupported: the named implementation, or every one, refuses; the message carries each reason.
        ValueError: the name is not one of this op's implementations.
    """
    if implementation is not None and implementation not in reasons:
        raise ValueError(
            f"{op} has no implementation {implementation!r}; choose one of {', '.join(reasons)}"
        )
    candidates = [implementation] if implementation is not None else list(reasons)
    refusals = {}
    for name in candidates:
        refusal = reasons[name]()
        if refusal is None:
            for passed_over, reason in refusals.items():
                _note_fallback(op, passed_over, reason, name)
            return name
        refusals[name] = refusal
    told = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    raise Unsupported(f"no implementation of {op} can run here: {told}")


def _note_fallback(op: str, passed_over: str, reason: str, chosen: str) -> None:
    """Counts a fallback, and logs it the first time."""
    key = (op, passed_over, reason)
    if not _FALLBACKS[key]:
        _LOG.info("%s runs as %s, since %s cannot: %s", op, chosen, passed_over, reason)
    _FALLBACKS[key] += 1
