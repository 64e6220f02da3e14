"""All kinds of blocks, by their names in a decoder's pattern."""

from collections.abc import Mapping

from jaxkv.models.block import Block
from jaxkv.models.eagle_attention import EAGLE_ATTENTION
from jaxkv.models.feed_forwards import (
    DENSE_AND_MIXTURE,
    DOUBLE_GATED,
    GATED,
    MIXTURE,
    PLAIN,
    SHARED,
)
from jaxkv.models.latent import LATENT, SPARSE_LATENT
from jaxkv.models.mixers import (
    ATTENTION,
    DELTA,
    GLOBAL_ATTENTION,
    KIMI_DELTA,
    KV_SHARED_ATTENTION,
    KV_SHARED_GLOBAL_ATTENTION,
    MAMBA1,
    MAMBA2,
    SHORT_CONV,
)
from jaxkv.models.transformer import TRANSFORMER

BLOCKS: Mapping[str, Block] = {
    "attention": ATTENTION,
    "global_attention": GLOBAL_ATTENTION,
    "kv_shared_attention": KV_SHARED_ATTENTION,
    "kv_shared_global_attention": KV_SHARED_GLOBAL_ATTENTION,
    "eagle_attention": EAGLE_ATTENTION,
    "latent": LATENT,
    "sparse_latent": SPARSE_LATENT,
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "delta": DELTA,
    "kimi_delta": KIMI_DELTA,
    "short_conv": SHORT_CONV,
    "transformer": TRANSFORMER,
    "gated": GATED,
    "double_gated": DOUBLE_GATED,
    "plain": PLAIN,
    "mixture": MIXTURE,
    "shared": SHARED,
    "dense_and_mixture": DENSE_AND_MIXTURE,
}
"""The last six are feed-forwards: `gated`, `double_gated`, twice as wide, and `plain` are dense, and `shared` is the
shared expert of a `mixture`."""
