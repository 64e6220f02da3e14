"""The same model as different versions of Transformers save it: 4.0, 4.45, 4.53, 4.56 and 5 give an equal config."""

import math

import pytest

from jaxkv.models.registry import read_config
from tests.models.hf_config.test_config_json import LLAMA_3_1, MISTRAL, QWEN_2_5, QWEN_3
from tests.models.hf_config.test_config_json_hybrid import (
    BAMBA,
    FALCON,
    GRANITE,
    MAMBA2,
    NEMOTRON,
    QWEN3_NEXT,
)
from tests.models.hf_config.test_config_json_latent import V2_LITE, V3, V32
from tests.models.hf_config.test_config_json_window import GEMMA_2, GEMMA_3, GPT_OSS

FILES = {
    "llama": LLAMA_3_1,
    "mistral": MISTRAL,
    "qwen2": QWEN_2_5,
    "qwen3": QWEN_3,
    "gemma2": GEMMA_2,
    "gemma3": GEMMA_3,
    "gpt_oss": GPT_OSS,
    "mamba2": MAMBA2,
    "bamba": BAMBA,
    "granite": GRANITE,
    "nemotron": NEMOTRON,
    "falcon": FALCON,
    "qwen3_next": QWEN3_NEXT,
    "deepseek_v2": V2_LITE,
    "deepseek_v3": V3,
    "deepseek_v32": V32,
}
OF_4_0 = {
    # What every file had before 4.40, in to_dict's full form.
    "_name_or_path": "org/model",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "sep_token_id": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "transformers_version": "4.12.0",
    "unk_token_id": 0,
    "use_bfloat16": False,
    "xla_device": None,
}


def of_4_0(file):
    return OF_4_0 | file


def of_4_45(file):
    extra = {"_attn_implementation_autoset": True, "_name_or_path": "org/model"}
    return file | extra | {"transformers_version": "4.45.0", "use_cache": True}


def of_4_53(file):
    """Windows are listed per layer, and Gemma 3's pattern has become private."""
    config = read_config(file)
    written = dict(file)
    if "sliding_window" in file:
        used = [window is not None for window in config.windows]
        kinds = ["sliding_attention" if one else "full_attention" for one in used]
        written["layer_types"] = kinds
        if "use_sliding_window" in file and not file["use_sliding_window"]:
            written["sliding_window"] = None
    if "sliding_window_pattern" in file:
        written["_sliding_window_pattern"] = written.pop("sliding_window_pattern")
    return written | {"transformers_version": "4.53.0"}


def of_4_56(file):
    """`torch_dtype` has become `dtype`."""
    written = of_4_53(file)
    if "torch_dtype" in written:
        written["dtype"] = written.pop("torch_dtype")
    return written | {"transformers_version": "4.56.2"}


def of_5(file):
    """The rotary keys have become one object, and Gemma 3 has one for each kind of layer."""
    written = of_4_56(file)
    rotary = dict(written.pop("rope_scaling", None) or {})
    theta = written.pop("rope_theta", None)
    if "type" in rotary:
        rotary["rope_type"] = rotary.pop("type")
    if theta is not None:
        rotary = {"rope_type": "default"} | rotary | {"rope_theta": theta}
        if "partial_rotary_factor" in written:
            rotary["partial_rotary_factor"] = written.pop("partial_rotary_factor")
    if "rope_local_base_freq" in written:
        local = {"rope_type": "default", "rope_theta": written.pop("rope_local_base_freq")}
        rotary = {"full_attention": rotary, "sliding_attention": local}
    if rotary:
        written["rope_parameters"] = rotary
    if math.inf in (written.get("time_step_limit") or ()):
        written["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    extra = {"output_hidden_states": False, "return_dict": True, "chunk_size_feed_forward": 0}
    return written | extra | {"transformers_version": "5.2.0", "problem_type": None}


@pytest.mark.parametrize("family", FILES)
@pytest.mark.parametrize("version", [of_4_0, of_4_45, of_4_53, of_4_56, of_5])
def test_every_version_of_a_file_gives_an_equal_config(family, version):
    file = FILES[family]
    written = version(file)
    assert written != file
    assert read_config(written) == read_config(file)


def test_layers_have_older_and_newer_names():
    newer = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [newer[kind] for kind in GRANITE["layer_types"]]
    assert read_config(GRANITE | {"layer_types": kinds}) == read_config(GRANITE)
    listed = ["mamba", "mlp", "mamba", "attention", "moe"]
    old = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    for names in (listed, [newer.get(kind, kind) for kind in listed]):
        assert read_config(old | {"layers_block_type": names}) == read_config(NEMOTRON)


def test_head_dim_has_two_names_in_nemotron_h():
    lacking = {key: value for key, value in NEMOTRON.items() if key != "attention_head_dim"}
    size = NEMOTRON["attention_head_dim"]
    assert read_config(lacking | {"head_dim": size}) == read_config(NEMOTRON)
    assert read_config(NEMOTRON | {"head_dim": size}) == read_config(NEMOTRON)


def test_mtp_layers_have_two_names_in_deepseek_v3():
    lacking = {key: value for key, value in V3.items() if key != "num_nextn_predict_layers"}
    assert read_config(lacking | {"num_mtp_layers": 1}) == read_config(V3)
