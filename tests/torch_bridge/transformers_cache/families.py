"""Tiny random models of many families of Transformers, with odd options of each."""

import copy

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

_SPARSE = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1}
_FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGCAT = {
    "num_layers": 1,
    "head_dim": 4,
    "q_lora_rank": 16,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "zero_expert_num": 2,
}

FAMILIES = {
    "apertus": ("Apertus", {"rope_parameters": _YARN}),
    "axk1": ("AXK1", {**_LATENT, "q_lora_rank": 16}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "cohere2": ("Cohere2", {**_BOTH_KINDS, "logit_scale": 1.0}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 16}),
    "dots1": ("Dots1", {**_SPARSE, "n_group": 1, "topk_group": 1}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "exaone4": ("Exaone4", _BOTH_KINDS),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"rope_parameters": _HALF_ROTATED, "head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {**_SPARSE, "head_dim": 16, "use_qk_norm": True}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENT, "q_lora_rank": 16, "mlp_layer_types": ["dense", "sparse"]}),
    "gpt_oss": ("GptOss", {**_BOTH_KINDS, **_FOUR_EXPERTS, "head_dim": 16, "rope_parameters": _YARN}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 0.5}),
    "granitemoe": ("GraniteMoe", _FOUR_EXPERTS),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 12}),
    "hunyuan_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 12}),
    "longcat_flash": ("LongcatFlash", {**_LATENT, **_LONGCAT}),
    "minicpm3": ("MiniCPM3", {**_LATENT, "q_lora_rank": 16}),
    "minimax_m2": ("MiniMaxM2", {**_FOUR_EXPERTS, "head_dim": 16}),
    "mistral4": ("Mistral4", {**_LATENT, "q_lora_rank": 16}),
    "mixtral": ("Mixtral", {**_FOUR_EXPERTS, "sliding_window": 9}),
    "nemotron": ("Nemotron", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _BOTH_KINDS),
    "phi3": ("Phi3", {"sliding_window": 11, "rope_parameters": _HALF_ROTATED}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0]}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_bias": True, "residual_dropout": 0.0}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], **_BOTH_KINDS, "use_sliding_window": True}),
    "stablelm": ("StableLm", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "youtu": ("Youtu", {**_LATENT, "q_lora_rank": 16}),
}  # fmt: skip
"""Family -> prefix of its classes' names, and settings besides the sizes."""


def model_of(family, seed=0, **options):
    """Returns a model of the family in float32, of which sinks and biases are random too."""
    name, more = FAMILIES[family]
    # Some configs write into the dictionaries that they are given.
    more = copy.deepcopy(more)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **more, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model
