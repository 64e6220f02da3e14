"""Programs of a smaller model that drafts: the chain of drafts, and their way into the cache of the verifying model."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec, Size
from jaxkv.runner.program_specs import Runner, StepSpec, lower_update
from jaxkv.step.draft_chain import draft_chain


@dataclass(frozen=True)
class DraftSpec(ProgramSpec[Runner]):
    """The program of the smaller model that drafts for some rows, see `draft_chain`.

    Attributes:
        step: sizes of a decode step of these rows.
        drafts: drafts of each row.
        texts: shape of the texts that the verifying model's cache keeps: sequences, and most tokens of each.
    """

    step: StepSpec
    drafts: int
    texts: tuple[int, int]

    @property
    def kind(self) -> str:
        """Always "draft"."""
        return "draft"

    @property
    def name(self) -> str:
        """The kind and the number of drafts, then the name of the step."""
        return f"draft_{self.drafts}_{self.step.name}"

    def sizes(self) -> dict[str, Size]:
        """Returns the sizes of the step, the number of drafts, and the shape of the texts."""
        return self.step.sizes() | {"drafts": self.drafts, "texts": self.texts}

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether it drafts as many tokens and its step can replace the step of `needed`."""
        return (
            isinstance(needed, DraftSpec)
            and (self.drafts, self.texts) == (needed.drafts, needed.texts)
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
        the tokens that the row's pages hold.
        """
        model, packed_layout = runner.model, runner.packed_layout
        page_sizes = tuple(group.page_size for group in runner.layout.paged_groups)

        def run(params: Params, cache: Cache, *arrays: Array) -> tuple[Cache, Array]:
            *packed, places, texts, lengths = arrays
            entries, capacity = places[0], places[1]
            return draft_chain(
                model,
                params,
                cache,
                packed_layout.unpack(self.step, *packed),
                texts.at[entries].get(mode="fill", fill_value=0),
                lengths.at[entries].get(mode="fill", fill_value=0),
                capacity,
                most=self.drafts,
                page_sizes=page_sizes,
            )

        texts, lengths = np.zeros(self.texts, np.int32), np.zeros(self.texts[0], np.int32)
        packed = packed_layout.blank(self.step)
        return lower_update(runner, run, (*packed, self.blank_places(), texts, lengths))

    def blank_places(self) -> np.ndarray:
        """Returns the places of no rows, int32 [2, rows]: entries out of range, and no room."""
        entries = np.full(self.step.rows, self.texts[0], np.int32)
        return np.stack([entries, np.zeros_like(entries)])


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
        """Returns `cache, () = run(params, cache, places, drafts)`, which donates the cache; see `DraftSpec`."""
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
