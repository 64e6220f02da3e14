"""The contract of `paged_attention`, signed by every implementation."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.inputs.nan_filled_pages import normal
from pallas_kernels.paged_attention import cudnn, mosaic_gpu, reference, xla
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import (
    bits,
    by_name,
    call,
    cases,
    compiled,
    equations,
    implementations,
    implementations_in,
    refusals,
)
from tests.tolerances import assert_lse, assert_output

SMALL = [case for case in CASES if case.ci]
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16}
BY_NAME = {case.name: case for case in CASES}
# Small shapes that kernels take too; their dtype is bfloat16.
KERNEL = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 8}
KERNEL_CASES = ["gpt-oss-like", "gemma2-like", "llama-b3-short"]
every_implementation = implementations("mosaic_gpu", "xla", "cudnn")
in_xla = by_name(xla.paged_attention, AttentionArrays, ScoreOptions)


refusal = refusals(
    mosaic_gpu=lambda *, q, k_pages, **_: mosaic_gpu.why_not(q, k_pages),
    cudnn=by_name(cudnn.why_not, AttentionArrays, ScoreOptions),
)


def run(inputs, implementation):
    return call(partial(paged_attention, return_lse=True), refusal, inputs, implementation)


def assert_is_oracle(result, inputs, dtype):
    out, lse = result
    wanted_out, wanted_lse = oracle.paged_attention(**inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == jnp.float32
    assert_output(out, wanted_out, dtype)
    assert_lse(lse, wanted_lse)


# Lengths on both sides of each bound, a window with sinks, a cap, pages of 8 bits, and a static page.
FAST = ("page-edges", "gpt-oss-like", "gemma2-like", "fp8-window", "int8-static")


# The tests of kernels' shapes below are in bfloat16.
@cases(SMALL, fast=FAST)
@implementations_in("mosaic_gpu", "xla", "cudnn")
def test_it_equals_the_oracle_and_reads_nothing_else(implementation, case, dtype):
    """Every place that must not be read holds NaN, as do the queries of empty rows."""
    inputs = case.inputs(1, dtype)
    assert_is_oracle(run(inputs, implementation), inputs, dtype)


@cases([case for case in SMALL if case.name in ("page-edges", "llama-b3-short")])
@every_implementation
def test_it_works_in_float16(implementation, case):
    inputs = case.inputs(1, "float16")
    assert_is_oracle(run(inputs, implementation), inputs, "float16")


@cases([case for case in CASES if not case.ci])
@every_implementation
def test_it_equals_the_reference_on_real_shapes(implementation, case):
    inputs = case.inputs(1, "bfloat16")
    out, lse = run(inputs, implementation)
    clean = {**inputs, "q": np.nan_to_num(inputs["q"])}
    for row in range(0, len(case.seq_lens), max(1, len(case.seq_lens) // 4)):
        one = {name: clean[name][row : row + 1] for name in ("q", "page_table", "seq_lens")}
        wanted_out, wanted_lse = compiled(reference.paged_attention, {**clean, **one})
        assert_output(out[row : row + 1], np.asarray(wanted_out, np.float64), "bfloat16")
        assert_lse(lse[row : row + 1], wanted_lse)


@cases(SMALL, fast=FAST)
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    clean = {**inputs, "q": np.nan_to_num(inputs["q"])}
    out, lse = compiled(reference.paged_attention, clean)
    wanted_out, wanted_lse = oracle.paged_attention(**clean)
    assert_output(out, wanted_out, "float32")
    assert_lse(lse, wanted_lse)


@cases(SMALL, fast=FAST)
def test_keys_visited_in_blocks_give_the_same_answer(case):
    """Partial softmaxes are kept in float32, and one without keys contributes nothing."""
    inputs = case.inputs(3, "float32")
    result = compiled(
        partial(in_xla, temporary_bytes=20_000),
        inputs,
    )
    assert_is_oracle(result, inputs, "float32")


@pytest.mark.parametrize("longest", [15, 16, 17])
def test_a_block_is_visited_for_its_first_key_alone(longest):
    inputs = Case("", (0, longest), **SIZES, table_width=5).inputs(3, "float32")
    result = compiled(
        partial(in_xla, temporary_bytes=1),
        inputs,
    )
    assert_is_oracle(result, inputs, "float32")


@every_implementation
def test_a_window_sees_exactly_its_width(implementation):
    """Lengths lie below, at and above the bound. The comparison notices a window one token wider."""
    for prefix_lens in ((1, 2, 3), (7, 8, 9)):
        inputs = Case("", prefix_lens, **KERNEL, window=4).inputs(4)
        assert_is_oracle(run(inputs, implementation), inputs, "bfloat16")
    inputs = Case("", (7, 8, 9), **KERNEL).inputs(4)
    wider = run({**inputs, "window": 5}, implementation)
    with pytest.raises(AssertionError):
        assert_is_oracle(wider, {**inputs, "window": 4}, "bfloat16")


@every_implementation
def test_a_window_wider_than_any_row_hides_nothing(implementation):
    """2**31 - 1 and a position after it would not fit in 32 bits."""
    case = Case("", (40, 33), **KERNEL, table_width=6)
    for window in (48, 2**31 - 1):
        inputs = case.inputs(4) | {"window": window}
        assert_is_oracle(run(inputs, implementation), inputs | {"window": None}, "bfloat16")


@every_implementation
@pytest.mark.parametrize("empty", ["rows", "table"])
def test_an_empty_call_returns_empty_arrays_or_nothing_seen(implementation, empty):
    inputs = Case("", (40, 33), **KERNEL, sinks=True).inputs(4)
    if empty == "rows":
        inputs |= {name: inputs[name][:0] for name in ("q", "page_table", "seq_lens")}
    else:
        inputs |= {"page_table": inputs["page_table"][:, :0], "seq_lens": 0 * inputs["seq_lens"]}
    out, lse = run(inputs, implementation)
    assert out.dtype == inputs["q"].dtype
    assert bits(out) == bits(np.zeros_like(inputs["q"]))
    assert bits(lse) == bits(np.full(inputs["q"].shape[:2], -np.inf, np.float32))


@every_implementation
@cases([BY_NAME[name] for name in ("window-edges", *KERNEL_CASES)])
def test_rows_do_not_see_each_other(implementation, case):
    """Permuted rows give permuted bits, and another row's query and length change nothing."""
    inputs = case.inputs(5)
    rows = ("q", "page_table", "seq_lens")
    order = np.random.default_rng(0).permutation(len(case.seq_lens))
    out, lse = run(inputs, implementation)
    moved = run({**inputs, **{name: inputs[name][order] for name in rows}}, implementation)
    if implementation == "cudnn":
        # Its last bits differ from run to run, which no test can ask for; all else holds.
        np.testing.assert_allclose(
            np.asarray(moved[0], np.float32), np.asarray(out, np.float32)[order], atol=2**-7
        )
        return
    assert [bits(out)[row] for row in order] == bits(moved[0])
    assert [bits(lse)[row] for row in order] == bits(moved[1])

    changed = {name: inputs[name].copy() for name in rows}
    changed["seq_lens"][1] = 3
    changed["q"][1] = 7.0
    other, _ = run({**inputs, **changed}, implementation)
    assert bits(out)[0] == bits(other)[0]
    assert bits(out)[2:] == bits(other)[2:]
    assert bits(out)[1] != bits(other)[1]


