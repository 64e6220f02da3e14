"""Several products one after the other in one Mosaic GPU kernel for Hopper: the memory never rests between them.

A kernel alone takes about 3 us more than its bytes: it must start, fetch its first numbers, and wait for its slowest
block. Here the blocks stay, one on each multiprocessor, and meet at a barrier in global memory between two *phases*;
what they wait for is only the rows, since the weights of the next phase have been on their way for long.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_rows import INTERPRETED
from pallas_kernels.paged_attention.mosaic_tile import swizzled
from pallas_kernels.skinny_matmul.mosaic_barrier import meet
from pallas_kernels.skinny_matmul.mosaic_ending import End, Ending
from pallas_kernels.skinny_matmul.mosaic_schedule import (
    ALIGNMENT,
    OTHER_BYTES,
    PADDING,
    ROW_TILE,
    Geometry,
    Schedule,
)

Ref = Any


@dataclass(frozen=True)
class Phase:
    """One product of a chain.

    Attributes:
        geometry: its sizes.
        schedule: how its weight is cut; splits are 1, and every phase has as many slots as the others.
        ending: what becomes of its sums.
        names: for each array that it reads or writes, as `Ending` and the kernel call them, the chain's name.
    """

    geometry: Geometry
    schedule: Schedule
    ending: Ending
    names: tuple[tuple[str, str], ...]

    @property
    def steps(self) -> int:
        """Turns that a block takes."""
        return self.schedule.tiles_per_block(self.geometry) * self.turns

    @property
    def turns(self) -> int:
        """Turns of each tile."""
        return self.schedule.turns_per_tile(self.geometry)

    @property
    def copies(self) -> tuple[int, int]:
        """Copies that bring a turn's weights, and its rows."""
        return self.schedule.folds * self.geometry.parts, self.schedule.folds


