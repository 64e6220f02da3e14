"""Cache specs, their groups and the order of the groups."""

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.cache.budget import plan_budget
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import (
    ROLE_ORDER,
    ArraySpec,
    LayerSpec,
    PagedSpec,
    StateSpec,
    group_layers,
)
from jaxkv.cache.variants import gqa, place, sampling, window
from tests.cache.layouts import HALF, MAMBA2, counts_of, every_variant, hybrid, reserve


def layer_specs_of(layout):
    return [LayerSpec(layer, group.spec) for group in layout.groups for layer in group.layers]


def test_host_bookkeeping_never_imports_jax():
    code = (
        "import sys, jaxkv.cache.page_allocator, jaxkv.cache.budget, jaxkv.cache.prefix.index, jaxkv.cache.variants\n"
        "sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_role_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=r"unknown role 'keys'.*key, value, key_scale"):
        ArraySpec("keys", (1,), "float32")


@pytest.mark.parametrize("shape", [(0,), (2, -1)])
def test_an_array_without_elements_is_refused(shape):
    with pytest.raises(ValueError, match="at least 1"):
        ArraySpec("key", shape, "float32")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="unknown dtype 'bfloat15'"):
        ArraySpec("key", (1,), "bfloat15")


def test_dtype_names_are_canonical_so_that_equal_memory_means_equal_specs():
    assert ArraySpec("key", (1,), "f4") == ArraySpec("key", (1,), "float32")


def test_a_spec_holds_each_role_once_and_at_least_one():
    key = ArraySpec("key", (1,), "float32")
    with pytest.raises(ValueError, match="each role once"):
        PagedSpec("twice", (key, key), 4)
    with pytest.raises(ValueError, match="at least one array"):
        StateSpec("none", ())


@pytest.mark.parametrize("sizes", [{"page_size": 0}, {"page_size": 4, "window": 0}])
def test_page_size_and_window_are_at_least_one(sizes):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        PagedSpec("empty", (ArraySpec("key", (1,), "float32"),), **sizes)


@given(st.randoms(use_true_random=False))
def test_the_layout_does_not_depend_on_the_order_given(shuffler: random.Random):
    layout = every_variant()
    specs = layer_specs_of(layout)
    shuffler.shuffle(specs)
    assert group_layers(specs) == layout
    assert group_layers(specs).arrays(counts_of(layout, 3)) == layout.arrays(counts_of(layout, 3))


def test_the_total_order_is_layer_then_role_priority():
    """Arrays declared in any order, in interleaved groups, are sorted."""
    spec = PagedSpec(
        "reversed",
        tuple(
            ArraySpec(role, (1,), "uint8") for role in ("indexer", "value_scale", "value", "key")
        ),
        page_size=2,
    )
    layout = group_layers([LayerSpec(2, spec), LayerSpec(0, spec), LayerSpec(1, MAMBA2)])
    order = [(array.layer, array.role) for array in layout.arrays(counts_of(layout, 1))]
    roles = ["key", "value", "value_scale", "indexer"]
    assert order == [(0, r) for r in roles] + [(1, "conv"), (1, "ssm")] + [(2, r) for r in roles]


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from(sorted(ROLE_ORDER))),
        min_size=1,
        max_size=40,
        unique=True,
    )
)
def test_names_are_unique_and_stable(places):
    """A name depends on layer and role alone."""
    specs = [
        LayerSpec(layer, PagedSpec(role, (ArraySpec(role, (1,), "uint8"),), page_size=1))
        for layer, role in places
    ]
    layout = group_layers(specs)
    names = [array.name for array in layout.arrays(counts_of(layout, 1))]
    assert len(set(names)) == len(names)
    assert set(names) == {f"layer{layer}.{role}" for layer, role in places}


