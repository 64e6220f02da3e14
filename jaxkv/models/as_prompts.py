"""A step as one of prompts that may have tokens before it, for the fixed order of sums.

Ops for decode steps divide their work in another way than those for prompts, and latents of fresh rows may be expanded,
so that a token's bits would depend on the kind of step that computed it. Under the fixed order all steps run the ops
for prompts, over pages.
"""

from dataclasses import replace

import jax.numpy as jnp

from jaxkv.batch import StepBatch


def as_prompts(batch: StepBatch) -> StepBatch:
    """Returns the batch as one of prompts that is not fresh; a row of a decode step is a prompt of one new token."""
    batch = replace(batch, fresh=False)
    if not batch.decode:
        return batch
    rows = batch.seq_lens.shape[0]
    return replace(batch, cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32), decode=False)
