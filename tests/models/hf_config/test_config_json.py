"""config.json is read key by key: understood, harmless or refused by name. Nothing in the directory is executed."""

import copy
import json

import pytest

from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import BadCheckpoint, UnknownConfig
from jaxkv.models.registry import build_model, load_config, read_config

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LLAMA_2 = {
    # As Transformers 4 wrote it.
    "_name_or_path": "x",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": -1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_1 = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TINY = LLAMA_2 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 199,
}


def stretched(**rope):
    return read_config(TINY | {"rope_scaling": rope})


def test_llama_2_and_3_1_of_transformers_4_are_read():
    two, three = read_config(LLAMA_2), read_config(LLAMA_3_1)
    assert (two.head_dim, two.dtype, two.eos_ids) == (128, "float16", (2,))
    assert two.rope == RopeConfig(theta=10000.0, rotary_dim=128)
    assert three.eos_ids == (128001, 128008, 128009)
    assert three.rope == RopeConfig(
        theta=500000.0,
        rotary_dim=128,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    assert (three.kv_heads, three.max_positions, three.dtype) == (8, 131072, "bfloat16")


def test_the_other_families_differ_as_their_files_say():
    assert read_config(MISTRAL).windows == (4096,) * 32
    assert read_config(MISTRAL | {"sliding_window": None}).windows == (None,) * 32
    qwen2 = read_config(QWEN_2_5)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.tie_embeddings) == (True, False, True)
    assert qwen2.windows == (None,) * 24
    used = read_config(QWEN_2_5 | {"use_sliding_window": True})
    assert used.windows == (None,) * 21 + (32768,) * 3
    qwen3 = read_config(QWEN_3)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_dim) == (True, False, 128)


@pytest.mark.torch
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_what_transformers_5_writes_means_what_transformers_4_wrote(family):
    transformers = pytest.importorskip("transformers")
    old = {"llama": LLAMA_3_1, "mistral": MISTRAL, "qwen2": QWEN_2_5, "qwen3": QWEN_3}[family]
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    new = getattr(transformers, f"{names[family]}Config").from_dict(copy.deepcopy(old)).to_dict()
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    from_new, from_old = read_config(new), read_config(old)
    # Transformers 5 writes its own defaults where the old file was silent about ends of text.
    assert from_new.rope == from_old.rope
    assert from_new.windows == from_old.windows
    for name in ("heads", "kv_heads", "head_dim", "ffn_size", "norm_eps", "max_positions", "dtype"):
        assert getattr(from_new, name) == getattr(from_old, name), name


@pytest.mark.torch
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_keys_that_the_file_leaves_out_mean_what_transformers_assumes(family):
    transformers = pytest.importorskip("transformers")
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    sizes = {"vocab_size": 99, "hidden_size": 1024, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 30, "num_attention_heads": 32}
    full = getattr(transformers, f"{names[family]}Config")(**sizes).to_dict()
    sparse, full = read_config(sizes | {"model_type": family}), read_config(full)
    for name in ("kv_heads", "head_dim", "max_positions", "rope", "windows", "norm_eps"):
        assert getattr(sparse, name) == getattr(full, name), name


@pytest.mark.parametrize(
    ("rope", "kind", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, "linear", 512),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic", 256),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            "yarn",
            512,
        ),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 32}, "yarn", 128),
        ({"rope_type": "default"}, "default", 128),
    ],
)
def test_stretched_rope_says_how_far_it_reaches(rope, kind, longest):
    config = stretched(**rope)
    assert (config.rope.kind, config.max_positions) == (kind, longest)


