"""What a config says of the format of weights is understood, or refused by the name that the file gives."""

import json
import re

import pytest

from jaxkv import default_model
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import load_config
from jaxkv.weights.quantised.config import read_quantised
from jaxkv.weights.quantised.scheme import Scheme

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | {
    "weight_block_size": [128, 128]
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def compressed(form, weights, *, activations=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}}
    return said | {"ignore": ["lm_head"], "quantization_status": "compressed"} | more


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
LAYERS = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("said", "code", "group", "block"),
    [
        (FP8, "float8_e4m3fn", 128, (128, 128)),
        (FP8 | {"scale_fmt": "ue8m0"}, "float8_e4m3fn", 128, (128, 128)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "float8_e4m3fn", None, None),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            "float8_e4m3fn",
            None,
            None,
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {}},
            "float8_e4m3fn",
            None,
            None,
        ),
        ({"quant_algo": "FP8", "ignore": ["lm_head"]}, "float8_e4m3fn", None, None),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}, "float4_e2m1fn", 32, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "float4_e2m1fn", 16, None),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "float8_e4m3fn", None, None),
        (MIXED, "float4_e2m1fn", 16, None),
        (BNB | {"bnb_4bit_quant_type": "nf4"}, "nf4", 64, None),
        (BNB | {"load_in_4bit": False, "load_in_8bit": True}, "int8", None, None),
        (compressed("nvfp4-pack-quantized", FP4, activations=FP4), "float4_e2m1fn", 16, None),
        (
            compressed("mxfp4-pack-quantized", FP4 | {"strategy": "group", "group_size": 32}),
            "float4_e2m1fn",
            32,
            None,
        ),
        (GPTQ, "int4", 128, None),
        (GPTQ | {"bits": 8, "group_size": -1}, "int8", None, None),
        (AWQ, "int4", 128, None),
        (compressed("pack-quantized", INT4), "int4", 64, None),
        (compressed("float-quantized", FLOAT8, activations=TOKENS), "float8_e4m3fn", None, None),
        (
            compressed(
                "float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 64]}
            ),
            "float8_e4m3fn",
            64,
            (128, 64),
        ),
        (compressed("int-quantized", FLOAT8 | {"type": "int"}), "int8", None, None),
    ],
)
def test_formats_that_are_read_are_understood(said, code, group, block):
    scheme = read_quantised({"quantization_config": said})
    assert scheme is not None
    assert (scheme.code, scheme.group, scheme.block) == (code, group, block)


PER_TENSOR = TOKENS | {"strategy": "tensor", "dynamic": False}
IN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}
OF_GROUPS = TOKENS | {"strategy": "group", "group_size": 128}


def in_fp8(weights, activations, *more):
    """Returns a config of compressed-tensors, of one or several groups of weights and activations."""
    said = compressed("float-quantized", weights, activations=activations)
    others = {
        str(number): {"weights": weights, "input_activations": activations}
        for number, (weights, activations) in enumerate(more)
    }
    return said | {"config_groups": said["config_groups"] | others}


