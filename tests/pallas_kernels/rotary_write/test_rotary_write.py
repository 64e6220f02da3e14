"""The contract of `rotary_write`, signed by every implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotary_write
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.rotary_write import mosaic_gpu, reference
from pallas_kernels.rotary_write.arguments import RotaryArrays
from pallas_kernels.rotary_write.cases import CASES
from tests.fast_cases import fast_cases
from tests.pallas_kernels.contract import bits, by_name, cases, device, grouped, implementations
from tests.tolerances import assert_output

SMALL = [case for case in CASES if case.ci]
BY_NAME = {case.name: case for case in CASES}
every_implementation = implementations("xla", "mosaic_gpu")
# XLA computes float16 as it does bfloat16.
every_dtype = pytest.mark.parametrize(
    "dtype", fast_cases(["float32", "bfloat16", "float16"], "float32", "bfloat16")
)


def run(inputs, implementation):
    """Runs an implementation as production does; if it refuses, checks that the op says so, and skips aloud."""
    arrays = device(inputs)
    if implementation == "mosaic_gpu":
        (given,), _ = grouped(arrays, RotaryArrays)
        reason = mosaic_gpu.why_not(given)
        if reason is not None:
            with pytest.raises(Unsupported, match=re.escape(reason)):
                rotary_write(**arrays, implementation=implementation)
            pytest.skip(f"{implementation} refuses: {reason}")
    return compiled(partial(rotary_write, implementation=implementation), arrays)


def compiled(function, arrays):
    """Runs a function in a program; whether values are normalised is an option of it, and no array."""
    options = {name: arrays[name] for name in ("value_norm",) if name in arrays}
    traced = {name: value for name, value in arrays.items() if name not in options}
    return jax.jit(partial(function, **options))(**traced)


def heads_of(inputs):
    kv_heads = inputs["pages"][0].shape[2]
    heads = inputs["qkv"].shape[1] - 2 * kv_heads
    return np.split(inputs["qkv"], (heads, heads + kv_heads), axis=1)


def oracle(inputs):
    """Queries and keys in float64, normalised and turned one pair after the other, and values, perhaps normalised."""
    cos, sin = (inputs[name].astype(np.float64) for name in ("cos", "sin"))
    *queries_and_keys, v = heads_of(inputs)
    half, out = cos.shape[1], []
    for index, x in enumerate(queries_and_keys):
        x = x.astype(np.float64)
        if inputs["norm"] is not None:
            x = unit(x) * inputs["norm"][index].astype(np.float64)
        for pair in range(half):
            first, second = x[..., pair].copy(), x[..., pair + half].copy()
            c, s = cos[:, pair, None], sin[:, pair, None]
            x[..., pair], x[..., pair + half] = first * c - second * s, first * s + second * c
        out.append(x)
    return *out, unit(v.astype(np.float64)) if "value_norm" in inputs else v


def unit(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def rows_of(pool, slots):
    """What lies at the slots."""
    return np.asarray(pool).reshape(-1, *pool.shape[2:])[slots]


def real_tokens(inputs):
    """Which tokens have a slot; the others are padding."""
    num_pages, page_size = inputs["pages"][0].shape[:2]
    return (inputs["slots"] >= 0) & (inputs["slots"] < num_pages * page_size)


def assert_rest_is_untouched(pools, inputs):
    for pool, before in zip(pools, inputs["pages"], strict=True):
        free = np.ones(before.shape[0] * before.shape[1], bool)
        free[inputs["slots"][real_tokens(inputs)]] = False
        assert rows_of(pool, free).tobytes() == rows_of(before, free).tobytes()


def assert_is_oracle(result, inputs, dtype):
    q, pools = result
    wanted_q, wanted_k, v = oracle(inputs)
    assert q.dtype == dtype
    assert_output(q, wanted_q, dtype)
    real = real_tokens(inputs)
    slots = inputs["slots"][real]
    if len(pools) == 2:
        assert_output(rows_of(pools[0], slots), wanted_k[real], dtype)
        if v.dtype == dtype:
            assert rows_of(pools[1], slots).tobytes() == v[real].tobytes()
        else:
            assert_output(rows_of(pools[1], slots), v[real], dtype)
    else:
        for pool, scales, wanted in zip(pools[:2], pools[2:], (wanted_k, v), strict=True):
            assert_is_quantised(rows_of(pool, slots), rows_of(scales, slots), wanted[real], dtype)
    assert_rest_is_untouched(pools, inputs)


def assert_is_quantised(stored, scales, wanted, dtype):
    """Within half a step of the stored dtype, besides what `dtype` rounds before."""
    wide, scales = stored.astype(np.float64), scales[..., None].astype(np.float64)
    largest = LARGEST[stored.dtype.name]
    step = 1 / 8 * np.maximum(np.abs(wide), 2.0**-6) if stored.dtype.name != "int8" else 1.0
    slack = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    error = np.abs(wide * scales - wanted.astype(np.float64))
    assert (error <= 0.51 * step * scales + slack * (1 + np.abs(wanted.astype(np.float64)))).all()
    np.testing.assert_array_equal(np.abs(wide).max(-1, initial=0), largest)


# With and without a norm, parts that are not turned, odd sizes, and pages of 8 bits.
@cases(
    [case for case in CASES if case.pages < 4096],
    fast=("groups", "norm", "odd-heads", "partly-turned", "width-6", "values", "fp8", "int8-norm"),
)
@every_implementation
@every_dtype
def test_it_equals_the_oracle_and_writes_exactly_its_slots(implementation, case, dtype):
    """The written values are bit-exact. Padding writes nothing, whether its values are finite or not."""
    inputs = case.inputs(1, dtype)
    assert_is_oracle(run(inputs, implementation), inputs, dtype)


@cases([BY_NAME[name] for name in ("norm", "partly-turned", "values", "fp8")])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    assert_is_oracle(compiled(reference.rotary_write, device(inputs)), inputs, "float32")


@cases([case for case in CASES if not case.ci])
@implementations("mosaic_gpu")
def test_real_shapes_equal_what_xla_gives(implementation, case):
    inputs = case.inputs(3)
    q, pools = run(inputs, implementation)
    wanted_q, wanted = run(inputs, "xla")
    assert_output(q, np.asarray(wanted_q, np.float64), "bfloat16")
    if not case.quantised:
        assert_output(pools[0], np.asarray(wanted[0], np.float64), "bfloat16")
        if case.value_norm:
            assert_output(pools[1], np.asarray(wanted[1], np.float64), "bfloat16")
        else:
            assert np.asarray(pools[1]).tobytes() == np.asarray(wanted[1]).tobytes()
    else:
        assert_is_oracle((q, pools), inputs, "bfloat16")


@every_implementation
@pytest.mark.parametrize("name", ["norm", "int8-norm"])
def test_permuted_tokens_give_the_same_bits(implementation, name):
    """The place of a token in the batch changes no bit."""
    inputs = BY_NAME[name].inputs(4)
    q, pools = run(inputs, implementation)
    order = np.random.default_rng(0).permutation(len(inputs["slots"]))
    moved = {key: inputs[key][order] for key in ("qkv", "cos", "sin", "slots")}
    q_moved, pools_moved = run(inputs | moved, implementation)
    assert bits(q_moved) == [bits(q)[row] for row in order]
    for pool, pool_moved in zip(pools, pools_moved, strict=True):
        assert np.asarray(pool).tobytes() == np.asarray(pool_moved).tobytes()


@every_implementation
@pytest.mark.parametrize("name", ["norm", "fp8"])
def test_padding_tokens_touch_nothing_whatever_they_hold(implementation, name):
    """They hold NaN, and their slots are negative or far past the end."""
    inputs = BY_NAME[name].inputs(5)
    q, pools = run(inputs, implementation)
    padding = ~real_tokens(inputs)
    assert padding.sum() == 2
    for array in ("qkv", "cos", "sin"):
        inputs[array][padding] = np.nan
    inputs["slots"][padding] = [-1, 2**31 - 1]
    q_again, pools_again = run(inputs, implementation)
    assert np.asarray(q)[~padding].tobytes() == np.asarray(q_again)[~padding].tobytes()
    for pool, again in zip(pools, pools_again, strict=True):
        assert np.asarray(pool).tobytes() == np.asarray(again).tobytes()


@every_implementation
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_row_is_marked_by_its_scale(implementation, bad):
    """It must fail loudly where it is read, and break no other."""
    inputs = BY_NAME["fp8"].inputs(6)
    real = np.flatnonzero(real_tokens(inputs))[0]
    inputs["qkv"][real, -1, 3] = bad  # the last head of values
    _, pools = run(inputs, implementation)
    scales = rows_of(pools[3], inputs["slots"][real])
    assert np.isnan(scales[-1])
    assert np.isfinite(scales[:-1]).all()
    assert np.isfinite(rows_of(pools[2], inputs["slots"][real])).all()
    stored = rows_of(pools[1], inputs["slots"][real])[-1]
    np.testing.assert_array_equal(stored.astype(np.float32), 0.0)


@every_implementation
def test_donated_pools_are_written_in_place(implementation):
    """All bytes alias and the addresses stay."""
    inputs = device(BY_NAME["fp8"].inputs(7))
    if implementation == "mosaic_gpu" and by_name(mosaic_gpu.why_not, RotaryArrays)(**inputs):
        pytest.skip("tested where it runs")

    def write(pages, rest):
        return rotary_write(pages, **rest, implementation=implementation)

    pages = inputs.pop("pages")
    compiled = jax.jit(write, donate_argnums=0).lower(pages, inputs).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == sum(pool.nbytes for pool in pages)
    before = [pool.unsafe_buffer_pointer() for pool in pages]
    _, written = compiled(pages, inputs)
    assert [pool.unsafe_buffer_pointer() for pool in written] == before


def refused(message, **changes):
    inputs = BY_NAME["norm"].inputs(8, "float32") | changes
    inputs["pages"] = tuple(map(jnp.asarray, inputs["pages"]))
    with pytest.raises(ValueError, match=message):
        rotary_write(**inputs)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def test_arrays_that_do_not_fit_are_refused(as_in_production):
    pool = zeros(3, 8, 2, 128)
    refused(r"4 \(keys, values and their scales\), got 3", pages=(pool,) * 3)
    refused(r"pages\[1\] must have shape", pages=(pool, zeros(3, 8, 2, 64)))
    refused("2 key heads and 2 value heads, got 7 heads in total", qkv=zeros(8, 7, 128))
    refused(r"qkv must have shape \[any, any, 128\]", qkv=zeros(8, 8, 64))
    refused(r"cos must have shape \[8, any\]", cos=zeros(7, 64))
    refused(r"sin must have shape \[8, 64\]", sin=zeros(8, 32))
    refused("must have 1 to 64 columns", cos=zeros(8, 65), sin=zeros(8, 65))
    refused("must be float32, got float16", cos=zeros(8, 64, dtype="float16"))
    refused(r"norm must have shape \[2, 128\]", norm=zeros(3, 128))
    refused("norm must have qkv's dtype", norm=zeros(2, 128, dtype="float16"))


def test_slots_are_checked_as_those_of_page_write(as_in_production):
    refused("slots must be int32, got int64", slots=np.arange(8))
    refused("slots holds a negative number", slots=np.arange(8, dtype=np.int32) - 1)


def test_scales_are_asked_for_where_they_are_needed_and_only_there(as_in_production):
    pool, scales = zeros(3, 8, 2, 128), zeros(3, 8, 2)
    quantised = zeros(3, 8, 2, 128, dtype="int8")
    refused("must have dtypes int8, int8, float32, float32", pages=(quantised, quantised))
    refused("must have dtypes float32, float32, got", pages=(pool, pool, scales, scales))
    refused(
        r"pages\[3\] must have shape \[3, 8, 2\]", pages=(quantised, quantised, scales, scales[:2])
    )
