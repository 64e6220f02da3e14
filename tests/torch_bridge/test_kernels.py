"""The ops on torch tensors: results, in-place writes, and one graph under torch.compile."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.library import opcheck

import pallas_kernels
from pallas_kernels.formats.quantise import quantise
from torch_bridge import NotZeroCopy, from_torch, kernels, to_torch
from torch_bridge.ops import calls

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.25


@pytest.fixture
def world():
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    pools = [draw(8, 4, KV_HEADS, DIM) for _ in range(2)]
    table = torch.tensor([[3, 1], [2, 5], [4, 6]], dtype=torch.int32)
    lengths = torch.tensor([5, 8, 1], dtype=torch.int32)
    return draw, pools, table, lengths


def dense(q, pools, table, length, window=None):
    """One query over one row, in float64."""
    keys, values = (
        pool.double()[table.long()].reshape(-1, KV_HEADS, DIM)[:length].repeat_interleave(2, 1)
        for pool in pools
    )
    scores = torch.einsum("hd,khd->hk", q.double(), keys) * SCALE
    if window is not None:
        scores[:, : max(0, length - window)] = -torch.inf
    out = torch.einsum("hk,khd->hd", scores.softmax(1), values)
    return out, scores.logsumexp(1)


@pytest.mark.parametrize("window", [None, 3])
def test_paged_attention_is_attention(world, window):
    draw, pools, table, lengths = world
    q = draw(3, HEADS, DIM)
    out, lse = kernels.paged_attention(
        q, *pools, table, lengths, scale=SCALE, window=window, return_lse=True
    )
    for row in range(3):
        wanted, wanted_lse = dense(q[row], pools, table[row], int(lengths[row]), window)
        torch.testing.assert_close(out[row].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[row].double(), wanted_lse, rtol=2e-5, atol=2e-5)


def test_ragged_attention_is_attention_of_each_query(world):
    draw, pools, table, lengths = world
    q, bounds = draw(5, HEADS, DIM), torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    out = kernels.ragged_attention(q, *pools, table, lengths, bounds, scale=SCALE)
    seen = [(0, 3), (0, 4), (0, 5), (1, 8), (2, 1)]
    for query, (row, length) in enumerate(seen):
        wanted, _ = dense(q[query], pools, table[row], length)
        torch.testing.assert_close(out[query].double(), wanted, rtol=1e-5, atol=1e-5)


def test_sinks_caps_and_scales_reach_the_op(world):
    draw, pools, table, lengths = world
    q, sinks = draw(3, HEADS, DIM), draw(HEADS)
    flat = [from_torch(pool.view(32, KV_HEADS, DIM)) for pool in pools]
    k, k_scales, v, v_scales = (
        part.reshape(8, 4, *part.shape[1:]) for pool in flat for part in quantise(pool, jnp.int8)
    )
    options = {"scale": SCALE, "soft_cap": 2.0}
    wanted = pallas_kernels.paged_attention(
        *map(from_torch, (q,)), k, v, from_torch(table), from_torch(lengths),
        sinks=from_torch(sinks), k_scales=k_scales, v_scales=v_scales, **options,
    )  # fmt: skip
    as_torch = {
        "k_pages": k, "v_pages": v, "k_scales": k_scales, "v_scales": v_scales,
    }  # fmt: skip
    tensors = {name: to_torch(array).clone() for name, array in as_torch.items()}
    got = kernels.paged_attention(
        q, tensors["k_pages"], tensors["v_pages"], table, lengths, sinks=sinks,
        k_scales=tensors["k_scales"], v_scales=tensors["v_scales"], **options,
    )  # fmt: skip
    np.testing.assert_allclose(got.numpy(), np.asarray(wanted), rtol=1e-6, atol=1e-6)


def test_pools_are_written_in_place_and_nowhere_else(world):
    draw, pools, _, _ = world
    new = [draw(3, KV_HEADS, DIM) for _ in range(2)]
    slots = torch.tensor([13, 2, 32], dtype=torch.int32)  # The last one is padding.
    wanted = [pool.clone() for pool in pools]
    for pool, values in zip(wanted, new, strict=True):
        pool.view(32, KV_HEADS, DIM)[[13, 2]] = values[:2]
    kernels.page_write(pools, new, slots)
    assert all(torch.equal(pool, other) for pool, other in zip(pools, wanted, strict=True))


def test_rotary_write_turns_queries_and_keys_and_writes(world):
    draw, pools, _, _ = world
    qkv, angles = draw(2, HEADS + 2 * KV_HEADS, DIM), draw(2, DIM // 2)
    slots = torch.tensor([0, 31], dtype=torch.int32)
    q = kernels.rotary_write(pools, qkv, angles.cos(), angles.sin(), slots)
    left, right = qkv[:, : HEADS + KV_HEADS].chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    torch.testing.assert_close(q, turned[:, :HEADS], rtol=1e-5, atol=1e-5)
    flat = pools[0].view(32, KV_HEADS, DIM)
    torch.testing.assert_close(flat[[0, 31]], turned[:, HEADS:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[1].view(32, KV_HEADS, DIM)[[0, 31]], qkv[:, -KV_HEADS:])


def block(q, keys, values, new, slots, table, lengths):
    kernels.page_write([keys, values], [new, new * 2], slots)
    return kernels.paged_attention(q * 2, keys, values, table, lengths, scale=SCALE) + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_keeps_ops_in_one_graph(world, backend):
    draw, pools, table, lengths = world
    q, new = draw(3, HEADS, DIM), draw(2, KV_HEADS, DIM)
    slots = torch.tensor([12, 9], dtype=torch.int32)
    compiled_pools = [pool.clone() for pool in pools]
    wanted = block(q, *pools, new, slots, table, lengths)
    got = torch.compile(block, backend=backend, fullgraph=True)(
        q, *compiled_pools, new, slots, table, lengths
    )
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(compiled_pools, pools, strict=True))


@pytest.mark.parametrize("op", ["paged_attention_lse", "ragged_attention"])
def test_fakes_have_the_shapes_of_the_ops(world, op):
    draw, pools, table, lengths = world
    q = draw(3, HEADS, DIM)
    bounds = [torch.tensor([0, 1, 2, 3], dtype=torch.int32)] if "ragged" in op else []
    args = (q, *pools, table, lengths, *bounds, SCALE, 2, None, None, None, None)
    found = opcheck(getattr(torch.ops.jaxkv, op).default, args)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ["page_write", "rotary_write"])
def test_fakes_of_writes_say_what_is_written(world, op):
    draw, pools, _, _ = world
    slots = torch.tensor([1, 2], dtype=torch.int32)
    if op == "page_write":
        args = (pools, [draw(2, KV_HEADS, DIM) for _ in range(2)], slots)
    else:
        angles = draw(2, DIM // 2)
        args = (
            pools,
            draw(2, HEADS + 2 * KV_HEADS, DIM),
            angles.cos(),
            angles.sin(),
            slots,
            None,
            1e-6,
        )
    found = opcheck(getattr(torch.ops.jaxkv, op).default, args)
    assert set(found.values()) == {"SUCCESS"}


def test_what_cannot_be_shared_is_refused_by_name(world):
    draw, pools, table, lengths = world
    q = draw(3, HEADS, DIM)
    with pytest.raises(NotZeroCopy, match=r"cast it to torch\.int32"):
        kernels.paged_attention(q, *pools, table.long(), lengths, scale=SCALE)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        kernels.paged_attention(draw(3, 3, DIM), *pools, table, lengths, scale=SCALE)


def test_a_gradient_is_refused(world):
    draw, pools, table, lengths = world
    q = draw(3, HEADS, DIM).requires_grad_()
    out = kernels.paged_attention(q, *pools, table, lengths, scale=SCALE)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


def test_calls_of_equal_shapes_and_options_share_one_program(world):
    draw, pools, table, lengths = world
    call = partial(kernels.paged_attention, scale=0.375)
    call(draw(3, HEADS, DIM), *pools, table, lengths)
    programs = calls._program.cache_info().currsize
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    for _ in range(3):
        call(draw(3, HEADS, DIM), *pools, table, lengths)
    jax.monitoring.clear_event_listeners()
    assert calls._program.cache_info().currsize == programs
    assert not [name for name in events if "backend_compile" in name]


def test_results_are_kept_until_a_later_call_is_ordered_after_torch(world, monkeypatch):
    """What a GPU needs (see `hand_out`), shown without one: the list is emptied by the call after the drop."""
    draw, pools, table, lengths = world
    monkeypatch.setattr(calls, "_LENT", [])
    monkeypatch.setattr(calls, "_is_asynchronous", lambda tensor: True)
    call = partial(kernels.paged_attention, scale=SCALE)
    first = call(draw(3, HEADS, DIM), *pools, table, lengths)
    second = call(draw(3, HEADS, DIM), *pools, table, lengths)
    assert len(calls._LENT) == 2
    del first
    assert len(calls._LENT) == 2
    third = call(draw(3, HEADS, DIM), *pools, table, lengths)
    assert len(calls._LENT) == 2
    del second, third
