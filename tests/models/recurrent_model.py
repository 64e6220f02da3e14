"""A tiny model with a layer of each recurrent block."""

import jax

from jaxkv.config.blocks import DeltaConfig, Mamba1Config, MambaConfig, ShortConvConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder

VOCAB, CHUNK = 61, 8
BLOCKS = ("mamba2", "delta", "mamba1", "short_conv")


def recurrent_model():
    """Returns a model with one layer of each recurrent block and one of attention, and its parameters."""
    patterns = (*((block,) for block in BLOCKS), ("attention", "gated"))
    model = Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=len(patterns),
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=32,
            max_positions=64,
            rope=RopeConfig(rotary_dim=8),
            windows=(None,) * len(patterns),
            pattern=patterns,
            mamba=MambaConfig(heads=4, head_dim=8, d_state=8, d_conv=4, groups=2, chunk_size=CHUNK),
            delta=DeltaConfig(
                key_heads=1, value_heads=2, key_dim=8, value_dim=8, d_conv=4, chunk_size=CHUNK
            ),
            mamba1=Mamba1Config(channels=16, d_state=4, dt_rank=2, d_conv=3, chunk_size=CHUNK),
            short_conv=ShortConvConfig(channels=32, d_conv=3),
        )
    )
    params = model.init_params(jax.random.key(3), "float32")
    return model, jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 1 else leaf, params)
