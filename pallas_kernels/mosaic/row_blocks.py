"""Kernels of one block per row of numbers, which its warpgroups read by turns. Knows no op."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.launch import LANE_PARAMS, interpreter
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.teams import Team


def run_blocks(
    name: str,
    run: Callable[[dict[str, Ref]], None],
    arrays: Mapping[str, Array],
    out: jax.ShapeDtypeStruct,
    *,
    team: Team,
    shared: Mapping[str, Any] | None = None,
    interpret: bool,
) -> Array:
    """Runs a kernel with a block for each row of its result, which finds its own as `axis_index("row")`.

    Args:
        name: the kernel's.
        run: does a block's work, given the arrays, the result as "out" and shared memory by their names.
        arrays: in global memory.
        out: the result's shape and dtype.
        team: the warpgroups of a block.
        shared: what a block needs in shared memory, beside what its team does.
        interpret: run on the CPU, slowly.
    """
    own = team.scratch() | dict(shared or {})

    def body(*refs: Ref) -> None:
        run(dict(zip((*arrays, "out", *own), refs, strict=True)))

    return plgpu.kernel(
        body,
        out_type=out,
        grid=out.shape[:1],
        grid_names=("row",),
        num_threads=team.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(own.values()),
        compiler_params=LANE_PARAMS,
        interpret=interpreter(interpret),
        kernel_name=name,
    )(*arrays.values())


def fold_ahead[Fetched, State](
    turns: Array,
    fetch: Callable[[Array], Fetched],
    look: Callable[[Array, Fetched, State], State],
    state: State,
) -> State:
    """Folds over turns, each of which is sent for while the one before is looked at.

    Args:
        turns: how many; may be none.
        fetch: sends for what a turn looks at.
        look: returns the state after a turn, given its number, what was sent for and the state before.
        state: a pytree.
    """

    def turn(index: Array, carried: tuple[Fetched, State]) -> tuple[Fetched, State]:
        fetched, state = carried
        # Behind the last turn it is the last one that is sent for once more.
        after = fetch(jnp.minimum(index + 1, jnp.maximum(turns - 1, 0)))
        return after, look(index, fetched, state)

    _, state = lax.fori_loop(jnp.int32(0), turns, turn, (fetch(jnp.int32(0)), state))
    return state
