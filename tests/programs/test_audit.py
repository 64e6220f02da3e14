"""The audit: a program that updates its cache in place passes, and every other is refused with its reason."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.errors import ProgramRefused
from jaxkv.programs.audit import audit, sum_bytes

POOL = jax.ShapeDtypeStruct((256, 32), jnp.float32)
POOL_BYTES = 256 * 32 * 4
WEIGHT = jax.ShapeDtypeStruct((32,), jnp.float32)
SLOTS = jax.ShapeDtypeStruct((4,), jnp.int32)


def audited(function, cache=(POOL, POOL), donated=(1,)):
    program = jax.jit(function, donate_argnums=donated)
    return audit(program.lower(WEIGHT, cache, SLOTS).compile(), cache_argument=1)


def write(pool, weight, slots):
    values = jnp.broadcast_to(weight, (4, 32))
    return pool.at[slots].set(values, mode="drop", unique_indices=True)


def in_place(weight, cache, slots):
    keys, values = (write(pool, weight, slots) for pool in cache)
    return (keys, values), keys[slots] + values[slots]


def test_a_program_that_updates_in_place_passes():
    report = audited(in_place)
    assert report.problems == ()
    assert report.copies == ()
    assert report.alias_bytes == report.cache_bytes == 2 * POOL_BYTES
    assert report.backend == jax.default_backend()
    assert report.sum_bytes == 0
    report.raise_if_bad("step")


def test_a_loop_of_updates_passes():
    def loop(weight, cache, slots):
        def body(carry):
            step, cache = carry
            (keys, values), _ = in_place(weight, cache, (slots + step) % 256)
            return step + 1, (keys, values)

        _, cache = jax.lax.while_loop(lambda carry: carry[0] < 5, body, (jnp.int32(0), cache))
        return cache, cache[0][slots]

    assert audited(loop).problems == ()


def test_a_cache_of_one_array_returned_alone_passes():
    report = audited(lambda weight, cache, slots: write(cache, weight, slots), cache=POOL)
    assert report.problems == ()
    assert report.alias_bytes == POOL_BYTES


def test_arrays_that_a_program_leaves_alone_come_back_in_place():
    def only_keys(weight, cache, slots):
        return (write(cache[0], weight, slots), cache[1]), jnp.float32(0)

    assert audited(only_keys).problems == ()


def test_a_cache_that_is_not_donated_is_refused():
    report = audited(in_place, donated=())
    with pytest.raises(
        ProgramRefused, match=r"cache\[0\] \(32768 bytes\) does not come back in its own"
    ):
        report.raise_if_bad("step")


def test_swapped_pools_are_refused():
    # Donation pairs equal shapes in order, so the aliases look right. Only the data flow shows the mistake.
    def swapped(weight, cache, slots):
        (keys, values), out = in_place(weight, cache, slots)
        return (values, keys), out

    report = audited(swapped)
    assert report.alias_bytes == report.cache_bytes
    with pytest.raises(ProgramRefused, match=r"cache\[1\] comes back in the place of cache\[0\]"):
        report.raise_if_bad("step")


def test_a_read_that_must_outlive_the_write_is_refused_as_a_copy():
    # The new values decide where the old keys are read, so both must exist at once.
    def read_late(weight, cache, slots):
        old_keys = cache[0]
        cache, out = in_place(weight, cache, slots)
        return cache, old_keys[out[:, 0].astype(jnp.int32) % 256]

    report = audited(read_late)
    assert [copy.pool for copy in report.copies if copy.exact]
    with pytest.raises(ProgramRefused, match=r"cache\[0\] \(32768 bytes\) is copied by %copy"):
        report.raise_if_bad("step")


def test_a_pool_made_anew_is_refused():
    def rebuilt(weight, cache, slots):
        keys = write(jnp.zeros_like(cache[0]), weight, slots)
        return (keys, write(cache[1], weight, slots)), jnp.float32(0)

    with pytest.raises(ProgramRefused, match=r"cache\[0\] comes back as a new array"):
        audited(rebuilt).raise_if_bad("step")


def test_an_array_that_changes_its_dtype_is_refused():
    def narrowed(weight, cache, slots):
        (keys, values), out = in_place(weight, cache, slots)
        return (keys, values.astype(jnp.bfloat16)), out

    # JAX does not always warn of this.
    with pytest.raises(ProgramRefused, match=r"cache\[1\] \(32768 bytes\) does not come back"):
        audited(narrowed).raise_if_bad("step")


def test_arguments_that_a_program_does_not_read_are_left_out_of_count():
    def unused(weight, cache, slots):
        return tuple(pool.at[slots].set(0.0, mode="drop") for pool in cache)

    assert audited(unused).problems == ()

    def swapped(weight, cache, slots):
        return unused(weight, cache, slots)[::-1]

    with pytest.raises(ProgramRefused, match=r"cache\[1\] comes back in the place of cache\[0\]"):
        audited(swapped).raise_if_bad("step")


def test_empty_places_among_the_arguments_are_no_arrays():
    def run(weight, cache, slots):
        return in_place(weight["scale"], cache, slots)

    program = jax.jit(run, donate_argnums=1)
    weight = {"bias": None, "scale": WEIGHT, "unread": WEIGHT}
    compiled = program.lower(weight, (POOL, POOL), SLOTS).compile()
    assert audit(compiled, cache_argument=1).problems == ()


def test_a_module_with_other_parameters_than_arguments_cannot_be_audited(monkeypatch):
    program = jax.jit(in_place, donate_argnums=1)
    compiled = program.lower(WEIGHT, (POOL, POOL), SLOTS).compile()
    # As if JAX had left out the weight that the module takes.
    places = ((None, *compiled.input_shardings[0][1:]), {})
    monkeypatch.setattr(jax.stages.Compiled, "input_shardings", places)
    with pytest.raises(ProgramRefused, match="takes 4 arrays where its arguments have 3"):
        audit(compiled, cache_argument=1).raise_if_bad("step")


def test_another_donated_argument_is_refused():
    def run(weight, cache, slots):
        return in_place(weight, cache, slots)[0], weight + 1

    report = audited(run, donated=(0, 1))
    with pytest.raises(
        ProgramRefused, match="65664 bytes are updated in place, but the cache has 65536"
    ):
        report.raise_if_bad("step")


def test_small_arrays_may_be_copied():
    # The same late read as above, of an array so small that copying it costs nothing.
    small = jax.ShapeDtypeStruct((16, 32), jnp.float32)

    def read_late(weight, cache, slots):
        new = write(cache, weight, slots)
        return new, cache[new[slots][:, 0].astype(jnp.int32) % 16]

    assert audited(read_late, cache=small).problems == ()


def test_a_pool_laid_out_anew_is_noted_on_the_cpu_and_refused_elsewhere():
    def transposed(weight, cache, slots):
        (keys, values), _ = in_place(weight, cache, slots)
        return (keys, values), jnp.sin(keys.T)

    report = audited(transposed)
    if report.backend != "cpu":
        assert report.problems
        return
    assert {copy.exact for copy in report.copies} == {False}
    assert report.problems == ()


def test_a_loop_that_makes_its_pool_anew_is_refused():
    def loop(weight, cache, slots):
        def body(carry):
            step, (keys, values) = carry
            anew = jnp.full_like(keys, 0.5) * step.astype(jnp.float32)
            return step + 1, (anew, write(values, weight, slots))

        _, cache = jax.lax.while_loop(
            lambda carry: carry[0] < slots[0], body, (jnp.int32(0), cache)
        )
        return cache, jnp.float32(0)

    with pytest.raises(ProgramRefused, match=r"cache\[0\] comes back as a new array"):
        audited(loop).raise_if_bad("step")


def test_each_sum_over_gpus_keeps_signals_and_two_copies_of_its_array():
    """In pieces of 2 MiB; what is too large for XLA's own kernel is summed by NCCL, and other operations keep none."""
    text = "\n".join(
        f"  %{name} = {shape}{{1,0}} {opcode}(%x), replica_groups={{{{0,1}}}}, to_apply=%add"
        for name, shape, opcode in (
            ("all-reduce.1", "bf16[8,4096]", "all-reduce"),
            ("all-reduce.2", "f32[256,4096]", "all-reduce"),
            ("all-reduce.3", "bf16[2048,4096]", "all-reduce"),
            ("fusion.1", "bf16[8,4096]", "fusion"),
        )
    )
    assert sum_bytes(text) == (2 + 2) * 2**20 + (2 + 8) * 2**20
    assert sum_bytes(text.replace("all-reduce(", "add(")) == 0
