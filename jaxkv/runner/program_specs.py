"""Specs of the step and score programs: padded sizes, lowering, and which program can replace another.

A spec is the key of its program in the manifest. The specs of other programs are in `jaxkv.runner.cache_programs` and
`jaxkv.offload.programs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.layers.adapted import LowRank, with_adapters
from jaxkv.models.protocol import Model, Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec, Size
from jaxkv.runner.buckets import FEW_MASKS, LOOSE_TOKENS
from jaxkv.runner.sampled_rows import pack_sampled, pack_verified
from jaxkv.sampling.features import Features
from jaxkv.step.multi_step import decode_steps
from jaxkv.step.score import TokenScores, score_tokens
from jaxkv.step.step import forward, step
from jaxkv.step.text_drafter import TextDrafter
from jaxkv.step.verify import verify_step
from jaxkv.weights.quantised.weight_forms import has_few_bits
from pallas_kernels.skinny_matmul.api import MOST_ROWS

_LIBRARIES = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Options of XLA with which products are those that NVIDIA's libraries choose."""

_SPARE_ROWS = 8
"""A compiled program with up to this many times the rows is used instead of compiling a new one."""


@runtime_checkable
class StepFields(Protocol):
    """Unpacks the fields of packed arrays; `jaxkv.runner.packed_layout.PackedLayout` is one."""

    def blank(self, shape: "StepSpec", /) -> tuple[np.ndarray, ...]:
        """Returns the packed arrays of a step without rows."""
        ...

    def unpack(self, shape: "StepSpec", ints: Array, floats: Array | None = None, /) -> StepBatch:
        """Returns the batch that packed arrays hold, inside a trace; a greedy step has no float fields."""
        ...

    def left(self, shape: "StepSpec", ints: Array, /) -> Array:
        """Returns how many of the program's steps each row takes part in, inside a trace."""
        ...

    def drafts(self, shape: "StepSpec", ints: Array, /) -> Array:
        """Returns how many of each row's last tokens are drafts, inside a trace."""
        ...


@runtime_checkable
class Runner(Protocol):
    """The model, parameters and cache that a spec lowers its program for."""

    @property
    def model(self) -> Model:
        """The model."""
        ...

    @property
    def params(self) -> Params:
        """Parameters on the device, or their types."""
        ...

    @property
    def stacks(self) -> Mapping[str, LowRank]:
        """Dotted path of a parameter -> the adapters' factors; empty without adapters."""
        ...

    @property
    def layout(self) -> CacheLayout:
        """Groups of the cache."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Group name -> pages or states of that group."""
        ...

    @property
    def cache(self) -> Cache:
        """The current cache; only its types are read."""
        ...

    @property
    def packed_layout(self) -> StepFields:
        """Layout of the packed arrays of steps."""
        ...


