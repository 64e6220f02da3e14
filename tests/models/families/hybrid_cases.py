"""Tiny random Hugging Face models with recurrent layers, for each family and each option that changes the sum."""

from tests.models.families.cases import GRANITE_FACTORS, SHAPE, Case, rope

CHUNK = 16
_NAMES = ("vocab_size", "hidden_size", "initializer_range", "bos_token_id", "eos_token_id")
BARE = {name: SHAPE[name] for name in _NAMES} | {"pad_token_id": None}
ATTENDING = BARE | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "intermediate_size": 96,
}
# As Bamba names them, and those after it.
MAMBA = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": CHUNK,
}
NEMOTRON = ATTENDING | {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": CHUNK,
    # Transformers bounds step sizes in prefill but not in decode; see jaxkv/models/families/recurrent/nemotron_h.py.
    "time_step_min": 1e-9,
}
ZAMBA = ATTENDING | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "chunk_size": CHUNK,
    "num_mem_blocks": 2,
    "adapter_rank": 6,
    # With larger weights attention is so sharp that float32 differs by 1e-4 from float64, here and in Transformers.
    "initializer_range": 0.1,
    # As Nemotron-H's; see jaxkv/models/families/recurrent/zamba2.py.
    "time_step_min": 1e-9,
}
FALCON_MULTIPLIERS = {
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9],
    "mlp_multipliers": [0.8, 1.3],
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 1.6,
}
DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
# Norms of the residual stream, of queries and of keys.
QWEN_NORMS = ("layernorm", "q_norm", "k_norm", "model.norm")

CASES = {
    "mamba2": Case(
        "Mamba2",
        {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": CHUNK,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        shape=BARE,
    ),
    "bamba": Case("Bamba", {"attn_layer_indices": [1]}, shape=ATTENDING | MAMBA),
    "granite": Case(
        "GraniteMoeHybrid",
        GRANITE_FACTORS
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "shared_intermediate_size": 48,
        },
        seed=1,
        shape=ATTENDING | MAMBA,
    ),
    "granite-dense-rope": Case(
        "GraniteMoeHybrid",
        {
            "layer_types": ["attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
        shape=ATTENDING | MAMBA,
    ),
    "nemotron": Case(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
        },
        shape=NEMOTRON,
    ),
    "nemotron-latent": Case(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "moe_intermediate_size": 32,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 48,
        },
        shape=NEMOTRON,
    ),
    "falcon-h1": Case(
        "FalconH1",
        FALCON_MULTIPLIERS
        | {"num_hidden_layers": 1, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_rms_norm": False},
        shape=ATTENDING | MAMBA,
    ),
    "falcon-h1-norm": Case(
        "FalconH1",
        {
            "num_hidden_layers": 1,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mlp_bias": True,
        },
        shape=ATTENDING | MAMBA,
    ),
    "qwen3-next": Case(
        "Qwen3Next",
        DELTA | EXPERTS | {"mlp_only_layers": [0]},
        seed=2,
        shape=ATTENDING,
        around_zero=QWEN_NORMS,
    ),
    "kimi-linear": Case(
        "KimiLinear",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        shape=ATTENDING,
    ),
    "qwen3.5": Case(
        "Qwen3_5Text",
        DELTA
        | rope(
            "default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
        ),
        shape=ATTENDING,
        around_zero=QWEN_NORMS,
        model="Qwen3_5ForCausalLM",
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5MoeText",
        DELTA | EXPERTS | {"linear_num_key_heads": 4},
        shape={key: value for key, value in ATTENDING.items() if key != "intermediate_size"},
        around_zero=QWEN_NORMS,
        model="Qwen3_5MoeForCausalLM",
    ),
    "qwen3.5-multimodal": Case(
        "Qwen3_5",
        {
            "text_config": ATTENDING | DELTA | {"model_type": "qwen3_5_text"},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "num_position_embeddings": 16,
                "out_hidden_size": 64,
                "patch_size": 4,
            },
            "tie_word_embeddings": False,
        },
        shape={},
        around_zero=(*QWEN_NORMS, "language_model.norm"),
        model="Qwen3_5ForConditionalGeneration",
    ),
    "mamba": Case(
        "Mamba",
        BARE
        | {
            "num_hidden_layers": 2,
            "state_size": 5,
            "conv_kernel": 3,
            "time_step_rank": 7,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        shape={},
    ),
    "jamba": Case(
        "Jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "use_mamba_kernels": False,
        },
        shape=ATTENDING,
    ),
    "jamba-dense": Case(
        "Jamba",
        {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_dt_rank": 5,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "use_mamba_kernels": False,
        },
        shape=ATTENDING,
    ),
    "zamba2": Case(
        "Zamba2", {"use_mem_rope": True, "use_shared_attention_adapter": True}, seed=1, shape=ZAMBA
    ),
    "zamba2-biases": Case(
        "Zamba2",
        {"add_bias_linear": True, "num_mem_blocks": 1, "num_key_value_heads": 2},
        seed=1,
        shape=ZAMBA,
    ),
    "lfm2": Case(
        "Lfm2",
        LFM2 | {"intermediate_size": 130, "block_multiple_of": 8, "conv_bias": True},
        shape=ATTENDING,
    ),
    "lfm2-moe": Case(
        "Lfm2Moe",
        LFM2
        | {
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "conv_L_cache": 4,
        },
        shape=ATTENDING,
    ),
}
"""Families; those after the first of each family have an option of their own."""
