"""Models with latent attention, besides parity: memory, packed records, MTP layers, config and weights."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.cache.budget import bytes_per_token, plan_budget
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache, init_cache
from jaxkv.cache.variants import mla, place
from jaxkv.config.blocks import IndexConfig, LatentConfig
from jaxkv.errors import BadCheckpoint, UnknownConfig
from jaxkv.layers import sparse_latent
from jaxkv.models.registry import build_model, load_config, load_params, read_config
from pallas_kernels.formats.index_keys import read_index_keys
from pallas_kernels.formats.latent_records import decode_records
from tests.engine.latent import LATENT, SPARSE, model
from tests.models.driver import Driver, run_step

# Sizes that records of bytes can hold.
RECORDS = replace(SPARSE, kv_lora_rank=128, index=IndexConfig(heads=16, head_dim=128, topk=14))
V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
V3 = V2 | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


@pytest.mark.parametrize(
    ("latent", "rows", "decode"),
    # A single row is one slice to XLA in both forms, so one of them is fast.
    [
        (RECORDS, 3, False),
        (RECORDS, 1, True),
        pytest.param(LATENT, 1, True, marks=pytest.mark.slow),
    ],
)
def test_a_donated_cache_is_updated_in_its_own_memory_and_copied_nowhere(latent, rows, decode):
    # The engine's tests audit steps of several rows over latents and over plain numbers.
    network, params = model(latent, layers=2 if decode else 1)
    dtype = "fp8" if latent is RECORDS else "float32"
    driver = Driver(network, params, rows=rows, step_tokens=14, max_tokens=512, cache_dtype=dtype)
    batch = driver.batch([[1]] * rows, decode=decode)
    compiled = run_step.lower(network, params, driver.cache, batch).compile()
    cache_bytes = sum(array.nbytes for array in driver.cache.arrays)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    shapes = {",".join(map(str, array.shape)) for array in driver.cache.arrays}
    for line in compiled.as_text().splitlines():
        assert " copy(" not in line or not any(f"[{shape}]" in line for shape in shapes), line


def test_latents_are_remembered_alone_whatever_is_asked_of_keys_and_values():
    # Each layer has one array, of kv_lora_rank + rope numbers.
    network, _ = model()
    [layer] = network.cache_specs(page_size=8, dtype="fp8")
    assert [(a.role, a.shape, a.dtype) for a in layer.spec.arrays] == [("key", (1, 32), "float32")]
    assert "fp8" in layer.spec.notes[0]


def test_layers_that_guess_further_tokens_share_the_map_and_the_budget():
    # The model has 61 layers, and one more behind them.
    spec = mla(512, 64, dtype="bfloat16", page_size=64)
    main, guess = place([spec] * 61), place([spec], layer_offset=61)
    layout = group_layers((*main, *guess))
    assert layout.groups[0].layers == tuple(range(62))
    assert sum(map(bytes_per_token, layout.paged_groups)) == 62 * 576 * 2
    budget = plan_budget(layout, 2**30, max_sequences=1, max_tokens=1024)
    assert budget.counts["mla"] == 2**30 // (62 * 576 * 2 * 64)
    with pytest.raises(ValueError, match="layer 60 already has 'key'"):
        group_layers((*main, *place([spec], layer_offset=60)))


def test_a_model_at_a_layer_offset_lives_in_the_same_cache_and_disturbs_nobody():
    # The layer that predicts further tokens uses the page tables of the model.
    (main, params), (guess, guess_params) = model(), model(layer_offset=1)
    assert [entry.layer for entry in guess.cache_specs(page_size=8, dtype="float32")] == [1]
    driver = Driver(main, params, max_tokens=32, step_tokens=16)
    alone = Driver(model()[0], guess_params, max_tokens=32, step_tokens=16)
    options = {"page_size": 8, "dtype": "float32"}
    layout = group_layers((*main.cache_specs(**options), *guess.cache_specs(**options)))
    shared = init_cache(layout, {group.name: driver.num_pages for group in layout.groups})
    for new in ([prompt(9), prompt(5)], [prompt(3), prompt(1)]):
        batch = driver.batch(new)
        shared, logits = run_step(main, params, shared, batch)
        shared, guessed = run_step(guess, guess_params, shared, batch)
        real = sum(map(len, new))
        np.testing.assert_array_equal(logits[:real], np.concatenate(driver.prefill(new)))
        np.testing.assert_array_equal(guessed[:real], np.concatenate(alone.prefill(new)))


# Parity with Transformers, in families/test_latent_parity.py, has models that choose some of the tokens and all.
@pytest.mark.slow
def test_sparse_attention_equals_dense_when_it_may_choose_everything_and_only_then():
    # The expanded step needs no indexer as long as it is no longer than what is chosen.
    sparse, params = model(SPARSE)
    everything, _ = model(replace(SPARSE, index=replace(SPARSE.index, topk=64)))
    dense, _ = model(replace(SPARSE, index=None))
    text, few = prompt(30), SPARSE.index.topk
    [wanted] = Driver(dense, params).prefill([text])
    for fresh in (False, True):
        [got] = Driver(everything, params, fresh=fresh).prefill([text])
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    [got] = Driver(sparse, params).prefill([text])
    np.testing.assert_allclose(got[:few], wanted[:few], atol=1e-4)
    assert np.max(np.abs(got[few:] - wanted[few:])) > 0.01


def test_records_of_bytes_mean_the_numbers_that_they_decode_to(monkeypatch):
    # Issue 6: the 656-byte layout against its dequantised reference, whose queries are rounded as its keys were.
    network, params = model(RECORDS)
    packed = Driver(network, params, cache_dtype="fp8")
    plain = Driver(network, params, cache_dtype="float32")
    texts = [prompt(30), prompt(7, seed=1)]
    packed.prefill(texts)
    got = packed.decode([3, 4])
    read = {
        "key": lambda pages: decode_records(pages, rank=RECORDS.kv_lora_rank),
        "indexer": read_index_keys,
    }
    arrays = [
        read[role](array)
        for (_, role), array in zip(packed.cache.keys, packed.cache.arrays, strict=True)
    ]
    plain.cache = Cache(arrays=tuple(arrays), keys=plain.cache.keys)
    plain.lengths = [len(text) for text in texts] + [0]
    batch = plain.batch([[3], [4]], decode=True)
    # The new tokens' records are there already, rounded as the others.
    nowhere = plain.num_pages * plain.page_size + jnp.arange(plain.rows, dtype=jnp.int32)
    tables = tuple(replace(one, write_slots=nowhere) for one in batch.paged)
    monkeypatch.setattr(
        sparse_latent, "_as_compared", lambda queries, weights, _: (rounded(queries), weights)
    )
    # Traced anew, with queries that are rounded, and never found by others.
    apart = jax.jit(partial(run_step.__wrapped__, network))
    _, wanted = apart(params, plain.cache, replace(batch, paged=tables))
    np.testing.assert_allclose(got, wanted[:2], atol=1e-4)


def rounded(queries):
    """Returns what is left of queries in 8 bits with a scale each, by DeepSeek's own recipe."""
    scales = jnp.maximum(jnp.max(jnp.abs(queries), axis=-1, keepdims=True), 1e-4) / 448
    return (queries / scales).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scales


