"""Which programs serving will need, so that they can be compiled before the first request. Compiles nothing."""

from jaxkv.engine.buckets import bucket
from jaxkv.engine.engine import Engine
from jaxkv.engine.fields import StepShape
from jaxkv.engine.request import Request
from jaxkv.engine.rows import features_of
from jaxkv.engine.shapes import Declared, row_of, tokens_held
from jaxkv.engine.side_programs import COPY


def declare_served(engine: Engine, request: Request, count: int) -> list[Declared]:
    """Lists every program that up to `count` requests like this one, or shorter, can need on the engine.

    Requests that choose their tokens in another way, and mixtures of several ways, need others.

    Args:
        engine: serves them.
        request: an example with the longest prompt and the most tokens.
        count: requests at once.
    """
    held, rows = tokens_held(request), min(count, engine.shapes.decode_rows[-1])
    returns = _may_return(engine, held, rows)
    needed = engine.shapes.declare_all(
        features_of([row_of(request, 0)]),
        rows=rows,
        new_tokens=rows * (1 + (held if returns else len(request.prompt))),
        total_tokens=held,
    )
    if engine.prefix is not None or count > 1:
        needed.append(COPY)
    if request.params.uses_penalties or request.params.logit_bias:
        needed += _admissions(engine, request, returns=returns)
    return needed


def _may_return(engine: Engine, held: int, rows: int) -> bool:
    """Whether some may come back with what they have generated: when a cache is lost, or pages run out."""
    if engine.config.most_rebuilds:
        return True
    groups = engine.executor.layout.paged_groups
    counts = engine.executor.owner.counts
    return any(rows * group.pages_for(held) > counts[group.name] for group in groups)


def _admissions(engine: Engine, request: Request, *, returns: bool) -> list[Declared]:
    """Lists what gives one sequence its entry: when it is new, and when it comes back with what it has generated."""
    widths = engine.executor.shapes.length_buckets
    longest = bucket(max(len(request.prompt), request.params.max_tokens), widths)
    prompt = bucket(len(request.prompt), widths)
    shape = StepShape(1, 1, ())
    new = [Declared("admit", shape, width) for width in widths if width <= prompt]
    back = [Declared("readmit", shape, width) for width in widths if width <= longest]
    return new + back if returns else new
