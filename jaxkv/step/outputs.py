"""Each sequence's last hidden state, kept beside its recurrent states, so that a prompt that is known computes nothing.

It is a state like the others: read and written by id, kept in checkpoints. A row without tokens takes its hidden state
from what it reads. (The idea of a terminal cache has no model in other engines that we know of.)
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
    """Keeps what the rows have come to, and recalls it for those that compute nothing.

    Args:
        outputs: the pool of kept hidden states. Donate it.
        hidden: of the step's tokens, after the final norm.
        last: of each row's last token; of rows without tokens, any.
        batch: the step's metadata; the last of its tables of states is that of this pool.

    Returns:
        The pool, and the hidden state from which each row's next token is chosen.
    """
    tables = batch.states[-1]
    if not batch.decode:
        empty = batch.cu_q_lens[1:] == batch.cu_q_lens[:-1]
        recalled = outputs.at[tables.read_states].get(mode="fill", fill_value=0)
        last = jnp.where(empty[:, None], recalled.astype(last.dtype), last)
    outputs = outputs.at[tables.write_states].set(last.astype(outputs.dtype), mode="drop")
    if batch.decode or tables.snapshot_ends is None or tables.snapshot_states is None:
        return outputs, last
    aside = hidden.at[tables.snapshot_ends - 1].get(mode="fill", fill_value=0)
    kept = outputs.at[tables.snapshot_states].set(aside.astype(outputs.dtype), mode="drop")
    return kept, last
