"""config.json of dense families beside Llama, and of multimodal models: published files, defaults, refusals."""

import copy
import math
from dataclasses import replace

import pytest

from jaxkv.config.blocks import QueryGrowth
from jaxkv.config.model import RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import read_config

GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "vocab_size": 155136,
}
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GLM_4 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 151552,
}
GLM = GLM_4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}
OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "vocab_size": 100352,
}
OLMO_3 = OLMO_2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
}
EXAONE_4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "vocab_size": 102400,
}
COHERE_2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 256000,
}
COHERE = {key: value for key, value in COHERE_2.items() if "window" not in key} | {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "use_qk_norm": False,
}
HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128256,
}
GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
MISTRAL_3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
QWEN_3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "model_type": "qwen3_vl"},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
MINISTRAL = {
    "architectures": ["Ministral3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 262144,
    "model_type": "ministral3",
    "num_attention_heads": 32,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 131072,
}
ARCEE = {
    "architectures": ["ArceeForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "arcee",
    "num_attention_heads": 20,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 20.0,
        "mscale": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
    },
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128004,
}
ERNIE_4_5 = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "vocab_size": 103424,
}
FILES = {
    "Arcee": ARCEE,
    "Ernie4_5": ERNIE_4_5,
    "Ministral3": MINISTRAL,
    "Gemma": GEMMA,
    "Granite": GRANITE,
    "SeedOss": SEED_OSS,
    "SmolLM3": SMOLLM3,
    "Phi3": PHI_4_MINI,
    "Glm": GLM,
    "Glm4": GLM_4,
    "Olmo2": OLMO_2,
    "Olmo3": OLMO_3,
    "Exaone4": EXAONE_4,
    "Cohere": COHERE,
    "Cohere2": COHERE_2,
    "HunYuanDenseV1": HUNYUAN,
    "Gemma3": GEMMA_3,
    "Mistral3": MISTRAL_3,
    "Qwen3VL": QWEN_3_VL,
}
"""Prefix of the classes in Transformers -> a file with the keys of a published one."""

VL_ROPE = RopeConfig(rotary_dim=128, theta=5e6)
ERNIE_ROPE = RopeConfig(rotary_dim=128, theta=500000.0)
EVERY_FOURTH = tuple(range(3, 32, 4))
EXPECTED = {
    "Arcee": {"pattern": (("attention", "plain"),) * 36, "activation": "relu2"},
    "Ernie4_5": {"qkv_bias": False, "tie_embeddings": True, "rope": ERNIE_ROPE},
    "Ministral3": {"query_growth": QueryGrowth(beta=0.1, length=16384), "max_positions": 262144},
    "Gemma": {"unit_offset": True, "activation": "gelu", "tie_embeddings": True, "kv_heads": 1},
    "Granite": {"attention_scale": 0.0078125, "norm_eps": 1e-5, "tie_embeddings": True},
    "SeedOss": {"qkv_bias": True, "o_bias": False, "head_dim": 128, "tie_embeddings": False},
    "SmolLM3": {"nope_layers": tuple(range(3, 36, 4)), "windows": (None,) * 36},
    "Phi3": {"windows": (None,) * 32, "max_positions": 131072, "norm_eps": 1e-5},
    "Glm": {"post_norms": False, "qkv_bias": True, "o_bias": False},
    "Glm4": {"post_norms": True, "rope": RopeConfig(rotary_dim=64)},
    "Olmo2": {"pre_norms": False, "wide_qk_norm": True, "wide_norms": True},
    "Olmo3": {"windows": (4096, 4096, 4096, None) * 8, "max_positions": 65536},
    "Exaone4": {"nope_layers": tuple(range(3, 64, 4)), "qk_norm": True, "pre_norms": False},
    "Cohere": {"nope_layers": (), "windows": (None,) * 32, "layer_norms": True},
    "Cohere2": {"nope_layers": EVERY_FOURTH, "windows": (4096, 4096, 4096, None) * 8},
    "HunYuanDenseV1": {"late_qk_norm": True, "qk_norm": False, "tie_embeddings": True},
    "Gemma3": {"heads": 8, "vocab_size": 262208, "dtype": "bfloat16", "eos_ids": (1, 106)},
    "Mistral3": {"heads": 32, "kv_heads": 8, "tie_embeddings": False, "dtype": "bfloat16"},
    "Qwen3VL": {"qk_norm": True, "tie_embeddings": True, "rope": VL_ROPE, "eos_ids": (151645,)},
}


