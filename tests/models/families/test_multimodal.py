"""Checkpoints of multimodal models: both ways to name the text part's tensors, and tensors of the other parts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, load_params
from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.torch

OLDER = {"language_model.model.": "text.", "language_model.lm_head.": "head."}
OLDER |= {"vision_tower.": "vision.", "multi_modal_projector.": "projector."}
NEWER = {"model.language_model.": "text.", "lm_head.": "head."}
NEWER |= {"model.vision_tower.": "vision.", "model.multi_modal_projector.": "projector."}


@pytest.fixture(scope="module", params=["mistral3", "gemma3-multimodal"])
def saved(request, tmp_path_factory):
    """A directory of a tiny model, its parameters, and its tensors by names of neither version."""
    directory = tmp_path_factory.mktemp("multimodal")
    cases.CASES[request.param].build().save_pretrained(directory)
    tensors = safetensors.load_file(directory / "model.safetensors")
    named = {_neutral(name): tensor for name, tensor in tensors.items()}
    assert len(named) == len(tensors)
    return directory, _params(directory), named


def _neutral(name):
    fitting = {**OLDER, **NEWER}
    prefix = next(prefix for prefix in fitting if name.startswith(prefix))
    return fitting[prefix] + name.removeprefix(prefix)


def _named(named, prefixes):
    back = {neutral: prefix for prefix, neutral in prefixes.items()}
    return {
        back[name.partition(".")[0] + "."] + name.partition(".")[2]: tensor
        for name, tensor in named.items()
    }


def _params(directory):
    return load_params(
        directory, build_model(load_config(directory)), dtype="float32", progress=False
    )


@pytest.mark.parametrize("prefixes", [OLDER, NEWER], ids=["older", "newer"])
def test_the_text_part_is_read_by_either_versions_names(saved, prefixes):
    directory, params, named = saved
    safetensors.save_file(_named(named, prefixes), directory / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, _params(directory), params)


def test_tensors_that_belong_to_no_part_are_refused(saved):
    directory, _, named = saved
    more = _named(named, OLDER) | {"language_model.model.extra": np.zeros(2, np.float32)}
    safetensors.save_file(more, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"'language_model\.model\.extra', which a"):
        _params(directory)


def test_a_tensor_under_two_names_is_refused(saved):
    directory, _, named = saved
    both = _named(named, OLDER) | _named(named, NEWER)
    safetensors.save_file(both, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="two names of one tensor"):
        _params(directory)


def test_experts_are_read_whichever_axis_is_last(tmp_path):
    """Published files of Qwen3-VL have the input axis before the output axis, and Transformers saves it behind."""
    cases.CASES["qwen3-vl-moe"].build().save_pretrained(tmp_path)
    params, path = _params(tmp_path), tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    fused = [name for name in tensors if ".experts." in name]
    assert len(fused) == 2
    for name in fused:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    safetensors.save_file(tensors, path)
    jax.tree.map(np.testing.assert_array_equal, _params(tmp_path), params)
    tensors[fused[0]] = tensors[fused[0]][:, :-1].copy()
    safetensors.save_file(tensors, path)
    with pytest.raises(BadCheckpoint, match=r"experts.* has shape .*, wanted"):
        _params(tmp_path)


@pytest.mark.parametrize("size", [32, 64])
def test_square_experts_are_read_as_transformers_saves_them(size, tmp_path):
    """Where both axes of the first or the second product have one size, the shape does not tell their order."""
    case = cases.CASES["qwen3-vl-moe"]
    text = case.options["text_config"] | {"moe_intermediate_size": size}
    case = replace(case, options=case.options | {"text_config": text})
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    model, tokens = build_model(load_config(tmp_path)), case.prompt(20)
    [got] = Driver(model, _params(tmp_path)).prefill([tokens])
    assert cases.far(got, cases.logits(theirs, tokens)) < 1e-4


def test_keys_and_values_of_layers_that_take_those_of_others_are_left_out(tmp_path):
    """Published files of Gemma 4 E2B hold them for all layers."""
    cases.CASES["gemma4-e2b"].build().save_pretrained(tmp_path)
    params, path = _params(tmp_path), tmp_path / "model.safetensors"
    tensors, prefix = (
        safetensors.load_file(path),
        "model.language_model.layers.{}.self_attn.{}.weight",
    )
    names = ("k_proj", "v_proj", "k_norm")
    of_own = {name: tensors[prefix.format(2, name)] for name in names}
    assert not any(prefix.format(3, name) in tensors for name in names)
    tensors |= {
        prefix.format(layer, name): of_own[name] + 1 for layer in (3, 4, 5) for name in names
    }
    safetensors.save_file(tensors, path)
    jax.tree.map(np.testing.assert_array_equal, _params(tmp_path), params)
    safetensors.save_file(tensors | {prefix.format(3, "v_norm"): of_own["k_norm"]}, path)
    with pytest.raises(BadCheckpoint, match=r"layers\.3\.self_attn\.v_norm\.weight', which a"):
        _params(tmp_path)
