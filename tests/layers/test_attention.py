"""The attention layer around the ops: projections, rotation, cache writes, and arguments of the ops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.config.model import RopeConfig
from jaxkv.layers.attention import AttentionSizes, attend, attention
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import rope_angles, rotate
from jaxkv.sampling.batch import SamplingBatch
from pallas_kernels import page_write, rotary_write
from pallas_kernels.formats.quantise import quantise

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 6, 10
PAGES, PAGE_SIZE = 5, 4
SHAPE = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
ROPE = RopeConfig(theta=100.0, rotary_dim=HEAD_DIM)
PAGE_TABLE = jnp.asarray([[3, 0], [1, 4]], jnp.int32)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def parameters(dtype=jnp.float32):
    fused = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return {
        "qkv": normal(1, fused, HIDDEN, dtype=dtype),
        "qkv_bias": normal(2, fused, dtype=dtype),
        "o": normal(3, HIDDEN, HEADS * HEAD_DIM, dtype=dtype),
        "o_bias": normal(4, HIDDEN, dtype=dtype),
        "qk_norm": 1 + normal(5, 2, HEAD_DIM, dtype=dtype),
    }


def pages(dtype=jnp.float32):
    return {
        role: normal(seed, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        for seed, role in ((6, "key"), (7, "value"))
    }


def one_row(positions, *, decode=False):
    """Row 0 has tokens at these positions; row 1 is padding, and so is one token."""
    count = len(positions)
    slots = [int(PAGE_TABLE[0, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in positions]
    positions, slots = np.array([*positions, 0]), np.array([*slots, PAGES * PAGE_SIZE + count])
    tables = PagedTables(page_table=PAGE_TABLE, write_slots=jnp.asarray(slots, jnp.int32))
    batch = StepBatch(
        tokens=jnp.zeros(count + 1, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        cu_q_lens=jnp.asarray([0, count, count], jnp.int32),
        seq_lens=jnp.asarray([positions[count - 1] + 1, 0], jnp.int32),
        paged=(tables,),
        states=(),
        sampling=SamplingBatch(state_ids=jnp.arange(2), carry=jnp.zeros(2, int)),
        decode=decode,
    )
    return batch, tables


@partial(jax.jit, static_argnames=("window", "implementation"))
def run(params, cache, x, batch, tables, *, window=None, implementation=None):
    angles = rope_angles(ROPE, batch.positions, batch.positions + 1)
    return attention(
        params,
        cache,
        x,
        batch,
        tables,
        angles,
        sizes=AttentionSizes(**SHAPE, window=window),
        implementation=implementation,
    )


@jax.jit
def rotated(params, x, positions):
    """Returns queries, keys and values of one whole sequence."""
    with jax.default_matmul_precision("highest"):
        qkv = x @ params["qkv"].T + params["qkv_bias"][None]
    qkv = qkv.reshape(len(x), -1, HEAD_DIM)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    angles = rope_angles(ROPE, positions, positions)
    q = rotate(angles, rms_norm(params["qk_norm"][0], q, eps=1e-6))
    k = rotate(angles, rms_norm(params["qk_norm"][1], k, eps=1e-6))
    return q, k, v


def dense(params, x, positions, *, window=None):
    """The same layer over one whole sequence, without a cache, in plain NumPy after the rotation."""
    q, k, v = (np.asarray(part, np.float64) for part in rotated(params, x, positions))
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
    behind = positions[:, None] - positions[None]
    seen = (behind >= 0) & (behind < (window or len(x)))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return mixed @ np.asarray(params["o"]).T + np.asarray(params["o_bias"])


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_a_chunk_and_a_decode_step_equal_dense_attention(window):
    params, x = parameters(), normal(8, 7, HIDDEN)
    wanted = dense(params, x, np.arange(7), window=window)
    cache, rows = pages(), []
    for start, stop in ((0, 4), (4, 6)):
        batch, tables = one_row(range(start, stop))
        new = jnp.concatenate((x[start:stop], jnp.zeros((1, HIDDEN))))
        cache, y = run(params, cache, new, batch, tables, window=window)
        rows.append(y[:-1])
    batch, tables = one_row([6], decode=True)
    cache, y = run(params, cache, x[6:].repeat(2, 0), batch, tables, window=window)
    np.testing.assert_allclose(jnp.concatenate((*rows, y[:1])), wanted, atol=1e-5)


def test_only_the_new_tokens_slots_change():
    # Every other element stays bit-identical, padding writes nothing.
    before = pages()
    batch, tables = one_row([2, 3, 4])
    after, _ = run(parameters(), before, normal(8, 4, HIDDEN), batch, tables)
    written = np.zeros((PAGES, PAGE_SIZE), bool)
    written[[3, 3, 0], [2, 3, 0]] = True
    for role in ("key", "value"):
        changed = np.any(np.asarray(before[role] != after[role]), axis=(2, 3))
        np.testing.assert_array_equal(changed, written)


def test_pages_may_be_narrower_than_the_parameters():
    batch, tables = one_row([0, 1, 2])
    x = normal(8, 4, HIDDEN)
    cache, y = run(parameters(), pages(jnp.bfloat16), x, batch, tables)
    assert cache["key"].dtype == jnp.bfloat16
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y[:3], dense(parameters(), x[:3], np.arange(3)), atol=0.2)


@pytest.mark.parametrize("decode", [False, True])
def test_the_implementation_is_handed_to_the_ops(decode):
    # The whole model has one implementation. The ops refuse a name that they do not know.
    batch, tables = one_row([5], decode=decode)
    x = normal(8, 2, HIDDEN)
    _, wanted = run(parameters(), pages(), x, batch, tables)
    _, got = run(parameters(), pages(), x, batch, tables, implementation="xla")
    np.testing.assert_array_equal(got, wanted)
    with pytest.raises(ValueError, match="nonesuch"):
        run(parameters(), pages(), x, batch, tables, implementation="nonesuch")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("norm", [True, False])
def test_what_is_written_is_what_the_layers_make_of_it_one_by_one(norm, dtype):
    """To the bit, so that `attend` serves models of other frameworks exactly as `attention` serves ours."""
    batch, tables = one_row([0, 1, 2])
    qkv = normal(12, 4, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype)
    angles = rope_angles(ROPE, batch.positions, batch.positions + 1)
    weights = parameters(dtype)["qk_norm"] if norm else None
    before = tuple(pages(dtype).values())

    def one_by_one(qkv):
        q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
        if weights is not None:
            q = rms_norm(weights[0], q, eps=1e-6)
            k = rms_norm(weights[1], k, eps=1e-6)
        return rotate(angles, q), page_write(before, (rotate(angles, k), v), tables.write_slots)

    def at_once(qkv):
        return rotary_write(before, qkv, *angles, tables.write_slots, norm=weights)

    if jax.default_backend() == "gpu":
        pytest.skip("there a kernel may round the last bit differently")
    for one, other in zip(
        jax.tree.leaves(jax.jit(one_by_one)(qkv)),
        jax.tree.leaves(jax.jit(at_once)(qkv)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("stored", [pytest.param("float8_e4m3fn", marks=pytest.mark.slow), "int8"])
def test_quantised_pages_give_nearly_the_same_answers(stored):
    plain, cache = pages(), {}
    for role, scale in (("key", "key_scale"), ("value", "value_scale")):
        flat = plain[role].reshape(-1, KV_HEADS, HEAD_DIM)
        numbers, scales = quantise(flat, stored)
        cache[role] = numbers.reshape(plain[role].shape)
        cache[scale] = scales.reshape(PAGES, PAGE_SIZE, KV_HEADS)
    x, previous = normal(8, 7, HIDDEN), cache
    for start, stop, decode in ((0, 4, False), (4, 6, False), (6, 7, True)):
        batch, tables = one_row(range(start, stop), decode=decode)
        new = jnp.concatenate((x[start:stop], jnp.zeros((1, HIDDEN))))
        cache, y = run(parameters(), previous, new, batch, tables)
        plain, wanted = run(parameters(), plain, new, batch, tables)
        np.testing.assert_allclose(y[:-1], wanted[:-1], atol=0.5, rtol=0.1)
        assert {role: pool.dtype for role, pool in cache.items()} == {
            role: pool.dtype for role, pool in previous.items()
        }
        previous = cache


def test_attend_serves_callers_that_project_for_themselves():
    batch, tables = one_row([0])
    q, k, v = normal(9, 2, HEADS, HEAD_DIM), *(normal(s, 2, KV_HEADS, HEAD_DIM) for s in (10, 11))
    cache, mixed = jax.jit(partial(attend, scale=1.0))(pages(), q, k, v, batch, tables)
    # The first token of a sequence sees itself alone.
    np.testing.assert_allclose(mixed[0], jnp.repeat(v[0], HEADS // KV_HEADS, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(cache["value"][3, 0], v[0])