@dataclass(frozen=True)
class StepSpec(ProgramSpec["Runner"]):
    """A program that runs one step, several decode steps, or one that verifies drafts: its sizes and features.

    Attributes:
        tokens, rows: most new tokens and most sequences.
        table_widths: pages per row, for each paged group.
        features: sampling features that it supports.
        decode: True if each row has exactly one new token.
        pending_checkpoints: most pending state checkpoints that it can write.
        fresh: True if all rows begin at their first token, so that no pages are read; used if `CacheLayout.expands` is
            not 0.
        forward_only: True if it returns the rows' hidden states instead of tokens. A `SampleSpec` samples from them.
        steps: decode steps that it runs in sequence.
        drafts: most drafts of a row that it verifies; 0 for a program that verifies none.
        drafter: makes the next drafts at the end of a program that verifies some; `None` if the host makes them.
        shares: True for a decode program that reads keys once for several rows that begin with the same pages.
        masks: most different masks of rows with a grammar; 0 without `features.grammar`. Only steps that verify drafts
            have any: others with such rows are `forward_only`.
    """

    tokens: int
    rows: int
    table_widths: tuple[int, ...]
    features: Features = Features()
    decode: bool = False
    pending_checkpoints: int = 0
    fresh: bool = False
    forward_only: bool = False
    steps: int = 1
    drafts: int = 0
    drafter: TextDrafter | None = None
    shares: bool = False
    masks: int = 0

    @property
    def kind(self) -> str:
        """One of "decode", "prefill" and "verify"."""
        if self.drafts:
            return "verify"
        return "decode" if self.decode else "prefill"

    @property
    def name(self) -> str:
        """Kind, tokens, rows, and pages of the widest table."""
        sizes = f"{self.tokens}x{self.rows}x{max(self.table_widths, default=0)}"
        several = f"_{self.steps}_steps" if self.steps > 1 else ""
        several += f"_{self.drafts}_drafts" if self.drafts else ""
        several += "_and_next" if self.drafter is not None else ""
        several += f"_{self.masks}_masks" if self.masks else ""
        before = "forward_" * self.forward_only + "fresh_" * self.fresh + "sharing_" * self.shares
        return f"{before}{self.kind}_{sizes}{several}"

    def sizes(self) -> dict[str, Size]:
        """Returns sizes and features by name; rare ones are `None` unless set."""
        sizes: dict[str, Size] = {"tokens": self.tokens, "rows": self.rows}
        sizes |= {"table_widths": self.table_widths}
        sizes |= {part.name: getattr(self.features, part.name) for part in fields(self.features)}
        return sizes | {
            "pending_checkpoints": self.pending_checkpoints or None,
            "fresh": self.fresh,
            "forward_only": self.forward_only,
            "steps": self.steps if self.steps > 1 else None,
            "drafts": self.drafts or None,
            "drafts_next": self.drafter is not None,
            "shares": self.shares,
            "masks": self.masks or None,
        }

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether it is at least as large in every size, with features that cover those of `needed`."""
        return (
            isinstance(needed, StepSpec)
            and self.decode == needed.decode
            and self.tokens >= needed.tokens
            and self.rows >= needed.rows
            and self.pending_checkpoints >= needed.pending_checkpoints
            and self.forward_only == needed.forward_only
            and self.steps == needed.steps
            # A program of more drafts can also verify fewer, but a step without drafts is another program.
            and (self.drafts >= needed.drafts > 0 or self.drafts == needed.drafts)
            and self.drafter == needed.drafter
            # A program without shared reads runs any step, only slower.
            and self.shares <= needed.shares
            and self.masks >= needed.masks
            # A program that reads pages can also run fresh rows, but not the other way round.
            and (needed.fresh or not self.fresh)
            and len(self.table_widths) == len(needed.table_widths)
            and all(map(int.__ge__, self.table_widths, needed.table_widths))
            and self.features.covers(needed.features)
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns whether it has few tokens, few more rows and masks than `needed`, and its tables and features."""
        return (
            isinstance(needed, StepSpec)
            and self.tokens <= LOOSE_TOKENS
            and self.rows <= _SPARE_ROWS * needed.rows
            and self.masks <= max(needed.masks, FEW_MASKS)
            and self.table_widths == needed.table_widths
            and self.features == needed.features
            and self.fresh == needed.fresh
            and self.shares == needed.shares
        )

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Sort key: tokens, rows, drafts, masks; then programs that read no pages or share reads first."""
        return self.tokens, self.rows, self.drafts, self.masks, not self.fresh, not self.shares

    def lowering(self, runner: Runner) -> Lowering:
        """Returns the step: `cache, packed tokens = run(params, cache, *packed)`, which donates the cache.

        A `forward_only` program returns hidden states, [rows, hidden_size], in place of packed tokens.
        """
        model, packed_layout = runner.model, runner.packed_layout
        page_sizes = tuple(group.page_size for group in runner.layout.paged_groups)

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, Array]:
            batch = packed_layout.unpack(self, *packed)
            params = _adapted(params, batch)
            if self.forward_only:
                return forward(model, params, cache, batch)
            if self.drafts:
                drafts = packed_layout.drafts(self, packed[0])
                cache, verified = verify_step(
                    model,
                    params,
                    cache,
                    batch,
                    drafts,
                    most=self.drafts,
                    page_sizes=page_sizes,
                    drafter=self.drafter,
                )
                return cache, pack_verified(verified)
            if self.steps == 1:
                cache, sampled = step(model, params, cache, batch)
                return cache, pack_sampled(sampled)
            cache, several = decode_steps(
                model,
                params,
                cache,
                batch,
                packed_layout.left(self, packed[0]),
                page_sizes=page_sizes,
                steps=self.steps,
            )
            return cache, jax.vmap(pack_sampled)(several)

        arrays = packed_layout.blank(self)
        return self.with_options(
            runner, lower_update(runner, run, arrays, params=self.params_of(runner))
        )

    def with_options(self, runner: Runner, lowering: Lowering) -> Lowering:
        """Returns the lowering of a step with XLA's options for its size.

        Steps of more tokens than our kernels multiply have the products that NVIDIA's libraries choose, not those that
        XLA generates (Triton) or measures as the fastest. On an H200 a layer of the 0.6B shape takes 2% more time so at
        80 tokens and 3 to 10% less at 128 to 256, one of the 8B shape as much, but for 9% more at 192. Longer prompts
        of the 0.6B shape take up to a fifth less. Other families and several GPUs were not timed. To generate and to
        measure takes most of XLA's time.

        Where sums have a fixed order, one kernel computes the products of all sizes of steps. Where none of our kernels
        widens weights of few bits, only Triton's do so without a copy.
        """
        is_short = self.tokens <= MOST_ROWS
        is_ours = runner.model.implementation == "mosaic_gpu"
        fuses_widening = has_few_bits(runner.params) and not is_ours
        if is_short or runner.model.batch_invariant or fuses_widening:
            return lowering
        return replace(lowering, compiler_options=_LIBRARIES)

    def params_of(self, runner: Runner) -> Any:  # noqa: ANN401 - a pytree
        """Returns the program's first argument: the parameters, and in a step with adapters their factors too."""
        return AdaptedParams(runner.params, runner.stacks) if self.features.lora else runner.params


