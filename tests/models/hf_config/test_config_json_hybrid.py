"""The config.json of families with recurrent layers, as the Hub has it and as Transformers 5 writes it."""

import math
from dataclasses import replace

import jax
import pytest

from jaxkv.cache.spec import ArraySpec
from jaxkv.cache.variants import short_conv
from jaxkv.config.blocks import (
    DeltaConfig,
    MambaConfig,
    MixtureConfig,
    ShortConvConfig,
    TransformerConfig,
)
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import build_model, read_config, rules_for
from jaxkv.weights.rules import expand

# Keys as the models on the Hub name them; sizes are made up.
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 2,
    "norm_before_gate": True,
    "num_heads": 4,
    "num_hidden_layers": 3,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 32,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_rank": 8,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 300,
}
ATTENDING = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "vocab_size": 300,
    "mamba_chunk_size": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
}
BAMBA = ATTENDING | {
    "model_type": "bamba",
    "attn_layer_indices": [1],
    "attn_rotary_emb": 16,
    "num_logits_to_keep": 1,
    "rope_scaling": None,
    "rope_theta": 20000.0,
}
GRANITE = ATTENDING | {
    "model_type": "granitemoehybrid",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "init_method": "mup",
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 4,
    "normalization_function": "rmsnorm",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "shared_intermediate_size": 48,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "chunk_size": 128,
    "attention_head_dim": 32,
    "hidden_size": 128,
    "hybrid_override_pattern": "M-M*E",
    "intermediate_size": 96,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_num_heads": 2,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "ssm_state_size": 32,
    "vocab_size": 300,
}
FALCON = ATTENDING | {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "key_multiplier": 0.5,
    "mamba_d_ssm": 256,
    "mamba_use_mlp": True,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.9, 0.3],
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 2.0,
    "ssm_multipliers": [0.5, 0.25, 1.0, 2.0, 3.0],
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "full_attention_interval": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 96,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 40,
    "vocab_size": 300,
}  # Text parts of published files; a file of text alone has these keys too.
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 96,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 320,
}
QWEN3_5_MOE = {key: QWEN3_5[key] for key in QWEN3_5 if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 64,
}
ZAMBA2 = {
    "adapter_rank": 8,
    "add_bias_linear": False,
    "architectures": ["Zamba2ForCausalLM"],
    "attention_dropout": 0.0,
    "attention_head_dim": 64,
    "attention_hidden_size": 256,
    "bos_token_id": 1,
    "chunk_size": 256,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": 128,
    "hybrid_layer_ids": [1, 3, 4],
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "kv_channels": 32,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_headdim": 32,
    "mamba_ngroups": 2,
    "max_position_embeddings": 4096,
    "model_type": "zamba2",
    "n_mamba_heads": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_logits_to_keep": 1,
    "num_mem_blocks": 2,
    "num_query_groups": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_cache": True,
    "use_conv_bias": True,
    "use_long_context": False,
    "use_mamba_kernels": True,
    "use_mem_eff_path": False,
    "use_mem_rope": True,
    "use_shared_attention_adapter": True,
    "vocab_size": 320,
}
ALL = {"mamba2": MAMBA2, "bamba": BAMBA, "granite": GRANITE, "nemotron": NEMOTRON, "falcon": FALCON}
ALL |= {"zamba2": ZAMBA2}
ALL |= {"qwen3-next": QWEN3_NEXT, "qwen3.5": QWEN3_5, "qwen3.5-moe": QWEN3_5_MOE}
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "linear_attn_config": {
        "full_attn_layers": [2, 4],
        "head_dim": 16,
        "kda_layers": [1, 3],
        "num_heads": 8,
        "short_conv_kernel_size": 3,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 12,
    "vocab_size": 320,
}
SCANNING = tuple(ALL)
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 128,
    "block_ff_dim": 1000,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 128,
    "conv_dim_out": 128,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2],
    "hidden_size": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 320,
}
LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "hidden_size": 128,
    "intermediate_size": 96,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 48,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_dense_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 320,
}
ALL |= {"lfm2": LFM2, "lfm2-moe": LFM2_MOE}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "bos_token_id": 0,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.1,
    "intermediate_size": 256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 8,
    "time_step_scale": 1.0,
    "torch_dtype": "float32",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 320,
}
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 1,
    "attn_layer_period": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 320,
}
ALL |= {"mamba": MAMBA, "jamba": JAMBA}


