"""The last hidden state of each sequence as a recurrent state, so that a fully cached prompt computes no token.

It is read and written by state id and kept in checkpoints, like other recurrent states. A row without tokens samples
from the hidden state that it reads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import StepBatch


def recall_outputs(
    outputs: Float[Array, "states hidden_size"],
    hidden: Float[Array, "tokens hidden_size"],
    last: Float[Array, "rows hidden_size"],
    batch: StepBatch,
) -> tuple[Float[Array, "states hidden_size"], Float[Array, "rows hidden_size"]]:
    """Writes the rows' last hidden states to the pool, and reads those of rows without tokens.

    Args:
        outputs: the pool of hidden states. Donate it.
        hidden: hidden states of the step's tokens, after the final norm.
        last: hidden state of each row's last token; arbitrary for rows without tokens.
        batch: the step's metadata; the last one of its state tables is that of this pool.

    Returns:
        The pool, and the hidden state from which each row samples its next token.
    """
    tables = batch.states[-1]
    if not batch.decode:
        empty = batch.cu_q_lens[1:] == batch.cu_q_lens[:-1]
        cached = outputs.at[tables.read_states].get(mode="fill", fill_value=0)
        last = jnp.where(empty[:, None], cached.astype(last.dtype), last)
    outputs = outputs.at[tables.write_states].set(last.astype(outputs.dtype), mode="drop")
    if batch.decode or tables.snapshot_ends is None or tables.snapshot_states is None:
        return outputs, last
    snapshots = hidden.at[tables.snapshot_ends - 1].get(mode="fill", fill_value=0)
    outputs = outputs.at[tables.snapshot_states].set(snapshots.astype(outputs.dtype), mode="drop")
    return outputs, last