@dataclass(frozen=True)
class ScoreSpec(ProgramSpec["Runner"]):
    """A program that returns, for each packed token, the log-probability of the token packed after it.

    Attributes:
        step: sizes of the step that computes the texts; it samples no tokens.
        top: number of most likely tokens that it reports too.
    """

    step: StepSpec
    top: int = 0

    @property
    def kind(self) -> str:
        """Always "score"."""
        return "score"

    @property
    def name(self) -> str:
        """The kind and the number of most likely tokens, then the name of the step."""
        return f"score{self.top or ''}_{self.step.name}"

    def sizes(self) -> dict[str, Size]:
        """Returns the sizes of the step, and the number of most likely tokens unless it is 0."""
        return self.step.sizes() | {"top": self.top or None}

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether its step can replace the step of `needed`."""
        return (
            isinstance(needed, ScoreSpec)
            and self.top >= needed.top
            and self.step.serves(needed.step)
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns whether its step costs about as much as the step of `needed`."""
        return isinstance(needed, ScoreSpec) and self.step.costs_like(needed.step)

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Sort key of the step."""
        return self.step.order_of_cost

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, scores = run(params, cache, *packed)`, which donates the cache."""
        model, packed_layout = runner.model, runner.packed_layout

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, TokenScores]:
            batch = packed_layout.unpack(self.step, *packed)
            return score_tokens(model, _adapted(params, batch), cache, batch, self.top)

        arrays, params = packed_layout.blank(self.step), self.params_of(runner)
        return self.step.with_options(runner, lower_update(runner, run, arrays, params=params))

    def params_of(self, runner: Runner) -> Any:  # noqa: ANN401 - a pytree
        """Returns the first argument of the step's program."""
        return self.step.params_of(runner)


class AdaptedParams(NamedTuple):
    """The parameters of a step with adapters.

    Attributes:
        params: the model's parameters.
        stacks: dotted path of a parameter -> the adapters' factors.
    """

    params: Params
    stacks: Mapping[str, LowRank]


def _adapted(params: Params | AdaptedParams, batch: StepBatch) -> Params:
    """Returns the parameters to compute a batch with: in a step with adapters, those of each token's row are added."""
    if not isinstance(params, AdaptedParams):
        return params
    slots = batch.sampling["adapter_slot"]
    if not batch.decode:
        # Padding tokens come after the last row's; they have no adapter.
        tokens = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        row = jnp.searchsorted(batch.cu_q_lens[1:], tokens, side="right")
        slots = slots.at[row].get(mode="fill", fill_value=0)
    return with_adapters(params.params, params.stacks, slots)


def lower_update(
    runner: Runner,
    run: Any,  # noqa: ANN401 - a function
    arrays: Sequence[np.ndarray | jax.ShapeDtypeStruct],
    *,
    params: Any = None,  # noqa: ANN401 - a pytree
) -> Lowering:
    """Returns the lowering of a function of parameters, cache and further arrays that updates the cache.

    Args:
        runner: has the cache and the parameters.
        run: the function.
        arrays: the further arrays, of the host or the types of those on the device; empty ones are left out.
        params: the first argument; the runner's parameters if not given.
    """
    first = runner.params if params is None else params
    return Lowering(run, (first, runner.cache, *without_empty(arrays)), cache_argument=1)


def without_empty[A: np.ndarray | Array | jax.ShapeDtypeStruct](arrays: Sequence[A]) -> list[A]:
    """Returns the arrays that are not empty; even an empty argument would cost a transfer."""
    return [array for array in arrays if array.size]
