"""Tiny random models of many families of Transformers, with odd options of each."""

import torch
import transformers

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_BOTH_KINDS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **_EXPERTS,
}

FAMILIES = {
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": ("Cohere2", {**_BOTH_KINDS, "logit_scale": 1.0}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 16}),
    "exaone4": ("Exaone4", _BOTH_KINDS),
    "glm4": ("Glm4", {"rope_parameters": _HALF_ROTATED, "head_dim": 16, "attention_bias": True}),
    "gpt_oss": ("GptOss", {**_BOTH_KINDS, "head_dim": 16, "num_local_experts": 4, "rope_parameters": _YARN}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 0.5}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 12}),
    "mixtral": ("Mixtral", {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"sliding_window": 11, "rope_parameters": _HALF_ROTATED}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0]}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_bias": True, "residual_dropout": 0.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], **_BOTH_KINDS, "use_sliding_window": True}),
}  # fmt: skip
"""Family -> prefix of its classes' names, and settings besides the sizes."""


def model_of(family, seed=0, **options):
    """Returns a model of the family in float32, of which sinks and biases are random too."""
    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **more, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model
