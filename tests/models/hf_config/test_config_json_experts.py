"""The config.json of families with experts, as the hub has it; keys that are missing mean what Transformers assumes."""

import math
from dataclasses import replace

import jax
import pytest

from jaxkv.config.blocks import MixtureConfig, Multipliers
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import build_model, read_config, rules_for
from jaxkv.weights.rules import expand

# Keys as the hub's files have them; sizes are made up.
ATTENDING = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 320,
}
MIXTRAL = ATTENDING | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_MOE = ATTENDING | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
GRANITE_MOE = ATTENDING | {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "model_type": "granitemoe",
    "num_experts_per_tok": 4,
    "num_local_experts": 8,
    "output_router_logits": False,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
}
GRANITE_SHARED = GRANITE_MOE | {
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "model_type": "granitemoeshared",
    "shared_intermediate_size": 48,
}
GLM_4_5 = ATTENDING | {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 16,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 24,
    "n_group": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
}
MINIMAX_M2 = ATTENDING | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1, 1, 1, 1],
    "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    "head_dim": 16,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 4,
    "num_local_experts": 16,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
OLMOE = ATTENDING | {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.01,
}
QWEN2_MOE = ATTENDING | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "max_window_layers": 4,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 48,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
ERNIE_4_5 = ATTENDING | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_capacity": [16, 16, 16],
    "moe_gate": "topk",
    "moe_intermediate_size": 24,
    "moe_k": 4,
    "moe_layer_end_index": 3,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 16,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_bias": False,
}
ALL = {
    "ernie-4.5": ERNIE_4_5,
    "minimax-m2": MINIMAX_M2,
    "olmoe": OLMOE,
    "qwen2-moe": QWEN2_MOE,
    "glm-4.5": GLM_4_5,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
    "granite-moe": GRANITE_MOE,
    "granite-shared": GRANITE_SHARED,
}
CLASSES = {
    "ernie-4.5": "Ernie4_5_Moe",
    "minimax-m2": "MiniMaxM2",
    "olmoe": "Olmoe",
    "qwen2-moe": "Qwen2Moe",
    "glm-4.5": "Glm4Moe",
    "mixtral": "Mixtral",
    "qwen3-moe": "Qwen3Moe",
    "granite-moe": "GraniteMoe",
    "granite-shared": "GraniteMoeShared",
}
# Keys without which a file is refused.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
NEEDED = (*SIZES, "model_type", "vocab_size")


def test_mixtral_has_experts_in_every_layer_and_qwen3_as_many_as_its_file_says():
    mixtral, qwen = read_config(MIXTRAL), read_config(QWEN3_MOE)
    assert mixtral.pattern == qwen.pattern == (("attention", "mixture"),) * 4
    assert mixtral.mixture == MixtureConfig(experts=8, top_k=2, size=96, gated=True)
    assert qwen.mixture == MixtureConfig(experts=16, top_k=4, size=24, gated=True)
    assert (mixtral.qk_norm, qwen.qk_norm, qwen.head_dim) == (False, True, 16)
    assert mixtral.windows == qwen.windows == (None,) * 4


def test_qwen3_moe_has_experts_in_every_second_layer_or_all_but_some():
    second = read_config(QWEN3_MOE | {"decoder_sparse_step": 2})
    assert [stages[1] for stages in second.pattern] == ["gated", "mixture"] * 2
    some = read_config(QWEN3_MOE | {"mlp_only_layers": [0, 3], "norm_topk_prob": False})
    assert [stages[1] for stages in some.pattern] == ["gated", "mixture", "mixture", "gated"]
    assert not some.mixture.renormalise


def test_granite_has_factors_and_perhaps_a_shared_expert():
    config, shared = read_config(GRANITE_MOE), read_config(GRANITE_SHARED)
    assert config.multipliers == Multipliers(embedding=12.0, residual=0.22, logits=1 / 6)
    assert config.attention_scale == 0.015625
    assert config.mixture == MixtureConfig(experts=8, top_k=4, size=96, gated=True)
    assert config.pattern == (("attention", "mixture"),) * 4
    assert shared.pattern == (("attention", "mixture+shared"),) * 4
    assert shared.mixture == replace(config.mixture, shared_size=48)


def test_glm_has_dense_layers_first_and_leaves_out_the_layer_of_further_tokens():
    config = read_config(GLM_4_5)
    assert [stages[1] for stages in config.pattern] == ["gated"] * 3 + ["mixture+shared"]
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, True)
    assert (config.rope.rotary_dim, config.head_dim, config.mtp_layers) == (8, 16, 1)
    assert config.mixture == MixtureConfig(
        experts=16,
        top_k=4,
        size=24,
        gated=True,
        scoring="sigmoid",
        correction=True,
        scale=2.5,
        shared_size=24,
    )
    rules = rules_for(config)
    assert rules.ignores("model.layers.4.eh_proj.weight", config)
    assert not rules.ignores("model.layers.5.eh_proj.weight", config)