def test_layers_with_equal_specs_form_one_group_and_ranks_count_within_a_sort():
    layout = hybrid()
    described = [(g.name, g.unit, g.layers, g.index, g.rank) for g in layout.groups]
    assert described == [
        ("gqa", "page", (0, 3), 0, 0),
        ("odd", "page", (1,), 1, 1),
        ("mamba2", "state", (2,), 2, 0),
        ("sampling", "state", (4,), 3, 0),
    ]
    assert [group.name for group in layout.paged_groups] == ["gqa", "odd"]
    assert [group.name for group in layout.state_groups] == ["mamba2"]
    assert [group.name for group in layout.in_place_groups] == ["sampling"]


def test_groups_of_one_kind_get_distinct_names():
    layout = group_layers(place([gqa(1, 2, **HALF), gqa(2, 2, **HALF), gqa(1, 2, **HALF)]))
    assert [(group.name, group.layers) for group in layout.groups] == [
        ("gqa", (0, 2)),
        ("gqa-2", (1,)),
    ]


def test_notes_do_not_split_groups():
    noted = PagedSpec("gqa", gqa(1, 2, **HALF).arrays, 4, notes=("a wish was ignored",))
    assert len(group_layers(place([noted, gqa(1, 2, **HALF)])).groups) == 1


def test_two_arrays_of_one_role_in_one_layer_are_refused():
    main = place([gqa(1, 2, **HALF)] * 2, layer_offset=10)
    assert [entry.layer for entry in main] == [10, 11]
    with pytest.raises(
        ValueError, match="layer 11 already has 'key' from gqa, and window has it too"
    ):
        group_layers([*main, *place([window(1, 2, window=4, **HALF)], layer_offset=11)])


def test_layers_may_be_offset_so_that_a_second_model_shares_the_cache():
    """61 layers and a multi-token-prediction layer behind them share one budget."""
    spec = gqa(1, 2, **HALF)
    main, extra = place([spec] * 61), place([spec], layer_offset=61)
    layout = group_layers([*main, *extra, LayerSpec(62, sampling(7))])
    assert layout.groups[0].layers == tuple(range(62))
    budget = plan_budget(layout, 62 * 32 + 3 * 4 + 5, max_sequences=2, max_tokens=4)
    assert budget.counts == {"gqa": 1, "sampling": 3}
    assert budget.left_over == 5


def test_a_variant_that_a_test_invents_needs_no_change_elsewhere():
    """The code of the cache names no variant."""
    spec = PagedSpec("rumour", (ArraySpec("ssm", (3, 5), "float16"),), page_size=4)
    layout = group_layers([LayerSpec(0, spec), LayerSpec(1, gqa(1, 2, **HALF))])
    assert [array.name for array in layout.arrays(counts_of(layout, 2))] == [
        "layer0.ssm",
        "layer1.key",
        "layer1.value",
    ]
    budget = plan_budget(layout, 5000, max_sequences=2, max_tokens=8)
    allocator = PageAllocator(layout, budget.counts)
    allocator.open(1)
    assert len(reserve(allocator, 1, 5)[1]["rumour"]) == 2
    allocator.check()


@pytest.mark.parametrize(
    "counts", [{}, {"gqa": 1}, {"gqa": 0, "odd": 1, "mamba2": 1, "sampling": 1}]
)
def test_counts_must_name_each_group(counts):
    with pytest.raises(ValueError, match="counts must be at least 1 for each of"):
        hybrid().arrays(counts)


def test_a_group_is_found_by_name_or_the_known_names_are_listed():
    layout = group_layers([LayerSpec(0, gqa(1, 2, **HALF)), LayerSpec(0, MAMBA2)])
    assert layout.group("gqa").layers == (0,)
    with pytest.raises(
        ValueError, match="no group 'mla'; the groups of this cache are gqa, mamba2"
    ):
        layout.group("mla")
    with pytest.raises(ValueError, match="holds states"):
        layout.group("mamba2").page_size


def test_a_cache_without_layers_and_negative_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        group_layers([])
    with pytest.raises(ValueError, match="count from 0, got -1"):
        LayerSpec(-1, MAMBA2)
