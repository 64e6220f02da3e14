"""Lower bound of the time of prompts: the FLOPs of their products and attention at the device's peak."""

from collections.abc import Sequence

import jax

from benchmarks.generate import Setting, decode_bytes
from benchmarks.timing import CEILINGS
from jaxkv.config.model import ModelConfig
from jaxkv.models.protocol import Params


def prompt_seconds(config: ModelConfig, params: Params, lengths: Sequence[int]) -> float | None:
    """Returns the lower bound in seconds for prompts of the given lengths; `None` if the device's peak is unknown.

    Logits are left out, since a prompt needs those of one token only.
    """
    ceilings = CEILINGS.get(jax.devices()[0].device_kind)
    if ceilings is None:
        return None
    itemsize = jax.tree.leaves(params)[0].dtype.itemsize
    weights = decode_bytes(config, params, Setting(0, 0, 0, 0), itemsize)
    layers = weights - config.vocab_size * config.hidden_size * itemsize
    products = 2 * layers / itemsize * sum(lengths)
    pairs = sum(length**2 for length in lengths)
    attention = 2 * config.num_layers * config.heads * config.head_dim * pairs
    return (products + attention) / ceilings.matmul["bfloat16"]
