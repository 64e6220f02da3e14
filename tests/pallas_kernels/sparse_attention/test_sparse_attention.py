"""The contract of `sparse_attention`, signed by every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import index_topk, latent_attention, sparse_attention
from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
from pallas_kernels.formats.latent_records import decode_records, encode_records
from pallas_kernels.sparse_attention import mosaic_gpu, reference, xla
from pallas_kernels.sparse_attention.cases import CASES
from tests.pallas_kernels.contract import bits, by_name, cases, compiled, implementations
from tests.tolerances import assert_lse, assert_output

SMALL = [case for case in CASES if case.ci]
every_implementation = implementations("xla")


def oracle(inputs):
    """Softmax and sums in float64, token by token."""
    records, rank = inputs["records"], inputs["value_dim"]
    flat = records.reshape(-1, records.shape[-1])
    if flat.dtype == np.uint8:
        flat = np.asarray(decode_records(jnp.asarray(flat), rank=rank))
    flat = flat.astype(inputs["q"].dtype).astype(np.float64)
    q = inputs["q"].astype(np.float64)
    out, lse = np.zeros((*q.shape[:2], rank)), np.full(q.shape[:2], -np.inf)
    for token, count in enumerate(inputs["counts"]):
        keys = flat[inputs["slots"][token, :count]]
        if count:
            scores = inputs["scale"] * q[token] @ keys.T
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            lse[token] = scores.max(-1) + np.log(weights.sum(-1))
            out[token] = weights @ keys[:, :rank] / weights.sum(-1, keepdims=True)
    return out, lse


def run(inputs, implementation):
    op = partial(sparse_attention, return_lse=True, implementation=implementation)
    return compiled(op, inputs)


@cases(SMALL)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_equals_the_oracle_and_reads_nothing_else(implementation, case, dtype):
    """Records that nobody chose hold NaN; tokens that chose nothing give zeros."""
    inputs = case.inputs(1, dtype)
    out, lse = run(inputs, implementation)
    wanted, wanted_lse = oracle(inputs)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == jnp.float32
    assert_output(out, wanted, dtype)
    assert_lse(lse, wanted_lse)


@cases(SMALL)
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    out, lse = compiled(reference.sparse_attention, inputs)
    wanted, wanted_lse = oracle(inputs)
    assert_output(out, wanted, "float32")
    assert_lse(lse, wanted_lse)


@every_implementation
def test_it_is_dense_where_everything_was_chosen(implementation):
    """With a top-k that covers the context the result is latent attention's, and so is a decoded record's."""
    rng = np.random.default_rng(3)
    rows, heads, rank, rope, page_size = 3, 4, 128, 16, 8
    seq_lens = np.array([19, 0, 33], np.int32)
    table = rng.permutation(20)[:15].reshape(rows, 5).astype(np.int32)
    latent = jnp.asarray(rng.standard_normal((20 * page_size, rank)), jnp.float32)
    turned = jnp.asarray(rng.standard_normal((20 * page_size, rope)), jnp.float32)
    records = jax.jit(encode_records)(latent, turned).reshape(20, page_size, 1, -1)
    plain = jax.jit(partial(decode_records, rank=rank))(records)
    keys = jnp.asarray(rng.standard_normal((20, page_size, 16)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((rows, heads, rank + rope)), jnp.float32)
    slots, counts = jax.jit(partial(index_topk, topk=40))(
        jnp.ones((rows, 2, 16)), jnp.ones((rows, 2)), keys, table, seq_lens
    )
    assert np.array_equal(counts, seq_lens)
    options = {"value_dim": rank, "scale": 0.1}
    dense = jax.jit(partial(latent_attention, **options))(q, plain, table, seq_lens)
    attend = jax.jit(partial(sparse_attention, implementation=implementation, **options))
    for pool in (plain, records):
        sparse = attend(q, pool, slots, counts)
        assert_output(sparse, np.asarray(dense), "float32")


@every_implementation
def test_tokens_do_not_see_each_other(implementation):
    inputs = SMALL[0].inputs(4, "bfloat16")
    order = np.random.default_rng(0).permutation(len(inputs["counts"]))
    moved = {
        name: value[order] if name in ("q", "slots", "counts") else value
        for name, value in inputs.items()
    }
    for one, other in zip(run(inputs, implementation), run(moved, implementation), strict=True):
        assert bits(np.asarray(one)[order]) == bits(other)


@every_implementation
def test_a_broken_record_breaks_the_tokens_that_chose_it(implementation):
    inputs = SMALL[0].inputs(5, "float32")
    slot = inputs["slots"][0, 2]
    choosers = [slot in chosen for chosen in inputs["slots"]]
    records = inputs["records"].reshape(-1, inputs["records"].shape[-1])
    records[slot, 128:132] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    out, _ = run(inputs, implementation)
    assert np.isnan(np.asarray(out)).all(axis=(1, 2)).tolist() == choosers
    assert not all(choosers)


@pytest.mark.parametrize(("refusal", "chosen"), [(None, "kernel"), ("no GPU", "xla")])
def test_the_kernel_runs_unasked_where_it_can(refusal, chosen, monkeypatch):
    ran = []

    def stand_in(name, arrays, options, *, return_lse=False):
        ran.append(name)
        return xla_itself(arrays, options)

    xla_itself = xla.sparse_attention
    monkeypatch.setattr(mosaic_gpu, "why_not", lambda *_, **__: refusal)
    monkeypatch.setattr(mosaic_gpu, "sparse_attention", partial(stand_in, "kernel"))
    monkeypatch.setattr(xla, "sparse_attention", partial(stand_in, "xla"))
    sparse_attention(**SMALL[0].inputs(7), return_lse=True)
    assert ran == [chosen]


def test_turns_of_tokens_change_nothing():
    """Where memory is short, XLA takes tokens in turns; rounding may differ in the last bits."""
    inputs = SMALL[0].inputs(6, "float32")
    run = by_name(xla.sparse_attention, SparseArrays, LatentOptions)
    whole, turns = (
        compiled(partial(run, temporary_bytes=bytes_), inputs) for bytes_ in (1 << 30, 20000)
    )
    np.testing.assert_allclose(whole[0], turns[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(whole[1], turns[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_dim": 100}, "value_dim of uint8 records must be a multiple of 128, got 100"),
        ({"value_dim": 500}, "value_dim must be 1 to 144"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        (
            {"records": np.zeros((2, 8, 1, 144), np.float32)},
            "uint8 or have q's dtype bfloat16, got float32",
        ),
        ({"records": np.zeros((2, 8, 1, 165), np.uint8)}, r"\[any, any, 1, 164\]"),
        ({"counts": np.zeros(3, np.int32)}, r"counts must have shape \[4\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message, as_in_production):
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**SMALL[0].inputs(), **change})