@pytest.mark.parametrize("name", FILES)
def test_published_files_are_read(name):
    config = read_config(FILES[name])
    assert config.family == FILES[name]["model_type"]
    assert {field: getattr(config, field) for field in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", FILES)
def test_the_epsilon_of_the_norms_is_read(name):
    """Logits of the parity tests do not show it: a family's default is as small as their tolerance."""
    file, key = FILES[name], "layer_norm_eps" if "Cohere" in name else "rms_norm_eps"
    part = {key: 0.25}
    changed = {"text_config": file["text_config"] | part} if "text_config" in file else part
    assert read_config(file | changed).norm_eps == 0.25


def test_factors_of_activations_are_read():
    granite, cohere = (read_config(file).multipliers for file in (GRANITE, COHERE_2))
    assert (granite.embedding, granite.residual, granite.logits) == (12.0, 0.22, 1 / 16)
    assert cohere.logits == 0.25
    assert read_config(GEMMA).multipliers.embedding == math.sqrt(2048)


def test_the_text_part_of_mistral_3_may_be_ministral():
    text = {key: MINISTRAL[key] for key in MINISTRAL if key not in ("architectures", "dtype")}
    config = read_config(MISTRAL_3 | {"text_config": text, "dtype": "bfloat16"})
    assert config == replace(read_config(MINISTRAL), family="mistral3")
    with pytest.raises(UnknownConfig, match="only mistral or ministral3 or mistral4 is supported"):
        read_config(MISTRAL_3 | {"text_config": text | {"model_type": "llama"}})


def test_ministral_needs_the_rate_at_which_its_queries_grow():
    rope = {key: MINISTRAL["rope_parameters"][key] for key in ("rope_theta", "rope_type")}
    with pytest.raises(ValueError, match=r"rope_parameters lacks llama_4_scaling_beta"):
        read_config(MINISTRAL | {"rope_parameters": rope})


def test_longrope_has_two_lists_of_factors_and_the_length_that_chooses_between_them():
    rope = read_config(PHI_4_MINI).rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_positions) == ("longrope", 96, 4096)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 48, (1.5,) * 48)
    assert (rope.factor, rope.attention_factor) == (32.0, None)
    # Microsoft's first files had other names of the kind.
    for kind in ("su", "yarn"):
        scaling = PHI_4_MINI["rope_scaling"] | {"type": kind}
        assert read_config(PHI_4_MINI | {"rope_scaling": scaling}).rope == rope


def test_hunyuans_alpha_multiplies_the_base():
    config = read_config(HUNYUAN)
    assert config.rope == RopeConfig(theta=10000.0 * 1000.0 ** (128 / 126), rotary_dim=128)
    assert config.max_positions == 32768


def test_proportional_angles_are_those_of_a_whole_head_and_some_do_not_turn():
    """The share stands beside the base, in the outer level, or nowhere."""
    rope = {"rope_theta": 10000.0, "rope_type": "proportional"}
    olmo = {key: OLMO_2[key] for key in OLMO_2 if key != "rope_theta"}
    for file, share, turning in (
        (GLM, {"partial_rotary_factor": 0.25}, 16),
        (GLM, {}, 32),
        (olmo, {"partial_rotary_factor": 0.25}, 16),
        (olmo, {}, 64),
    ):
        wanted = RopeConfig(theta=1e4, rotary_dim=128, kind="proportional", turning=turning)
        assert read_config(file | {"rope_parameters": rope | share}).rope == wanted


def test_windows_and_full_layers_of_olmo_3_have_different_angles():
    config = read_config(OLMO_3)
    assert (config.rope.kind, config.rope.theta) == ("yarn", 500000.0)
    assert config.window_rope == RopeConfig(theta=500000.0, rotary_dim=128)


def test_rotary_parts_of_olmo_3_without_a_base_have_the_familys():
    parts = {"full_attention": OLMO_3["rope_scaling"], "sliding_attention": {}}
    file = {key: OLMO_3[key] for key in OLMO_3 if key not in ("rope_scaling", "rope_theta")}
    assert read_config(file | {"rope_parameters": parts}) == read_config(OLMO_3)


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [
        ({}, {}, False),
        ({"tie_word_embeddings": True}, {}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
        # Transformers 5 adds its default, true, to the outer level of models with a head of their own.
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, False),
        ({}, {"tie_word_embeddings": True}, True),
    ],
)
def test_both_levels_of_a_multimodal_file_may_say_whether_embeddings_are_tied(outer, text, tied):
    file = MISTRAL_3 | outer | {"text_config": MISTRAL_3["text_config"] | text}
    assert read_config(file).tie_embeddings == tied


def test_the_whole_qwen_3_vl_unties_embeddings_if_it_says_nothing():
    """As Transformers, also if its text part ties them."""
    file = {key: QWEN_3_VL[key] for key in QWEN_3_VL if key != "tie_word_embeddings"}
    assert QWEN_3_VL["text_config"]["tie_word_embeddings"]
    assert not read_config(file).tie_embeddings


def comparable(config):
    """Returns the config without the dtype, which Transformers adds where a file has none."""
    return replace(config, dtype="float32")


