"""The sizes of models that people know, for measuring with random weights."""

from jaxkv.model_config import ModelConfig, RopeConfig

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
