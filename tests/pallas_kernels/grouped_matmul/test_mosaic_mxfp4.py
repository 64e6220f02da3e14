"""`grouped_matmul` of MXFP4 and few rows per group: the code of a thread in NumPy, and on a GPU."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_mxfp4
from pallas_kernels.grouped_matmul.mosaic_mxfp4 import Plan
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry
from tests.pallas_kernels.few_bits import drawn, exact
from tests.pallas_kernels.mosaic.numpy_threads import NumpyThreads, Race, without_barrier


def made(sizes, inner, out, axis, kind="mxfp4", seed=0):
    """Returns a weight, x with a row for each of all groups, and the sizes of the groups."""
    groups = len(sizes)
    lead = (groups, out) if axis == 0 else (out, groups)
    weight = drawn(kind, lead, inner, seed=seed, hostile=True)
    x = np.random.default_rng(seed).normal(size=(sum(sizes), inner)).astype(ml_dtypes.bfloat16)
    return weight, x, np.array(sizes, np.int32)


def by_hand(weight, x, sizes, axis):
    """Returns the results in float64."""
    matrices = np.moveaxis(exact(weight), axis, 0)[np.repeat(np.arange(len(sizes)), sizes)]
    return np.einsum("ri,roi->ro", x.astype(np.float64), matrices)


def sums_of_magnitudes(weight, x, sizes, axis):
    """Returns what the errors of float32 sums are measured by."""
    matrices = np.moveaxis(np.abs(exact(weight)), axis, 0)
    found = matrices[np.repeat(np.arange(len(sizes)), sizes)]
    return np.einsum("ri,roi->ro", np.abs(x.astype(np.float64)), found)


def in_numpy(
    weight, x, sizes, axis, *, result=np.float32, threads=NumpyThreads, **changes
) -> np.ndarray:
    """Runs the code of each block, of four warps."""
    geometry = Geometry.of(weight, x, group_axis=axis, result=result)
    assert geometry.refusal() is None
    plan = replace(Plan.of(geometry), warps=4, **changes)
    out = np.full(geometry.rows * geometry.out, np.nan, result)
    for block in range(geometry.groups * plan.parts):
        mosaic_mxfp4.multiply(
            threads(),
            sizes,
            weight.codes.reshape(-1),
            weight.scales.reshape(-1).view(np.uint8),
            x.reshape(-1),
            out,
            np.full(plan.rows * plan.stride, np.nan, np.float32),
            np.full(128, block, np.int32),
            geometry=geometry,
            plan=plan,
        )
    return out.reshape(geometry.rows, geometry.out)


def assert_near(got, wanted, tolerance=1e-5):
    error = np.abs(np.asarray(got, np.float64) - wanted)
    assert (error <= tolerance * np.abs(wanted).max()).all()


@pytest.mark.parametrize(
    ("sizes", "inner", "out", "axis", "changes"),
    [
        # A row has a turn that is not whole; some columns of the last tile are not there.
        ((3, 0, 6, 1), 192, 72, 0, {"parts": 2, "columns": 48}),
        # More rows than a block keeps, and two turns.
        ((0, 19, 2), 256, 64, 1, {"rows": 16, "tiles": 2}),
        # Several units of several turns.
        ((11, 0, 1), 256, 136, 1, {"rows": 8, "tiles": 1, "parts": 1, "columns": 144}),
        # More groups than a warp has lanes.
        ((0,) * 20 + (2,) + (0,) * 14 + (3, 0, 0, 1), 64, 64, 0, {}),
    ],
)
@pytest.mark.parametrize("result", [np.float32, ml_dtypes.bfloat16])
def test_each_row_meets_the_matrix_of_its_group(sizes, inner, out, axis, changes, result):
    given = made(sizes, inner, out, axis)
    got = in_numpy(*given, axis, result=result, **changes)
    assert_near(got, by_hand(*given, axis), max(1e-5, float(jnp.finfo(result).eps)))


@pytest.mark.parametrize("number", range(4))
def test_each_barrier_is_needed(number):
    """Of a group with two rounds of rows; the first one waits for no other warp."""
    given = made((9, 0), 128, 64, 0)
    options = {"rows": 8, "parts": 1, "columns": 64}
    if number == 0:
        in_numpy(*given, 0, threads=without_barrier(0), **options)
        return
    with pytest.raises(Race):
        in_numpy(*given, 0, threads=without_barrier(number), **options)


def test_a_rows_bits_depend_on_no_other_row():
    weight, x, sizes = made((5, 11), 192, 64, 0)
    whole = in_numpy(weight, x, sizes, 0, rows=16)
    alone = in_numpy(weight, x[7:8], np.array([0, 1], np.int32), 0, rows=8, tiles=1)
    np.testing.assert_array_equal(alone[0], whole[7])
    x[[0, 6, 15]] = np.nan
    others = in_numpy(weight, x, sizes, 0, rows=16)
    assert np.isnan(others[[0, 6, 15]]).all()
    kept = np.delete(np.arange(16), [0, 6, 15])
    np.testing.assert_array_equal(others[kept], whole[kept])


def test_sizes_that_exceed_the_rows_store_nothing_behind_them():
    """They are not checked under a trace."""
    weight, x, sizes = made((3, 4, 2), 128, 64, 0)
    whole = in_numpy(weight, x, sizes, 0)
    for wrong in ([3, 9, 2], [3, 2**30, 2], [3, 6, 7]):
        got = in_numpy(weight, x, np.array(wrong, np.int32), 0)
        np.testing.assert_array_equal(got[:7], whole[:7])


def every_scale():
    """Returns a weight with a scale per row, from code 0 on, and all codes of 4 bits in each row."""
    codes = np.resize(np.arange(256, dtype=np.uint8), (1, 256, 32))
    codes[:, :, :16] = np.arange(16) * 17
    scales = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 2, axis=2)
    return FewBits(codes, scales.view(ml_dtypes.float8_e8m0fnu), None, None, "float4_e2m1fn")


@pytest.mark.parametrize("implementation", ["code", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_every_scale_is_the_number_that_it_stands_for(implementation):
    """From 2**-93 to 2**33; larger ones and NaN are NaN, and the least ones may lose places."""
    weight = every_scale()
    x = np.eye(8, 64, dtype=ml_dtypes.bfloat16)
    sizes = np.array([8], np.int32)
    if implementation == "code":
        got = in_numpy(weight, x, sizes, 0)
    else:
        got = grouped_matmul(weight, x, sizes, result=jnp.float32, implementation="mosaic_gpu")
    got = np.asarray(got).T
    wanted = exact(weight)[0, :, :8]
    np.testing.assert_array_equal(got[127 - 93 : 127 + 34], wanted[127 - 93 : 127 + 34])
    np.testing.assert_allclose(got[: 127 - 93], wanted[: 127 - 93], rtol=0, atol=2.0**-94)
    assert np.isnan(got[127 + 34 :]).all()


def test_the_kernel_is_for_mxfp4_and_few_rows():
    weight, x, _ = made((1, 0), 128, 64, 0)

    def plan(rows=1, **changes):
        return Plan.of(
            replace(Geometry.of(weight, x, group_axis=0, result=None), rows=rows, **changes)
        )

    assert plan() is not None
    assert plan(16) is not None
    assert plan(17) is None
    assert plan(dtype=jnp.dtype(jnp.float16)) is None
    assert plan(packing=None) is None
    # A row of x would not fit into shared memory eight times.
    assert plan(inner=16384) is None
    with fixed_order():
        assert plan() is None
    for kind in ("int4 by 32", "int4 by 32, powers", "e2m1 by 64, powers", "e2m1 by row, powers"):
        other, x, _ = made((1, 0), 128, 64, 0, kind=kind)
        assert Plan.of(Geometry.of(other, x, group_axis=0, result=None)) is None


@pytest.mark.parametrize(
    ("rows", "groups", "out", "wanted"),
    [
        # GPT-OSS-20B's products of 8 and 64 tokens.
        (32, 32, 5760, Plan(8, 6, 960, 23, 2)),
        (256, 32, 5760, Plan(16, 4, 1440, 23, 2)),
        (256, 32, 2880, Plan(16, 4, 720, 23, 1)),
        # And GPT-OSS-120B's of 24 and 64.
        (96, 128, 5760, Plan(8, 3, 1920, 23, 2)),
        (256, 128, 5760, Plan(8, 1, 5760, 23, 2)),
    ],
)
def test_blocks_fill_the_gpu_once(rows, groups, out, wanted):
    weight, x, _ = made((1, 0), 192, 64, 0)
    geometry = Geometry.of(weight, x, group_axis=0, result=None)
    packing = geometry.packing._replace(groups=90)
    geometry = replace(geometry, rows=rows, groups=groups, out=out, inner=2880, packing=packing)
    assert Plan.of(geometry) == wanted


@pytest.mark.slow
def test_interpreted_the_kernel_does_the_same_without_a_race(races):
    weight, x, sizes = made((3, 0, 6), 128, 64, 0)
    arrays = jax.tree.map(jnp.asarray, (weight, x, sizes))
    got = mosaic_gpu.grouped_matmul(*arrays, result=jnp.float32, interpret=True)
    assert_near(got, by_hand(weight, x, sizes, 0))
    assert not races()


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("result", "tolerance"), [(jnp.float32, 3e-6), (jnp.bfloat16, 2**-8)])
def test_on_a_gpu_rows_of_many_groups_have_the_bits_that_they_have_alone(axis, result, tolerance):
    """To float32's precision, as the other kernel for these weights (`test_grouped_matmul`)."""
    draw = np.random.default_rng(4)
    for rows, groups, inner, out in (
        (200, 32, 2880, 720),
        (40, 8, 2880, 5760),
        (5, 64, 512, 200),
        (60, 13, 7168, 72),
    ):
        sizes = np.bincount(draw.integers(0, groups, rows), minlength=groups).astype(np.int32)
        sizes[0] += 21
        weight, x, sizes = made(list(sizes), inner, out, axis, seed=rows)
        geometry = Geometry.of(weight, x, group_axis=axis, result=result)
        assert Plan.of(geometry) is not None, "another kernel would run"
        run = jax.jit(
            lambda *arrays: grouped_matmul(
                *arrays, group_axis=axis, result=result, implementation="mosaic_gpu"
            )
        )
        got = np.asarray(run(weight, x, sizes))
        error = np.abs(got.astype(np.float64) - by_hand(weight, x, sizes, axis))
        assert (error <= tolerance * sums_of_magnitudes(weight, x, sizes, axis)).all()
        last = np.flatnonzero(sizes)[-1]
        alone = np.asarray(run(weight, x[-1:], np.eye(groups, dtype=np.int32)[last]))
        np.testing.assert_array_equal(alone, got[-1:])