def test_each_family_is_a_pattern_of_blocks():
    assert read_config(MAMBA2).pattern == (("mamba2",),) * 3
    assert read_config(BAMBA).pattern[0] == ("mamba2", "gated")
    assert read_config(BAMBA).pattern[1] == ("attention", "gated")
    assert read_config(GRANITE).pattern[1] == ("attention", "mixture+shared")
    assert read_config(GRANITE | {"num_local_experts": 0}).pattern[2] == ("mamba2", "gated")
    alone = [("mamba2",), ("plain",), ("mamba2",), ("attention",), ("mixture+shared",)]
    assert list(read_config(NEMOTRON).pattern) == alone
    assert read_config(FALCON).pattern == (("mamba2+attention", "gated"),) * 3
    expert = "mixture+shared"
    mixed = [("delta", expert), ("attention", "gated"), ("delta", expert), ("attention", expert)]
    assert list(read_config(QWEN3_NEXT).pattern) == mixed


def test_sizes_come_from_where_each_family_keeps_them():
    mamba2 = read_config(MAMBA2)
    assert mamba2.mamba == MambaConfig(
        heads=4, head_dim=64, d_state=32, d_conv=4, groups=2, chunk_size=256
    )
    assert (mamba2.wide_residual, mamba2.eos_ids) == (True, (0,))
    bamba = read_config(BAMBA)
    assert (bamba.rope.rotary_dim, bamba.rope.theta, bamba.head_dim) == (16, 20000.0, 32)
    granite = read_config(GRANITE)
    assert (granite.rope.kind, granite.attention_scale) == ("none", 0.0078125)
    assert granite.mixture == MixtureConfig(experts=8, top_k=2, size=96, gated=True, shared_size=48)
    assert (granite.multipliers.logits, granite.multipliers.residual) == (0.25, 0.22)
    assert read_config(GRANITE | {"num_local_experts": 0}).ffn_size == 48
    nemotron = read_config(NEMOTRON)
    assert (nemotron.head_dim, nemotron.activation, nemotron.rope.kind) == (32, "relu2", "none")
    assert nemotron.mamba.norm_groups == 2
    assert nemotron.mixture.correction
    assert read_config(NEMOTRON | {"hybrid_override_pattern": "M-"}).mixture is None
    qwen = read_config(QWEN3_NEXT)
    assert (qwen.rope.rotary_dim, qwen.attention_gate, qwen.unit_offset) == (8, True, True)
    assert qwen.delta == DeltaConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=24, d_conv=4)
    falcon = read_config(FALCON)
    assert falcon.attention_scale == pytest.approx(0.5 * 32**-0.5)
    assert falcon.multipliers.ssm_in == (1.0, 0.5, 2.0, 4.0, 6.0)
    assert falcon.mamba.norm_groups == 0


@pytest.mark.parametrize("family", SCANNING)
def test_a_config_describes_a_model_with_memory_and_parameters(family):
    model = build_model(read_config(ALL[family]))
    specs = model.cache_specs(page_size=8, dtype="bfloat16")
    part = model.config.mamba or model.config.delta
    chunks = {entry.spec.chunk_size for entry in specs if entry.spec.kind in ("mamba2", "delta")}
    assert chunks == {part.chunk_size}
    states = {array.role: array for entry in specs for array in entry.spec.arrays}
    # The state is float32 in every dtype of the model.
    recurrent = states.get("ssm") or states["delta"]
    assert (states["conv"].dtype, recurrent.dtype) == ("bfloat16", "float32")
    quantised = model.cache_specs(page_size=8, dtype="int8")
    kept = {a.role: a.dtype for entry in quantised for a in entry.spec.arrays}
    assert (kept["conv"], kept.get("key", "int8")) == (model.config.dtype, "int8")


