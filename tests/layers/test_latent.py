"""The absorbed and the expanded form of latent attention agree, and read only their own tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.config.blocks import LatentConfig
from jaxkv.layers import sparse_latent
from jaxkv.layers.latent import attend_absorbed, attend_expanded, own_pages
from jaxkv.sampling.batch import SamplingBatch
from tests.tolerances import assert_output

HEADS, PAGE, TOKENS = 3, 8, 48
LENS = (17, 0, 1, 20)
SCALE = 0.2


def case(latent, dtype, seed=0):
    """Returns matrices, queries, what is kept of each token, and pages that hold it and NaN everywhere else."""
    draw = np.random.default_rng(seed)

    def normal(*shape, deviation=1.0):
        return jnp.asarray(draw.normal(size=shape) * deviation, dtype)

    rank = latent.kv_lora_rank
    params = {
        "k_up": normal(HEADS, latent.nope_dim, rank, deviation=rank**-0.5),
        "v_up": normal(HEADS, latent.value_dim, rank, deviation=rank**-0.5),
    }
    q, key = normal(TOKENS, HEADS, latent.query_dim), normal(TOKENS, latent.stored)
    width = -(-max(LENS) // PAGE)
    table = draw.permutation(len(LENS) * width).reshape(len(LENS), width)
    pages = np.full((table.size, PAGE, 1, latent.stored), np.nan, np.float32)
    for row, (length, begin) in enumerate(zip(LENS, np.cumsum((0, *LENS)), strict=False)):
        at = np.arange(length)
        pages[table[row, at // PAGE], at % PAGE, 0] = np.asarray(key[begin : begin + length])
    return params, q, key, jnp.asarray(pages, dtype), jnp.asarray(table, jnp.int32)


def batch_of(**options):
    return StepBatch(
        tokens=jnp.zeros(TOKENS, jnp.int32),
        positions=jnp.zeros(TOKENS, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum((0, *LENS)), jnp.int32),
        seq_lens=jnp.asarray(LENS, jnp.int32),
        paged=(),
        states=(),
        sampling=SamplingBatch(
            state_ids=jnp.zeros(len(LENS), int), carry=jnp.zeros(len(LENS), int)
        ),
        **options,
    )


def oracle(params, q, key, latent):
    """Attends head by head in float64, with keys and values written out."""
    params, q, key = jax.tree.map(partial(np.asarray, dtype=np.float64), (params, q, key))
    compressed, rope = key[:, : latent.kv_lora_rank], key[:, latent.kv_lora_rank :]
    out = np.zeros((TOKENS, HEADS, latent.value_dim))
    for begin, length in zip(np.cumsum((0, *LENS)), LENS, strict=False):
        for token in range(begin, begin + length):
            seen = slice(begin, token + 1)
            for head in range(HEADS):
                keys = np.concatenate(
                    (compressed[seen] @ params["k_up"][head].T, rope[seen]), axis=1
                )
                scores = keys @ q[token, head] * SCALE
                weights = np.exp(scores - scores.max())
                values = compressed[seen] @ params["v_up"][head].T
                out[token, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(("dtype", "value_dim"), [("float32", 28), ("bfloat16", 12)])
def test_both_ways_equal_attention_over_keys_and_values_written_out(dtype, value_dim):
    # Values are narrower than keys, or wider; rows are ragged, and one is empty.
    latent = LatentConfig(kv_lora_rank=32, rope_dim=8, nope_dim=16, value_dim=value_dim)
    params, q, key, pages, table = case(latent, dtype)
    tables = PagedTables(page_table=table, write_slots=jnp.arange(TOKENS))
    wanted = oracle(params, q, key, latent)
    options = {"latent": latent, "scale": SCALE}
    expanded = jax.jit(partial(attend_expanded, **options))(params, q, key, batch_of(fresh=True))
    absorbed = jax.jit(partial(attend_absorbed, **options))(params, q, pages, batch_of(), tables)
    real = sum(LENS)
    for got in (expanded, absorbed):
        assert got.shape == (TOKENS, HEADS, value_dim)
        assert_output(got[:real], wanted[:real], dtype)


def test_rows_of_a_step_do_not_see_each_other_expanded():
    # Neighbours and padding full of NaN change no bit.
    latent = LatentConfig(kv_lora_rank=32, rope_dim=8, nope_dim=16, value_dim=12)
    params, q, key, _, _ = case(latent, "float32")
    attend = jax.jit(partial(attend_expanded, latent=latent, scale=SCALE))
    clean = attend(params, q, key, batch_of(fresh=True))
    last = slice(sum(LENS[:3]), sum(LENS))
    junk = jnp.full_like(key, jnp.nan).at[last].set(key[last])
    dirty = attend(
        params, jnp.where(jnp.isnan(junk[:, :1, None]), jnp.nan, q), junk, batch_of(fresh=True)
    )
    np.testing.assert_array_equal(np.asarray(dirty[last]), np.asarray(clean[last]))


@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (3, 64), (16, 64), (16, 500)])
def test_pages_of_a_step_hold_each_row_from_the_beginning_of_one(rows, tokens):
    draw = np.random.default_rng(rows * tokens)
    bounds = np.sort(draw.integers(0, tokens + 1, rows))
    bounds = np.concatenate(([0], bounds))
    lay_out = jax.jit(own_pages, static_argnums=1)
    token, table = map(np.asarray, lay_out(jnp.asarray(bounds, jnp.int32), tokens))
    assert table.max() < len(token)
    for row in range(rows):
        length = bounds[row + 1] - bounds[row]
        held = token[table[row]].reshape(-1)[:length]
        np.testing.assert_array_equal(held, np.arange(bounds[row], bounds[row + 1]))
    # Little is expanded in vain, where rows are not many more than pages.
    assert token.size <= 1.5 * tokens + 7 * rows


def test_index_queries_are_rounded_as_keys_of_bytes_are_and_their_scales_go_into_the_weights():
    # Issue 6: what an H200's scores kernel takes, and DeepSeek-V3.2 computes with.
    draw = np.random.default_rng(0)
    queries = draw.normal(size=(5, 3, 128)).astype(np.float32) * [[[0.1], [30.0], [1.0]]]
    queries[4, 2, 7] = np.nan
    weights = draw.normal(size=(5, 3)).astype(np.float32)
    arrays = jnp.asarray(queries, jnp.float32), jnp.asarray(weights)
    plain = sparse_latent._as_compared(*arrays, jnp.zeros((1, 8, 128), jnp.bfloat16))
    assert plain[0] is arrays[0]
    assert plain[1] is arrays[1]
    numbers, scaled = sparse_latent._as_compared(*arrays, jnp.zeros((1, 8, 132), jnp.uint8))
    assert numbers.dtype == jnp.float8_e4m3fn
    wanted = queries.astype(np.float64) * weights[..., None]
    got = np.asarray(numbers, np.float64) * np.asarray(scaled, np.float64)[..., None]
    # Half a step of three bits behind the comma.
    slack = np.abs(wanted) / 16 + np.abs(wanted).max(-1, keepdims=True) / 448 / 512
    assert np.all((np.abs(got - wanted) <= slack)[np.isfinite(wanted).all(-1)])
    # A query that is no number makes its scores none, which `index_topk` chooses.
    assert np.isnan(scaled[4, 2])