@every_implementation
@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_a_token_that_could_not_be_quantised_is_an_error_of_its_row_alone(implementation, name):
    """Its scale is NaN, and so is the result of its row; no other row changes."""
    inputs = Case("", (40, 30, 0), **KERNEL, quantised="float8_e4m3fn").inputs(5)
    page, head = inputs["page_table"][1, 2], 1
    inputs[name][page, 3, head] = np.nan
    out, _ = run(inputs, implementation)
    is_nan = np.isnan(np.asarray(out, np.float32))
    assert is_nan[1, 4:].all()
    assert not is_nan[1, :4].any()
    assert not is_nan[[0, 2]].any()


@every_implementation
def test_scales_of_any_size_are_taken(implementation):
    """float16 holds neither such weights nor such values; tokens of 0 have the smallest scale there is."""
    inputs = Case("", (100, 70, 9), **KERNEL, quantised="int8", sinks=True).inputs(6)
    rng = np.random.default_rng(0)
    powers = rng.integers(-30, 30, inputs["v_scales"].shape).astype(np.float32)
    inputs["v_scales"] *= np.exp2(powers)
    inputs["k_scales"] *= np.exp2(rng.integers(-3, 3, powers.shape).astype(np.float32))
    nothing = rng.random(powers.shape) < 0.2
    inputs["v_pages"][nothing] = 0
    seen = ~np.isnan(inputs["v_scales"])
    inputs["v_scales"][nothing & seen] = np.finfo(np.float32).smallest_normal
    out, lse = run(inputs, implementation)
    wanted_out, wanted_lse = oracle.paged_attention(**inputs)
    largest = np.abs(wanted_out).max(axis=-1, keepdims=True)
    assert_output(np.asarray(out, np.float64) / largest, wanted_out / largest, "bfloat16")
    assert_lse(lse, wanted_lse)