@pytest.mark.slow
def test_records_say_the_same_to_an_expanded_step_and_to_its_readers():
    # An expanded step rounds its own tokens as the records do.
    wide = replace(RECORDS, index=replace(RECORDS.index, topk=64))
    network, params = model(wide)
    texts = [prompt(30), prompt(7, seed=1)]
    read, made = (
        Driver(network, params, cache_dtype="fp8", fresh=fresh).prefill(texts)
        for fresh in (False, True)
    )
    for got, wanted in zip(made, read, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must equal"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_indexer": True}, "use_indexer"),
    ],
)
def test_a_key_that_would_change_the_result_is_refused_by_name(changes, message):
    with pytest.raises(UnknownConfig, match=message):
        read_config(V2 | changes)


def test_layers_of_another_order_are_refused():
    v32 = V3 | {"model_type": "deepseek_v32", "q_lora_rank": 20, "index_head_dim": 16}
    assert read_config(v32 | {"mlp_layer_types": ["dense", "sparse"]}).blocks_of(0)[1] == "gated"
    with pytest.raises(UnknownConfig, match="mlp_layer_types"):
        read_config(v32 | {"mlp_layer_types": ["sparse", "dense"]})
    with pytest.raises(UnknownConfig, match="layer_types"):
        read_config(v32 | {"layer_types": ["full_attention"] * 2})
    with pytest.raises(ValueError, match="needs a latent of queries"):
        read_config(v32 | {"q_lora_rank": None})
    with pytest.raises(ValueError, match="at least rope_dim 8, got 4"):
        read_config(v32 | {"index_head_dim": 4})


def test_weights_of_layers_that_guess_are_left_out_and_no_others(tmp_path):
    pytest.importorskip("torch")
    from tests.models.families.latent_cases import CASES

    CASES["v3"].build().save_pretrained(tmp_path)
    network = build_model(load_config(tmp_path))
    assert network.config.mtp_layers == 1
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.{}.eh_proj.weight"
    save_file(tensors | {name.format(2): np.zeros((2, 2), np.float32)}, file)
    load_params(tmp_path, network, dtype="float32", progress=False)
    for layer in (1, 3):
        save_file(tensors | {name.format(layer): np.zeros((2, 2), np.float32)}, file)
        with pytest.raises(BadCheckpoint, match="no use for"):
            load_params(tmp_path, network, dtype="float32", progress=False)


def test_the_keys_of_the_matrices_are_told_from_those_of_the_values(tmp_path):
    pytest.importorskip("torch")
    from tests.models.families.latent_cases import CASES

    CASES["v2-lite"].build().save_pretrained(tmp_path)
    network = build_model(load_config(tmp_path))
    params = load_params(tmp_path, network, dtype="float32", progress=False)
    latent = network.config.latent
    assert isinstance(latent, LatentConfig)
    both = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    both = both.reshape(4, latent.nope_dim + latent.value_dim, latent.kv_lora_rank)
    layer = jax.tree.map(np.asarray, params["layers"][1])
    np.testing.assert_array_equal(layer["k_up"], both[:, : latent.nope_dim])
    np.testing.assert_array_equal(layer["v_up"], both[:, latent.nope_dim :])


def test_a_directory_without_index_keys_is_refused(tmp_path):
    pytest.importorskip("torch")
    from tests.models.families.latent_cases import CASES

    CASES["v32"].build().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    lacking = "model.layers.0.self_attn.indexer.wk.weight"
    tensors = {name: array for name, array in load_file(file).items() if name != lacking}
    save_file(tensors, file)
    with pytest.raises(BadCheckpoint, match=r"lacks 'model\.layers\.0\.self_attn\.indexer\.wk"):
        load_params(tmp_path, build_model(load_config(tmp_path)), dtype="float32", progress=False)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deepseek_v32"