@pytest.mark.parametrize("family", ALL)
def test_the_weight_rules_cover_exactly_the_parameters(family):
    model = build_model(read_config(ALL[family]))
    recipes = expand(rules_for(model.config), model.config)
    paths = jax.tree_util.tree_flatten_with_path(model.param_shapes("float32"))[0]
    shapes = {
        jax.tree_util.keystr(at, simple=True, separator="."): leaf.shape for at, leaf in paths
    }
    assert shapes.keys() == recipes.keys()
    for target, recipe in recipes.items():
        sizes = [math.prod(shape) for shape in recipe.source_shapes(shapes[target])]
        assert (len(sizes), sum(sizes)) == (len(recipe.sources), math.prod(shapes[target]))


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mamba2", {"hidden_act": "gelu"}),
        ("mamba2", {"rms_norm": False}),
        ("mamba2", {"d_model": 5}),
        ("bamba", {"attn_layer_indices": [3]}),
        ("bamba", {"attn_rotary_emb": 32}),
        ("granite", {"layer_types": ["mamba", "attention", "mlp"]}),
        ("granite", {"layer_types": ["mamba"]}),
        ("granite", {"position_embedding_type": "alibi"}),
        ("granite", {"normalization_function": "layernorm"}),
        ("nemotron", {"hybrid_override_pattern": "MX"}),
        ("nemotron", {"hybrid_override_pattern": ""}),
        ("nemotron", {"sliding_window": 64}),
        ("nemotron", {"mlp_bias": True}),
        ("falcon", {"mamba_use_mlp": False}),
        ("falcon", {"mamba_proj_bias": True}),
        ("falcon", {"attn_layer_indices": [1]}),
        ("zamba2", {"attention_head_dim": 32}),
        ("zamba2", {"hidden_act": "tanh"}),
        ("zamba2", {"hybrid_layer_ids": [1, 3]}),
        ("zamba2", {"kv_channels": 64}),
        ("zamba2", {"layers_block_type": ["mamba"] * 4 + ["attention"]}),
        ("zamba2", {"num_key_value_heads": 2}),
        ("zamba2", {"rms_norm_eps": 1e-6}),
        ("zamba2", {"sliding_window": 64}),
        ("zamba2", {"state_size": 16}),
        ("zamba2", {"tie_word_embeddings": False}),
        ("zamba2", {"use_conv_bias": False}),
        ("zamba2", {"use_long_context": True}),
        ("zamba2", {"use_shared_block_lora": False}),
        ("kimi-linear", {"hidden_act": "gelu"}),
        ("kimi-linear", {"linear_attn_config": [1]}),
        ("kimi-linear", {"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1]}}),
        ("kimi-linear", {"linear_attn_config": {"full_attn_layers": [4]}}),
        # Numbers as texts name no layer.
        (
            "kimi-linear",
            {"linear_attn_config": {"full_attn_layers": ["2", 4], "kda_layers": [1, 3]}},
        ),
        ("kimi-linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}),
        ("kimi-linear", {"mla_use_nope": False}),
        ("kimi-linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
        ("kimi-linear", {"moe_layer_freq": 2}),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}),
        ("kimi-linear", {"num_experts_per_tok": 3}),
        ("qwen3-next", {"attention_bias": True}),
        ("qwen3-next", {"mlp_only_layers": [4]}),
        ("qwen3-next", {"layer_types": ["linear_attention"]}),
        *(
            (family, {"hidden_act": "gelu"})
            for family in ("jamba", "lfm2", "lfm2-moe", "qwen3-next")
        ),
        ("qwen3.5", {"hidden_act": "gelu"}),
        ("qwen3.5-moe", {"hidden_act": "gelu"}),
        ("lfm2", {"conv_dim": 64}),
        ("lfm2", {"block_use_swiglu": False}),
        ("lfm2", {"layer_types": ["conv"]}),
        ("lfm2", {"num_experts": 8}),
        ("lfm2-moe", {"n_shared_experts": 1}),
        ("qwen3.5", {"attn_output_gate": False}),
        ("qwen3.5", {"mlp_only_layers": [0]}),
        ("qwen3.5", {"num_experts": 8}),
        ("qwen3.5-moe", {"norm_topk_prob": False}),
        ("qwen3.5-moe", {"output_gate_type": "sigmoid"}),
    ],
)
def test_what_is_not_understood_is_refused_by_name(family, change):
    lists = ("hybrid_override_pattern", "layer_types", "layers_block_type")
    said = dict.fromkeys(lists, "kind of each") | {
        "moe_router_activation_func": "scoring_func",
        "use_shared_block_lora": "use_shared_mlp_adapter",
    }
    [key] = change
    file = KIMI_LINEAR if family == "kimi-linear" else ALL[family]
    with pytest.raises(UnknownConfig, match=said.get(key, key)):
        read_config(file | change)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mamba2", {"num_heads": 3}),
        ("mamba2", {"n_groups": 3}),
        ("mamba2", {"time_step_limit": [0.1]}),
        ("mamba2", {"time_step_limit": [0.2, 0.1]}),
        ("mamba2", {"time_step_limit": [0.0, "much"]}),
        ("bamba", {"mamba_d_head": 63}),
        ("granite", {"num_experts_per_tok": 9}),
        ("nemotron", {"n_group": 3}),
        ("falcon", {"ssm_multipliers": [1.0]}),
        ("falcon", {"mlp_multipliers": [1.0, math.nan]}),
        ("qwen3-next", {"linear_num_value_heads": 3}),
        ("zamba2", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        ("zamba2", {"n_mamba_heads": 16}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(family, change):
    with pytest.raises(ValueError):
        read_config(ALL[family] | change)


def test_mixers_sizes_that_contradict_each_other_are_named():
    message = "n_mamba_heads = 16 and mamba_headdim = 32, which contradict the mixers' width of 256"
    with pytest.raises(ValueError, match=message):
        read_config(ZAMBA2 | {"n_mamba_heads": 16})


def test_kimi_linear_has_its_sizes_under_two_names_and_counts_layers_from_one():
    config = read_config(KIMI_LINEAR)
    assert [stages[0] for stages in config.pattern] == ["kimi_delta", "latent"] * 2
    assert [stages[1] for stages in config.pattern] == ["gated"] + ["mixture+shared"] * 3
    assert config.delta == DeltaConfig(
        key_heads=8, value_heads=8, key_dim=16, value_dim=16, d_conv=3, gate_rank=16
    )
    assert (config.rope.kind, config.max_positions, config.eos_ids) == ("none", 4096, (2,))
    assert (config.mixture.experts, config.mixture.top_k, config.mixture.renormalise) == (
        8,
        2,
        True,
    )
    assert config.latent.q_lora_rank is None
    linear = KIMI_LINEAR["linear_attn_config"]
    saved = {key: value for key, value in KIMI_LINEAR.items() if key != "linear_attn_config"} | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "linear_head_dim": linear["head_dim"],
        "linear_num_heads": linear["num_heads"],
        "num_local_experts": 8,
        "max_position_embeddings": 4096,
    }
    assert read_config(saved) == config
    rules = rules_for(config)
    for stored, name in {
        "layers.0.block_sparse_moe.up_proj.weight": "layers.0.mlp.up_proj.weight",
        "layers.1.mlp.shared_experts.up_proj.weight": "layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        "layers.1.block_sparse_moe.experts.0.w1.weight": "layers.1.block_sparse_moe.experts.0.w1.weight",
        "layers.0.self_attn.forget_gate.f_a_proj.weight": "layers.0.self_attn.f_a_proj.weight",
    }.items():
        assert rules.name_of(f"model.{stored}", config) == f"model.{name}"


def test_qwen3_5_rotates_text_as_others_do_and_has_experts_in_all_layers_or_none():
    dense, experts = read_config(QWEN3_5), read_config(QWEN3_5_MOE)
    assert dense.rope == RopeConfig(theta=1e7, rotary_dim=8)
    assert [stages[0] for stages in dense.pattern] == ["delta"] * 3 + ["attention"]
    assert {stages[1] for stages in dense.pattern} == {"gated"}
    assert {stages[1] for stages in experts.pattern} == {"mixture+shared"}
    assert experts.mixture == MixtureConfig(
        experts=8, top_k=2, size=48, gated=True, shared_size=64, shared_gate=True
    )
    assert dense.delta == experts.delta == read_config(QWEN3_NEXT).delta


@pytest.mark.parametrize(
    ("text", "name"), [(QWEN3_5, "Qwen3_5"), (QWEN3_5_MOE, "Qwen3_5Moe")], ids=["dense", "experts"]
)
def test_a_multimodal_qwen3_5_is_its_text_part(text, name):
    model_type = text["model_type"].removesuffix("_text")
    file = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "image_token_id": 300,
        "language_model_only": False,
        "model_type": model_type,
        "text_config": {key: text[key] for key in text if key != "architectures"},
        "tie_word_embeddings": False,
        "video_token_id": 301,
        "vision_config": {"depth": 27, "model_type": model_type},
        "vision_end_token_id": 302,
        "vision_start_token_id": 303,
    }
    config = read_config(file)
    assert config == replace(read_config(text), family=model_type)
    rules = rules_for(config)
    assert rules.name_of("model.language_model.layers.0.mlp.gate.weight", config) == (
        "model.layers.0.mlp.gate.weight"
    )
    assert rules.ignores("model.visual.blocks.0.attn.qkv.weight", config)
    assert rules.ignores("mtp.layers.0.input_layernorm.weight", config)
    assert not rules.ignores("model.audio.weight", config)


