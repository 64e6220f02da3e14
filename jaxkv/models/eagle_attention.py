"""The attention of an EAGLE-3 head, which reads the token's embedding beside its hidden state (Li et al., EAGLE-3)."""

import jax.numpy as jnp

from jaxkv.config.model import ModelConfig
from jaxkv.layers.attention import attention
from jaxkv.layers.norm import rms_norm
from jaxkv.models.block import Block, BlockInputs, BlockOutput, Leaf
from jaxkv.models.mixers import ATTENTION, attention_sizes, attention_spec


def _leaves(config: ModelConfig) -> dict[str, Leaf]:
    leaves, hidden = ATTENTION.leaves(config), config.hidden_size
    rows, _ = leaves["qkv"].shape
    wide = leaves["qkv"]._replace(shape=(rows, 2 * hidden))
    return leaves | {"qkv": wide, "embedding_norm": Leaf((hidden,), is_scale=True)}


def _run(inputs: BlockInputs) -> BlockOutput:
    config, weight = inputs.config, inputs.params["embedding_norm"]
    embeddings = rms_norm(weight, inputs.embeddings, eps=config.norm_eps)
    return attention(
        inputs.params,
        inputs.cache,
        jnp.concatenate((embeddings, inputs.hidden), axis=1),
        inputs.batch,
        inputs.pages,
        inputs.angles,
        sizes=attention_sizes(config, inputs.layer),
        implementation=inputs.implementation,
    )


EAGLE_ATTENTION = Block(_leaves, _run, "page", attention_spec)
