"""The device's side of the engine: parameters, the one live cache, and the compiled programs that update it.

It runs what it is given. Which sequences, how many tokens and when to stop are decided by its callers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.batch import Features
from jaxkv.cache.accounts import Accounts
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.config import SamplingParams
from jaxkv.engine.fields import StepShape
from jaxkv.engine.packer import Packer
from jaxkv.engine.programs import Lowering, Program, ProgramKey, Programs
from jaxkv.engine.results import pack_sampled
from jaxkv.engine.rows import Row
from jaxkv.engine.shapes import Declared, Shapes
from jaxkv.models.protocol import Model, Params
from jaxkv.step.loop import Generated, generate_loop
from jaxkv.step.sample import admit
from jaxkv.step.score import score_tokens
from jaxkv.step.step import step


class Executor:
    """Runs packed steps over one cache.

    Args:
        model, params: what to compute, and its parameters on the device.
        layout, counts: the cache's groups, and how many pages or states each has.
        max_tokens: longest sequence.
        max_rows: most rows of a step.
        programs: where compiled programs are kept.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        layout: CacheLayout,
        counts: Mapping[str, int],
        *,
        max_tokens: int,
        max_rows: int,
        programs: Programs,
    ) -> None:
        self.model = model
        self.params = params
        self.layout = layout
        self.programs = programs
        self.shapes = Shapes(layout, max_tokens=max_tokens, max_rows=max_rows)
        self.owner = CacheOwner(layout, counts)
        self.accounts = Accounts(layout, counts)
        self.packer = Packer(layout, counts, model.vocab_size)

    def step(self, shape: StepShape, rows: Sequence[Row]) -> Array:
        """Dispatches one step and returns its packed tokens, which may not be computed yet.

        Read them with `jaxkv.engine.results.unpack_sampled`.
        """
        packed = self.packer.pack(shape, rows, self.accounts)
        return self._run(self.step_program(shape), packed)

    def step_program(self, shape: StepShape) -> Program:
        """Returns the compiled step of a shape."""

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, Array]:
            batch, _ = self.packer.unpack(shape, *packed)
            cache, sampled = step(self.model, params, cache, batch)
            return cache, pack_sampled(sampled)

        return self._program("decode" if shape.decode else "prefill", shape, run)

    def loop(self, shape: StepShape, rows: Sequence[Row]) -> Generated:
        """Generates until every row has stopped, in one executable."""
        packed = self.packer.pack(shape, rows, self.accounts)
        width = self.shapes.width(max(row.params.max_tokens for row in rows))
        return self._run(self.loop_program(shape, width), packed)

    def loop_program(self, shape: StepShape, width: int) -> Program:
        """Returns the compiled generate of a shape, with `width` columns of output."""
        page_sizes = tuple(group.page_size for group in self.layout.paged_groups)

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, Generated]:
            batch, limits = self.packer.unpack(shape, *packed)
            assert limits is not None
            return generate_loop(
                self.model, params, cache, batch, limits, page_sizes=page_sizes, max_tokens=width
            )

        return self._program("generate", shape, run, (("width", width),))

    def score(self, shape: StepShape, rows: Sequence[Row]) -> Array:
        """Returns, for each packed token, the log-probability of the token packed after it."""
        packed = self.packer.pack(shape, rows, self.accounts)

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, Array]:
            batch, _ = self.packer.unpack(shape, *packed)
            return score_tokens(self.model, params, cache, batch)

        return self._run(self._program("score", shape, run), packed)

    def admit(self, row: Row, prompt: Sequence[int]) -> None:
        """Gives a row that penalties may concern a clean entry in the sampling group."""
        width = self.shapes.width(len(prompt))
        ids = self.model.vocab_size + np.arange(width, dtype=np.int32)[None]
        ids[0, : len(prompt)] = prompt
        slot = np.asarray([self.accounts.states(row.sequence, "sampling")[1]], np.int32)
        arrays = (slot, ids, *self._bias(row.params))
        layer = self.model.num_layers

        def run(
            params: Params, cache: Cache, slots: Array, prompts: Array, *bias: Array
        ) -> tuple[Cache, tuple[()]]:
            del params
            nothing_yet = jnp.zeros((1, 0), jnp.int32)
            choices = admit(cache.layer(layer), slots, prompts, nothing_yet, *bias)
            return cache.with_layer(layer, choices), ()

        key = ProgramKey("admit", width, 1, 0, Features(penalties=True))
        self._run(self._compiled(key, run, arrays), arrays)

    def declared(self, declared: Declared) -> Program:
        """Returns the compiled form of a declared program."""
        if declared.kind == "generate":
            return self.loop_program(declared.shape, declared.width)
        return self.step_program(declared.shape)

    def _bias(self, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        entries = self.layout.find(self.model.num_layers, "bias_ids")[1].shape[0]
        if len(params.logit_bias) > entries:
            raise ValueError(
                f"logit_bias has {len(params.logit_bias)} entries, but the cache holds {entries}"
            )
        ids = np.full((1, entries), self.model.vocab_size, np.int32)
        values = np.zeros((1, entries), np.float32)
        ids[0, : len(params.logit_bias)] = list(params.logit_bias.keys())
        values[0, : len(params.logit_bias)] = list(params.logit_bias.values())
        return ids, values

    def _program(
        self,
        kind: str,
        shape: StepShape,
        run: Callable[..., tuple[Cache, Any]],
        extra: tuple[tuple[str, int], ...] = (),
    ) -> Program:
        groups = zip(self.layout.paged_groups, shape.table_widths, strict=True)
        extra += tuple((f"{group.name}_width", width) for group, width in groups)
        widest = max(shape.table_widths, default=0)
        key = ProgramKey(kind, shape.tokens, shape.rows, widest, shape.features, extra)
        return self._compiled(key, run, _present(self.packer.blank(shape)))

    def _compiled(
        self,
        key: ProgramKey,
        run: Callable[..., tuple[Cache, Any]],
        arrays: Sequence[np.ndarray],
    ) -> Program:
        def build() -> Lowering:
            return Lowering(
                run, (self.params, self.owner.handle().cache, *arrays), cache_argument=1
            )

        return self.programs.get(key, build)

    def _run(self, program: Program, arrays: Sequence[np.ndarray]) -> Any:  # noqa: ANN401 - the program's own output
        return self.owner.run(lambda cache: program(self.params, cache, *_present(arrays)))


def _present(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Leaves out empty arrays: a transfer of nothing still costs one."""
    return [array for array in arrays if array.size]
