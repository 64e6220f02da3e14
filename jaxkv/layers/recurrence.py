"""The parts that mixers with states share: the short convolution, and the recurrence over a step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import StateTables, StepBatch
from jaxkv.layers.adapted import LayerParams
from pallas_kernels import causal_conv
from pallas_kernels.families import member
from pallas_kernels.fixed_order import is_fixed

NO_STATE = 2**30
"""Ids from this on are no state's, so nothing is written."""


class StateWrite(NamedTuple):
    """How a step writes one array of a layer's states, so that it can be written from fewer of the step's tokens.

    Attributes:
        role: role of the array in the layer's cache.
        inputs: what is computed of each token, along the first axes.
        run: returns the array after the step, given the one before, the inputs, the step's metadata, and the ids of
            the states that the layer's group reads and writes.
    """

    role: str
    inputs: tuple[Array, ...]
    run: Callable[[Array, tuple[Array, ...], StepBatch, StateTables], Array]


def nowhere(write_states: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Returns ids of no states, distinct for each row, which the compiler does not know.

    For one row XLA leaves out a write to a constant id of no state. What the write was computed from then need not be
    read before the next write, so XLA reads it from a copy of the states.
    """
    rows = jnp.arange(write_states.shape[0], dtype=jnp.int32)
    return jnp.maximum(write_states, NO_STATE + rows)


def without_last(
    batch: StepBatch, rejected: Int[Array, " rows"]
) -> tuple[StepBatch, Int[Array, " tokens"]]:
    """Returns a step without the last tokens of each row, for `StateWrite.run`.

    Args:
        batch: the step, which is no decode step.
        rejected: how many tokens of each row are left out.

    Returns:
        The step's metadata, with the bounds and lengths of the remaining tokens; and for each of them its index among
        the tokens of `batch`. The indices of padding are arbitrary.
    """
    kept = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1] - rejected
    ends = jnp.cumsum(kept, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    # Not by bisection, whose loop XLA would leave out of the CUDA graph.
    row = jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, rejected.shape[0] - 1)
    places = batch.cu_q_lens[row] + index - bounds[row]
    return replace(batch, cu_q_lens=bounds, seq_lens=batch.seq_lens - rejected), places


def convolve(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    inputs: Float[Array, "tokens wide"],
    batch: StepBatch,
    tables: StateTables,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states history channels"]]:
    """Runs the short convolution over each row's new tokens, in the dtype of its cached inputs.

    Args:
        params: "conv" [d_conv, channels], the last row for the token itself; if the model has it, "conv_bias".
        layer_cache: the layer's states, of which "conv" holds the last inputs.
        inputs: the inputs, in `channels` columns from `first_channel` on.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        first_channel: first column of the inputs.
        activation: applied to the result; `None` for none.
        writes: gets how the cached inputs are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The result, and the cached inputs after the step.
    """
    # New inputs are rounded to the cache's dtype, so that they equal the cached inputs of later steps.
    stored, bias = layer_cache["conv"].dtype, params.get("conv_bias")

    def run(
        states: Array, inputs: tuple[Array, ...], batch: StepBatch, tables: StateTables
    ) -> tuple[Array, Array]:
        (new,) = inputs
        ragged = (batch.cu_q_lens, tables.snapshot_ends, tables.snapshot_states)
        return causal_conv(
            params["conv"].astype(stored),
            None if bias is None else bias.astype(stored),
            states,
            new,
            tables.read_states,
            tables.write_states,
            *((None,) * 3 if batch.decode else ragged),
            first_channel=first_channel,
            activation=activation,
            implementation=member(implementation, "causal_conv"),
        )

    return _run_and_keep(run, "conv", layer_cache, (inputs.astype(stored),), batch, tables, writes)


def recur(
    update: Callable[..., tuple[Array, Array]],
    scan: Callable[..., tuple[Array, Array]],
    weights: tuple[Array, ...],
    layer_cache: Mapping[str, Array],
    role: str,
    inputs: tuple[Array, ...],
    batch: StepBatch,
    tables: StateTables,
    *,
    chunk_size: int,
    writes: list[StateWrite] | None = None,
    implementation: str | None = None,
    **options: object,
) -> tuple[Array, Array]:
    """Runs a recurrence over each row's new tokens, and writes the state after them.

    Args:
        update: the op for decode steps, which have one token per row.
        scan: the op for all other steps.
        weights: what both ops take first.
        layer_cache: the layer's states.
        role: which of them the ops take next.
        inputs: what both ops take then, of each token.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        chunk_size: tokens that the scan takes at a time.
        writes: gets how the states are written; `None` if they are not written again.
        implementation: family of implementations that every op must use; `None` for the best.
        **options: further options of both ops.

    Returns:
        The result for each token, and the states after the step.
    """

    def run(
        states: Array, inputs: tuple[Array, ...], batch: StepBatch, tables: StateTables
    ) -> tuple[Array, Array]:
        operands = (*weights, states, *inputs)
        if batch.decode:
            return update(
                *operands,
                tables.read_states,
                tables.write_states,
                implementation=member(implementation, update.__name__),
                **options,
            )
        return scan(
            *operands,
            batch.cu_q_lens,
            batch.seq_lens,
            tables.read_states,
            tables.write_states,
            tables.snapshot_ends,
            tables.snapshot_states,
            chunk_size=chunk_size,
            implementation=member(implementation, scan.__name__),
            **options,
        )

    return _run_and_keep(run, role, layer_cache, inputs, batch, tables, writes)


def _run_and_keep(
    run: Callable[..., tuple[Array, Array]],
    role: str,
    layer_cache: Mapping[str, Array],
    inputs: tuple[Array, ...],
    batch: StepBatch,
    tables: StateTables,
    writes: list[StateWrite] | None,
) -> tuple[Array, Array]:
    """Runs an op that returns its result and the states after it, and appends to `writes` how it wrote these."""
    if is_fixed():
        # With a second use, XLA would otherwise fuse what computes them in another way, and round differently.
        inputs = lax.optimization_barrier(inputs)
    if writes is not None:

        def write(
            states: Array, inputs: tuple[Array, ...], batch: StepBatch, tables: StateTables
        ) -> Array:
            return _with_result(*run(states, inputs, batch, tables), tables)

        writes.append(StateWrite(role, inputs, write))
    return run(layer_cache[role], inputs, batch, tables)


def _with_result(result: Array, states: Array, tables: StateTables) -> Array:
    """Returns the states; under the fixed order of sums XLA computes the result beside them too.

    Without it, the loop over the tokens would be other code than that of the first time, and round in other ways.
    """
    if not is_fixed():
        return states
    unused = nowhere(tables.write_states)[:1]
    return states.at[unused].set(jnp.sum(result).astype(states.dtype), mode="drop")
