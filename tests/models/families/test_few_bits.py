"""Families whose projections and experts are in 8 and 4 bits, rounded here or by GPTQ or AWQ, are what these mean."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, load_params
from jaxkv.weights.quantised.weight_forms import is_few_bits
from tests.models.driver import Driver
from tests.weights.quantised import definitions

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.torch

ALL = cases.CASES | hybrid_cases.CASES | latent_cases.CASES


def meant(params):
    """Returns the plain float32 parameters that some in few bits stand for."""
    return jax.tree.map(
        lambda leaf: leaf.widened(jnp.float32) if is_few_bits(leaf) else leaf,
        params,
        is_leaf=is_few_bits,
    )


def in_few_bits(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_few_bits)
    return {
        jax.tree_util.keystr(path[-1:], simple=True): (leaf.code, leaf.rounds_rows)
        for path, leaf in leaves
        if is_few_bits(leaf)
    }


@pytest.mark.parametrize(
    ("family", "quantization", "names"),
    [
        pytest.param("llama", "int4", {"qkv", "o", "gate_up", "down"}, marks=pytest.mark.slow),
        pytest.param("llama", "int8", {"qkv", "o", "gate_up", "down"}, marks=pytest.mark.slow),
        ("qwen3-moe", "fp8", {"qkv", "o", "gate_up", "down", "experts_up", "experts_down"}),
        pytest.param(
            "qwen3-moe",
            "int4",
            {"qkv", "o", "gate_up", "down", "experts_up", "experts_down"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "v3",
            "int4",
            {"qkv_down", "q_up", "o", "gate_up", "down", "experts_up", "experts_down"}
            | {"shared_up", "shared_down"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bamba",
            "int8",
            {"qkv", "o", "gate_up", "down", "ssm_in", "ssm_out"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logits_are_those_of_the_same_weights_in_plain_float32(
    family, quantization, names, tmp_path
):
    case = ALL[family]
    case.build().save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path))
    params = load_params(
        tmp_path, model, dtype="float32", quantization=quantization, progress=False
    )
    code = {"fp8": "float8_e4m3fn"}.get(quantization, quantization)
    # Products of experts round no activations.
    rounds = {name: quantization == "fp8" and "experts" not in name for name in names}
    assert in_few_bits(params) == {name: (code, rounds[name]) for name in names}
    plain = load_params(tmp_path, model, dtype="float32", progress=False)
    assert jax.tree.structure(plain) == jax.tree.structure(meant(params))

    tokens = case.prompt(24)
    ours, theirs, other = (Driver(model, one) for one in (params, meant(params), plain))
    for run in ("prefill", "decode"):
        got, wanted, unrounded = (
            np.concatenate(one.prefill([tokens])) if run == "prefill" else one.decode(tokens[:1])
            for one in (ours, theirs, other)
        )
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())
        # What is compared was rounded.
        assert np.abs(wanted - unrounded).max() > 1e-3 * np.abs(wanted).max()


def gptq(rows, columns, seed):
    return definitions.gptq(rows, columns, symmetric=True, seed=seed)


def awq(rows, columns, seed):
    return definitions.awq(rows, columns, seed=seed)


LINEAR = re.compile(r"(.*\.layers\..*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|w[123]))\.weight")
DENSE = {"qkv", "o", "gate_up", "down"}
EXPERTS = {"experts_up", "experts_down"}
SHARED = {"shared_up", "shared_down"}


def with_options(case, options):
    """Returns a case with other sizes of its text part."""
    if "text_config" in case.options:
        options = {"text_config": case.options["text_config"] | options}
    return replace(case, options=case.options | options)


def save_quantised(directory, case, quantise, extra=None):
    """Saves a tiny model of which each linear map but router and output head is quantised, as the libraries name it.

    Args:
        directory: a new directory; what the weights mean is in its folder "plain".
        case: the model.
        quantise: makes the tensors of one weight and what they mean.
        extra: further tensors by name.
    """
    plain = directory / "plain"
    case.build().save_pretrained(plain)
    means = safetensors.load_file(plain / "model.safetensors")
    stored = dict(means)
    for seed, (name, weight) in enumerate(means.items()):
        found = LINEAR.fullmatch(name)
        if found is None:
            continue
        file = quantise(*weight.shape, seed)
        del stored[name]
        stored |= {f"{found[1]}{end.removeprefix('a')}": part for end, part in file.tensors.items()}
        means[name] = file.means
        config = file.config
    safetensors.save_file(means, plain / "model.safetensors")
    safetensors.save_file(stored | (extra or {}), directory / "model.safetensors")
    said = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(said))


def loaded(directory):
    model = build_model(load_config(directory))
    return load_params(directory, model, dtype="float32", progress=False)


@pytest.mark.parametrize(
    ("family", "options", "quantise", "names"),
    [
        # The names of the slow ones are those of plain Qwen2 below, and of ERNIE.
        pytest.param("ministral3", {"head_dim": 16}, gptq, DENSE, marks=pytest.mark.slow),
        ("qwen3-vl", {}, awq, DENSE),
        ("gemma4-dense", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, awq, DENSE),
        ("minimax-m2", {"head_dim": 16, "intermediate_size": 32}, awq, {"qkv", "o"} | EXPERTS),
        ("ernie4.5-moe", {"moe_intermediate_size": 32}, gptq, DENSE | EXPERTS | SHARED),
        pytest.param(
            "qwen2-moe",
            {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
            gptq,
            DENSE | EXPERTS | SHARED,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoints_of_gptq_and_awq_are_read_as_what_they_mean(
    family, options, quantise, names, tmp_path
):
    save_quantised(tmp_path, with_options(ALL[family], options), quantise)
    params = loaded(tmp_path)
    assert in_few_bits(params) == dict.fromkeys(names, ("int4", False))
    jax.tree.map(np.testing.assert_array_equal, meant(params), loaded(tmp_path / "plain"))


def test_biases_of_zeros_that_gptq_adds_are_left_out_and_others_refused(tmp_path):
    """AutoGPTQ saves one for each map, as in the GPTQ files of Qwen2 and Qwen2.5."""
    case, name = ALL["qwen2"], "model.layers.1.mlp.down_proj.bias"
    for directory, bias in (("zeros", 0.0), ("ones", 1.0)):
        extra = {name: np.full(64, bias, np.float16)}
        save_quantised(tmp_path / directory, case, gptq, extra)
    wanted = loaded(tmp_path / "zeros" / "plain")
    jax.tree.map(np.testing.assert_array_equal, meant(loaded(tmp_path / "zeros")), wanted)
    with pytest.raises(BadCheckpoint, match=rf"{name}.*no use for"):
        loaded(tmp_path / "ones")
    # Beside a plain weight a bias means that the model is another one.
    plain = tmp_path / "zeros" / "plain" / "model.safetensors"
    safetensors.save_file(safetensors.load_file(plain) | extra, plain)
    with pytest.raises(BadCheckpoint, match=rf"{name}.*no use for"):
        loaded(plain.parent)
