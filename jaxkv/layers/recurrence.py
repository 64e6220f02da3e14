"""The parts that mixers with states share: the short convolution, and the recurrence over a step."""

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float

from jaxkv.batch import StateTables, StepBatch
from jaxkv.layers.adapted import LayerParams
from pallas_kernels import causal_conv
from pallas_kernels.families import member


def convolve(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    inputs: Float[Array, "tokens wide"],
    batch: StepBatch,
    tables: StateTables,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
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
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The result, and the cached inputs after the step.
    """
    # New inputs are rounded to the cache's dtype, so that they equal the cached inputs of later steps.
    stored, bias = layer_cache["conv"].dtype, params.get("conv_bias")
    ragged = (batch.cu_q_lens, tables.snapshot_ends, tables.snapshot_states)
    return causal_conv(
        params["conv"].astype(stored),
        None if bias is None else bias.astype(stored),
        layer_cache["conv"],
        inputs.astype(stored),
        tables.read_states,
        tables.write_states,
        *((None,) * 3 if batch.decode else ragged),
        first_channel=first_channel,
        activation=activation,
        implementation=member(implementation, "causal_conv"),
    )


def recur(
    update: Callable[..., tuple[Array, Array]],
    scan: Callable[..., tuple[Array, Array]],
    operands: tuple[Array, ...],
    batch: StepBatch,
    tables: StateTables,
    *,
    chunk_size: int,
    implementation: str | None = None,
    **options: object,
) -> tuple[Array, Array]:
    """Runs a recurrence over each row's new tokens, and writes the state after them.

    Args:
        update: the op for decode steps, which have one token per row.
        scan: the op for all other steps.
        operands: what both ops take first: weights, states and inputs.
        batch: the step's metadata.
        tables: ids of the states that the layer's group reads and writes.
        chunk_size: tokens that the scan takes at a time.
        implementation: family of implementations that every op must use; `None` for the best.
        **options: further options of both ops.

    Returns:
        The result for each token, and the states after the step.
    """
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