def test_lfm2_computes_its_width_and_names_its_attention_layers_in_two_ways():
    dense, experts = read_config(LFM2), read_config(LFM2_MOE)
    # 1000 by two thirds is 666, and the next multiple of 256 is 768.
    assert (dense.ffn_size, experts.ffn_size) == (768, 96)
    assert read_config(LFM2 | {"block_auto_adjust_ff_dim": False}).ffn_size == 1000
    assert [stages[0] for stages in dense.pattern] == [stages[0] for stages in experts.pattern]
    assert [stages[1] for stages in experts.pattern] == ["gated"] * 2 + ["mixture"] * 2
    assert (dense.short_conv, dense.tie_embeddings) == (
        ShortConvConfig(channels=128, d_conv=3),
        True,
    )
    assert not read_config(LFM2 | {"tie_embedding": False}).tie_embeddings
    with pytest.raises(UnknownConfig, match="tie_embedding = False, which contradicts"):
        read_config(LFM2 | {"tie_embedding": False, "tie_word_embeddings": True})
    assert experts.mixture == MixtureConfig(
        experts=8, top_k=2, size=48, gated=True, scoring="sigmoid", correction=True, sum_eps=1e-6
    )


def test_a_short_convolution_keeps_its_last_inputs_in_the_models_dtype():
    model = build_model(read_config(LFM2))
    for dtype, kept in (("float32", "float32"), ("int8", "bfloat16")):
        specs = [entry.spec for entry in model.cache_specs(page_size=8, dtype=dtype)]
        assert [spec.kind for spec in specs] == ["short_conv", "short_conv", "gqa", "short_conv"]
        assert specs[0] == short_conv(128, d_conv=3, dtype=kept)
        assert specs[0].arrays == (ArraySpec("conv", (2, 128), kept, split=1),)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3.5", "Qwen3_5Text"),
        ("qwen3.5-moe", "Qwen3_5MoeText"),
        ("lfm2", "Lfm2"),
        ("lfm2-moe", "Lfm2Moe"),
        ("mamba", "Mamba"),
        ("jamba", "Jamba"),
        ("zamba2", "Zamba2"),
    ],
)
def test_keys_that_the_file_leaves_out_mean_what_transformers_assumes(family, name):
    transformers = pytest.importorskip("transformers")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    sizes += ("layers_block_type",)
    sizes += ("vocab_size",) if family != "lfm2-moe" else ("vocab_size", "layer_types")
    # Eight heads or more, as the default number of those of keys and values.
    file = {key: ALL[family][key] for key in sizes if key in ALL[family]}
    if "num_attention_heads" in file:
        file["num_attention_heads"] = 8
    full = getattr(transformers, f"{name}Config")(**file).to_dict()
    assert read_config(file | {"model_type": ALL[family]["model_type"]}) == read_config(full)


