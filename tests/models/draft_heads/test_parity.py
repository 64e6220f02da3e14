"""Heads compute what their published definitions do: a step over a text, and the chain behind it."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.config.speculation import SpeculationConfig
from jaxkv.models.draft_heads.eagle3 import read_eagle3
from jaxkv.models.draft_heads.load import head_of, joined, load_head
from jaxkv.models.draft_heads.mtp import read_mtp
from jaxkv.models.registry import build_model, load_config, load_params
from jaxkv.models.tensor_parallel import TensorParallel, tensor_mesh
from jaxkv.weights.quantised.weight_forms import is_few_bits
from tests.fast_cases import fast_cases
from tests.models.draft_heads import eagle3_files
from tests.models.driver import Driver

pytest.importorskip("torch")
made = pytest.importorskip("tests.models.draft_heads.checkpoints")
cases = pytest.importorskip("tests.models.families.cases")
mtp_cases = pytest.importorskip("tests.models.draft_heads.mtp_cases")

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
EAGLE = {
    "eagle3": {},
    "eagle3-some-ids": {"drafted": 120},
    "eagle3-other-width": {"width": 32, "own_embed": True, "drafted": 90},
}


@pytest.fixture(
    scope="module",
    # A head of another width has ids of its own too; one of the model's width drafts in the engine's
    # test_draft_heads.py. GLM's checkpoints name such layers as DeepSeek's do.
    params=fast_cases(
        [*EAGLE, *mtp_cases.CASES], "eagle3-other-width", "deepseek-v3", "qwen3-next"
    ),
)
def head(request, tmp_path_factory):
    """The definition of a head, and ours with its parameters, read from files."""
    folder = tmp_path_factory.mktemp("heads") / request.param
    if request.param in mtp_cases.CASES:
        definition = mtp_cases.CASES[request.param].save(folder)
        verifier, own = build_model(load_config(folder)), folder
        ours = read_mtp(verifier)
    else:
        options = EAGLE[request.param]
        theirs, own = made.llama(folder), folder / "head"
        tensors = eagle3_files.eagle3_tensors(3, **options)
        width, drafted = (
            options.get("width", eagle3_files.WIDTH),
            options.get("drafted", eagle3_files.VOCAB),
        )
        config = eagle3_files.save_eagle3(
            own,
            tensors,
            hidden_size=width,
            draft_vocab_size=drafted,
            **({"target_hidden_size": eagle3_files.WIDTH} if width != eagle3_files.WIDTH else {}),
        )
        embed = theirs.model.model.embed_tokens.weight.detach().numpy()
        definition = made.Eagle3(tensors, config, theirs, embed, reads=(2, 2, 1))
        verifier = build_model(load_config(folder))
        ours = read_eagle3(own, verifier)
    ours, params = load_head(ours, own, verifier.config, dtype="float32")
    theirs = load_params(folder, verifier, dtype="float32", progress=False)
    return definition, ours, joined(ours, params, theirs)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def run(model, params, cache, batch):
    cache, hidden = model.forward(params, cache, batch)
    return cache, hidden, model.logits(params, hidden)


def step(driver, tokens, hidden, *, decode=False):
    """Runs one row; returns hidden states and logits of its tokens."""
    batch = driver.batch([tokens], decode=decode)
    padded = jnp.zeros((len(batch.tokens), hidden.shape[1]), jnp.float32)
    batch = replace(batch, hidden=padded.at[: len(tokens)].set(hidden))
    driver.cache, hidden, logits = run(driver.model, driver.params, driver.cache, batch)
    driver.lengths[0] += len(tokens)
    return np.asarray(hidden)[: len(tokens)], np.asarray(logits)[: len(tokens)]


def test_a_text_and_a_chain_behind_it_have_the_logits_of_the_definition(head):
    definition, model, params = head
    text = np.random.default_rng(5).integers(0, eagle3_files.VOCAB, 30).tolist()
    kept = definition.kept(text[:-1])
    wanted_hidden, wanted = definition.run(text[1:], definition.projected(kept))
    drafts, chain = definition.chain(text, 4)
    can_draft = np.isfinite(wanted[0])
    assert can_draft.sum() == (model.draft_vocab or eagle3_files.VOCAB)
    assert np.std(wanted[:, can_draft]) > 0.3

    driver = Driver(model, params)
    hidden = model.projected(params, jnp.asarray(kept, jnp.float32))
    # In two chunks, as prompts are.
    parts = [step(driver, text[1:][part], hidden[part]) for part in (slice(13), slice(13, None))]
    hidden, logits = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert cases.far(hidden, wanted_hidden) < TOLERANCE
    assert cases.far(logits[:, can_draft], wanted[:, can_draft]) < TOLERANCE
    assert (logits[:, ~can_draft] < -1e29).all()
    for draft, later in zip(drafts, chain[1:], strict=False):
        hidden, logits = step(driver, [draft], hidden[-1:], decode=True)
        assert cases.far(logits[-1][can_draft], later[can_draft]) < TOLERANCE


BLOCK = 32


def in_8_bits(weight):
    """Returns a matrix in DeepSeek's 8 bits, its scales, and what they mean."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
    scales = np.abs(blocks).max(axis=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    means = codes.astype(np.float32) * scales[:, None, :, None]
    cut = tuple(map(slice, weight.shape))
    codes, means = (np.ascontiguousarray(one.reshape(padded.shape)[cut]) for one in (codes, means))
    return codes, scales, means


def test_a_layer_of_a_checkpoint_in_8_bits_computes_what_its_weights_mean(tmp_path):
    """DeepSeek publishes its models so; projections and experts of the layer keep their 8 bits on the device."""
    plain = tmp_path / "plain"
    mtp_cases.CASES["deepseek-v3"].save(plain)
    stored, few = load_file(plain / "model.safetensors"), {}
    for name, weight in stored.items():
        if name.startswith("model.layers.2.") and name.endswith("proj.weight"):
            few[name], few[f"{name}_scale_inv"], stored[name] = in_8_bits(weight)
    save_file(stored, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text(json.dumps(config))
    save_file(stored | few, quantised / "model.safetensors")
    text, logits = list(range(3, 23)), []
    for folder in (plain, quantised):
        verifier = build_model(load_config(folder))
        head, params = load_head(read_mtp(verifier), folder, verifier.config, dtype="float32")
        theirs = load_params(plain, verifier, dtype="float32", progress=False)
        driver = Driver(head, joined(head, params, theirs))
        hidden = jnp.asarray(np.random.default_rng(2).standard_normal((20, 64)), jnp.float32)
        logits.append(step(driver, text, hidden)[1])
        kinds = map(is_few_bits, jax.tree.leaves(params, is_leaf=is_few_bits))
        assert any(kinds) == (folder == quantised)
    assert np.std(logits[0]) > 0.3
    assert cases.far(*logits) < TOLERANCE


def test_the_layer_of_a_multimodal_checkpoint_is_read_by_its_names(tmp_path):
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    mtp_cases.CASES["deepseek-v3"].save(plain)
    whole.mkdir()
    stored = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, whole / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    config = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    (whole / "config.json").write_text(json.dumps(config))
    read = []
    for folder in (plain, whole):
        verifier = build_model(load_config(folder))
        _, params = load_head(read_mtp(verifier), folder, verifier.config, dtype="float32")
        read.append({name: params[name] for name in params if name not in ("embed", "lm_head")})
    jax.tree.map(np.testing.assert_array_equal, *read)


def test_several_devices_are_refused(tmp_path):
    mtp_cases.CASES["glm-4.5"].save(tmp_path)
    divided = TensorParallel(build_model(load_config(tmp_path)), tensor_mesh(1))
    with pytest.raises(ValueError, match="mtp is supported for a Decoder on one device, got a Ten"):
        head_of(SpeculationConfig(method="mtp"), divided)