@dataclass(frozen=True)
class Chain:
    """The kernel for some phases.

    Attributes:
        phases: in their order.
        inputs: names of the arrays that are there before.
        outputs: names, shapes and dtypes of those that the phases make.
        blocks: how many work; no more than there are multiprocessors, since each waits for all others.
    """

    phases: tuple[Phase, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...]
    blocks: int

    def build(self, interpret: bool) -> Callable[..., list[Array]]:
        """Returns the function of the inputs, and of a ref to the barrier's counter, that launches the kernel."""
        return plgpu.kernel(
            partial(self._body, interpret),
            out_type=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in self.outputs],
            scratch_types=self._scratch(),
            grid=(self.blocks,),
            grid_names=("block",),
            # `_Block` says which barriers take the place of those that would be added.
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
            interpret=INTERPRETED if interpret else None,
            kernel_name="skinny_chain",
        )

    @property
    def stages(self) -> int:
        """Slots of the ring."""
        return self.phases[0].schedule.stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block asks for."""
        most, itemsize = self._most(), jnp.dtype(self.phases[0].geometry.dtype).itemsize
        slot = (most["height"] + most["width"]) * most["chunk"] * itemsize
        sums = 4 * most["height"] * (most["width"] + PADDING)
        return self.stages * slot + -(-sums // ALIGNMENT) * ALIGNMENT + ALIGNMENT + OTHER_BYTES

    def _most(self) -> dict[str, int]:
        """Returns the largest sizes that any phase needs."""
        most = {"height": 0, "width": 0, "chunk": 0}
        for phase in self.phases:
            s, g = phase.schedule, phase.geometry
            sizes = {"height": s.height(g), "width": s.width(g), "chunk": s.chunk(g)}
            most = {name: max(most[name], size) for name, size in sizes.items()}
        return most

    def _scratch(self) -> dict[str, Any]:
        most = self._most()
        g = self.phases[0].geometry
        transforms = swizzled(most["chunk"], g.dtype)

        def slots(rows: int) -> Any:  # noqa: ANN401 - private to JAX
            return plgpu.SMEM((self.stages, rows, most["chunk"]), g.dtype, transforms=transforms)

        scratch = {
            "weights": slots(most["height"]),
            "rows": slots(most["width"]),
            "sums": plgpu.SMEM((most["height"], most["width"] + PADDING), jnp.float32),
            "factors": plgpu.SMEM((g.padded_rows,), jnp.float32),
        }
        for index, kind in enumerate(("weights", "rows")):
            for copies in {phase.copies[index] for phase in self.phases}:
                scratch[f"{kind}_arrived_{copies}"] = plgpu.Barrier(
                    num_arrivals=copies, num_barriers=self.stages
                )
        return scratch

    def _body(self, interpret: bool, *refs: Ref, **scratch: Ref) -> None:
        names = [*self.inputs, "met", *(name for name, _, _ in self.outputs)]
        named = dict(zip(names, refs, strict=True))
        _Block(self, named, scratch).run(interpret)


class _Block:
    """One block at work. A *step* counts the turns of a phase, a *place* those of all phases."""

    def __init__(self, chain: Chain, refs: Mapping[str, Ref], scratch: Mapping[str, Ref]) -> None:
        self.chain, self.phases, self.stages = chain, chain.phases, chain.stages
        self.scratch, self.met = scratch, refs["met"]
        self.number = lax.axis_index("block")
        self.refs = [
            {own: refs[name] for own, name in phase.names} | dict(scratch) for phase in self.phases
        ]
        self.starts = [
            sum(p.steps for p in self.phases[:index]) for index in range(len(self.phases))
        ]

    def run(self, interpret: bool) -> None:
        """Works through all phases."""
        for place in range(self.stages):
            index = max(i for i, start in enumerate(self.starts) if start <= place)
            self.fetch_weights(index, jnp.int32(place - self.starts[index]), place)
        for index, phase in enumerate(self.phases):
            if index and not interpret:
                meet(self.met, self.chain.blocks)
            for step in range(min(self.stages, phase.steps)):
                slot = (self.starts[index] + step) % self.stages
                self.fetch_rows(index, jnp.int32(step), slot)
            end = End(phase.geometry, phase.schedule, phase.ending, self.refs[index])
            end.prepare()

            def take(tile: Array, carry: None, index: int = index, end: End = end) -> None:
                self.take_tile(index, end, tile)
                return carry

            tiles = phase.schedule.tiles_per_block(phase.geometry)
            lax.fori_loop(jnp.int32(0), jnp.int32(tiles), take, None)

    def first_column(self, phase: Phase, tile: Array) -> Array:
        """Returns where a tile begins."""
        s, g = phase.schedule, phase.geometry
        start = (self.number * s.tiles_per_block(g) + tile) * s.columns
        return pl.multiple_of(jnp.minimum(start, g.out - s.columns), ROW_TILE)

    def inner(self, phase: Phase, step: Array, fold: int) -> Any:  # noqa: ANN401 - a slice
        """Returns which numbers along the contraction a fold takes in a step."""
        s, g = phase.schedule, phase.geometry
        chunk = lax.rem(step, jnp.int32(phase.turns)) * s.folds + fold
        return pl.ds(pl.multiple_of(chunk * s.chunk(g), g.piece), s.chunk(g))

    def fetch_weights(self, index: int, step: Array, slot: Array | int) -> None:
        """Starts the copies of a step's weights; every warp must have passed a barrier since the slot was read."""
        phase, refs = self.phases[index], self.refs[index]
        s, g = phase.schedule, phase.geometry
        column = self.first_column(phase, lax.div(step, jnp.int32(phase.turns)))
        for fold in range(s.folds):
            for part in range(g.parts):
                rows = pl.multiple_of(column + part * g.out, ROW_TILE)
                place = (fold * g.parts + part) * s.columns
                plgpu.copy_gmem_to_smem(
                    refs["weight"].at[pl.ds(rows, s.columns), self.inner(phase, step, fold)],
                    refs["weights"].at[slot, pl.ds(place, s.columns)],
                    self.arrived("weights", index, slot),
                )

    def fetch_rows(self, index: int, step: Array, slot: Array | int) -> None:
        """Starts the copies of a step's rows, likewise."""
        phase, refs = self.phases[index], self.refs[index]
        height = phase.geometry.padded_rows
        for fold in range(phase.schedule.folds):
            plgpu.copy_gmem_to_smem(
                refs["x"].at[pl.ds(0, height), self.inner(phase, step, fold)],
                refs["rows"].at[slot, pl.ds(fold * height, height)],
                self.arrived("rows", index, slot),
            )

    def arrived(self, kind: str, index: int, slot: Array | int) -> Ref:
        """Returns the barrier that a step's copies arrive at."""
        copies = self.phases[index].copies[("weights", "rows").index(kind)]
        return self.scratch[f"{kind}_arrived_{copies}"].at[slot]

    def take_tile(self, index: int, end: End, tile: Array) -> None:
        """Computes the sums of one tile and delivers them."""
        phase, refs = self.phases[index], self.refs[index]
        s, g = phase.schedule, phase.geometry
        shape = (s.height(g), s.width(g))

        def take_turn(sums: Ref, turn: Array, carry: None) -> None:
            step = tile * phase.turns + turn
            slot = lax.rem(step + self.starts[index], jnp.int32(self.stages))
            plgpu.barrier_wait(self.arrived("weights", index, slot))
            plgpu.barrier_wait(self.arrived("rows", index, slot))
            right = refs["rows"].at[slot, pl.ds(0, shape[1])].transpose((1, 0))
            plgpu.wgmma(sums, refs["weights"].at[slot, pl.ds(0, shape[0])], right)
            # The product of the turn before is done.
            plgpu.wgmma_wait(1)
            pl.when(turn > 0)(partial(self.refill, index, step - 1))
            return carry

        def multiply(sums: Ref) -> Array:
            lax.fori_loop(jnp.int32(0), jnp.int32(phase.turns), partial(take_turn, sums), None)
            plgpu.wgmma_wait(0)
            return sums[...]

        sums = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        refs["sums"].at[pl.ds(0, shape[0]), pl.ds(0, shape[1])][...] = sums
        plgpu.commit_smem()
        self.refill(index, (tile + 1) * phase.turns - 1)
        number = self.number * s.tiles_per_block(g) + tile
        end.store(jnp.minimum(number, s.tiles(g) - 1), self.first_column(phase, tile), jnp.int32(0))
        plgpu.commit_smem()

    def refill(self, index: int, step: Array) -> None:
        """Sends for what shall lie where a step's numbers lay; of the phases to come only weights are there already."""
        plgpu.commit_smem()
        place = self.starts[index] + step + self.stages
        slot = lax.rem(place, jnp.int32(self.stages))
        first = self.starts[index] + self.stages
        last = first + self.phases[index].steps - 1
        for of, (start, phase) in enumerate(zip(self.starts, self.phases, strict=True)):
            if of < index or start > last or start + phase.steps <= first:
                continue

            @pl.when((place >= start) & (place < start + phase.steps))
            def _(of: int = of, start: int = start) -> None:
                self.fetch_weights(of, place - start, slot)
                if of == index:
                    self.fetch_rows(of, place - start, slot)
