"""The cache as a pytree: order of its leaves, memory, and copies of single pages and states."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import PADDING_HEADROOM, copy_units, init_cache
from jaxkv.cache.variants import gqa, place
from tests.cache.layouts import counts_of, every_variant, hybrid


def numbered(layout, count):
    """A cache in which unit i of every array is filled with i + 1."""
    cache = init_cache(layout, counts_of(layout, count))

    def fill(array):
        units = np.arange(1, count + 1).reshape(-1, *[1] * (array.ndim - 1))
        return jnp.asarray(np.broadcast_to(units, array.shape).astype(array.dtype))

    return cache.replace(arrays=tuple(map(fill, cache.arrays)))


def units_of(array):
    """What `numbered` put into each unit; every element of a unit agrees."""
    flat = np.asarray(array).astype(np.float32).reshape(array.shape[0], -1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def bytes_of(cache):
    return sum(array.size * array.dtype.itemsize for array in cache.arrays)


def copied(cache, layout, group, source, target):
    """Returns a cache with copied units; the program does not donate the given one."""
    return jax.jit(lambda *given: copy_units(given[0], layout, group, *given[1:]))(
        cache, source, target
    )


def pool_copies(compiled):
    """Copy instructions in the optimised HLO that are not of scalars or index vectors."""
    return re.findall(r"= \w+\[\d+,\d+,[\d,]+\]\S* copy\(", compiled.as_text())


def test_a_new_cache_is_zero_in_the_shapes_and_dtypes_of_its_layout():
    layout = every_variant()
    named = layout.arrays(counts_of(layout, 3))
    cache = init_cache(layout, counts_of(layout, 3))
    assert [(a.shape, a.dtype.name) for a in cache.arrays] == [(n.shape, n.dtype) for n in named]
    assert all(not np.asarray(array).view(np.uint8).any() for array in cache.arrays)
    assert bytes_of(cache) == sum(array.nbytes for array in named)
    assert not any(array.weak_type for array in cache.arrays)


def test_flattening_order_is_the_total_order():
    """Donation pairs leaves in the order of the layout."""
    layout = every_variant()
    cache = init_cache(layout, counts_of(layout, 2))
    named = layout.arrays(counts_of(layout, 2))
    leaves = jax.tree.leaves(cache)
    assert all(leaf is array for leaf, array in zip(leaves, cache.arrays, strict=True))
    assert [leaf.shape for leaf in leaves] == [array.shape for array in named]
    assert cache.keys == tuple((array.layer, array.role) for array in named)
    assert list(cache.layer(1)) == ["key", "value", "key_scale", "value_scale"]


def test_replacing_arrays_of_a_layer_keeps_the_order():
    """The order of the updates does not matter."""
    layout = hybrid()
    cache = init_cache(layout, counts_of(layout, 2))
    old = cache.layer(3)
    new = cache.with_layer(3, {"value": old["value"] + 2, "key": old["key"] + 1})
    assert new.keys == cache.keys
    chex.assert_trees_all_equal_structs(new, cache)
    assert units_of(new.layer(3)["key"]) == [1, 1]
    assert units_of(new.layer(3)["value"]) == [2, 2]
    chex.assert_trees_all_equal(new.layer(0), cache.layer(0))
    assert units_of(cache.layer(3)["key"]) == [0, 0]


def test_an_update_that_could_not_take_the_old_arrays_memory_is_refused():
    layout = hybrid()
    cache = init_cache(layout, counts_of(layout, 2))
    key = cache.layer(0)["key"]
    for wrong in (key.astype(jnp.float32), key[:1]):
        with pytest.raises(ValueError, match=r"layer 0 key must stay bfloat16\[2, 4, 1, 2\],"):
            cache.with_layer(0, {"key": wrong})
    with pytest.raises(ValueError, match=r"layer 0 has the arrays \['key', 'value'\], got 'ssm'"):
        cache.with_layer(0, {"ssm": key})
    with pytest.raises(ValueError, match=r"no layer 9; it has \[0, 1, 2, 3, 4\]"):
        cache.layer(9)


def test_a_cache_survives_what_jax_does_to_pytrees():
    """Constructors must not look at leaves: eval_shape, tree.map with other types, vmap and lower rebuild them."""
    layout = hybrid()
    cache = jax.eval_shape(lambda: init_cache(layout, counts_of(layout, 2)))
    assert jax.tree.map(lambda leaf: str(leaf.dtype), cache).layer(0)["key"] == "bfloat16"
    assert bytes_of(cache) == sum(array.nbytes for array in layout.arrays(counts_of(layout, 2)))
    jax.jit(lambda cache: cache).lower(cache)


def test_slots_that_int32_cannot_name_are_refused():
    """Padding past the end must fit too. The check allocates nothing."""
    layout = group_layers(place([gqa(1, 1, dtype="uint8", page_size=64)]))
    most = (2**31 - PADDING_HEADROOM) // 64
    jax.eval_shape(lambda: init_cache(layout, {"gqa": most}))
    with pytest.raises(ValueError, match=f"'gqa' would have {most + 1} pages of 64 slots"):
        init_cache(layout, {"gqa": most + 1})


def test_leaves_of_more_than_two_to_the_31_elements_are_fine():
    """They are indexed by ids and offsets, never by a flat element number."""
    layout = group_layers(place([gqa(8, 128, dtype="uint8", page_size=64)]))
    cache = jax.eval_shape(lambda: init_cache(layout, {"gqa": 2**16}))
    assert cache.arrays[0].size > 2**31


def test_the_device_or_sharding_is_the_callers_choice():
    layout = hybrid()
    device = jax.devices()[0]
    for where in (device, jax.sharding.SingleDeviceSharding(device)):
        cache = init_cache(layout, counts_of(layout, 2), device=where)
        assert all(array.devices() == {device} for array in cache.arrays)


def test_copied_pages_change_their_group_alone():
    layout = hybrid()
    cache = numbered(layout, 5)
    found = copied(cache, layout, "gqa", jnp.array([4, 0]), jnp.array([1, 2]))
    for layer in (0, 3):
        for array in found.layer(layer).values():
            assert units_of(array) == [1, 5, 1, 4, 5]
    for layer in (1, 2, 4):
        chex.assert_trees_all_equal(found.layer(layer), cache.layer(layer))


def test_sources_are_read_before_targets_are_written():
    layout = hybrid()
    found = copied(numbered(layout, 3), layout, "gqa", jnp.array([0, 1]), jnp.array([1, 0]))
    assert units_of(found.layer(0)["key"]) == [2, 1, 3]


def test_padding_copies_change_nothing():
    """Distinct targets past the end are dropped, the last page is not clamped onto."""
    layout = hybrid()
    cache = numbered(layout, 3)
    padding = jnp.arange(3, 7, dtype=jnp.int32)
    for group in ("gqa", "mamba2", "sampling"):
        chex.assert_trees_all_equal(copied(cache, layout, group, padding, padding), cache)


def test_copied_states_change_their_group_alone():
    layout = hybrid()
    cache = numbered(layout, 4)
    found = copied(cache, layout, "mamba2", jnp.array([3]), jnp.array([1]))
    assert [units_of(array) for array in found.layer(2).values()] == [[1, 4, 3, 4]] * 2
    for layer in (0, 1, 3, 4):
        chex.assert_trees_all_equal(found.layer(layer), cache.layer(layer))


@pytest.mark.parametrize("unit", ["page", "state"])
def test_copies_happen_in_the_donated_memory(unit):
    """The aliased bytes are those of the cache, and no pool is copied, for every variant and dtype."""
    layout = every_variant()
    cache = numbered(layout, 16)
    ids = jnp.array([3, 1], jnp.int32)
    for group in layout.groups:
        if group.unit == unit:
            jitted = jax.jit(
                lambda cache, source, target, name=group.name: copy_units(
                    cache, layout, name, source, target
                ),
                donate_argnums=0,
            )
            compiled = jitted.lower(cache, ids, ids).compile()
            assert compiled.memory_analysis().alias_size_in_bytes == bytes_of(cache)
            assert pool_copies(compiled) == []


def test_leaves_alias_their_own_place_after_an_update_of_every_layer():
    """The pairing of inputs and outputs is the identity, though all pools have one shape."""
    layout = group_layers(place([gqa(1, 2, dtype="float32", page_size=4)] * 3))
    cache = numbered(layout, 2)

    def step(cache):
        for layer in (2, 0, 1):
            arrays = cache.layer(layer)
            update = {role: arrays[role].at[0].add(1.0) for role in ("value", "key")}
            cache = cache.with_layer(layer, update)
        return cache

    pointers = [array.unsafe_buffer_pointer() for array in cache.arrays]
    compiled = jax.jit(step, donate_argnums=0).lower(cache).compile()
    assert pool_copies(compiled) == []
    after = compiled(cache)
    assert [array.unsafe_buffer_pointer() for array in after.arrays] == pointers
