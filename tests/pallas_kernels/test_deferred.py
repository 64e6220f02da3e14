"""A deferred kernel is one equation of a trace, runs as the kernel does, and is the same kernel if its sizes are.

Kernels are plain functions of JAX here. What is lowered for an H200 is in `tests/pallas_kernels/h200`.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import deferred as module
from pallas_kernels import device, skinny_matmul
from pallas_kernels.argument_weights import are_arguments, argument_weights, computed_weights
from pallas_kernels.deferred import DEFERRED, deferred, describe
from pallas_kernels.fixed_order import fixed_order, is_fixed
from tests.layers.jaxprs import equations as all_equations

X = jnp.arange(8, dtype=jnp.float32)
OPTIONS = {"out_type": jax.ShapeDtypeStruct((8,), jnp.float32), "kernel_name": "scale"}
TRACES = []


@pytest.fixture(autouse=True)
def lowered(monkeypatch):
    """What other tests have lowered is unknown; returns what this one lowers."""
    kept = {}
    TRACES.clear()
    monkeypatch.setattr(module, "_lowered", kept)
    return kept


class Shade(Enum):
    DARK = 1


@dataclass(frozen=True)
class Sizes:
    """What a kernel is specialised for."""

    factor: float
    dtype: np.dtype = np.dtype("float32")

    def body(self, *refs):
        raise AssertionError("a stand-in for the body, whose launch is a plain function")


def launch(body, options):
    """What a kernel is here, which notes the contexts of each of its traces."""
    factor = body.func.__self__.factor

    def run(x):
        TRACES.append((is_fixed(), are_arguments()))
        return x.astype(jnp.float32) * jnp.float32(factor)

    return run


def launch_of_two(body, options):
    return lambda x: {"first": x, "second": jnp.arange(2, dtype=jnp.int32)}


def launch_in_place(body, options):
    def run(array, ref):
        TRACES.append(ref)
        ref[...] = ref[...] * 2
        return array[...] + ref[...]

    return run


def scale(factor, options=OPTIONS):
    return deferred(launch, partial(Sizes(factor).body, True), options)


def equations(traced):
    return [str(one.primitive) for one in traced.jaxpr.jaxpr.eqns]


def test_a_body_is_traced_with_the_lowering_and_once_for_equal_kernels():
    def run(x):
        for factor in (2.0, 3.0, 2.0):
            x = scale(factor)(x)
        return x

    traced = jax.jit(run).trace(X)
    assert equations(traced) == [DEFERRED] * 3
    assert len(TRACES) == 0
    compiled = traced.lower().compile()
    assert len(TRACES) == 2
    np.testing.assert_array_equal(compiled(X), np.arange(8) * 12)


def test_programs_that_follow_take_over_what_the_first_one_lowered(lowered):
    double = scale(2.0)
    compiled = jax.jit(lambda x: double(x) + 1).lower(X).compile()
    assert len(TRACES) == 1
    # Another kernel of equal sizes, and the name of its function is taken in this program.
    others = scale(2.0), scale(3.0)

    def run(x):
        for other in others:
            x = other(x)
        return jnp.sqrt(x)

    following = jax.jit(run).lower(X).compile()
    assert len(TRACES) == 2
    assert len(lowered) == 2
    np.testing.assert_array_equal(compiled(X), np.arange(8) * 2 + 1)
    np.testing.assert_allclose(following(X), np.sqrt(np.arange(8) * 6), rtol=1e-6)


def test_operands_of_another_type_make_another_kernel(lowered):
    double = scale(2.0)
    for operand in (X, X.astype(jnp.int32), X.astype(jnp.bfloat16)):
        jax.jit(lambda x: double(x)).lower(operand)
    assert len(TRACES) == len(lowered) == 3


def test_devices_of_a_mesh_take_over_what_one_device_lowered():
    """A kernel under `jax.shard_map` is the same on each device."""
    double = scale(2.0)
    jax.jit(double).lower(X)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("rows",))
    whole = jnp.tile(X, mesh.size)
    split = jax.sharding.PartitionSpec("rows")
    over = jax.shard_map(double, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    np.testing.assert_array_equal(jax.jit(over)(whole), np.asarray(whole) * 2)
    assert len(TRACES) == 1


def test_a_kernel_runs_outside_of_a_program_and_over_a_further_axis():
    double = scale(2.0)
    np.testing.assert_array_equal(double(X), np.arange(8) * 2)
    both = jax.vmap(double)(jnp.stack((X, -X)))
    np.testing.assert_array_equal(both, np.stack((np.arange(8), -np.arange(8))) * 2)


def test_results_have_the_structure_of_the_launch():
    two = {"first": OPTIONS["out_type"], "second": jax.ShapeDtypeStruct((2,), jnp.int32)}

    found = jax.jit(deferred(launch_of_two, Sizes(1.0).body, OPTIONS | {"out_type": two}))(X)
    assert found.keys() == two.keys()
    assert found["second"].dtype == jnp.int32


def test_a_kernel_changes_operands_that_are_refs_and_keeps_the_others():
    def program(x, y):
        ref = jax.new_ref(x)
        out = deferred(launch_in_place, Sizes(2.0).body, OPTIONS)(y, ref)
        return out, jax.freeze(ref)

    traced = jax.jit(program).trace(X, X + 1)
    assert DEFERRED in equations(traced)
    assert not TRACES
    out, changed = traced.lower().compile()(X, X + 1)
    np.testing.assert_array_equal(out, np.arange(8) * 3 + 1)
    np.testing.assert_array_equal(changed, np.arange(8) * 2)
    assert len(TRACES) == 1


def test_one_ref_is_not_two_operands():
    def program(x):
        ref = jax.new_ref(x)
        return deferred(launch_in_place, Sizes(2.0).body, OPTIONS)(ref, ref)

    with pytest.raises(ValueError, match="scale was given one Ref as several operands"):
        jax.jit(program).trace(X)


def test_a_kernel_that_changes_an_operand_is_another_than_one_that_reads_it():
    def text(wrap):
        call = deferred(launch_in_place, Sizes(2.0).body, OPTIONS)
        return str(jax.jit(lambda x, y: call(wrap(x), jax.new_ref(y))).trace(X, X).jaxpr)

    assert text(jax.new_ref) != text(lambda x: x)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_body_is_traced_in_the_contexts_of_its_call(in_order, given):
    with fixed_order(in_order), argument_weights(given):
        traced = jax.jit(scale(2.0)).trace(X)
    traced.lower()
    assert [(in_order, given)] == TRACES


def test_contexts_and_sizes_tell_kernels_apart():
    def text(factor, *, in_order=False):
        with fixed_order(in_order):
            return str(jax.jit(scale(factor)).trace(X).jaxpr)

    assert text(2.0) == text(2.0)
    assert len({text(2.0), text(3.0), text(2.0, in_order=True)}) == 3


def test_a_weight_that_is_copied_early_is_checked():
    options = OPTIONS | {"kernel_name": "scale_of_argument"}
    double = scale(2.0, options)
    given = jax.jit(double).trace(X).jaxpr.jaxpr
    computed = jax.jit(lambda x: double(x + 1)).trace(X).jaxpr.jaxpr
    assert computed_weights(given, [True]) == set()
    assert computed_weights(computed, [True]) == {"scale_of_argument"}


@pytest.mark.parametrize(
    "value",
    [
        lambda refs: None,
        partial(Sizes.body, lambda: 0),
        {"bounds": np.zeros(2)},
        (X,),
        object(),
    ],
)
def test_what_no_text_tells_is_traced_at_once(value):
    """A function with variables of another one, arrays, and objects of unknown state."""
    with pytest.raises(module._Unknown):
        describe(value)
    options = OPTIONS | {"scratch_types": value}
    jax.jit(scale(1.0, options)).trace(X)
    assert len(TRACES) == 1


@pytest.mark.parametrize("rows", [1, 64])
def test_products_are_deferred(rows, monkeypatch):
    """Else a warm start would trace their bodies again, which no result shows."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 4096), (rows, 4096))]
    multiply = partial(skinny_matmul, implementation="mosaic_gpu")
    found = all_equations(multiply, *types, whole=(DEFERRED, "mpmd_map"))
    kinds = [str(one.primitive) for one in found]
    assert DEFERRED in kinds
    assert "mpmd_map" not in kinds


def test_descriptions_name_every_part():
    sizes = Sizes(0.5)
    found = describe((sizes.body, {"shade": Shade.DARK, "type": OPTIONS["out_type"]}, [None, "x"]))
    for part in ("factor=0.5", "Sizes.body", "Shade.DARK", "float32[8]", "None", "'x'"):
        assert part in found
    assert describe((jnp.bfloat16, np.float32, Sizes)) == describe(
        (jnp.bfloat16, np.float32, Sizes)
    )
    assert describe(jnp.bfloat16) != describe(jnp.float32)
    assert describe(1) != describe("1")
    assert describe((1, 2)) != describe([1, 2])
    assert "0x" not in found
