"""Keys of config.json are judged by what they can do: accepted, compared with others, or refused by name."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config import known_keys
from jaxkv.models.hf_config.known_keys import (
    CHANGES,
    HARMLESS,
    LENGTHS,
    SAME_FACT,
    USED_LENGTHS,
    why_harmless,
)
from jaxkv.models.registry import read_config
from tests.models.hf_config import test_config_json_window
from tests.models.hf_config.test_config_json import MISTRAL, QWEN_2_5, QWEN_3, TINY
from tests.models.hf_config.test_config_json_hybrid import MAMBA2, NEMOTRON

REPEATS = frozenset().union(*SAME_FACT, LENGTHS, USED_LENGTHS)
GEMMA_2 = test_config_json_window.GEMMA_2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_name_or_path", "somewhere"),
        ("_flash_attn_2_enabled", True),
        ("_attn_implementation", "eager"),
        ("_attn_implementation", {"": "sdpa", "text_config": "flash_attention_2"}),
        ("attn_implementation", "flash_attention_2"),
        ("_experts_implementation", "grouped_mm"),
        ("unk_token_id", 0),
        ("end_token_id", 2),
        ("image_token_index", 5),
        ("hidden_dropout_prob", 0.1),
        ("embd_pdrop", 0.1),
        ("router_aux_loss_coef", 0.001),
        ("z_loss_coefficient", 0.0),
        ("internal_version", "7b-alpha"),
        ("unsloth_version", "2024.9"),
        ("axolotl_config", {"seq": 1}),
        ("transformers.js_config", {"dtype": "q4"}),
        ("vision_config", {"hidden_size": 3}),
        ("mm_tokens_per_image", 256),
        ("num_nextn_predict_layers", 1),
        ("mtp_layers_block_type", ["attention"]),
        ("time_step_init_scheme", "random"),
        ("is_decoder", True),
        ("top_k", 50),
        ("auto_map", {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}),
    ],
)
def test_keys_that_cannot_change_the_logits_are_accepted(key, value):
    assert read_config(TINY | {key: value}) == read_config(TINY)


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_every_key_of_the_table_is_accepted_with_any_value(key):
    value = TINY[key] if key == "model_type" else "org/code"
    assert read_config(TINY | {key: value}) == read_config(TINY)


@pytest.mark.parametrize(
    "key", sorted(set(CHANGES) - {"attention_bias", "mlp_bias", "layer_types"})
)
def test_a_key_that_changes_the_logits_is_accepted_at_its_neutral_values_only(key):
    for neutral in CHANGES[key][1]:
        assert read_config(TINY | {key: neutral}) == read_config(TINY)
    with pytest.raises(UnknownConfig, match=rf"\b{key} = 'another'"):
        read_config(TINY | {key: "another"})


def test_the_tables_do_not_overlap():
    both = set(HARMLESS) & (set(CHANGES) | REPEATS)
    assert not both
    assert not {key for key in CHANGES if why_harmless(key, True)}
    assert sum(len(keys.split()) for keys in known_keys.HARMLESS_GROUPS.values()) == len(HARMLESS)
    # A rule in the place of a line of the table would decide the same.
    assert all(why_harmless(key, True) is None for key in REPEATS)


@pytest.mark.parametrize(
    ("file", "key", "agrees", "contradicts"),
    [
        (TINY, "attention_head_dim", 16, 32),
        (TINY, "kv_channels", 16, 8),
        (TINY, "num_kv_heads", 2, 4),
        (TINY, "n_layer", 3, 4),
        (TINY, "n_embd", 64, 65),
        (TINY, "ffn_hidden_size", 96, 128),
        (TINY, "norm_eps", 1e-5, 1e-6),
        (TINY, "layer_norm_eps", 1e-5, 1e-12),
        (TINY, "rotary_emb_base", 10000, 1000000),
        (TINY, "theta", 10000.0, 500000.0),
        (TINY, "rotary_dim", 16, 8),
        (TINY, "activation", "swiglu", "geglu"),
        (TINY, "n_positions", 128, 64),
        (TINY, "seq_length", 128, 256),
        (TINY, "seq_length", 64, 129),
        (TINY, "max_sequence_length", 128, 4096),
        (TINY, "tie_embeddings", False, True),
        (TINY, "dtype", "float16", "bfloat16"),
        (TINY, "padded_vocab_size", 199, 256),
        (MISTRAL, "sliding_window_size", 4096, 1024),
        (GEMMA_2, "sliding_window_size", 4096, 2048),
        (QWEN_3, "kv_channels", 128, 64),
        (MAMBA2, "intermediate_size", 256, 128),
        (MAMBA2, "d_state", 32, 64),
        (NEMOTRON, "norm_eps", 1e-5, 1e-6),
        (NEMOTRON, "mamba_n_groups", NEMOTRON.get("n_groups", 8), 3),
    ],
)
def test_another_name_of_a_fact_must_agree(file, key, agrees, contradicts):
    assert read_config(file | {key: agrees}) == read_config(file)
    with pytest.raises(UnknownConfig, match=rf"{key} = .*contradicts"):
        read_config(file | {key: contradicts})


def test_a_length_may_be_that_of_the_stretched_rope():
    stretched = TINY | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    config = read_config(stretched)
    for length in (128, 512):
        assert read_config(stretched | {"max_sequence_length": length}) == config
        assert read_config(stretched | {"n_positions": length}) == config
    with pytest.raises(UnknownConfig, match="contradicts"):
        read_config(stretched | {"max_sequence_length": 513})
    with pytest.raises(UnknownConfig, match="contradicts"):
        read_config(stretched | {"n_positions": 256})


def test_a_value_under_another_name_alone_is_not_taken_for_the_default():
    """The family would read its default of 128 tokens."""
    lacking = {key: value for key, value in NEMOTRON.items() if key != "chunk_size"}
    with pytest.raises(UnknownConfig, match=r"mamba_chunk_size = 64.*contradicts chunk_size = 128"):
        read_config(lacking | {"mamba_chunk_size": 64})


def test_the_base_of_rope_may_stand_twice_if_both_agree():
    nested = {"rope_type": "default", "rope_theta": 5e5}
    both = TINY | {"rope_theta": 5e5, "rope_parameters": nested}
    assert read_config(both) == read_config(TINY | {"rope_theta": 5e5})
    with pytest.raises(UnknownConfig, match="contradicts"):
        read_config(both | {"rope_theta": 1e4})


@pytest.mark.parametrize(
    ("rope", "plain"),
    [
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 128}, {}),
        ({"rope_type": "default", "factor": 1.0}, {}),
        ({"type": "yarn", "factor": 2.0, "finetuned": True}, {}),
        ({"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}, {}),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}, {}),
    ],
)
def test_keys_of_rope_that_change_nothing_are_accepted(rope, plain):
    kept = ("type", "rope_type", "factor")
    plain = {key: rope[key] for key in kept if key in rope and rope[key] not in ("mrope", 1.0)}
    assert read_config(TINY | {"rope_scaling": rope}) == read_config(TINY | {"rope_scaling": plain})


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 2.0, "finetuned": False},
        {"rope_type": "default", "factor": 2.0},
        {"type": "linear", "factor": 2.0, "attn_factor": 0.9},
        {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        {"type": "yarn", "factor": 2.0, "extrapolation_factor": 0.5},
    ],
)
def test_keys_of_rope_that_change_something_are_refused(rope):
    with pytest.raises(UnknownConfig):
        read_config(TINY | {"rope_scaling": rope})


def test_attn_factor_of_yarn_is_ignored_as_in_transformers_and_said(caplog):
    """DeepSeek-R1-0528-Qwen3-8B."""
    plain = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert not caplog.records
    with_factor = read_config(TINY | {"rope_scaling": plain | {"attn_factor": 0.8782488562869419}})
    assert with_factor == read_config(TINY | {"rope_scaling": plain})
    (record,) = caplog.records
    assert "attn_factor = 0.8782488562869419" in record.getMessage()


@pytest.mark.parametrize("named", [["LLaMAForCausalLM"], ["LlamaForCausalLM"]])
def test_architectures_are_compared_without_case(named):
    assert read_config(TINY | {"architectures": named}) == read_config(TINY)


def test_qwen2_may_name_the_biases_that_it_always_has():
    assert read_config(QWEN_2_5 | {"attention_bias": True}) == read_config(QWEN_2_5)
    assert read_config(QWEN_2_5 | {"qkv_bias": True}) == read_config(QWEN_2_5)
    with pytest.raises(UnknownConfig, match="mlp_bias = True"):
        read_config(QWEN_2_5 | {"mlp_bias": True})


def test_dual_chunk_attention_is_refused_with_what_to_do():
    settings = {"chunk_size": 262144, "local_size": 8192}
    with pytest.raises(UnknownConfig, match=r"vLLM applies it.*delete the key"):
        read_config(QWEN_2_5 | {"dual_chunk_attention_config": settings})


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"d_model": 768, "n_layer": 24, "ssm_cfg": {"layer": "Mamba2"}}, "convert_mamba2_ssm"),
        ({"d_model": 2560, "n_layer": 64, "ssm_cfg": {}}, "convert_mamba_ssm"),
        (
            {"d_model": 768, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [9]},
            "has attention layers",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "its architectures suggest 'llama'"),
        (
            {"model_type": "nonesuch_vl", "text_config": {"model_type": "qwen3"}},
            "its text_config is qwen3",
        ),
    ],
)
def test_a_file_without_a_known_model_type_is_refused_with_what_it_is(raw, told):
    with pytest.raises(
        UnknownConfig, match=rf"(lacks model_type|not supported) \(.*{told}.*supported are"
    ):
        read_config(raw)


def test_an_unsupported_family_is_named_before_its_format():
    with pytest.raises(UnknownConfig, match="model_type 'gpt2' is not supported"):
        read_config({"model_type": "gpt2", "quantization_config": {"quant_method": "awq"}})


NAMES = st.text(
    st.characters(codec="ascii", categories=("L", "N"), include_characters="_"), min_size=1
)
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


@given(key=NAMES, value=VALUES)
def test_a_random_key_is_never_read_as_something_else(key, value):
    assume(key not in TINY and key not in CHANGES and key not in REPEATS)
    raw = TINY | {key: value}
    if why_harmless(key, value):
        assert read_config(raw) == read_config(TINY)
        return
    assume(key not in ("dtype", "head_dim", "quantization", "architectures", "rope_parameters"))
    with pytest.raises(UnknownConfig):
        read_config(raw)
