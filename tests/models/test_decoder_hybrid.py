"""Forward passes of every family with states beside pages: updates in place, rows independent, padding inert."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.state import copy_units
from jaxkv.config.blocks import MambaConfig, TransformerConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder
from tests.models.driver import Driver, run_step

VOCAB = 61
SMALL = {"max_tokens": 32, "step_tokens": 16, "page_size": 4}


@pytest.fixture(scope="module")
def model():
    return Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=3,
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=48,
            max_positions=64,
            rope=RopeConfig(rotary_dim=8),
            windows=(None,) * 3,
            # A layer with both memories, one with none, one with states alone.
            pattern=(("mamba2+attention",), ("plain",), ("mamba2",)),
            mamba=MambaConfig(heads=4, head_dim=8, d_state=8, d_conv=4, groups=2, chunk_size=4),
        )
    )


@pytest.fixture(scope="module")
def params(model):
    drawn = model.init_params(jax.random.key(1), "float32")
    return jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim == 2 else leaf, drawn)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_layers_share_states_and_pages_by_what_they_remember(model):
    driver = Driver(model, None, **SMALL)
    groups = {group.name: group.layers for group in driver.layout.groups}
    assert groups == {"gqa": (0,), "mamba2": (0, 2)}
    assert driver.layout.chunk_size == 4
    roles = ((0, "key"), (0, "value"), (0, "conv"), (0, "ssm"), (2, "conv"), (2, "ssm"))
    assert driver.cache.keys == roles


# An engine audits its programs of prompts too, in tests/engine/test_hybrid_engine.py.
@pytest.mark.parametrize("decode", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_donated_cache_is_updated_in_its_own_memory(model, params, decode):
    # Each array of states too is the output in the place of its input.
    driver = Driver(model, params, **SMALL)
    batch = driver.batch([[1], [2], [3]], decode=decode)
    compiled = run_step.lower(model, params, driver.cache, batch).compile()
    cache_bytes = sum(array.nbytes for array in driver.cache.arrays)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}", compiled.as_text().splitlines()[0])
    outputs, inputs = zip(*((int(o), int(i)) for o, i in pairs), strict=True)
    first = len(jax.tree.leaves(params))
    assert outputs == tuple(range(len(driver.cache.arrays)))
    assert inputs == tuple(range(first, first + len(outputs)))


def test_padding_and_foreign_states_never_reach_an_answer(model, params):
    # Junk in every state and page but the zero state changes no bit of the result.
    clean, dirty = (Driver(model, params, **SMALL) for _ in range(2))
    junk = [
        jnp.full_like(array, jnp.nan).at[0].set(0 if role in ("conv", "ssm") else jnp.nan)
        for (_, role), array in zip(dirty.cache.keys, dirty.cache.arrays, strict=True)
    ]
    dirty.cache = dirty.cache.replace(arrays=tuple(junk))
    for driver in (clean, dirty):
        driver.prefill([prompt(7), [], prompt(2)])
    np.testing.assert_array_equal(clean.decode([1, 2, 3])[[0, 2]], dirty.decode([1, 2, 3])[[0, 2]])
    for layer, role in ((0, "ssm"), (2, "conv")):
        assert not np.any(np.asarray(dirty.cache.layer(layer)[role][0]))


def test_a_row_without_tokens_and_padding_change_no_state(model, params):
    # The zero state stays zero, and no other row's state is written.
    driver = Driver(model, params, **SMALL)
    driver.prefill([prompt(5), prompt(6, 1), prompt(3, 2)])
    before = {
        key: np.asarray(array)
        for key, array in zip(driver.cache.keys, driver.cache.arrays, strict=True)
    }
    driver.prefill([[], prompt(2), []])
    [states], step = driver.states, driver.steps[1]
    written = states[1][(step - 1) % 2]
    for layer in (0, 2):
        for role in ("conv", "ssm"):
            after = np.asarray(driver.cache.layer(layer)[role])
            changed = np.any(after != before[layer, role], axis=tuple(range(1, after.ndim)))
            assert np.flatnonzero(changed).tolist() == [written]


def test_rows_do_not_see_each_other(model, params):
    # The bits of a row do not depend on the other rows.
    def run(neighbours):
        driver = Driver(model, params, **SMALL)
        prefilled = driver.prefill([neighbours[0], prompt(4), neighbours[1]])[1]
        return prefilled, driver.decode([5, 6, 7])[1]

    for got, wanted in zip(
        run((prompt(3, 1), prompt(5, 2))), run((prompt(3, 3), prompt(5, 4))), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_a_split_on_the_grid_changes_no_bit_of_a_state(model, params):
    # Both runs scan the chunks 0-3, 4-7 and 8-11, so the output of the third layer is the same.
    whole, split = (Driver(model, params, **SMALL) for _ in range(2))
    tokens = prompt(11)
    whole.prefill([tokens])
    split.prefill([tokens[:8]])
    split.prefill([tokens[8:]])
    for layer in (0, 2):
        states = [
            np.asarray(driver.cache.layer(layer)["ssm"])[
                driver.states[0][0][(driver.steps[0] - 1) % 2]
            ]
            for driver in (whole, split)
        ]
        np.testing.assert_allclose(states[0], states[1], rtol=1e-5, atol=1e-6)


def test_a_copied_state_goes_on_as_the_original_does(model, params):
    # The state is restored bit-exactly for another row.
    driver = Driver(model, params, **SMALL)
    driver.prefill([prompt(6), prompt(6)])
    [states] = driver.states
    kept, other = states[0][0], states[1][0]
    ids = jnp.asarray([kept]), jnp.asarray([other])
    driver.cache = copy_units(driver.cache, driver.layout, "mamba2", *ids)
    for layer in (0, 2):
        for role in ("conv", "ssm"):
            held = np.asarray(driver.cache.layer(layer)[role])
            np.testing.assert_array_equal(held[kept], held[other])
    one, same, _ = driver.decode([4, 4, 4])
    np.testing.assert_allclose(one, same, rtol=1e-6, atol=1e-6)


def test_a_state_kept_on_the_way_is_one_to_go_on_from(model, params):
    # The state is kept at a boundary of the scan's chunks in the middle of a step, and read again by its id.
    driver = Driver(model, params, **SMALL)
    tokens, [states] = prompt(11), driver.states
    # The state of a row that takes no part.
    kept = int(states[2][0])
    batch = driver.batch([tokens])
    tables = replace(
        batch.states[0],
        snapshot_ends=jnp.asarray([8, 17]),
        snapshot_states=jnp.asarray([kept, driver.num_states + 1]),
    )
    batch = replace(batch, states=(tables,))
    driver.cache, whole = run_step(model, params, driver.cache, batch)
    # The row goes back to its eighth token and reads the kept state.
    driver.lengths[0], driver.steps[0], states[0][1] = 8, 2, kept
    [again] = driver.prefill([tokens[8:]])
    np.testing.assert_allclose(again, whole[8:11], rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(driver.cache.layer(2)["ssm"][0]))


def test_a_wide_residual_is_float32_between_narrow_blocks(model):
    wide = Decoder(ModelConfig(**(vars(model.config) | {"wide_residual": True})))
    params = wide.init_params(jax.random.key(0), "bfloat16")
    # What decays and steps are computed from stays wide, whatever the model is in.
    kept = {name for name, leaf in params["layers"][2].items() if leaf.dtype == jnp.float32}
    assert kept == {"a_log", "dt_bias", "skip"}
    driver = Driver(wide, params, cache_dtype="bfloat16", **SMALL)
    batch = driver.batch([prompt(5)])
    cache, hidden = jax.eval_shape(wide.forward, params, driver.cache, batch)
    assert hidden.dtype == jnp.bfloat16
    assert {str(array.dtype) for array in cache.arrays} == {"bfloat16", "float32"}
    text = str(jax.make_jaxpr(wide.forward)(params, driver.cache, batch))
    assert f"f32[16,{model.config.hidden_size}] = add" in text


def test_blocks_of_one_layer_may_not_share_a_parameter(model):
    twice = ModelConfig(**(vars(model.config) | {"pattern": (("gated", "plain"),) * 3}))
    with pytest.raises(ValueError, match="down"):
        Decoder(twice).param_shapes("float32")


@pytest.mark.slow
def test_layers_with_one_owner_store_what_they_share_once_and_compute_as_with_copies(model):
    stage = ("transformer>mamba2",)
    sharing = replace(
        model,
        config=replace(
            model.config,
            pattern=(stage, ("mamba2",), stage),
            owners=(0, 1, 0),
            transformer=TransformerConfig(adapter_rank=3),
        ),
    )
    drawn = sharing.init_params(jax.random.key(1), "float32")
    params = jax.tree.map(lambda leaf: leaf * 10 if leaf.ndim == 2 else leaf, drawn)
    first, _, last = params["layers"]
    shared = {"side_norm", "qkv", "o", "inner_norm", "gate_up", "down"}
    assert first.keys() - last.keys() == shared
    copied = params | {
        "layers": (*params["layers"][:2], {name: first[name] for name in shared} | last)
    }
    alone = replace(sharing, config=replace(sharing.config, owners=()))
    pair = [Driver(sharing, params, **SMALL), Driver(alone, copied, **SMALL)]
    assert pair[0].layout == pair[1].layout
    tokens = prompt(9)
    np.testing.assert_array_equal(*(driver.prefill([tokens])[0] for driver in pair))
    np.testing.assert_array_equal(*(driver.decode([5]) for driver in pair))