@pytest.mark.torch
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_transformers_writes_again_means_the_same(name):
    transformers = pytest.importorskip("transformers")
    file = FILES[name]
    again = getattr(transformers, f"{name}Config").from_dict(copy.deepcopy(file)).to_dict()
    assert comparable(read_config(again)) == comparable(read_config(file))


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


@pytest.mark.torch
@pytest.mark.parametrize("name", FILES)
def test_keys_that_a_file_leaves_out_mean_what_transformers_assumes(name):
    transformers = pytest.importorskip("transformers")
    full = getattr(transformers, f"{name}Config")().to_dict()
    sparse = {"model_type": full["model_type"]}
    if "text_config" in full:
        # Of an absent text_config Mistral 3 has other defaults than of absent keys in it.
        kinds = {"gemma3": "Gemma3Text", "mistral3": "Mistral", "qwen3_vl": "Qwen3VLText"}
        kind = kinds[full["model_type"]]
        text = getattr(transformers, f"{kind}Config")().to_dict()
        full |= {"text_config": text}
        sparse["text_config"] = {"model_type": text["model_type"]}
    else:
        sparse |= {key: full[key] for key in (*SIZES, "num_attention_heads")}
    assert comparable(read_config(sparse)) == comparable(read_config(full))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["Ministral3", "Mistral4"])
def test_each_text_of_mistral_3_has_the_sizes_that_transformers_assumes(kind):
    transformers = pytest.importorskip("transformers")
    text = getattr(transformers, f"{kind}Config")().to_dict()
    sizes = (*SIZES, "num_attention_heads")
    sparse = {key: text[key] for key in text if key not in sizes}
    full, short = (MISTRAL_3 | {"text_config": part} for part in (text, sparse))
    assert read_config(short) == read_config(full)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (GEMMA, {"use_bidirectional_attention": True}, "only causal attention"),
        (GEMMA, {"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation.*contradict"),
        (GRANITE, {"logit_scale": 2.0}, "logit_scale = 2.0"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers must hold"),
        (SMOLLM3, {"no_rope_layers": [1, 1, 1, 2] * 9}, "no_rope_layers must hold"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36}, "layer_types must name"),
        (PHI_4_MINI, {"full_attn_mod": 2}, "full_attn_mod = 2"),
        (PHI_4_MINI, {"lm_head_bias": True}, "lm_head_bias = True"),
        (PHI_4_MINI, {"rope_scaling": {"type": "longrope"}}, "short_factor"),
        (GLM_4, {"rope_interleaved": True}, "rope_interleaved = True"),
        (OLMO_2, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (OLMO_3, {"rope_theta": 10000.0}, "rope_theta = 10000.0"),
        (COHERE, {"use_qk_norm": True}, "use_qk_norm = True"),
        (COHERE_2, {"use_qk_norm": True}, "use_qk_norm = True"),
        (HUNYUAN, {"use_qk_norm": False}, "use_qk_norm = False"),
        (HUNYUAN, {"attention_head_dim": 64}, "attention_head_dim = 64"),
        (HUNYUAN, {"rope_scaling": {"type": "linear", "alpha": 2.0, "factor": 2.0}}, "alpha"),
        (HUNYUAN, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "no rotary scaling.* yarn"),
        (GEMMA_3, {"mask_scheme": 1}, "mask_scheme = 1"),
        (GEMMA_3, {"text_config": {"model_type": "gemma2"}}, "only gemma3_text"),
        (
            GEMMA_3,
            {"text_config": GEMMA_3["text_config"] | {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping",
        ),
        (MISTRAL_3, {"architectures": ["MistralForCausalLM"]}, "only Mistral3ForConditional"),
        (MISTRAL_3, {"text_config": MISTRAL_3["text_config"] | {"alibi": 1}}, "alibi = 1"),
    ],
)
def test_keys_that_would_change_the_result_are_refused_by_name(file, change, message):
    with pytest.raises(UnknownConfig, match=message):
        read_config(file | change)


@pytest.mark.parametrize(
    "wrong",
    [
        {"short_factors": (1.0,) * 4},
        {"kind": "longrope", "short_factors": (1.0,) * 4, "long_factors": (1.0,) * 4},
        {
            "kind": "longrope",
            "original_max_positions": 8,
            "short_factors": (1.0,) * 3,
            "long_factors": (1.0,) * 4,
        },
        {
            "kind": "longrope",
            "original_max_positions": 8,
            "short_factors": (1.0,) * 4,
            "long_factors": (1.0, 0.0, 1.0, 1.0),
        },
    ],
)
def test_factors_that_do_not_fit_the_rope_are_refused(wrong):
    with pytest.raises(ValueError):
        RopeConfig(**({"rotary_dim": 8} | wrong))
