"""All kinds of blocks, by their names in a decoder's pattern."""

from collections.abc import Mapping

from jaxkv.models.block import Block
from jaxkv.models.eagle_attention import EAGLE_ATTENTION
from jaxkv.models.feed_forwards import DENSE_AND_MIXTURE, GATED, MIXTURE, PLAIN, SHARED
from jaxkv.models.latent import LATENT, SPARSE_LATENT
from jaxkv.models.mixers import (
    ATTENTION,
    DELTA,
    GLOBAL_ATTENTION,
    MAMBA1,
    MAMBA2,
    SHORT_CONV,
)
from jaxkv.models.transformer import TRANSFORMER

BLOCKS: Mapping[str, Block] = {
    "attention": ATTENTION,
    "global_attention": GLOBAL_ATTENTION,
    "eagle_attention": EAGLE_ATTENTION,
    "latent": LATENT,
    "sparse_latent": SPARSE_LATENT,
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "delta": DELTA,
    "short_conv": SHORT_CONV,
    "transformer": TRANSFORMER,
    "gated": GATED,
    "plain": PLAIN,
    "mixture": MIXTURE,
    "shared": SHARED,
    "dense_and_mixture": DENSE_AND_MIXTURE,
}
"""The last five are feed-forwards: `gated` and `plain` are dense, `shared` is the shared expert of a `mixture`."""