@every_implementation
def test_one_executable_serves_all_lengths(implementation):
    """One trace serves the lengths (1, 4, 8) and then (2, 5, 9)."""
    base = Case("", (12, 12, 12), **KERNEL).inputs(6)
    chex.clear_trace_counter()  # it knows functions by their source, which the parametrisation repeats

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(q, k_pages, v_pages, page_table, seq_lens):
        return paged_attention(
            q,
            k_pages,
            v_pages,
            page_table,
            seq_lens,
            scale=base["scale"],
            return_lse=True,
            implementation=implementation,
        )

    for totals in ((1, 4, 8), (2, 5, 9)):
        inputs = {**base, "seq_lens": np.array(totals, np.int32)}
        arrays = ("q", "k_pages", "v_pages", "page_table", "seq_lens")
        assert_is_oracle(step(*(inputs[name] for name in arrays)), inputs, "bfloat16")


@every_implementation
def test_the_static_view_equals_pages_and_dense_attention(implementation):
    """A static cache is pages as long as a sequence, with an identity table."""
    rng = np.random.default_rng(7)
    rows, length, page_size = 3, 128, 8
    q = normal(rng, (rows, 8, 64), "bfloat16")
    k, v = normal(rng, (2, rows, length, 2, 64), "bfloat16")
    seq_lens = np.array([128, 5, 77], np.int32)
    options = {"scale": 0.25, "window": None, "soft_cap": None, "sinks": None}
    table = np.arange(rows, dtype=np.int32)[:, None]
    static = {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "seq_lens": seq_lens}
    order = rng.permutation(rows * length // page_size)

    def paged(dense):
        pages = np.empty((len(order), page_size, 2, 64), dense.dtype)
        pages[order] = dense.reshape(pages.shape)
        return pages

    table = order.astype(np.int32).reshape(rows, -1)
    pages = {**static, "k_pages": paged(k), "v_pages": paged(v), "page_table": table}
    wanted = np.stack(
        [
            oracle.attend(q[r], k[r, :n], v[r, :n], scale=0.25, soft_cap=None, sinks=None)[0]
            for r, n in enumerate(seq_lens)
        ]
    )
    assert_output(run({**static, **options}, implementation)[0], wanted, "bfloat16")
    assert_output(run({**pages, **options}, implementation)[0], wanted, "bfloat16")


@every_implementation
def test_sums_over_many_keys_are_float32(implementation):
    """The sum is of 4001 equal weights. A bfloat16 sum would stop growing at 256, or round to 4000."""
    inputs = Case("", (4001, 3), **KERNEL).inputs(8)
    inputs["q"] = np.zeros_like(inputs["q"])
    inputs["v_pages"] = np.where(np.isnan(inputs["v_pages"]), inputs["v_pages"], 1)
    out, lse = run(inputs, implementation)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
    assert_lse(lse, np.log([[4001.0] * 8, [3.0] * 8]))


@every_implementation
def test_the_log_sum_exp_is_returned_only_when_asked_for(implementation):
    inputs = Case("", (0, 5, 16), **KERNEL).inputs(9)
    out = compiled(partial(paged_attention, implementation=implementation), inputs)
    both = run(inputs, implementation)
    assert bits(out) == bits(both[0])


def test_a_kernel_that_cannot_run_says_why_and_is_passed_over():
    """The kernels take no float32, on the CPU and on a GPU."""
    inputs = BY_NAME["page-edges"].inputs(10, "float32")
    reason = refusal("mosaic_gpu", inputs)
    assert reason is not None
    with pytest.raises(Unsupported, match=re.escape(f"mosaic_gpu: {reason}")):
        compiled(partial(paged_attention, implementation="mosaic_gpu"), inputs)
    chosen = compiled(partial(paged_attention, return_lse=True), inputs)
    assert bits(chosen[0]) == bits(run(inputs, "xla")[0])


def test_a_dtype_that_nothing_takes_is_refused_with_every_reason():
    inputs = BY_NAME["page-edges"].inputs(10, "float8_e5m2")
    with pytest.raises(Unsupported, match=r"mosaic_gpu: .*; xla: q must be one of .*float8_e5m2"):
        compiled(paged_attention, inputs)


def test_a_pool_beyond_32_bit_offsets_is_addressed_by_page():
    """The pool has 2**36 elements. The gathers index whole pages, so no index counts elements."""
    pool = jax.ShapeDtypeStruct((2**20, 64, 8, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16)
    table, lens = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    attend = partial(paged_attention, scale=0.1, implementation="xla")
    jaxpr = jax.make_jaxpr(attend)(q, pool, pool, table, lens)
    gathers = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "gather" and equation.invars[0].aval.shape == pool.shape
    ]
    assert len(gathers) == 2
    for gather in gathers:
        assert gather.params["dimension_numbers"].start_index_map == (0,)
        assert gather.invars[1].aval.dtype == jnp.int32
