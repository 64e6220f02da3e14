"""Sliding windows in models: each token attends to exactly its window, at every length and in every cache group."""

from dataclasses import replace

import numpy as np
import pytest

from jaxkv.models.registry import build_model
from tests.layers.jaxprs import equations
from tests.models.driver import Driver, run_step

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
far = cases.far

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
WINDOW = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Gemma 3 with five windows of 6 tokens in six layers: Hugging Face's model, ours, and its parameters."""
    return cases.maker(cases.CASES, tmp_path_factory)("gemma3")


def test_one_program_serves_texts_on_both_sides_of_a_window(pair):
    """One executable serves the lengths W - 1, W, W + 1 and 3 W, with and without tokens in the cache."""
    case, theirs, model, params = pair
    driver = Driver(model, params)
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1)
    rows = [case.prompt(length + 2 * WINDOW, offset=length) for length in lengths]
    first = driver.prefill([row[:length] for row, length in zip(rows, lengths, strict=True)])
    compiled = run_step._cache_size()
    second = driver.prefill([row[length:] for row, length in zip(rows, lengths, strict=True)])
    assert run_step._cache_size() == compiled
    for row, *halves in zip(rows, first, second, strict=True):
        assert far(np.concatenate(halves), cases.logits(theirs, row)) < TOLERANCE


# The test above compares with Transformers on both sides of a window.
@pytest.mark.slow
@pytest.mark.parametrize("more", [-1, 1])
def test_another_window_gives_other_logits(pair, more):
    """The comparison of the other tests notices a window that is one token wider or narrower."""
    case, theirs, model, params = pair
    windows = tuple(None if reach is None else reach + more for reach in model.config.windows)
    wrong = build_model(replace(model.config, windows=windows))
    tokens = case.prompt(WINDOW + 1)
    wanted = cases.logits(theirs, tokens)
    [got] = Driver(wrong, params).prefill([tokens])
    assert far(got[-1], wanted[-1]) > 100 * TOLERANCE
    assert far(got[: WINDOW - 1], wanted[: WINDOW - 1]) < TOLERANCE


def written(driver, before):
    """Returns (layer, role) -> the slots whose bytes changed."""
    found = {}
    for key, old, new in zip(driver.cache.keys, before, driver.cache.arrays, strict=True):
        new = np.asarray(new)
        changed = (old != new).reshape(old.shape[0] * old.shape[1], -1).any(axis=1)
        found[key] = set(np.flatnonzero(changed).tolist())
    return found


def test_a_short_batch_after_a_long_one_writes_its_own_slots_alone(pair):
    """SGLang #24743: padding writes nothing, in groups with windows and without."""
    _, _, model, params = pair
    driver = Driver(model, params, rows=8, max_tokens=16)
    driver.prefill([[row + 1, row + 2] for row in range(8)])
    driver.decode(range(8))
    before = [np.array(array) for array in driver.cache.arrays]
    driver.decode([5, 6, 7])
    for (layer, _), slots in written(driver, before).items():
        [group] = [one for one in driver.layout.paged_groups if layer in one.layers]
        table = driver.tables[group.rank]
        page, offset = divmod(3, driver.page_size)
        assert slots == {int(table[row, page]) * driver.page_size + offset for row in range(3)}


def test_each_layer_writes_where_its_own_group_says(pair):
    """The slots of a window's group move the writes of its layers, and none of the other layers."""
    _, _, model, params = pair
    group = next(g for g in Driver(model, params).layout.paged_groups if g.window is not None)
    results = []
    for move in (False, True):
        driver = Driver(model, params, rows=1, max_tokens=16)
        if move:
            driver.tables[group.rank] = driver.tables[group.rank][:, ::-1].copy()
        before = [np.array(array) for array in driver.cache.arrays]
        logits = driver.prefill([[3, 1, 4]])
        results.append((written(driver, before), logits[0]))
    for layer in range(model.num_layers):
        same = results[0][0][layer, "key"] == results[1][0][layer, "key"]
        assert same == (layer not in group.layers)
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_a_step_translates_no_slot(pair):
    """The host gives each group's slots in 32 bits, so no program gathers them or uses 64-bit indices."""
    _, _, model, params = pair
    driver = Driver(model, params)
    batch = driver.batch([[1], [2], [3]], decode=True)
    step = run_step.__wrapped__
    found = equations(lambda one: step(model, params, driver.cache, one), batch)
    wide = [v for e in found for v in e.outvars if str(v.aval.dtype) in ("int64", "uint64")]
    assert not wide
    looked_up = [e.invars[0].aval for e in found if e.primitive.name == "gather"]
    whole = {a.shape for a in looked_up if str(a.dtype) == "int32"}
    # The page tables themselves are read, a block of pages at a time; nothing as long as a pool is.
    assert whole <= {batch.paged[0].page_table.shape}
    assert any(str(a.dtype) == "float32" for a in looked_up)
