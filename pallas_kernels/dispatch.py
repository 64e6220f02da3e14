"""Chooses one implementation of an op, or says why none can run. Knows no op in particular."""

from collections.abc import Callable, Mapping


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
            return name
        refusals[name] = refusal
    told = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    raise Unsupported(f"no implementation of {op} can run here: {told}")
