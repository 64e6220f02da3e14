"""The contract of `page_write`, signed by every implementation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_write
from pallas_kernels.page_write import reference, xla
from pallas_kernels.page_write.cases import CASES
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import cases, device, equations, implementations

SMALL = [case for case in CASES if case.ci]
every_implementation = implementations("xla", "mosaic_gpu")


def assert_same_bytes(pages, wanted):
    assert [np.asarray(pool).tobytes() for pool in pages] == [pool.tobytes() for pool in wanted]


@cases(CASES)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_writes_exactly_its_slots(implementation, case, dtype):
    """The written values are bit-exact. Padding writes nothing, whether its values are finite or not."""
    inputs = case.inputs(1, dtype)
    program = jax.jit(page_write, static_argnames="implementation")
    written = program(**inputs, implementation=implementation)
    assert_same_bytes(written, oracle.page_write(**inputs))


@cases(SMALL[:1] + SMALL[5:])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    assert_same_bytes(jax.jit(reference.page_write)(**inputs), oracle.page_write(**inputs))


@every_implementation
def test_any_slot_past_the_end_writes_nothing(implementation):
    """A slot far past the end is not clamped to the last one."""
    pages = (jnp.ones((2, 4, 3)),)
    slots = jnp.array([8, 9, 2**31 - 1], jnp.int32)
    written = page_write(pages, (jnp.zeros((3, 3)),), slots, implementation=implementation)
    assert_same_bytes(written, [np.ones((2, 4, 3), np.float32)])


@every_implementation
def test_a_negative_slot_inside_a_trace_writes_nothing(implementation):
    """Plain JAX indexing would wrap -1 to the last slot."""
    pages = (jnp.ones((2, 4, 3)),)
    program = jax.jit(page_write, static_argnames="implementation")
    slots = jnp.array([-1, -4, -8, -9], jnp.int32)
    written = program(pages, (jnp.zeros((4, 3)),), slots, implementation=implementation)
    assert_same_bytes(written, [np.ones((2, 4, 3), np.float32)])


@every_implementation
def test_slot_zero_is_a_slot_like_any_other(implementation):
    slots = jnp.array([0], jnp.int32)
    (pool,) = page_write((jnp.ones((2, 4)),), (jnp.zeros(1),), slots, implementation=implementation)
    np.testing.assert_array_equal(np.flatnonzero(pool == 0), [0])


@every_implementation
def test_values_are_cast_to_the_pool(implementation):
    pages = (jnp.zeros((2, 4), jnp.bfloat16),)
    slots = jnp.array([5], jnp.int32)
    (pool,) = page_write(pages, (jnp.full(1, 1 / 3),), slots, implementation=implementation)
    assert pool.dtype == jnp.bfloat16
    assert pool[1, 1] == jnp.bfloat16(1 / 3)


@every_implementation
def test_donated_pools_are_written_in_place(implementation):
    """All bytes alias, no copy is as large as a pool, and the addresses stay."""
    inputs = device(SMALL[2].inputs(3, "bfloat16"))

    def write(pages, values, slots):
        return page_write(pages, values, slots, implementation=implementation)

    compiled = jax.jit(write, donate_argnums=0).lower(**inputs).compile()
    pool_bytes = sum(pool.nbytes for pool in inputs["pages"])
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
    shape = ",".join(str(size) for size in inputs["pages"][0].shape)
    assert not re.search(rf"= \w+\[{shape}\]\S* copy\(", compiled.as_text())
    before = [pool.unsafe_buffer_pointer() for pool in inputs["pages"]]
    written = compiled(**inputs)
    assert [pool.unsafe_buffer_pointer() for pool in written] == before


def test_a_pool_beyond_32_bit_offsets_is_addressed_by_page_and_offset():
    """The pool has 2**36 elements. One scatter writes it, whose indices are pages and offsets, never elements."""
    pool = jax.ShapeDtypeStruct((2**20, 64, 8, 128), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((5, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((5,), jnp.int32)
    jaxpr = jax.make_jaxpr(xla.page_write)((pool,), (values,), slots)
    used = [e for e in equations(jaxpr.jaxpr) if e.outvars[0].aval.shape == pool.shape]
    assert [equation.primitive.name for equation in used] == ["scatter"]
    numbers = used[0].params["dimension_numbers"]
    assert numbers.scatter_dims_to_operand_dims == (0, 1)
    assert used[0].params["unique_indices"]
    (written,) = jax.eval_shape(page_write, (pool,), (values,), slots)
    assert written.shape == pool.shape


def refused(message, **changes):
    good = {
        "pages": (np.zeros((2, 4, 3), np.float32),) * 2,
        "values": (np.zeros((5, 3), np.float32),) * 2,
        "slots": np.arange(5, dtype=np.int32),
    }
    inputs = {**good, **changes}
    with pytest.raises(ValueError, match=message):
        page_write(jax.tree.map(jnp.asarray, inputs["pages"]), inputs["values"], inputs["slots"])


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int16", "float32"])
def test_slots_of_another_dtype_are_refused(as_in_production, dtype):
    refused(f"slots must be int32, got {dtype}", slots=np.arange(5).astype(dtype))


def test_negative_slots_are_refused(as_in_production):
    refused("slots holds a negative number", slots=np.array([0, 1, 2, 3, -1], np.int32))


def test_values_that_do_not_fit_the_pools_are_refused(as_in_production):
    refused("got 2 pools and 1 arrays of values", values=(np.zeros((5, 3), np.float32),))
    refused(r"values\[1\] must have shape \[5, 3\]", values=(np.zeros((5, 3)), np.zeros((5, 4))))
    pools = (np.zeros((2, 4, 3), np.float32), np.zeros((3, 4, 3), np.float32))
    refused(r"pages\[1\] must have shape \[2, 4, 3\]", pages=pools)


def test_a_pool_that_leaves_no_padding_slots_is_refused():
    """Padding slots must stay distinct int32 numbers."""
    pool = jax.ShapeDtypeStruct((2**21, 1024, 1), jnp.uint8)
    values = jax.ShapeDtypeStruct((5, 1), jnp.uint8)
    with pytest.raises(ValueError, match="leave no int32 numbers"):
        jax.eval_shape(page_write, (pool,), (values,), jax.ShapeDtypeStruct((5,), jnp.int32))
