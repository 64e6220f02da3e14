"""Adapters in PEFT's layout: the sums that Transformers computes with, and refusal of all that is more than that."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv import LLM, CacheConfig, default_model
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.lora import merged_tensors, read_adapters

ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj")
SIZES = {ADAPTED[0]: (256, 256), ADAPTED[1]: (256, 576)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}


def save(folder, config=None, ranks=(4, 4), **changes):
    """Writes an adapter; returns its factors by module."""
    draw = np.random.default_rng(0)
    factors = {}
    for name, rank in zip(ADAPTED, ranks, strict=True):
        outputs, inputs = SIZES[name]
        factors[name] = (
            draw.normal(size=(rank, inputs)).astype(np.float32) * 0.1,
            draw.normal(size=(outputs, rank)).astype(np.float32) * 0.1,
        )
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": factor
        for name, pair in factors.items()
        for letter, factor in zip("AB", pair, strict=True)
    }
    save_file({**tensors, **changes}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
    return factors


def base():
    from safetensors.flax import load_file as load

    return {
        name: np.asarray(leaf).astype(np.float32)
        for name, leaf in load(default_model.path() / "model.safetensors").items()
    }


@pytest.mark.parametrize(
    ("config", "ranks", "scales"),
    [
        ({}, (4, 4), (3.0, 3.0)),
        ({"use_rslora": True}, (4, 4), (6.0, 6.0)),
        ({"alpha_pattern": {"down_proj": 4}, "rank_pattern": {"q_proj": 8}}, (8, 4), (1.5, 1.0)),
    ],
    ids=["plain", "root", "patterns"],
)
def test_the_sum_is_weight_plus_scaled_product(tmp_path, config, ranks, scales):
    factors, weights = save(tmp_path, config, ranks), base()
    merged = dict(merged_tensors(default_model.path(), tmp_path, dtype="float32"))
    assert merged.keys() == weights.keys()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        wanted = weight.astype(np.float64)
        if module in factors:
            inner, outer = factors[module]
            wanted = wanted + scales[ADAPTED.index(module)] * outer.astype(np.float64) @ inner
            assert np.abs(wanted - weight).max() > 0.05
        np.testing.assert_allclose(np.asarray(merged[name], np.float64), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "12"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"^model.*": 3}}, "is no name of a module"),
    ],
    ids=lambda value: None,
)
def test_an_adapter_that_is_more_than_its_factors_is_refused(tmp_path, config, message):
    save(tmp_path, config)
    with pytest.raises(BadCheckpoint, match=message):
        read_adapters(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.lm_head.weight", (2, 2), "is no lora_A or lora_B"),
        (f"base_model.model.{ADAPTED[0]}.lora_A.weight", (4, 256, 1), "is no lora_A or lora_B"),
        (f"base_model.model.{ADAPTED[0]}.lora_A.weight", (3, 256), "needs lora_A"),
        (f"base_model.model.{ADAPTED[0]}.lora_A.weight", (4, 255), r"got \[256, 256\]"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", (4, 2), "needs lora_A"),
    ],
    ids=lambda value: None,
)
def test_factors_that_do_not_fit_are_refused(tmp_path, name, shape, message):
    save(tmp_path, **{name: np.zeros(shape, np.float32)})
    with pytest.raises(BadCheckpoint, match=message):
        list(merged_tensors(default_model.path(), tmp_path, dtype="float32"))


def test_a_path_that_is_no_folder_is_told_what_an_adapter_is(tmp_path):
    with pytest.raises(
        BadCheckpoint, match=r"wanted the folder of an adapter.*adapter_config\.json"
    ):
        read_adapters(tmp_path / "none")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(BadCheckpoint, match=f"give the folder of this file, {tmp_path}$"):
        read_adapters(tmp_path / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.torch
def test_an_llm_with_an_adapter_scores_as_transformers_with_the_sums(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    factors = save(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.path(), dtype=torch.float32
    ).eval()
    llm = LLM(dtype="float32", cache=CacheConfig(max_sequences=2), max_model_len=64, progress=False)
    prompt = [5, 6, 7, 8, 9, 10]

    def wanted():
        with torch.no_grad():
            told = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
        return [told[at, token] for at, token in enumerate(prompt[1:])]

    plain = wanted()
    modules = dict(theirs.named_modules())
    with torch.no_grad():
        for name, (inner, outer) in factors.items():
            modules[name].weight += 3.0 * torch.from_numpy(outer @ inner)
    assert llm.load_lora(tmp_path) == 1
    np.testing.assert_allclose(llm.score(prompt)[0], wanted(), atol=1e-4)
    assert np.abs(llm.score(prompt)[0] - plain).max() > 0.1
    llm.load_lora(None, version="base")
    np.testing.assert_allclose(llm.score(prompt)[0], plain, atol=1e-4)
