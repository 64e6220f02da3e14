"""Keys of the authors' own code beside those of Transformers: read if they say what is computed, refused otherwise."""

import pytest

from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import read_config

LLAMA_3_ROPE = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Command R7B; the keys after vocab_size are the authors'.
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "vocab_size": 256000,
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}
# EXAONE 4.5's text part.
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LLAMA_3_ROPE,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "vocab_size": 153600,
    "max_window_layers": 4,
    "reorder_qk_norm": True,
    "sliding_window_pattern": "LLLG",
}
# mamba-130m-hf.
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-5,
    "model_type": "mamba",
    "num_hidden_layers": 24,
    "residual_in_fp32": True,
    "state_size": 16,
    "time_step_rank": 48,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50280,
    "d_inner": 1536,
    "d_model": 768,
    "fused_add_norm": True,
    "n_layer": 24,
    "pad_vocab_size_multiple": 8,
    "rms_norm": True,
    "ssm_cfg": {},
}
# Jamba v0.1.
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "calc_logits_for_entire_prompt": False,
    "mamba_inner_layernorms": True,
    "n_ctx": 262144,
}
FILES = {"cohere2": COHERE2, "exaone4": EXAONE4, "mamba": MAMBA, "jamba": JAMBA}


@pytest.mark.parametrize("family", FILES)
def test_a_published_file_is_the_model_that_it_is_without_the_authors_keys(family):
    raw = FILES[family]
    names = list(raw)
    without = {name: raw[name] for name in names[: names.index("vocab_size") + 1]}
    assert len(without) < len(raw)
    assert read_config(raw) == read_config(without)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere2", {"layer_switch": 2}),
        ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}),
        ("cohere2", {"position_embedding_type": "rope_neox"}),
        ("cohere2", {"rotary_pct": 0.5}),
        ("cohere2", {"use_embedding_sharing": False}),
        ("cohere2", {"use_gated_activation": False}),
        ("cohere2", {"use_parallel_block": False}),
        ("cohere2", {"use_qk_norm": True}),
        ("exaone4", {"reorder_qk_norm": False}),
        # Transformers computes layers from a number alone, and raises for text.
        ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": None}),
        ("mamba", {"d_inner": 768}),
        ("mamba", {"d_model": 384}),
        ("mamba", {"n_layer": 12}),
        ("mamba", {"rms_norm": False}),
        ("mamba", {"ssm_cfg": {"layer": "Mamba2"}}),
        ("jamba", {"mamba_inner_layernorms": False}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_a_key_that_says_something_else_is_refused_by_name(family, changes):
    with pytest.raises(UnknownConfig, match=next(iter(changes))):
        read_config(FILES[family] | changes)