def test_minimax_rotates_as_much_as_its_own_code_does():
    """Transformers 5.17 rotates whole heads of published files, which give the width and not the share."""
    assert read_config(MINIMAX_M2).rope.rotary_dim == 16
    assert read_config(MINIMAX_M2 | {"rotary_dim": 8}).rope.rotary_dim == 8
    assert read_config(MINIMAX_M2 | {"partial_rotary_factor": 0.5}).rope.rotary_dim == 8
    both = {"rotary_dim": 8, "partial_rotary_factor": 0.5}
    assert read_config(MINIMAX_M2 | both).rope.rotary_dim == 8
    with pytest.raises(UnknownConfig, match=r"rotary_dim = 12.* rotates 8 of 16"):
        read_config(MINIMAX_M2 | both | {"rotary_dim": 12})
    rope = {"rope_type": "proportional", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    whole = {key: MINIMAX_M2[key] for key in MINIMAX_M2 if key != "rope_theta"}
    whole |= {"rope_parameters": rope}
    assert read_config(whole | {"rotary_dim": 16}).rope.turning == 4
    with pytest.raises(UnknownConfig, match="rotary_dim = 8 and rope_type = 'proportional'"):
        read_config(whole | {"rotary_dim": 8})


def test_minimax_and_ernie_correct_the_choice_of_experts():
    minimax, ernie = read_config(MINIMAX_M2), read_config(ERNIE_4_5)
    routing = {"experts": 16, "top_k": 4, "gated": True, "correction": True}
    assert minimax.mixture == MixtureConfig(**routing, size=96, scoring="sigmoid")
    assert ernie.mixture == MixtureConfig(
        **routing, size=24, sum_eps=1e-12, shared_size=48, wide_router=True
    )
    assert minimax.wide_qk_norm
    # The router of ERNIE is float32 in a model of another dtype, as in Transformers.
    for config, dtype in ((minimax, "bfloat16"), (ernie, "float32")):
        layer = build_model(config).param_shapes("bfloat16")["layers"][-1]
        assert (layer["router"].dtype, layer["experts_up"].dtype) == (dtype, "bfloat16")


def test_ernie_has_experts_in_every_nth_layer_between_two():
    feed_forwards = [stages[1] for stages in read_config(ERNIE_4_5).pattern]
    assert feed_forwards == ["gated"] + ["mixture+shared"] * 3
    some = {"moe_layer_interval": 2, "moe_layer_end_index": -1, "moe_num_shared_experts": 0}
    feed_forwards = [stages[1] for stages in read_config(ERNIE_4_5 | some).pattern]
    assert feed_forwards == ["gated", "mixture"] * 2


def test_windows_of_qwen2_moe_need_the_kinds_of_its_layers():
    used = QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 64}
    with pytest.raises(UnknownConfig, match="use_sliding_window without layer_types"):
        read_config(used)
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    assert read_config(used | kinds).windows == (None, 64) * 2


def test_a_window_is_that_of_every_layer():
    assert read_config(MIXTRAL | {"sliding_window": 64}).windows == (64,) * 4
    used = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    assert read_config(QWEN3_MOE | used).windows == (64,) * 4
    assert read_config(QWEN3_MOE | used | {"use_sliding_window": False}).windows == (None,) * 4


@pytest.mark.torch
@pytest.mark.parametrize("family", ALL)
def test_keys_that_the_file_leaves_out_mean_what_transformers_assumes(family):
    transformers = pytest.importorskip("transformers")
    file = {key: ALL[family][key] for key in NEEDED}
    sizes = {key: value for key, value in file.items() if key != "model_type"}
    full = getattr(transformers, f"{CLASSES[family]}Config")(**sizes).to_dict()
    assert full.keys() > file.keys()
    assert read_config(file) == read_config(full)


def test_the_base_of_frequencies_is_mixtrals_unless_the_file_has_one():
    file = {key: MIXTRAL[key] for key in MIXTRAL if key != "rope_theta"}
    assert read_config(file).rope.theta == 1e6
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert read_config(file | nested).rope.theta == 5e5


@pytest.mark.torch
@pytest.mark.parametrize("family", ALL)
def test_what_transformers_saves_again_means_the_same(family):
    transformers = pytest.importorskip("transformers")
    file = ALL[family]
    saved = getattr(transformers, f"{CLASSES[family]}Config").from_dict(dict(file)).to_dict()
    assert "rope_parameters" in saved
    assert read_config(saved) == read_config(file)


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
        ("mixtral", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}),
        ("mixtral", {"n_shared_experts": 1}),
        ("qwen3-moe", {"mlp_only_layers": [4]}),
        ("qwen3-moe", {"num_local_experts": 8}),
        ("qwen3-moe", {"shared_expert_intermediate_size": 64}),
        ("granite-moe", {"shared_intermediate_size": 48}),
        ("granite-moe", {"position_embedding_type": "nope"}),
        ("glm-4.5", {"scoring_func": "softmax"}),
        ("minimax-m2", {"scoring_func": "softmax"}),
        ("minimax-m2", {"attn_type_list": [1, 0, 1, 1]}),
        ("minimax-m2", {"shared_intermediate_size": 24}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("ernie-4.5", {"use_bias": True}),
        ("ernie-4.5", {"moe_norm_min": 0.5}),
        ("ernie-4.5", {"moe_use_aux_free": False}),
        ("qwen3-moe", {"architectures": ["Qwen3MoeForSequenceClassification"]}),
    ],
)
def test_what_would_change_the_result_and_is_not_understood_is_refused_by_name(family, change):
    [key] = change
    with pytest.raises(UnknownConfig, match=key):
        read_config(ALL[family] | change)
