"""Programs of a smaller model or a head that drafts: prompts, the chain of drafts, and their way to the verifier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.cache.state import Cache
from jaxkv.models.draft_heads.head import DraftHead
from jaxkv.models.protocol import Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec, Size
from jaxkv.runner.program_specs import Runner, StepSpec, lower_update
from jaxkv.step.draft_chain import KeptHidden, draft_chain

_TURNS = 3
"""Steps' worth of tokens by which the host may not know where a text ends, and one more that is drafted from."""


class HiddenPool(NamedTuple):
    """The pool in which the verifying model keeps hidden states for a head.

    Attributes:
        pages, page_size, width: its shape.
        dtype: its dtype name.
    """

    pages: int
    page_size: int
    width: int
    dtype: str

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """Type of the pool."""
        shape = (self.pages, self.page_size, self.width)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def slots(self, table: Sequence[int], start: int, count: int) -> np.ndarray:
        """Returns the slots of positions [start, start + count) of a sequence with this page table, int32."""
        positions = np.arange(start, start + count)
        pages = np.asarray(table, np.int32)[positions // self.page_size]
        return (pages * self.page_size + positions % self.page_size).astype(np.int32)

    def columns(self, drafts: int) -> int:
        """Returns how many pages hold the end of a text, wherever a step with so many drafts has moved it."""
        return _TURNS * (drafts + 1) // self.page_size + 2


@dataclass(frozen=True)
class CatchUpSpec(ProgramSpec[Runner]):
    """The program with which a smaller model or a head computes texts that it lacks, without sampling.

    Attributes:
        step: sizes of the step.
        hidden: where the verifying model keeps hidden states, for a head; `None` for a smaller model.
    """

    step: StepSpec
    hidden: HiddenPool | None = None

    @property
    def kind(self) -> str:
        """Always "catch_up"."""
        return "catch_up"

    @property
    def name(self) -> str:
        """The kind, then the name of the step."""
        return f"{self.kind}_{self.step.name}"

    def sizes(self) -> dict[str, Size]:
        """Returns the sizes of the step and the pool."""
        return self.step.sizes() | {"hidden": _size_of(self.hidden)}

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether its step can replace the step of `needed`."""
        return (
            isinstance(needed, CatchUpSpec)
            and self.hidden == needed.hidden
            and self.step.serves(needed.step)
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns whether its step costs about as much as the step of `needed`."""
        return isinstance(needed, CatchUpSpec) and self.step.costs_like(needed.step)

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Sort key of the step."""
        return self.step.order_of_cost

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, () = run(params, cache, *packed)`, which donates the cache.

        For a head, the slot of each token in the pool and the pool follow.
        """
        model, packed_layout = runner.model, runner.packed_layout

        def run(params: Params, cache: Cache, *arrays: Array) -> tuple[Cache, tuple[()]]:
            if not isinstance(model, DraftHead):
                batch = packed_layout.unpack(self.step, *arrays)
            else:
                *packed, slots, pool = arrays
                kept = pool.reshape(-1, pool.shape[2]).at[slots].get(mode="fill", fill_value=0)
                batch = packed_layout.unpack(self.step, *packed)
                batch = replace(batch, hidden=model.projected(params, kept))
            cache, _ = model.forward(params, cache, batch)
            return cache, ()

        kept = () if self.hidden is None else (self.blank_slots(), self.hidden.type)
        return lower_update(runner, run, (*packed_layout.blank(self.step), *kept))

    def blank_slots(self) -> np.ndarray:
        """Returns the slots of no tokens, int32 [tokens]: out of range."""
        assert self.hidden is not None, "only a head has slots"
        return np.full(self.step.tokens, self.hidden.pages * self.hidden.page_size, np.int32)


@dataclass(frozen=True)
class DraftSpec(ProgramSpec[Runner]):
    """The program of the smaller model or head that drafts for some rows, see `draft_chain`.

    Attributes:
        step: sizes of a decode step of these rows.
        drafts: drafts of each row.
        texts: shape of the texts that the verifying model's cache keeps: sequences, and most tokens of each.
        hidden: where the verifying model keeps hidden states, for a head; `None` for a smaller model.
    """

    step: StepSpec
    drafts: int
    texts: tuple[int, int]
    hidden: HiddenPool | None = None

    @property
    def kind(self) -> str:
        """Always "draft"."""
        return "draft"

    @property
    def name(self) -> str:
        """The kind and the number of drafts, then the name of the step."""
        return f"draft_{self.drafts}_{self.step.name}"

    def sizes(self) -> dict[str, Size]:
        """Returns the sizes of the step, the number of drafts, and the shapes of the texts and the pool."""
        own: dict[str, Size] = {"drafts": self.drafts, "texts": self.texts}
        return self.step.sizes() | own | {"hidden": _size_of(self.hidden)}

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether it drafts as many tokens and its step can replace the step of `needed`."""
        return (
            isinstance(needed, DraftSpec)
            and replace(self, step=needed.step) == needed
            and self.step.serves(needed.step)
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns whether its step costs about as much as the step of `needed`."""
        return isinstance(needed, DraftSpec) and self.step.costs_like(needed.step)

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Sort key of the step."""
        return self.step.order_of_cost

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, drafts = run(params, cache, *packed, places, texts, lengths)`, which donates the cache.

        `places` has the row's entry in the sampling group of the verifying model, whose texts and lengths follow, and
        the tokens that the row's pages hold. For a head it also has `KeptHidden.first_page` and `page_table`, and the
        pool comes last.
        """
        model, packed_layout = runner.model, runner.packed_layout
        page_sizes = tuple(group.page_size for group in runner.layout.paged_groups)

        def run(params: Params, cache: Cache, *arrays: Array) -> tuple[Cache, Array]:
            *packed, places, texts, lengths = arrays if self.hidden is None else arrays[:-1]
            entries, capacity, *pages = places
            kept = None
            if self.hidden is not None:
                first_page, *table = pages
                kept = KeptHidden(
                    pages=arrays[-1], first_page=first_page, page_table=jnp.stack(table, axis=1)
                )
            return draft_chain(
                model,
                params,
                cache,
                packed_layout.unpack(self.step, *packed),
                texts.at[entries].get(mode="fill", fill_value=0),
                lengths.at[entries].get(mode="fill", fill_value=0),
                capacity,
                kept,
                most=self.drafts,
                page_sizes=page_sizes,
            )

        texts, lengths = np.zeros(self.texts, np.int32), np.zeros(self.texts[0], np.int32)
        packed = packed_layout.blank(self.step)
        pool = () if self.hidden is None else (self.hidden.type,)
        return lower_update(runner, run, (*packed, self.blank_places(), texts, lengths, *pool))

    def blank_places(self) -> np.ndarray:
        """Returns the places of no rows, int32 [2 or more, rows]: entries out of range, no room, and any pages."""
        pages = 0 if self.hidden is None else 1 + self.hidden.columns(self.drafts)
        places = np.zeros((2 + pages, self.step.rows), np.int32)
        places[0] = self.texts[0]
        return places


def _size_of(hidden: HiddenPool | None) -> Size:
    return None if hidden is None else (hidden.pages, hidden.page_size, hidden.width)


@dataclass(frozen=True)
class PutDraftsSpec(ProgramSpec[Runner]):
    """The program of the verifying model that writes drafts to its sampling group.

    Attributes:
        rows: rows with drafts.
        drafts: drafts of each row.
    """

    rows: int
    drafts: int

    @property
    def kind(self) -> str:
        """Always "put_drafts"."""
        return "put_drafts"

    @property
    def name(self) -> str:
        """Kind, rows and drafts."""
        return f"{self.kind}_{self.rows}x{self.drafts}"

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, () = run(params, cache, places, drafts)`, which donates the cache.

        Of `DraftSpec`'s places it takes the first two.
        """
        layer = runner.model.num_layers
        columns = jnp.arange(self.drafts, dtype=jnp.int32)[None, :]

        def run(
            params: Params,
            cache: Cache,
            places: Int[Array, "two rows"],
            drafts: Int[Array, "rows most"],
        ) -> tuple[Cache, tuple[()]]:
            del params
            choices = cache.layer(layer)
            kept = choices["drafts"].at[places[0][:, None], columns].set(drafts, mode="drop")
            return cache.with_layer(layer, {**choices, "drafts": kept}), ()

        places = np.zeros((2, self.rows), np.int32)
        return lower_update(runner, run, (places, np.zeros((self.rows, self.drafts), np.int32)))
