"""The traced and compiled forward pass of every family: one program for all lengths, in place, rows independent."""

import re
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.blocks import Multipliers
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Model
from jaxkv.models.registry import build_model, read_config
from tests.layers.jaxprs import equations
from tests.models.driver import Driver, run_step

TINY = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_MOE = TINY | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8, "use_sliding_window": False}
SMALL = {"max_tokens": 32, "step_tokens": 16, "page_size": 4}


@pytest.fixture(scope="module")
def model():
    return build_model(read_config(TINY))


@pytest.fixture(scope="module")
def params(model):
    # Ten times the usual scale: random weights of 0.02 attend to everything alike.
    drawn = model.init_params(jax.random.key(1), "float32")
    return jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim == 2 else leaf, drawn)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, TINY["vocab_size"], length).tolist()


def test_a_decoder_is_a_model_and_can_be_static(model):
    answers: Model = model
    assert (answers.vocab_size, answers.num_layers, answers.max_positions) == (61, 3, 64)
    assert hash(model) == hash(build_model(read_config(TINY)))
    assert model != build_model(read_config(TINY), implementation="xla")


def test_a_block_that_sums_over_the_devices_is_the_only_one_of_its_stage():
    config = read_config(QWEN3_MOE)
    own, both = ("dense_and_mixture",), ("dense_and_mixture+gated",)
    build_model(replace(config, pattern=(("attention", *own),) * config.num_layers))
    with pytest.raises(ValueError, match="'dense_and_mixture' must be the only block of its stage"):
        build_model(replace(config, pattern=(("attention", *both),) * config.num_layers))


def test_attention_to_keys_of_another_layer_has_the_factors_of_attention():
    """Factors of its input and output are those of its weights."""
    file = {name: value for name, value in TINY.items() if "window" not in name}
    config = read_config(file | {"model_type": "llama"})
    shared = replace(
        config,
        windows=(None,) * 3,
        pattern=(("attention", "gated"), ("kv_shared_attention", "gated"), ("attention", "gated")),
        key_owners=(0, 0, 2),
    )
    scaled = replace(shared, multipliers=Multipliers(attention_in=2.0, attention_out=3.0))
    plain, other = (Decoder(one, implementation="xla") for one in (shared, scaled))
    params = jax.tree.map(
        lambda leaf: leaf * 10 if leaf.ndim == 2 else leaf,
        plain.init_params(jax.random.key(1), "float32"),
    )
    factors = {"qkv": 2.0, "q": 2.0, "o": 3.0}
    layers = tuple(
        {name: leaf * factors.get(name, 1.0) for name, leaf in layer.items()}
        for layer in params["layers"]
    )
    [wanted] = Driver(plain, params | {"layers": layers}, **SMALL).prefill([prompt(9)])
    [got] = Driver(other, params, **SMALL).prefill([prompt(9)])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    [unscaled] = Driver(plain, params, **SMALL).prefill([prompt(9)])
    assert np.abs(got - unscaled).max() > 0.1 * np.abs(wanted).max()


