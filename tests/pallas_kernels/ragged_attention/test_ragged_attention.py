"""The contract of `ragged_attention`, signed by every implementation."""

import dataclasses
from collections import Counter
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, paged_attention, ragged_attention
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.ragged_attention import mosaic_gpu, reference, xla
from pallas_kernels.ragged_attention.cases import CASES, Case
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import (
    bits,
    by_name,
    call,
    cases,
    compiled,
    implementations,
    implementations_in,
    refusals,
)
from tests.tolerances import assert_lse, assert_output

SMALL = [case for case in CASES if case.ci]
# Small shapes that kernels take too; their dtype is bfloat16.
KERNEL = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 8}
every_implementation = implementations("mosaic_gpu", "xla")


refusal = refusals(mosaic_gpu=lambda *, q, k_pages, **_: mosaic_gpu.why_not(q, k_pages))


def run(inputs, implementation):
    return call(partial(ragged_attention, return_lse=True), refusal, inputs, implementation)


def assert_is_oracle(result, inputs, dtype):
    out, lse = result
    wanted_out, wanted_lse = oracle.ragged_attention(**inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == jnp.float32
    assert_output(out, wanted_out, dtype)
    assert_lse(lse, wanted_lse)


# The tests of kernels' shapes below are in bfloat16. Each option of scores, odd sizes, pages of 8 bits and static ones,
# and many tiles, also of chunks after prefixes, are fast; the others are parts of these. Rows of all kinds are in the
# test of small tiles.
FAST = (
    *("all-padding", "odd-sizes", "window-edges", "gemma-gpt-mix"),
    *("static", "many-tiles", "fp8", "int8-static"),
)


@cases(SMALL, fast=FAST)
@implementations_in("mosaic_gpu", "xla")
def test_it_equals_the_oracle_and_reads_nothing_else(implementation, case, dtype):
    """Places that must not be read hold NaN; tokens past the last row give zeros."""
    inputs = case.inputs(1, dtype)
    assert_is_oracle(run(inputs, implementation), inputs, dtype)


@cases([case for case in CASES if not case.ci])
@every_implementation
def test_it_equals_the_reference_on_real_shapes(implementation, case):
    """Samples tokens of every row, its first and last among them, against one query over pages."""
    inputs = case.inputs(1, "bfloat16")
    out, lse = run(inputs, implementation)
    starts, stops = inputs["cu_q_lens"][:-1], inputs["cu_q_lens"][1:]
    for row, (first, stop) in enumerate(zip(starts, stops, strict=True)):
        token = np.unique(np.linspace(first, stop - 1, 4).astype(np.int32))
        seen = inputs["seq_lens"][row] - (stop - 1 - token)
        table = np.repeat(inputs["page_table"][row : row + 1], len(token), axis=0)
        sample = {"q": inputs["q"][token], "page_table": table, "seq_lens": seen.astype(np.int32)}
        sampled = {name: value for name, value in inputs.items() if name != "cu_q_lens"} | sample
        wanted_out, wanted_lse = compiled(reference.reference.paged_attention, sampled)
        assert_output(out[token], np.asarray(wanted_out, np.float64), "bfloat16")
        assert_lse(lse[token], wanted_lse)


@cases(
    [case for case in SMALL if case.padding_tokens == 0],
    fast=("one-prompt", "odd-sizes", "window-edges", "gemma-gpt-mix", "static", "int8"),
)
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    out, lse = compiled(reference.ragged_attention, inputs)
    wanted_out, wanted_lse = oracle.ragged_attention(**inputs)
    assert_output(out, wanted_out, "float32")
    assert_lse(lse, wanted_lse)


# Rows of each kind, each option of scores, pages of 8 bits, and a static page.
@cases(SMALL, fast=("mixed", "gemma-gpt-mix", "fp8-window", "static-long"))
def test_small_tiles_and_blocks_of_keys_give_the_same_answer(case):
    """Partial softmaxes are kept in float32, and one without keys contributes nothing."""
    inputs = case.inputs(3, "float32")
    result = compiled(
        partial(
            by_name(xla.ragged_attention, AttentionArrays, ScoreOptions),
            temporary_bytes=40_000,
            largest_tile=16,
        ),
        inputs,
    )
    assert_is_oracle(result, inputs, "float32")


@every_implementation
def test_a_window_sees_exactly_its_width(implementation):
    """Lengths lie below, at and above the bound. The comparison notices a window one token wider."""
    for prefix_lens, padding in (((1, 2, 3), 3), ((7, 8, 9), 0)):
        rows = tuple((min(n, 3), n) for n in prefix_lens)
        case = Case("", rows, padding, **KERNEL, window=4, table_width=2)
        inputs = case.inputs(4)
        assert_is_oracle(run(inputs, implementation), inputs, "bfloat16")
    clean = dataclasses.replace(case, window=None).inputs(4)
    wider = run({**clean, "window": 5}, implementation)
    with pytest.raises(AssertionError):
        assert_is_oracle(wider, {**clean, "window": 4}, "bfloat16")


@every_implementation
def test_a_window_wider_than_any_row_hides_nothing(implementation):
    """2**31 - 1 and a position after it would not fit in 32 bits."""
    case = Case("", ((9, 40), (1, 33)), **KERNEL, table_width=6)
    for window in (48, 2**31 - 1):
        inputs = case.inputs(4) | {"window": window}
        assert_is_oracle(run(inputs, implementation), inputs | {"window": None}, "bfloat16")


@every_implementation
@pytest.mark.parametrize("empty", ["tokens", "rows", "table"])
def test_an_empty_call_returns_empty_arrays_or_nothing_seen(implementation, empty):
    inputs = Case("", ((9, 40), (1, 33)), **KERNEL, sinks=True).inputs(4)
    if empty == "tokens":
        inputs |= {"q": inputs["q"][:0], "cu_q_lens": 0 * inputs["cu_q_lens"]}
    elif empty == "rows":
        no_rows = {name: inputs[name][:0] for name in ("page_table", "seq_lens")}
        inputs |= no_rows | {"cu_q_lens": np.zeros(1, np.int32)}
    else:
        inputs |= {"page_table": inputs["page_table"][:, :0], "seq_lens": 0 * inputs["seq_lens"]}
    out, lse = run(inputs, implementation)
    assert out.dtype == inputs["q"].dtype
    assert bits(out) == bits(np.zeros_like(inputs["q"]))
    assert bits(lse) == bits(np.full(inputs["q"].shape[:2], -np.inf, np.float32))


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """The same rows in another order, and beside other rows, give the same bits."""
    case = next(case for case in SMALL if case.name == "mixed")
    case = dataclasses.replace(case, **KERNEL)
    inputs = case.inputs(5, "bfloat16")
    order = np.random.default_rng(0).permutation(len(case.rows))
    rows_of = [
        np.arange(inputs["cu_q_lens"][row], inputs["cu_q_lens"][row + 1])
        for row in range(len(order))
    ]
    tokens = np.concatenate([*(rows_of[row] for row in order), np.arange(38 - 1, 38 + 6)])
    assert len(tokens) == len(inputs["q"])
    moved = {
        **inputs,
        "q": inputs["q"][tokens],
        "page_table": inputs["page_table"][order],
        "seq_lens": inputs["seq_lens"][order],
        "cu_q_lens": np.cumsum([0, *(len(rows_of[row]) for row in order)]).astype(np.int32),
    }
    out, lse = run(inputs, implementation)
    moved_out, moved_lse = run(moved, implementation)
    real = slice(0, int(inputs["cu_q_lens"][-1]))
    assert [bits(out)[token] for token in tokens][real] == bits(moved_out)[real]
    assert [bits(lse)[token] for token in tokens][real] == bits(moved_lse)[real]


@every_implementation
def test_one_executable_serves_all_batches(implementation):
    """One trace serves a prefill, a chunk after a prefix and decode."""
    base = Case("", ((10, 12), (1, 12), (1, 12)), 4, **KERNEL).inputs(6)
    base["q"] = np.nan_to_num(base["q"].astype(np.float32)).astype(base["q"].dtype)
    chex.clear_trace_counter()  # it knows functions by their source, which the parametrisation repeats

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(q, k_pages, v_pages, page_table, seq_lens, cu_q_lens):
        arrays = (q, k_pages, v_pages, page_table, seq_lens, cu_q_lens)
        return ragged_attention(
            *arrays, scale=base["scale"], return_lse=True, implementation=implementation
        )

    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "cu_q_lens")
    batches = (([12, 3, 0], [0, 12, 15, 15]), ([8, 12, 1], [0, 4, 5, 6]), ([0] * 3, [0] * 4))
    for seq_lens, cu_q_lens in batches:
        inputs = {**base, "seq_lens": np.array(seq_lens, np.int32)}
        inputs["cu_q_lens"] = np.array(cu_q_lens, np.int32)
        assert_is_oracle(step(*(inputs[name] for name in names)), inputs, "bfloat16")


