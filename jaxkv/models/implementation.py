"""Chooses the family of implementations of a whole model: all ops of all layers use the same one.

The model is traced once over shapes, and each op reports which implementations support its arguments.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import init_cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.batch import SamplingBatch
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import Question, Unsupported, asking
from pallas_kernels.families import FAMILIES, WIDEST_HEAD, member

_LOG = logging.getLogger(__name__)
_LOGGED: set[str] = set()
_BEST, _PLAINEST = "mosaic_gpu", "xla"
# Rows and tokens of the traced steps. Whether a kernel supports a layer does not depend on them.
_ROWS, _TOKENS, _TABLE_WIDTH = 2, 32, 4


@dataclass(frozen=True)
class Choice:
    """The family of implementations of a model's ops.

    Attributes:
        name: one of `FAMILIES`.
        reasons: why the best family cannot run the model; empty if it does, or if the user named another.
    """

    name: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.reasons:
            return self.name
        return f"{self.name}, since {_BEST} cannot: {'; '.join(self.reasons)}"


def best_on_device() -> Choice:
    """Returns the best family on the default device, for a model whose shapes it supports."""
    refusal = why_not_mosaic()
    return Choice(_BEST) if refusal is None else Choice(_PLAINEST, (refusal,))


def choose_implementation(
    model: Model, params: Params, layout: CacheLayout, counts: Mapping[str, int]
) -> Choice:
    """Returns the family for all of a model's ops on this cache; logs it once with the reasons.

    Args:
        model: the model; if it names an implementation, only that one is tried.
        params: its parameters, or their shapes.
        layout: the cache's groups.
        counts: group name -> number of pages or states.

    Raises:
        Unsupported: the named implementation cannot run an op of a layer (the message has every reason), or XLA would
            have to update an fp8 cache.
        ValueError: the name is unknown.
    """
    choice = _choose(model, params, layout, counts)
    arrays = [array for group in layout.groups for array in group.spec.arrays]
    stored = [array for array in arrays if array.dtype.startswith("float8")]
    widest = max((array.shape[-1] for array in stored), default=0)
    if stored and (choice.name == _PLAINEST or widest > WIDEST_HEAD):
        # XLA converts the whole pool to a wider dtype to update fp8 values.
        what = str(choice) if choice.name == _PLAINEST else f"xla for heads of {widest} components"
        raise Unsupported(
            f"an fp8 cache needs our kernels, because XLA copies its pools at every step, but this model runs as "
            f"{what}; store keys and values as int8 instead"
        )
    if str(choice) not in _LOGGED:
        _LOGGED.add(str(choice))
        _LOG.info("the model runs as %s", choice)
    return choice


def _choose(model: Model, params: Params, layout: CacheLayout, counts: Mapping[str, int]) -> Choice:
    named = model.implementation
    if named is not None and named not in FAMILIES:
        raise ValueError(f"implementation must be one of {', '.join(FAMILIES)}, got {named!r}")
    if named == _PLAINEST:
        return Choice(named)
    choice = best_on_device()
    if named is not None or not choice.reasons:
        refused = _refusals(named or _BEST, ask(model, params, layout, counts))
        if named is not None and refused:
            raise Unsupported(f"this model cannot run as {named}: {'; '.join(refused)}")
        choice = Choice(_PLAINEST, refused) if refused else Choice(named or _BEST)
    return choice


def ask(
    model: Model, params: Params, layout: CacheLayout, counts: Mapping[str, int]
) -> list[Question]:
    """Returns each op's record of supported implementations in decode and prefill steps; computes nothing."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    # The records are the same for every family; with "xla" no op raises because it lacks the family's member.
    plain = model.running(_PLAINEST)

    def run(decode: bool, fresh: bool, params: Params) -> Array:
        batch = _batch(layout, _ROWS if decode else _TOKENS, decode=decode, fresh=fresh)
        return plain.forward(params, init_cache(layout, counts), batch)[1]

    with asking() as questions:
        fresh = [(False, True)] if layout.expands >= _TOKENS else []
        steps = [(True, False), (False, False), *fresh]
        for decode, fresh in steps:
            jax.eval_shape(partial(run, decode, fresh), shapes)
    return questions


def _refusals(family: str, questions: Iterable[Question]) -> tuple[str, ...]:
    """Returns one message per op and reason why a family cannot run it, with the layers."""
    places: dict[tuple[str, str], dict[str, None]] = {}
    for question in questions:
        refusal = _refusal(family, question)
        if refusal is not None:
            places.setdefault((question.op, refusal), {})[question.place] = None
    return tuple(f"{op}{_where(list(found))}: {refusal}" for (op, refusal), found in places.items())


def _refusal(family: str, question: Question) -> str | None:
    wanted = member(family, question.op)
    if wanted is not None:
        return question.refusals.get(wanted, f"has no implementation {wanted!r}")
    # If an op prefers another implementation at these sizes, the family's kernel still supports them.
    for name, refusal in question.refusals.items():
        if refusal is None or name == family:
            return refusal
    return None


def _where(places: list[str]) -> str:
    known = [place for place in places if place]
    if not known:
        return ""
    return f" in {known[0]}" + (f" and {len(known) - 1} more" if len(known) > 1 else "")


def _batch(layout: CacheLayout, tokens: int, *, decode: bool, fresh: bool = False) -> StepBatch:
    """Returns a small step in which all tokens are padding."""

    def ints(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    rows = PagedTables(page_table=ints(_ROWS, _TABLE_WIDTH), write_slots=ints(tokens))
    states = StateTables(read_states=ints(_ROWS), write_states=ints(_ROWS))
    return StepBatch(
        tokens=ints(tokens),
        positions=ints(tokens),
        cu_q_lens=ints(_ROWS + 1),
        seq_lens=ints(_ROWS),
        paged=(rows,) * len(layout.paged_groups),
        states=(states,) * len(layout.state_groups),
        sampling=SamplingBatch(state_ids=ints(_ROWS), carry=ints(_ROWS)),
        decode=decode,
        fresh=fresh,
    )
