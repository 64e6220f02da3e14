"""Launch of a kernel with one block per row, and a fold with the loads of the next iteration in flight."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
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
    """Runs a kernel with one block per row of its result; `axis_index("row")` is the block's row.

    Args:
        name: the kernel's name.
        run: the kernel's body. Its argument maps the names in `arrays`, "out" and the names of the shared memory to
            refs.
        arrays: inputs in global memory, by name.
        out: shape and dtype of the result.
        team: the warpgroups of a block.
        shared: shared memory by name, in addition to the team's `scratch`.
        interpret: run on the CPU, slowly.
    """
    own = team.scratch() | dict(shared or {})

    def body(*refs: Ref) -> None:
        run(dict(zip((*arrays, "out", *own), refs, strict=True)))

    return mosaic_kernel(
        body,
        out_type=out,
        grid=out.shape[:1],
        grid_names=("row",),
        num_threads=team.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(own.values()),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name=name,
    )(*arrays.values())


def fold_ahead[Fetched, State](
    turns: Array,
    fetch: Callable[[Array], Fetched],
    look: Callable[[Array, Fetched, State], State],
    state: State,
) -> State:
    """Folds `look` over iterations, with the loads of iteration i + 1 issued before iteration i is processed.

    Args:
        turns: number of iterations, may be 0.
        fetch: issues the loads of an iteration, given its index, and returns the loaded arrays.
        look: returns the state after an iteration, given its index, its loaded arrays and the state before.
        state: the initial state, a pytree.
    """

    def turn(index: Array, carried: tuple[Fetched, State]) -> tuple[Fetched, State]:
        fetched, state = carried
        # The last iteration loads its own data again instead of reading past the end.
        after = fetch(jnp.minimum(index + 1, jnp.maximum(turns - 1, 0)))
        return after, look(index, fetched, state)

    _, state = lax.fori_loop(jnp.int32(0), turns, turn, (fetch(jnp.int32(0)), state))
    return state
