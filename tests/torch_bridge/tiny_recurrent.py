"""Tiny random Transformers models with recurrent layers, with biases and odd sizes, in float32 on the CPU."""

import torch
import transformers

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_PURE = {
    name: _SIZES[name]
    for name in _SIZES
    if name not in ("intermediate_size", "num_attention_heads", "num_key_value_heads")
} | {"num_hidden_layers": 2, "state_size": 8, "conv_kernel": 3, "expand": 2, "use_bias": True}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": True,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SHORT = {
    "num_hidden_layers": 3,
    "conv_L_cache": 4,
    "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OPTIONS = {
    "Mamba2": {**_PURE, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "Mamba": {**_PURE, "time_step_rank": 4},
    "FalconMamba": {**_PURE, "time_step_rank": 4},
    "Bamba": {**_SIZES, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **_SIZES,
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "position_embedding_type": "rope",
    },
    "FalconH1": {
        **_SIZES,
        **_MAMBA,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": False,
    },
    "NemotronH": {
        **_SIZES,
        "head_dim": 8,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 3,
        "chunk_size": 8,
        "use_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "Jamba": {
        **_SIZES,
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "Qwen3Next": {
        **_SIZES,
        **_DELTA,
        "head_dim": 16,
        "num_experts": 0,
        "mlp_only_layers": [0, 1, 2],
    },
    "Qwen3_5": {**_SIZES, **_DELTA, "head_dim": 16},
    "OlmoHybrid": {**_SIZES, **_DELTA},
    "KimiLinear": {
        **_SIZES,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Lfm2": {**_SIZES, **_SHORT},
    "Lfm2Moe": {**_SIZES, **_SHORT, **_EXPERTS, "num_dense_layers": 1},
}
RECURRENT = tuple(_OPTIONS)


WIDE = {
    "Mamba2": {},
    "Bamba": {"hidden_size": 256, "mamba_d_head": 128},
    "FalconH1": {"head_dim": 64},
    "Qwen3Next": {"head_dim": 64},
    "Lfm2": {"hidden_size": 256},
}
"""Options with which heads of attention are 64 wide, as kernels need them."""


def recurrent_model(family, seed=0, **more):
    """Returns a model whose greedy tokens differ from one another."""
    torch.manual_seed(seed)
    names = {"Qwen3_5": "Qwen3_5TextConfig"}
    options = {**_OPTIONS[family], **more}
    config = getattr(transformers, names.get(family, f"{family}Config"))(**options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def cache_name(model):
    """Returns the argument under which a model takes its cache."""
    return "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
