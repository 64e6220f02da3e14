"""Tiny random Hugging Face models with latent attention, for each version and each option that changes the sum."""

from tests.models.families.cases import SHAPE, STRETCHED, Case, rope

ATTENDING = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    # Unlike that of keys, as it is in the published models.
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}
YARN = rope("yarn", **STRETCHED, mscale=0.7, mscale_all_dim=0.9, beta_fast=32.0, beta_slow=1.0)

CASES = {
    # As DeepSeek-V2-Lite: no latent of queries, experts chosen without groups.
    "v2-lite": Case(
        "DeepseekV2",
        {"q_lora_rank": None, "n_shared_experts": 2} | YARN,
        seed=1,
        shape=ATTENDING,
    ),
    "v2": Case(
        "DeepseekV2",
        {
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            # Wider values than keys, the other way of filling up.
            "v_head_dim": 28,
            "tie_word_embeddings": True,
        },
        shape=ATTENDING,
    ),
    "v3": Case(
        "DeepseekV3",
        {
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "num_nextn_predict_layers": 1,
        }
        | YARN,
        shape=ATTENDING,
    ),
    # Half of the prompts are longer than what is chosen.
    "v32": Case(
        "DeepseekV32",
        {
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "index_n_heads": 16,
            "index_head_dim": 20,
            "index_topk": 20,
        }
        | YARN,
        shape=ATTENDING,
    ),
    # As GLM-5: no groups, and rotary pairs beside one another in the indexer.
    "glm-5": Case(
        "GlmMoeDsa",
        {
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "index_n_heads": 16,
            "index_head_dim": 20,
            "index_topk": 20,
            "mlp_layer_types": ["dense", "sparse"],
        },
        shape=ATTENDING,
    ),
    # As Mistral Small 4: queries grow with their position, and experts are chosen by a softmax.
    "mistral4": Case(
        "Mistral4",
        {"q_lora_rank": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | rope(
            "yarn",
            **STRETCHED | {"original_max_position_embeddings": 16},
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.5,
        ),
        shape=ATTENDING,
    ),
    # As Kimi-K2.5: DeepSeek-V3 beside a part for images.
    "kimi-k2.5": Case(
        "Kimi_K25",
        {
            "text_config": ATTENDING
            | YARN
            | {
                "model_type": "deepseek_v3",
                "q_lora_rank": 24,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
        },
        shape={},
        model="Kimi_K25ForConditionalGeneration",
    ),
    # As GLM-4.7-Flash: no groups, and values as wide as keys.
    "glm-flash": Case(
        "Glm4MoeLite",
        {
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "v_head_dim": 24,
            "mlp_layer_types": ["dense", "sparse"],
        },
        shape=ATTENDING,
    ),
    "v3-halves": Case(
        "DeepseekV3",
        {
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
        shape=ATTENDING,
    ),
}