def test_yarn_without_a_factor_stretches_by_the_ratio_of_the_lengths():
    assert stretched(type="yarn", original_max_position_embeddings=32).rope.factor == 4.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModelForCausalLM": "modeling.Evil"}),
        ("model_file", "evil.py"),
        ("_attn_implementation", "org/evil-kernel"),
        ("_attn_implementation_internal", "org/evil-kernel"),
        ("quantization_config", {"quant_method": "hqq"}),
        ("rope_interleaved", True),
        ("sliding_window", 4096),
        ("partial_rotary_factor", 0.5),
        ("embedding_multiplier", 12.0),
        ("logit_scale", 0.1),
        ("hidden_act", "relu6"),
        ("hidden_act", ["silu"]),
        ("torch_dtype", "float8_e4m3fn"),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("layer_types", 7),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "extra": 1}),
        ("rope_scaling", {"rope_type": "default", "factor": 2.0}),
        ("rope_scaling", {"full_attention": {"rope_type": "default"}}),
        (
            "rope_scaling",
            {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_what_would_change_the_result_and_is_not_understood_is_refused_by_name(key, value):
    with pytest.raises(UnknownConfig) as caught:
        read_config(TINY | {key: value})
    message = str(caught.value)
    assert "\n" not in message
    nested = key == "rope_scaling" and isinstance(value, dict)
    assert (key in message) or (nested and "rope" in message)


def test_a_refusal_names_the_value_and_every_key():
    with pytest.raises(UnknownConfig, match=r"alpha = 1, beta = 'two'.*not supported"):
        read_config(TINY | {"alpha": 1, "beta": "two"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_dropout", 0.0),
        ("pretraining_tp", 1),
        ("use_sliding_window", False),
        ("sliding_window", None),
        ("quantization_config", None),
        ("auto_map", None),
        ("rope_scaling", {}),
        ("layer_types", ["full_attention"] * 3),
        ("architectures", None),
        ("_attn_implementation", None),
        ("_attn_implementation_autoset", True),
        ("transformers.js_config", {"dtype": "q4"}),
        ("anything_at_all", None),
    ],
)
def test_keys_at_their_neutral_value_pass(key, value):
    assert read_config(TINY | {key: value}) == read_config(TINY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -64),
        ("hidden_size", 63),
        ("hidden_size", 2**70),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2**20 + 1),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("vocab_size", 2**40),
        ("intermediate_size", None),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", 10**400),
        ("rope_theta", float("inf")),
        ("head_dim", 15),
        ("tie_word_embeddings", 1),
        ("eos_token_id", -1),
        ("eos_token_id", [1, "2"]),
        ("rope_scaling", 7),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0.5}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "truncate": "yes"}),
    ],
)
def test_absurd_sizes_and_wrong_types_are_refused_in_one_line(key, value):
    with pytest.raises(ValueError) as caught:
        read_config(TINY | {key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(key):
    raw = {name: value for name, value in TINY.items() if name != key}
    with pytest.raises(ValueError, match=f"lacks {key}"):
        read_config(raw)


@pytest.mark.parametrize("model_type", ["gpt2", None, 3, ["llama"], "__class__"])
def test_an_unknown_family_is_refused_with_the_supported_ones(model_type):
    with pytest.raises(
        UnknownConfig, match="supported are llama, mistral, ministral3, qwen2, qwen3"
    ):
        read_config(TINY | {"model_type": model_type})


@pytest.mark.parametrize("named", [["LlamaForSequenceClassification"], [], "LlamaModel", 3])
def test_architectures_must_name_the_familys_causal_language_model(named):
    with pytest.raises(UnknownConfig, match="only LlamaForCausalLM"):
        read_config(TINY | {"architectures": named})


def test_ids_past_the_vocabularys_end_are_left_out():
    config = read_config(TINY | {"eos_token_id": [5, 199, 128009], "bos_token_id": 128000})
    assert config.eos_ids == (5,)


def test_a_directory_gives_the_end_ids_of_its_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert load_config(tmp_path).eos_ids == (2,)
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_ids == (7, 8)
    assert build_model(load_config(tmp_path)).vocab_size == 199


@pytest.mark.parametrize(
    "content", ["", "[]", '{"model_type": ', "[" * 100_000, '{"a": 1, "a": 2}']
)
def test_a_file_that_is_no_json_object_is_one_clear_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_config(tmp_path / "nowhere")


def sized(**changes):
    shape = {"hidden_size": 8, "num_layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4}
    shape |= {"family": "llama", "vocab_size": 9, "ffn_size": 8, "max_positions": 16}
    rope = RopeConfig(rotary_dim=4)
    return ModelConfig(**(shape | {"rope": rope, "windows": (None, None)} | changes))


def test_a_config_fills_in_the_pattern_and_refuses_what_does_not_fit():
    assert sized().pattern == (("attention", "gated"),) * 2
    assert hash(sized()) == hash(sized())
    for wrong in (
        {"windows": (None,)},
        {"windows": (None, 0)},
        {"pattern": (("attention", "gated"),)},
        {"rope": RopeConfig(rotary_dim=6)},
        {"eos_ids": (-1,)},
        {"norm_eps": float("nan")},
    ):
        with pytest.raises(ValueError):
            sized(**wrong)
    with pytest.raises(ValueError, match="nonesuch"):
        build_model(sized(pattern=(("attention", "gated"), ("nonesuch", "gated"))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "nonesuch"},
        {"kind": "yarn", "factor": 2.0},
        {"rotary_dim": 3},
        {"kind": "dynamic", "rotary_dim": 2, "original_max_positions": 8},
        {"low_freq_factor": 4.0},
        {"theta": 0.0},
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused(wrong):
    with pytest.raises(ValueError):
        RopeConfig(**({"rotary_dim": 8} | wrong))