@every_implementation
def test_one_query_per_row_is_paged_attention(implementation):
    inputs = Case("", ((1, 9), (1, 30)), **KERNEL).inputs(7)
    out, lse = run(inputs, implementation)
    inputs.pop("cu_q_lens")
    wanted_out, wanted_lse = compiled(partial(paged_attention, return_lse=True), inputs)
    assert_output(out, np.asarray(wanted_out, np.float64), "bfloat16")
    assert_lse(lse, wanted_lse)


def test_temporary_memory_is_bounded_by_tiles_and_blocks():
    """8192 new tokens, 32 heads, context 8192: all scores at once would be 8.6 GB."""
    q = jax.ShapeDtypeStruct((8192, 32, 128), jnp.float32)
    pool = jax.ShapeDtypeStruct((1024, 16, 8, 128), jnp.float32)
    table, lens, bounds = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((4, 512), (4,), (5,)))
    program = jax.jit(partial(ragged_attention, scale=0.1, implementation="xla"))
    compiled = program.lower(q, pool, pool, table, lens, bounds).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30


@pytest.mark.parametrize(
    ("width", "times"), [(512, 0), (513, 1), pytest.param(8192, 1, marks=pytest.mark.slow)]
)
def test_tables_too_large_to_unpack_are_handed_on_to_the_bounded_form(monkeypatch, width, times):
    """64 rows of 8192 keys are 2 GiB as bfloat16; at 8192 pages a row it would be 32."""
    monkeypatch.setattr(mosaic_gpu, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(mosaic_gpu, "ragged_attention", lambda arrays, *_, **__: 2 * arrays.q)
    q = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((1024, 16, 8, 128), jnp.int8)
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    tables = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((64, width), (64,), (65,))]
    attend = partial(ragged_attention, scale=0.1, implementation="mosaic_gpu")
    before = Counter(dispatch.fallbacks())
    program = jax.jit(lambda *a: attend(*a[:6], k_scales=a[6], v_scales=a[7]))
    compiled = program.lower(q, pool, pool, *tables, scales, scales).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30
    counted = Counter(dispatch.fallbacks()) - before
    assert sum(counted.values()) == times
    for op, passed_over, reason in counted:
        assert (op, passed_over) == ("ragged_attention", "mosaic_gpu")
        assert f"64 rows of {width} pages take {width << 22} bytes in bfloat16" in reason


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (64, 64), (128, 4), (17, 16)])
def test_a_small_step_is_one_piece(tokens, rows):
    """Loops would split the step's CUDA graph and serialise a CPU."""
    q = jax.ShapeDtypeStruct((tokens, 8, 32), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((64, 16, 2, 32), jnp.bfloat16)
    shapes = ((rows, 32), (rows,), (rows + 1,))
    tables = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    hlo = jax.jit(partial(ragged_attention, scale=0.1)).lower(q, pool, pool, *tables).as_text()
    assert "stablehlo.while" not in hlo
