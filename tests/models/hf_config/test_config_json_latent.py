"""The config.json that DeepSeek publishes is read, although it names code and quantised weights."""

from dataclasses import replace

import pytest

from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import read_config, rules_for

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"} | {
    "original_max_position_embeddings": 4096
}
SHARED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}


def published(version, **keys):
    """Returns a file that names classes of this version, with code beside it."""
    name = f"Deepseek{version}"
    code = {
        "AutoConfig": f"configuration_deepseek.{name}Config",
        "AutoModel": f"modeling_deepseek.{name}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{name}ForCausalLM",
    }
    return (
        SHARED
        | {
            "model_type": f"deepseek_{version.lower()}",
            "architectures": [f"{name}ForCausalLM"],
            "auto_map": code,
        }
        | keys
    )


V2_LITE = published(
    "V2",
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    pretraining_tp=1,
    q_lora_rank=None,
    rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    seq_aux=True,
    topk_group=1,
    topk_method="greedy",
    vocab_size=102400,
)
V3 = published(
    "V3",
    bos_token_id=0,
    eos_token_id=1,
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    quantization_config={
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
)
# Keys as Moonshot publishes them, after DeepSeek-V3's code.
KIMI_K2 = V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"beta_fast": 1, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = KIMI_K2 | {
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": None,
}
# Keys as Zhipu publishes them.
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
V32 = {key: value for key, value in V3.items() if key != "auto_map"} | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"},
}
GLM_5 = GLM_4_7_FLASH | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
KIMI_K2_5 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
    "dtype": "bfloat16",
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "text_config": {key: KIMI_K2[key] for key in KIMI_K2 if key != "quantization_config"},
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"mm_hidden_size": 1152, "model_type": "kimi_k25"},
}


@pytest.mark.parametrize(
    ("file", "layers", "experts", "further"),
    [
        (V2_LITE, 27, 64, 0),
        (V3, 61, 256, 1),
        (V32, 61, 256, 1),
        (KIMI_K2, 61, 384, 0),
        (MOONLIGHT, 27, 64, 0),
        (GLM_4_7_FLASH, 47, 64, 1),
        (GLM_5, 78, 256, 1),
        (KIMI_K2_5, 61, 384, 0),
    ],
    ids=["v2-lite", "v3", "v3.2", "kimi-k2", "moonlight", "glm-4.7-flash", "glm-5", "kimi-k2.5"],
)
def test_what_is_published_is_read(file, layers, experts, further):
    config = read_config(file)
    assert (config.family, config.num_layers, config.mtp_layers) == (
        file["model_type"],
        layers,
        further,
    )
    assert config.mixture is not None
    assert (config.mixture.experts, config.dtype) == (experts, "bfloat16")
    assert config.latent is not None
    assert (config.latent.stored, config.latent.index is not None) == (576, file in (V32, GLM_5))


def test_kimi_k2_is_deepseek_v3_by_another_name():
    renamed = read_config(KIMI_K2 | {"model_type": "deepseek_v3"})
    config = read_config(KIMI_K2)
    assert config == replace(renamed, family="kimi_k2")
    assert rules_for(config) == rules_for(renamed)
    assert (config.mixture.groups, config.mixture.top_groups, config.mixture.scale) == (1, 1, 2.827)


def test_the_text_part_of_kimi_k2_5_is_kimi_k2():
    config, text = read_config(KIMI_K2_5), read_config(KIMI_K2_5["text_config"])
    assert config == replace(text, family="kimi_k25")


def test_the_indexer_of_glm_5_has_other_rotary_pairs_than_that_of_v3_2():
    for file, pairs in ((V32, False), (GLM_5, True)):
        index = read_config(file).latent.index
        assert index is not None
        assert index.pairs == pairs


@pytest.mark.parametrize(
    "change",
    [
        {"indexer_types": ["full"] * 3 + ["shared"] * 75},
        {"index_topk_freq": 4},
        {"index_topk_pattern": "F" + "S" * 77},
        {"indexer_rope_interleave": False},
        {"rope_interleave": False},
    ],
)
def test_glm_5_without_an_indexer_of_each_layers_own_is_refused_by_name(change):
    assert read_config(GLM_5 | {"indexer_types": ["full"] * 78, "index_topk_freq": 1})
    [key] = change
    with pytest.raises(UnknownConfig, match=key):
        read_config(GLM_5 | change)


def test_keys_that_glm_flash_leaves_out_have_the_values_of_its_class():
    """The theta of the published file is a hundred times that of the class."""
    named = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size")
    left = {key: GLM_4_7_FLASH[key] for key in (*named, "num_attention_heads", "dtype")}
    config, short = read_config(GLM_4_7_FLASH), read_config(left)
    rope = replace(config.rope, theta=10000.0)
    assert short == replace(config, rope=rope, eos_ids=(1,), assumed_eos=True)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["GlmMoeDsa", "Mistral4"])
def test_keys_that_a_file_leaves_out_mean_what_transformers_assumes(name):
    transformers = pytest.importorskip("transformers")
    full = getattr(transformers, f"{name}Config")().to_dict()
    needed = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size")
    sparse = {key: full[key] for key in (*needed, "num_attention_heads")}
    config, short = read_config(full), read_config(sparse)
    assert short == replace(config, dtype=short.dtype)


@pytest.mark.torch
def test_the_rotated_share_of_mistral_small_4_is_that_of_its_sizes():
    transformers = pytest.importorskip("transformers")
    full = transformers.Mistral4Config().to_dict()
    assert full["rope_parameters"]["partial_rotary_factor"] == 0.5
    with pytest.raises(UnknownConfig, match=r"sizes of heads rotate 0\.75 of each"):
        read_config(full | {"qk_rope_head_dim": 192})


def test_quantised_weights_and_code_that_is_not_run_change_no_config():
    left_out = {key: V3[key] for key in V3 if key not in ("auto_map", "quantization_config")}
    assert read_config(left_out) == read_config(V3)


def test_scales_per_tensor_may_be_denied_and_not_affirmed():
    blocks = V3["quantization_config"]
    denied = blocks | {"weight_per_tensor": False, "act_per_tensor": False}
    assert read_config(V3 | {"quantization_config": denied}) == read_config(V3)
    with pytest.raises(UnknownConfig, match="weight_per_tensor = True"):
        read_config(V3 | {"quantization_config": blocks | {"weight_per_tensor": True}})


@pytest.mark.parametrize(
    "code",
    [
        {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"},
        {"AutoModelForCausalLM": ["modeling_deepseek.DeepseekV3ForCausalLM", None]},
        {"AutoModel": "modeling_deepseek.DeepseekV3ForCausalLM"},
        {},
        "modeling_deepseek.DeepseekV3ForCausalLM",
    ],
)
def test_code_for_anything_but_the_named_class_is_refused(code):
    with pytest.raises(UnknownConfig, match=r"auto_map.*runs no code"):
        read_config(V3 | {"auto_map": code})


def test_code_of_a_class_that_is_not_the_familys_is_refused():
    other = {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    with pytest.raises(UnknownConfig, match="only DeepseekV3ForCausalLM is supported"):
        read_config(V3 | {"auto_map": other, "architectures": ["OtherForCausalLM"]})
    with pytest.raises(UnknownConfig, match="auto_map"):
        read_config(V3 | {"auto_map": other, "architectures": None})
