"""The contract of `latent_attention`, signed by every implementation."""

from functools import partial

import chex
import jax
import numpy as np
import pytest

from pallas_kernels import latent_attention
from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
from pallas_kernels.latent_attention import mosaic_gpu, reference
from pallas_kernels.latent_attention.cases import CASES, Case
from pallas_kernels.workbench.attention_inputs import latent_answer, some_queries
from tests.pallas_kernels.contract import (
    bits,
    by_name,
    call,
    cases,
    compared,
    compiled,
    implementations,
    refusals,
)
from tests.pallas_kernels.latent_attention.oracle import assert_is_oracle
from tests.tolerances import assert_output

SMALL = [case for case in CASES if case.ci]
# Small sizes that the kernel takes too; its dtype is bfloat16.
KERNEL = {"heads": 8, "value_dim": 128, "page_size": 8}
MIXED = ((1, 40), (0, 0), (13, 46), (1, 1), (5, 21))
every_implementation = implementations("mosaic_gpu", "xla")


refusal = refusals(mosaic_gpu=by_name(mosaic_gpu.why_not, LatentArrays, LatentOptions))


def run(inputs, implementation):
    return call(partial(latent_attention, return_lse=True), refusal, inputs, implementation)


@compared(SMALL)
def test_it_equals_the_oracle_and_reads_nothing_else(implementation, case, dtype):
    """Places that must not be read hold NaN; rows and tokens without keys give zeros."""
    inputs = case.inputs(1, dtype)
    assert_is_oracle(run(inputs, implementation), inputs, dtype)


@cases([case for case in CASES if not case.ci])
@every_implementation
def test_it_equals_the_reference_on_real_shapes(implementation, case):
    inputs = case.inputs(1)
    out, _ = run(inputs, implementation)
    wanted = latent_answer(inputs)[0].astype(np.float64)
    assert_output(np.asarray(out)[some_queries(inputs)], wanted, "bfloat16")


@cases([case for case in SMALL if case.name in ("page-edges", "odd-sizes", "mixed")])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    result = compiled(reference.latent_attention, inputs)
    assert_is_oracle(result, inputs, "float32")


@every_implementation
@pytest.mark.parametrize("packed", [False, True])
def test_rows_do_not_see_each_other(implementation, packed):
    """The same rows in another order give the same bits."""
    rows = MIXED if packed else tuple((min(1, keys), keys) for _, keys in MIXED)
    case = Case(name="", rows=rows, packed=packed, padding_tokens=3 * packed, **KERNEL)
    inputs = case.inputs(5)
    order = np.random.default_rng(0).permutation(len(rows))
    moved = {**inputs, **{name: inputs[name][order] for name in ("page_table", "seq_lens")}}
    tokens = order
    if packed:
        bounds = inputs["cu_q_lens"]
        tokens = np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in order])
        moved["cu_q_lens"] = np.cumsum([0, *np.diff(bounds)[order]]).astype(np.int32)
    rest = np.arange(len(tokens), len(inputs["q"]))
    moved["q"] = inputs["q"][np.concatenate([tokens, rest])]
    results, moved_results = run(inputs, implementation), run(moved, implementation)
    for result, moved_result in zip(results, moved_results, strict=True):
        assert [bits(result)[token] for token in tokens] == bits(moved_result)[: len(tokens)]


@every_implementation
def test_one_executable_serves_all_batches(implementation):
    """One trace serves a prefill, a chunk after a prefix and decode."""
    case = Case(name="", rows=((10, 12), (1, 12), (1, 12)), packed=True, **KERNEL)
    base = case.inputs(6)
    chex.clear_trace_counter()  # it knows functions by their source, which the parametrisation repeats

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(q, latent_pages, page_table, seq_lens, cu_q_lens):
        arrays = (q, latent_pages, page_table, seq_lens, cu_q_lens)
        options = {"value_dim": 128, "scale": base["scale"], "return_lse": True}
        return latent_attention(*arrays, implementation=implementation, **options)

    batches = (([12, 3, 0], [0, 12, 12, 12]), ([8, 12, 1], [0, 4, 5, 6]), ([0] * 3, [0] * 4))
    for seq_lens, cu_q_lens in batches:
        inputs = {**base, "seq_lens": np.array(seq_lens, np.int32)}
        inputs["cu_q_lens"] = np.array(cu_q_lens, np.int32)
        names = ("q", "latent_pages", "page_table", "seq_lens", "cu_q_lens")
        assert_is_oracle(step(*(inputs[name] for name in names)), inputs, "bfloat16")


@every_implementation
def test_one_packed_query_per_row_is_what_rows_of_one_query_get(implementation):
    inputs = Case(name="", rows=((1, 9), (1, 30)), packed=True, **KERNEL).inputs(7)
    packed, _ = run(inputs, implementation)
    inputs.pop("cu_q_lens")
    assert_output(run(inputs, implementation)[0], np.asarray(packed, np.float64), "bfloat16")


@every_implementation
@pytest.mark.parametrize("empty", ["tokens", "rows", "table"])
def test_an_empty_call_returns_empty_arrays_or_nothing_seen(implementation, empty):
    inputs = Case(name="", rows=((9, 40), (1, 33)), packed=True, **KERNEL).inputs(4)
    if empty == "tokens":
        inputs |= {"q": inputs["q"][:0], "cu_q_lens": 0 * inputs["cu_q_lens"]}
    elif empty == "rows":
        no_rows = {name: inputs[name][:0] for name in ("page_table", "seq_lens")}
        inputs |= no_rows | {"cu_q_lens": np.zeros(1, np.int32)}
    else:
        inputs |= {"page_table": inputs["page_table"][:, :0], "seq_lens": 0 * inputs["seq_lens"]}
    out, lse = run(inputs, implementation)
    assert out.dtype == inputs["q"].dtype
    assert bits(out) == bits(np.zeros_like(inputs["q"][..., :128]))
    assert bits(lse) == bits(np.full(inputs["q"].shape[:2], -np.inf, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_dim": 0}, "at most the 192 components of a latent, got 0"),
        ({"value_dim": 193}, "at most the 192 components of a latent, got 193"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"q": np.zeros((2, 8, 192), np.float32)}, "cast q to the cache's dtype"),
        ({"latent_pages": np.zeros((3, 8, 2, 192), "bfloat16")}, r"shape \[any, any, 1, 192\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(changes, message):
    inputs = Case(name="", rows=((1, 9), (1, 30)), **KERNEL).inputs() | changes
    with pytest.raises(ValueError, match=message):
        latent_attention(**inputs)
