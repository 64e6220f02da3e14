"""A decode step as a step of prompts with one new token each, for the fixed order of sums.

Ops for decode steps divide their work in another way than those for prompts, so that a token's bits would depend on the
kind of step that computed it. Under the fixed order all steps run the ops for prompts.
"""

from dataclasses import replace

import jax.numpy as jnp

from jaxkv.batch import StepBatch


def as_prompts(batch: StepBatch) -> StepBatch:
    """Returns the batch of a decode step as one of prompts; other batches are unchanged."""
    if not batch.decode:
        return batch
    rows = batch.seq_lens.shape[0]
    return replace(batch, cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32), decode=False)