def test_zamba2s_hybrid_layers_use_the_blocks_of_the_first_ones_in_turn():
    config = read_config(ZAMBA2)
    mamba, hybrid = ("mamba2",), ("transformer>mamba2",)
    assert config.pattern == (mamba, hybrid, mamba, hybrid, hybrid)
    assert config.owners == (0, 1, 2, 3, 1)
    assert read_config(ZAMBA2 | {"num_mem_blocks": 1}).owners == (0, 1, 2, 1, 1)
    assert (config.head_dim, config.attention_scale) == (64, 32**-0.5)
    assert config.transformer == TransformerConfig(adapter_rank=8, adapts_attention=True)
    assert (config.mamba.norm_groups, config.mamba.head_dim) == (2, 32)
    assert (config.rope.kind, config.tie_embeddings) == ("default", True)
    assert read_config(ZAMBA2 | {"use_mem_rope": False}).rope.kind == "none"


def test_the_names_of_zyphras_first_files_are_read():
    names = {
        "adapter_rank": "lora_rank",
        "intermediate_size": "ffn_hidden_size",
        "mamba_d_conv": "conv_dimension",
        "mamba_d_state": "state_size",
        "mamba_expand": "expansion_factor",
        "use_shared_attention_adapter": "use_shared_attention_lora",
    }
    older = {names.get(key, key): value for key, value in ZAMBA2.items() if key != "n_mamba_heads"}
    older |= {"ft_lora": False, "gated_linear_unit": True, "use_shared_block_lora": True}
    assert read_config(older) == read_config(ZAMBA2)
    # Transformers 5.17 saves such a file with both names and its default number of heads, whatever the width says.
    wide = older | {"mamba_headdim": 16}
    saved_again = {**ZAMBA2, **wide, "n_mamba_heads": 8}
    assert read_config(saved_again) == read_config(wide)
    assert read_config(wide).mamba.heads == 16


