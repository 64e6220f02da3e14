"""The sizes of well-known models, for benchmarks with random weights."""

from dataclasses import replace

from jaxkv.config.blocks import MambaConfig
from jaxkv.config.model import ModelConfig, RopeConfig

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        max_positions=131072,
        rope=RopeConfig(
            theta=500000.0,
            rotary_dim=128,
            kind="llama3",
            factor=8.0,
            original_max_positions=8192,
        ),
        windows=(None,) * 32,
        norm_eps=1e-5,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        num_layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn_size=3072,
        max_positions=40960,
        rope=RopeConfig(theta=1000000.0, rotary_dim=128),
        windows=(None,) * 28,
        qk_norm=True,
        tie_embeddings=True,
    ),
    # For trying the benchmark on a CPU.
    "tiny": ModelConfig(
        family="llama",
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=128,
        max_positions=2048,
        rope=RopeConfig(rotary_dim=16),
        windows=(None,) * 2,
    ),
}

# The same model with other sizes.
SHAPES["llama-3.1-70b"] = replace(
    SHAPES["llama-3.1-8b"],
    hidden_size=8192,
    num_layers=80,
    heads=64,
    ffn_size=28672,
    windows=(None,) * 80,
    pattern=SHAPES["llama-3.1-8b"].pattern[:1] * 80,
)

# Multipliers are left at 1, because they do not change the time.
HYBRID_SHAPES = {
    "granite-4.0-h-micro": ModelConfig(
        family="granitemoehybrid",
        vocab_size=100352,
        hidden_size=2048,
        num_layers=40,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        max_positions=131072,
        rope=RopeConfig(rotary_dim=64),
        windows=(None,) * 40,
        pattern=tuple(
            ("attention" if layer % 10 == 5 else "mamba2", "gated") for layer in range(40)
        ),
        tie_embeddings=True,
        mamba=MambaConfig(heads=64, head_dim=64, d_state=128, d_conv=4, groups=1, chunk_size=256),
    ),
    # For trying the benchmark on a CPU.
    "tiny-hybrid": ModelConfig(
        family="granitemoehybrid",
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn_size=64,
        max_positions=4096,
        rope=RopeConfig(rotary_dim=16),
        windows=(None,) * 2,
        pattern=(("mamba2", "gated"), ("attention", "gated")),
        tie_embeddings=True,
        mamba=MambaConfig(heads=4, head_dim=32, d_state=16, d_conv=4, groups=1, chunk_size=64),
    ),
}
