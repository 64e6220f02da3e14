"""The config.json of families with windows: what Transformers has written, what is assumed, what is refused."""

import math
from dataclasses import replace

import pytest

from jaxkv.config.blocks import GlobalAttentionConfig, MixtureConfig
from jaxkv.config.model import RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import read_config

GEMMA_2 = {
    # As Transformers 4 wrote it, with both names of the activation.
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_4 = {
    # The text part of the published 26B-A4B.
    "attention_bias": False,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": True,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
GEMMA_4_E2B = GEMMA_4 | {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "top_k_experts": None,
    "use_double_wide_mlp": True,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


def test_gemma_2_of_transformers_4_is_read():
    config = read_config(GEMMA_2)
    assert config.windows == (4096, None) * 13
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    assert config.attention_scale == 256**-0.5
    assert config.multipliers.embedding == math.sqrt(2304)
    assert config.tie_embeddings
    assert config.unit_offset
    assert config.post_norms
    assert (config.activation, config.window_rope, config.qk_norm) == ("gelu_tanh", None, False)


def test_gemma_3_of_transformers_4_and_5_are_the_same_model():
    """Five of six layers see 512 tokens and turn by other angles."""
    old = read_config(GEMMA_3)
    assert old.windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert (old.rope.theta, old.window_rope.theta) == (1e6, 1e4)
    assert old.qk_norm
    kinds = ["full_attention" if reach is None else "sliding_attention" for reach in old.windows]
    gone = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern", "rope_scaling")
    new = {key: value for key, value in GEMMA_3.items() if key not in gone}
    new |= {
        "layer_types": kinds,
        "_sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert read_config(new) == old


def test_stretching_gemma_3_leaves_its_windows_and_its_length_as_they_are():
    config = read_config(GEMMA_3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (config.rope.kind, config.rope.factor) == ("linear", 8.0)
    assert (config.window_rope.kind, config.window_rope.theta) == ("default", 1e4)
    assert config.max_positions == 32768


@pytest.mark.parametrize("missing", [{}, None, {"rope_theta": None}])
def test_rotary_parts_of_gemma_3_without_a_base_have_the_familys(missing):
    parts = {"full_attention": missing, "sliding_attention": missing}
    gone = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    file = {key: value for key, value in GEMMA_3.items() if key not in gone}
    config = read_config(file | {"rope_parameters": parts})
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)
    outer = {"rope_theta": 7e5, "rope_local_base_freq": 3e4, "rope_parameters": parts}
    config = read_config(file | outer)
    assert (config.rope.theta, config.window_rope.theta) == (7e5, 3e4)


def test_gemma_4_has_keys_of_other_sizes_without_a_window():
    config = read_config(GEMMA_4)
    sizes = GlobalAttentionConfig(kv_heads=2, head_dim=512, keys_are_values=True)
    assert (config.kv_heads, config.head_dim, config.global_attention) == (8, 256, sizes)
    assert config.windows == ((1024,) * 5 + (None,)) * 5
    mixers = [stages[0] for stages in config.pattern]
    assert mixers == (["attention"] * 5 + ["global_attention"]) * 5
    assert {stages[1] for stages in config.pattern} == {"dense_and_mixture"}
    rope = RopeConfig(theta=1e6, rotary_dim=512, kind="proportional", turning=64)
    assert (config.rope, config.window_rope) == (rope, RopeConfig(theta=1e4, rotary_dim=256))
    assert config.mixture == MixtureConfig(experts=128, top_k=8, size=704, gated=True)
    # The last layer sees all tokens, also if its kind is another.
    kinds = {"layer_types": ["sliding_attention"] * 30}
    assert read_config(GEMMA_4 | kinds).windows == (1024,) * 29 + (None,)


@pytest.mark.torch
@pytest.mark.parametrize("change", [{}, {"global_head_dim": 256}, {"attention_k_eq_v": False}])
def test_gemma_4_saved_again_is_the_same_model(change):
    """Transformers writes the sizes of each layer instead of `global_head_dim` and `num_global_key_value_heads`."""
    transformers = pytest.importorskip("transformers")
    saved = transformers.Gemma4TextConfig.from_dict(GEMMA_4 | change).to_dict()
    assert "per_layer_config" in saved
    assert read_config(saved) == read_config(GEMMA_4 | change)


@pytest.mark.torch
def test_keys_that_gemma_4_leaves_out_mean_what_transformers_assumes():
    transformers = pytest.importorskip("transformers")
    full = transformers.Gemma4TextConfig(hidden_size_per_layer_input=0).to_dict()
    needed = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    sparse = {key: full[key] for key in (*needed, "num_attention_heads")}
    assert read_config(sparse | {"hidden_size_per_layer_input": 0}) == read_config(full)
    null = sparse | {"hidden_size_per_layer_input": 0, "rope_parameters": None}
    assert read_config(null) == read_config(full)
    assert read_config(sparse).layer_embedding_size == 256
    null = sparse | {"hidden_size_per_layer_input": None, "num_kv_shared_layers": None}
    assert read_config(null) == read_config(full)


def test_last_layers_of_gemma_4_take_keys_of_the_last_ones_before_them_of_their_kind():
    config = read_config(GEMMA_4_E2B)
    assert config.layer_embedding_size == 256
    # Before them are 15 layers, of which the last has no window.
    assert config.key_owners == (*range(15), *((13,) * 4 + (14,)) * 4)
    own = [("attention", "gated")] * 4 + [("global_attention", "gated")]
    shared = [("kv_shared_attention", "double_gated")] * 4
    shared += [("kv_shared_global_attention", "double_gated")]
    assert config.pattern == (*own * 3, *shared * 4)
    plain = read_config(GEMMA_4_E2B | {"use_double_wide_mlp": False})
    assert {feed_forward for _, feed_forward in plain.pattern} == {"gated"}
    assert read_config(GEMMA_4_E2B | {"num_kv_shared_layers": 0}).key_owners == ()


def test_keys_are_shared_with_an_earlier_layer_that_has_its_own_and_the_same_window():
    config = read_config(GEMMA_4_E2B)
    assert (config.key_owner(14), config.key_owner(34)) == (14, 14)
    with pytest.raises(
        ValueError, match="layer 15 attends to keys of layer 15, and its blocks are kv"
    ):
        replace(config, key_owners=())
    with pytest.raises(
        ValueError, match="layer 1 attends to keys of layer 0, and its blocks are att"
    ):
        replace(config, key_owners=(0, 0, *config.key_owners[2:]))
    for layer, owner in ((34, 13), (34, 29), (15, 14)):
        owners = list(config.key_owners)
        owners[layer] = owner
        with pytest.raises(
            ValueError, match=f"key_owners: layer {layer} must .* got layer {owner}"
        ):
            replace(config, key_owners=tuple(owners))
    other = [*config.pattern]
    other[34] = ("kv_shared_attention", "gated")
    with pytest.raises(
        ValueError, match="whose blocks are global_attention, gated, and needs attention"
    ):
        replace(config, pattern=tuple(other))
    for name in ("qkv_bias", "o_bias", "sinks", "wide_qk_norm", "late_qk_norm", "attention_gate"):
        with pytest.raises(ValueError, match=f"keys have no {name}; leave key_owners empty"):
            replace(config, **{name: True})
    with pytest.raises(ValueError, match="key_owners must be an int in"):
        replace(config, key_owners=(1, *config.key_owners[1:]))
    with pytest.raises(ValueError, match="one entry per layer"):
        replace(config, key_owners=(0,))


def test_gpt_oss_as_its_makers_wrote_it_is_read():
    config = read_config(GPT_OSS)
    assert config.windows == (128, None) * 12
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    assert (config.sinks, config.qkv_bias, config.o_bias) == (True, True, True)
    assert config.mixture is not None
    assert (config.mixture.experts, config.mixture.top_k, config.mixture.size) == (32, 4, 2880)
    assert (config.mixture.biases, config.mixture.clamp) == (True, 7.0)
    # As it is published: experts of 4 bits, and nothing said of the others, which are of 16.
    published = read_config(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}})
    assert (config.dtype, published.dtype) == ("float32", "bfloat16")
    bare = {key: GPT_OSS[key] for key in GPT_OSS if key not in ("rope_scaling", "rope_theta")}
    assert read_config(bare).rope == config.rope


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (GEMMA_2, {"use_bidirectional_attention": True}, "only causal attention"),
        (GEMMA_2, {"layer_types": ["chunked_attention"] * 26}, "layer_types must name"),
        (GEMMA_3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must name"),
        (
            GEMMA_3,
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": {"full_attention": {}, "sliding_attention": {}},
            },
            "keep one of them",
        ),
        (GPT_OSS, {"swiglu_limit": 3.0}, "swiglu_limit = 3.0"),
        (GPT_OSS, {"experts_per_token": 2}, "experts_per_token = 2"),
        (GPT_OSS, {"quantization_config": {"quant_method": "hqq"}}, "quant_method = 'hqq'"),
        (GEMMA_4_E2B, {"num_kv_shared_layers": 35}, "= 35, which leaves no layer without a"),
        (GEMMA_4_E2B, {"num_kv_shared_layers": 33}, "= 33, which leaves no layer without a"),
        (GEMMA_4_E2B, {"vocab_size_per_layer_input": 262000}, "per_layer_input = 262000 and"),
        (
            GEMMA_4,
            {"num_kv_shared_layers": 12, "use_double_wide_mlp": True},
            "use_double_wide_mlp and enable_moe_block",
        ),
        (GEMMA_4, {"use_bidirectional_attention": "all"}, "only causal attention"),
        (GEMMA_4, {"attention_bias": True}, "attention_bias = True"),
        (GEMMA_4, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling = "),
        (GEMMA_4, {"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config must give"),
        (GEMMA_4, {"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config must give"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(file, change, told):
    with pytest.raises(UnknownConfig, match=told):
        read_config(file | change)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (GEMMA_2, {"sliding_window": None}),
        (GEMMA_3, {"sliding_window": 0}),
        (GPT_OSS, {"sliding_window": "128"}),
        (GEMMA_2, {"final_logit_softcapping": -1.0}),
        (GEMMA_2, {"query_pre_attn_scalar": "x"}),
    ],
)
def test_wrong_types_and_absurd_sizes_are_refused_in_one_line(file, change):
    with pytest.raises(
        ValueError, match=next(iter(change)).replace("final_logit_softcapping", "logit_cap")
    ) as error:
        read_config(file | change)
    assert "\n" not in str(error.value)