def test_prompts_are_whole_where_angles_depend_on_the_length_of_the_sequence(model):
    """With LongRoPE only sequences longer than the original context have other angles."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 16} | factors
    scaled = [
        build_model(read_config(TINY | {"rope_scaling": rope})) for rope in (dynamic, longrope)
    ]
    assert not model.whole_prompts
    assert [one.whole_prompts for one in scaled] == [True, True]
    assert [one.limited(16).whole_prompts for one in scaled] == [True, False]
    assert [one.limited(17).whole_prompts for one in scaled] == [True, True]
    assert scaled[1].limited(16).max_positions == 16
    assert model.limited(16) is model


def test_the_last_layers_have_a_pool_of_their_own(model):
    specs = [entry.spec for entry in model.cache_specs(page_size=4, dtype="bfloat16")]
    assert [spec.window for spec in specs] == [None, None, 6]
    assert specs[0] == specs[1]
    assert {array.dtype for spec in specs for array in spec.arrays} == {"bfloat16"}


def test_parameters_are_few_fused_leaves(model):
    shapes = model.param_shapes("bfloat16")
    assert set(shapes) == {"embed", "layers", "final_norm", "lm_head"}
    layer = {name: leaf.shape for name, leaf in shapes["layers"][0].items()}
    assert layer == {
        "norms": (2, 32),
        "qkv": ((4 + 2 * 2) * 8, 32),
        "qkv_bias": ((4 + 2 * 2) * 8,),
        "o": (32, 32),
        "gate_up": (96, 32),
        "down": (32, 48),
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


def test_random_parameters_have_the_promised_tree_in_and_out_of_a_jit(model):
    key = jax.random.key(3)
    drawn = model.init_params(key, "float32")
    chex.assert_trees_all_equal_shapes_and_dtypes(drawn, model.param_shapes("float32"))
    jitted = jax.jit(model.init_params, static_argnums=1)(key, "float32")
    chex.assert_trees_all_close(drawn, jitted, atol=1e-6)
    np.testing.assert_array_equal(drawn["layers"][1]["norms"], 1.0)
    assert float(jnp.std(drawn["embed"])) == pytest.approx(0.02, rel=0.1)
    first, second = drawn["layers"][0]["qkv"], drawn["layers"][1]["qkv"]
    assert not np.array_equal(first, second)


def test_one_trace_serves_all_lengths_and_pages(model, params):
    # The program holds no length, slot or page as a constant.
    traced = chex.assert_max_traces(n=1)(run_step.__wrapped__)
    step = jax.jit(traced, static_argnums=0)
    for seed, lengths in enumerate([(3, 7, 1), (1, 0, 0), (9, 2, 5)]):
        driver = Driver(model, params, seed=seed, **SMALL)
        new = [prompt(length) for length in lengths]
        _, logits = step(model, params, driver.cache, driver.batch(new))
        wanted = np.concatenate(Driver(model, params, seed=9 - seed, **SMALL).prefill(new))
        np.testing.assert_allclose(logits[: len(wanted)], wanted, atol=1e-5)


@pytest.mark.parametrize("decode", [False, True])
def test_a_donated_cache_is_updated_in_its_own_memory(model, params, decode):
    # Every leaf of the cache is the output in the place of its input.
    driver = Driver(model, params, **SMALL)
    batch = driver.batch([[1], [2], [3]], decode=decode)
    compiled = run_step.lower(model, params, driver.cache, batch).compile()
    cache_bytes = sum(array.nbytes for array in driver.cache.arrays)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    header = compiled.as_text().splitlines()[0]
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)
    outputs, inputs = zip(*((int(o), int(i)) for o, i in pairs), strict=True)
    first = len(jax.tree.leaves(params))
    assert outputs == tuple(range(len(driver.cache.arrays)))
    assert inputs == tuple(range(first, first + len(outputs)))


@pytest.mark.parametrize("decode", [False, True])
def test_no_write_to_the_cache_can_be_clamped(model, params, decode):
    # dynamic_update_slice would move an out-of-range write onto the last slot.
    driver = Driver(model, params, **SMALL)
    batch = driver.batch([[1], [2], [3]], decode=decode)
    found = equations(model.forward, params, driver.cache, batch)
    names = {equation.primitive.name for equation in found}
    assert "scatter" in names
    assert "dynamic_update_slice" not in names


def test_the_cache_keeps_its_order(model, params):
    driver = Driver(model, params, **SMALL)
    before = driver.cache.keys
    driver.prefill([prompt(5)])
    assert driver.cache.keys == before
    assert before == tuple((layer, role) for layer in range(3) for role in ("key", "value"))


def test_each_layer_writes_the_pages_of_its_own_group(model, params):
    driver = Driver(model, params, **SMALL)
    driver.prefill([prompt(5), prompt(3)])
    for group, table in zip(driver.layout.paged_groups, driver.tables, strict=True):
        for layer in group.layers:
            written = np.any(np.asarray(driver.cache.layer(layer)["key"]) != 0, axis=(2, 3))
            slots = np.zeros_like(written)
            for row, length in enumerate((5, 3)):
                positions = np.arange(length)
                slots[table[row, positions // 4], positions % 4] = True
            np.testing.assert_array_equal(written, slots)
    assert len(driver.tables) == 2
    assert not np.array_equal(*driver.tables)


def test_rows_do_not_see_each_other(model, params):
    # The bits of a row do not depend on the other rows.
    def run(neighbours):
        driver = Driver(model, params, **SMALL)
        prefilled = driver.prefill([neighbours[0], prompt(4), neighbours[1]])[1]
        return prefilled, driver.decode([5, 6, 7])[1]

    # Neighbours of equal length, so that the row's own place in the batch stays the same.
    for got, wanted in zip(
        run((prompt(3, 1), prompt(5, 2))), run((prompt(3, 3), prompt(5, 4))), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_padding_and_foreign_pages_never_reach_an_answer(model, params):
    # Junk in every slot that is not the rows' own changes no bit of the result.
    clean, dirty = (Driver(model, params, **SMALL) for _ in range(2))
    dirty.cache = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), dirty.cache)
    for driver in (clean, dirty):
        driver.prefill([prompt(7), prompt(2)])
    np.testing.assert_array_equal(clean.decode([1, 2]), dirty.decode([1, 2]))


def test_the_page_size_changes_nothing_but_the_pages(model, params):
    # A static cache is a paged one with one page per row.
    wanted = Driver(model, params, **SMALL).prefill([prompt(9), prompt(6)])
    got = Driver(model, params, **SMALL | {"page_size": 32}).prefill([prompt(9), prompt(6)])
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_narrow_parameters_stay_narrow_and_logits_are_float32(model):
    params = model.init_params(jax.random.key(0), "bfloat16")
    driver = Driver(model, params, cache_dtype="bfloat16", **SMALL)
    batch = driver.batch([prompt(5)])
    cache, hidden = jax.eval_shape(model.forward, params, driver.cache, batch)
    assert hidden.dtype == jnp.bfloat16
    assert {array.dtype for array in cache.arrays} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(model.logits, params, hidden).dtype == jnp.float32
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    for equation in equations(lambda p, b: run_step(model, p, driver.cache, b), params, batch):
        if equation.primitive.name in ("convert_element_type", "transpose"):
            assert equation.invars[0].aval.shape not in weights


def test_bfloat16_stays_near_float32(model, params):
    # The narrow model computes the same thing: an exact cast of its weights, run wide, differs by rounding alone.
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    [wanted] = Driver(model, widened, **SMALL).prefill([prompt(10)])
    [got] = Driver(model, narrow, cache_dtype="bfloat16", **SMALL).prefill([prompt(10)])
    assert np.max(np.abs(got - wanted)) < 0.05 * np.max(np.abs(wanted))


def test_the_models_implementation_reaches_the_ops(model, params):
    # The whole model has one implementation.
    named = replace(model, implementation="xla")
    [wanted], [got] = (Driver(m, params, **SMALL).prefill([prompt(5)]) for m in (model, named))
    np.testing.assert_array_equal(got, wanted)
    refused = replace(model, implementation="nonesuch")
    with pytest.raises(ValueError, match="nonesuch"):
        Driver(refused, params, **SMALL).prefill([prompt(5)])