def test_jamba_places_attention_and_experts_by_period_and_offset():
    config = read_config(JAMBA)
    gated, experts = "gated", "mixture"
    assert config.pattern == (
        ("mamba1", gated),
        ("attention", experts),
        ("mamba1", gated),
        ("mamba1", experts),
    )
    assert (config.mamba1.dt_rank, config.mamba1.norms, config.rope.kind) == (8, True, "none")
    assert not config.mixture.renormalise
    dense = read_config(JAMBA | {"num_experts": 1})
    assert dense.mixture is None
    assert "mixture" not in dense.blocks
    with pytest.raises(ValueError, match=r"attn_layer_offset must be an integer in \[0, 3\]"):
        read_config(JAMBA | {"attn_layer_offset": 4})


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_mamba_keeps_inputs_of_the_convolution_and_a_state_per_channel(dtype):
    [first, *_] = build_model(read_config(MAMBA)).cache_specs(page_size=16, dtype=dtype)
    kept = "float32" if dtype == "int8" else dtype
    assert first.spec.arrays == (
        ArraySpec("conv", (3, 256), kept, split=1),
        ArraySpec("ssm", (256, 16), "float32", split=0),
    )


def test_mambas_step_rank_is_a_sixteenth_unless_given():
    odd = MAMBA | {"hidden_size": 100, "intermediate_size": 200, "time_step_rank": "auto"}
    assert read_config(odd).mamba1.dt_rank == 7
    with pytest.raises(UnknownConfig, match="intermediate_size"):
        read_config(MAMBA | {"intermediate_size": 300})


def test_infinity_has_two_spellings():
    both = [[0.001, math.inf], [0.001, {"__float__": "Infinity"}]]
    limits = {read_config(MAMBA2 | {"time_step_limit": pair}).mamba.dt_limit for pair in both}
    assert limits == {(0.001, math.inf)}


def test_owners_must_own_their_parameters_and_have_the_same_stages():
    two = replace(
        read_config(MAMBA2), num_layers=3, pattern=(("mamba2",), ("mamba2",), ("mamba2", "mamba2"))
    )
    shared = replace(two, owners=(0, 0, 2))
    assert (two.owner(1), shared.owner(1)) == (1, 0)
    for owners in ((1, 0, 2), (0, 1, 1)):
        with pytest.raises(ValueError, match="owner of layer"):
            replace(two, owners=owners)
    with pytest.raises(ValueError, match="one entry per layer"):
        replace(two, owners=(0, 0))


def test_blocks_whose_sizes_are_missing_are_refused():
    shape = {"hidden_size": 8, "num_layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4}
    shape |= {"family": "x", "vocab_size": 9, "ffn_size": 8, "max_positions": 16}
    rope = RopeConfig(rotary_dim=4, kind="none")
    for stage in ("mamba2", "attention+mamba2", "mixture", "transformer>attention"):
        with pytest.raises(ValueError, match="sizes are missing"):
            ModelConfig(**shape, rope=rope, windows=(None,), pattern=((stage,),))