@pytest.mark.parametrize(
    ("said", "rounds"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (MIXED, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        (compressed("nvfp4-pack-quantized", FP4, activations=FP4), False),
        (in_fp8(FLOAT8, TOKENS), True),
        (in_fp8(FLOAT8 | {"strategy": "tensor"}, PER_TENSOR), True),
        (in_fp8(FLOAT8, TOKENS, (FLOAT8, PER_TENSOR)), True),
        (in_fp8(FLOAT8, TOKENS, (FLOAT8, None)), False),
        # Activations before other weights have no part in it.
        (in_fp8(FLOAT8, TOKENS, (FLOAT8 | {"type": "int"}, IN_INT8)), True),
        (in_fp8(FLOAT8, TOKENS, (BLOCKS, OF_GROUPS)), False),
        (in_fp8(FLOAT8, None), False),
        (in_fp8(FLOAT8, IN_INT8), False),
        (in_fp8(FLOAT8, TOKENS | {"num_bits": 4}), False),
        (in_fp8(FLOAT8, OF_GROUPS), False),
        (in_fp8(FLOAT8 | {"strategy": "group", "group_size": 32}, TOKENS), False),
        (in_fp8(BLOCKS, OF_GROUPS), False),
        (in_fp8(BLOCKS, TOKENS), False),
        (compressed("int-quantized", FLOAT8 | {"type": "int"}, activations=IN_INT8), False),
        (compressed("int-quantized", FLOAT8 | {"type": "int"}, activations=TOKENS), False),
        (compressed("pack-quantized", INT4), False),
        (FP8, False),
        ({"quant_method": "mxfp4"}, False),
        (GPTQ, False),
        (AWQ, False),
    ],
)
def test_activations_are_rounded_if_all_are_said_to_be_in_fp8_by_token_or_matrix(said, rounds):
    scheme = read_quantised({"quantization_config": said})
    assert scheme is not None
    assert scheme.rounds_rows is rounds


def test_groups_of_compressed_tensors_may_have_formats_of_their_own():
    """As RedHat's files have them: block fp8 beside NVFP4."""
    groups = {
        "a": {"format": "float-quantized", "weights": BLOCKS, "input_activations": OF_GROUPS},
        "b": {"format": "nvfp4-pack-quantized", "weights": FP4, "input_activations": FP4},
    }
    for named in (groups, dict(reversed(groups.items()))):
        said = compressed("mixed-precision", FP4) | {"config_groups": named}
        scheme = read_quantised({"quantization_config": said})
        assert scheme is not None
        assert scheme.block == (128, 128)
        assert {"eight_bit", "packed_floats"} <= {*scheme.readers}
        assert not scheme.rounds_rows


def test_the_key_of_older_files_is_read_too():
    said = compressed("pack-quantized", INT4)
    del said["quant_method"]
    assert read_quantised({"compression_config": said}) == read_quantised(
        {"quantization_config": said | {"quant_method": "compressed-tensors"}}
    )
    assert read_quantised({"quantization_config": None}) is None
    assert read_quantised({}) is None


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "sets quantization, .*format of MLX"),
        ({"quantization_config": "fp8"}, "must be an object"),
        *[
            ({"quantization_config": said}, told)
            for said, told in [
                (BNB | {"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit"),
                ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit"),
                (BNB | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type = 'int4'"),
                (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage = 'bf"),
                (BNB | {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = True"),
                (BNB | {"bnb_8bit_extra": 1}, "'bnb_8bit_extra' = 1"),
                (
                    {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
                    "quant_algo = 'NVFP4_AWQ'; supported: 'FP8', .*'NVFP4'",
                ),
                (MIXED | {"quantized_layers": {}}, "lacks quantized_layers"),
                (
                    MIXED | {"quantized_layers": LAYERS | {"c": "NVFP4_AWQ"}},
                    "quantized_layers of 'c' must be an object, got 'NVFP4_AWQ'",
                ),
                (
                    MIXED | {"quantized_layers": LAYERS | {"c": {"quant_algo": "MXFP8"}}},
                    "quantized_layers of 'c' sets quant_algo = 'MXFP8'",
                ),
                (
                    {"quant_algo": "NVFP4", "quantized_layers": LAYERS},
                    "'quantized_layers' = .* not supported",
                ),
                ({"quant_method": "hqq"}, "'hqq'.*quantization='fp8'"),
                ({"bits": 4}, "None, in the form of MLX"),
                ({"quant_method": ["fp8"]}, "quant_method = "),
                (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'; supported: 'e4m3'"),
                (FP8 | {"scale_fmt": "ue4m3"}, "scale_fmt = 'ue4m3'; supported: 'float', 'ue8m0'"),
                (FP8 | {"weight_block_size": [128]}, "two integers"),
                (FP8 | {"weight_block_size": [128, 0]}, "two integers"),
                (FP8 | {"weight_block_size": [True, 128]}, "two integers"),
                (FP8 | {"expert_dtype": "fp4"}, "'expert_dtype' = 'fp4', which is not supported"),
                (FP8 | {"quant_algo": "MIXED_PRECISION"}, "quant_algo = 'MIXED_PRECISION'"),
                ({"quant_method": "mxfp4", "weight_block_size": [1, 32]}, "weight_block_size"),
                (GPTQ | {"bits": 3}, "bits = 3; supported: 4, 8"),
                (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
                (GPTQ | {"rotation": "hadamard"}, "'rotation' = 'hadamard'"),
                (GPTQ | {"group_size": 0}, "group_size must be -1 or an integer"),
                (AWQ | {"version": "gemv"}, "version = 'gemv'; supported: 'gemm'"),
                (AWQ | {"zero_point": False}, "zero_point = False"),
                (compressed("nvfp4-pack-quantized", INT4), "'int' in the format 'nvfp4-pack-quant"),
                (compressed("pack-quantized", FP4), "'float' in the format 'pack-quantized'"),
                (compressed("mixed-precision", FP4), "has the format 'mixed-precision'"),
                (compressed("marlin-24", INT4), "'marlin-24'"),
                (compressed("pack-quantized", INT4, activations=TOKENS), "W4A8"),
                (compressed("pack-quantized", INT4 | {"num_bits": 3}), "weights of 3 bits"),
                (
                    compressed("pack-quantized", FLOAT8),
                    "8 bits of type 'float' in the format 'pack-",
                ),
                (
                    compressed(
                        "pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}
                    ),
                    "sparse weights are not read",
                ),
                (
                    compressed(
                        "float-quantized", FLOAT8, transform_config={"config_groups": {"R3": {}}}
                    ),
                    "'transform_config' .* not supported",
                ),
            ]
        ],
    ],
)
def test_any_other_format_is_refused_by_name_and_in_one_line(raw, told):
    with pytest.raises(UnknownConfig, match=told) as caught:
        read_quantised(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said", "told"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            "sets quant_algo = 'W4A8_AWQ'",
        ),
        ("hf_quant_config.json", {"strange": 1}, "lacks the format"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}, None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, None),
        ("quantize_config.json", {"bits": 2, "desc_act": True}, "bits = 2"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMV"}, "version = 'GEMV'"),
    ],
)
def test_a_file_beside_the_config_names_a_format_too(tmp_path, name, said, told):
    raw = json.loads((default_model.path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plain = load_config(tmp_path)
    (tmp_path / name).write_text(json.dumps(said))
    if told is None:
        assert load_config(tmp_path) == plain
        return
    with pytest.raises(UnknownConfig, match=rf"{name}.*{told}"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "module", "is_meant"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp", "model.layers.0.mlp.down_proj", True),
        ("layers.0", "model.layers.0.mlp", True),
        ("layers.0", "model.layers.00.mlp", False),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp", False),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        # Expressions that could take long to match, or that are none.
        ("re:(a+)+$", "aaaa", False),
        ("re:.*.*.*.*.*.*.*", "a", False),
        ("re:(", "(", False),
    ],
)
def test_an_entry_of_an_ignore_list_means_modules_as_its_library_says(pattern, module, is_meant):
    assert ignoring(pattern).ignores(f"{module}.weight") is is_meant


def ignoring(*entries):
    return Scheme("any", ("eight_bit",), "int8", ignored=entries)


def test_a_long_ignore_list_is_compiled_once(monkeypatch):
    """That of GLM-5 in fp8 has 720 names, and its model 60,000 modules; `re` keeps 512 expressions."""
    compiled, compile_one = [], re.compile
    monkeypatch.setattr(re, "compile", lambda form: compiled.append(form) or compile_one(form))
    names = [f"model.layers.{layer}.mlp" for layer in range(600)]
    scheme = ignoring(*names, *(f"model.layers.{layer}.self_attn.*" for layer in range(600)))
    found = [scheme.ignores(f"model.layers.{layer}.mlp.up.weight") for layer in range(590, 610)]
    assert found == [True] * 10 + [False] * 10
    assert scheme.ignores("model.layers.7.self_attn.q_proj.weight")
    assert len(compiled) == 600
