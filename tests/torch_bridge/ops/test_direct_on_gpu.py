"""Kernels that torch launches without XLA on a GPU: XLA's numbers, torch's streams, torch's graphs."""

import pytest
import torch
from jaxtyping import TypeCheckError

from torch_bridge import from_torch, kernels, to_torch
from torch_bridge.ops import direct
from torch_bridge.ops.direct import decode_kernel, ragged_kernel, write_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
CUDA = "cuda"
SLEEP = 400_000  # cycles, about a quarter of a millisecond


def decode_case(rows, width):
    """Returns queries, pools, table and lengths of rows up to `width` pages of 16."""
    q = torch.randn(rows, 32, 128, dtype=torch.bfloat16, device=CUDA)
    pools = [torch.randn(2048, 16, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    table = torch.randperm(2048, device=CUDA)[: rows * width].to(torch.int32).view(rows, width)
    lengths = torch.randint(1, width * 16 + 1, (rows,), device=CUDA).to(torch.int32)
    return q, *pools, table, lengths


def through_xla(tensors, op=kernels.paged_attention, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "IS_ON", False)
        return op(*tensors, **options)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (64, 16)])
def test_the_kernel_launched_by_torch_equals_the_kernel_launched_by_xla(rows, width, window):
    tensors = decode_case(rows, width)
    options = {"scale": 0.1, "window": window, "soft_cap": None}
    launch = decode_kernel(*tensors, **options)
    assert launch is not None
    for _ in range(3):
        torch.cuda._sleep(SLEEP)
        tensors[0].normal_()
        out = launch(*tensors)
    assert torch.equal(out, through_xla(tensors, scale=0.1, window=window))
    assert torch.equal(out, kernels.paged_attention(*tensors, scale=0.1, window=window))
    # With beartype, the annotation refuses the table before the op does.
    with pytest.raises((ValueError, TypeCheckError), match="page_table"):
        kernels.paged_attention(*tensors[:3], tensors[3].view(-1), tensors[4], scale=0.1)


@pytest.mark.parametrize(("rows", "width", "heads"), [(2, 1024, 32), (1, 512, 28), (16, 8, 28)])
def test_split_rows_and_odd_groups_need_no_xla(rows, width, heads):
    kv_heads = 8 if heads == 32 else 4
    pool = torch.randn(2, 2048, 16, kv_heads, 128, device=CUDA)
    table = torch.randperm(2048, device=CUDA)[: rows * width].to(torch.int32).view(rows, width)
    lengths = torch.randint(1, width * 16 + 1, (rows,), device=CUDA).to(torch.int32)
    lengths[0] = 17
    q = torch.randn(rows, heads, 128, device=CUDA)
    tensors = (*(x.to(torch.bfloat16) for x in (q, *pool)), table, lengths)
    launch = decode_kernel(*tensors, scale=0.1, window=None, soft_cap=None)
    out = launch(*tensors)
    torch.testing.assert_close(out, through_xla(tensors, scale=0.1), rtol=1e-2, atol=2e-3)
    for row in range(rows):
        keys, values = (
            x[table[row].long()].flatten(0, 1)[: lengths[row]].double() for x in tensors[1:3]
        )
        group = heads // kv_heads
        scores = torch.einsum(
            "hd,khd->hk", tensors[0][row].double(), keys.repeat_interleave(group, 1)
        )
        wanted = torch.einsum(
            "hk,khd->hd", (scores * 0.1).softmax(1), values.repeat_interleave(group, 1)
        )
        torch.testing.assert_close(out[row].double(), wanted, rtol=2e-2, atol=1e-2)
    lengths.zero_()
    assert not launch(*tensors).any()


@pytest.mark.parametrize(("rows", "width"), [(8, 64), (1, 512)])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_sinks_and_pages_of_8_bits_need_no_xla_in_decode(rows, width, stored, has_sinks):
    """The second size splits its row; the logarithms of the parts' sums hold the sink once."""
    q, *pools, table, lengths = decode_case(rows, width)
    sinks = torch.randn(32, device=CUDA).to(torch.bfloat16) * 3 if has_sinks else None
    scales = ()
    if stored != torch.bfloat16:
        top = 448.0 if stored.is_floating_point else 127.0
        scales = tuple(pool.float().abs().amax(-1) / top for pool in pools)
        pools = [(pool / size[..., None]) for pool, size in zip(pools, scales, strict=True)]
        pools = [(one if stored.is_floating_point else one.round()).to(stored) for one in pools]
    tensors = (q, *pools, table, lengths)
    more = dict(zip(("k_scales", "v_scales"), scales, strict=False)) | {"sinks": sinks}
    options = {"scale": 0.1, "window": None, "soft_cap": None}
    launch = decode_kernel(*tensors, **options, sinks=sinks, scales=scales)
    out = launch(*tensors, sinks=sinks, scales=scales)
    # With several parts torch sums them, in another order.
    torch.testing.assert_close(out, through_xla(tensors, scale=0.1, **more), rtol=1e-2, atol=2e-3)
    assert torch.equal(out, kernels.paged_attention(*tensors, scale=0.1, **more))


@pytest.mark.parametrize("window", [None, 100])
def test_sinks_of_packed_queries_need_no_xla(window):
    _, keys, values, table, _ = decode_case(3, 32)
    q = torch.randn(256, 32, 128, dtype=torch.bfloat16, device=CUDA)
    sinks = torch.randn(32, device=CUDA).to(torch.bfloat16) * 3
    lengths = torch.tensor([100, 512, 31], dtype=torch.int32, device=CUDA)
    bounds = torch.tensor([0, 100, 200, 231], dtype=torch.int32, device=CUDA)
    tensors = (q, keys, values, table, lengths, bounds)
    launch = ragged_kernel(*tensors, scale=0.1, window=window, soft_cap=None, sinks=sinks)
    tiles = [to_torch(array) for array in launch.plan(from_torch(lengths), from_torch(bounds))]
    out = launch(*tensors[:4], *tiles, sinks=sinks)
    options = {"scale": 0.1, "window": window}
    wanted = through_xla(tensors, kernels.ragged_attention, **options, sinks=sinks)
    assert torch.equal(out, wanted)
    assert torch.equal(out, kernels.ragged_attention(*tensors, **options, sinks=sinks))
    assert not torch.equal(out, kernels.ragged_attention(*tensors, **options))


@pytest.mark.parametrize("tokens", [256, 233])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (100, True)])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_8_bits_need_no_xla_in_prefill(stored, window, has_sinks, tokens):
    _, *pools, table, _ = decode_case(3, 32)
    top = 448.0 if stored.is_floating_point else 127.0
    scales = [pool.float().abs().amax(-1) / top for pool in pools]
    pools = [pool / size[..., None] for pool, size in zip(pools, scales, strict=True)]
    pools = [(one if stored.is_floating_point else one.round()).to(stored) for one in pools]
    q = torch.randn(tokens, 32, 128, dtype=torch.bfloat16, device=CUDA)
    sinks = torch.randn(32, device=CUDA).to(torch.bfloat16) * 3 if has_sinks else None
    lengths = torch.tensor([100, 512, 31], dtype=torch.int32, device=CUDA)
    bounds = torch.tensor([0, 100, 200, 231], dtype=torch.int32, device=CUDA)
    tensors = (q, *pools, table, lengths, bounds)
    options = {"scale": 0.1, "window": window, "sinks": sinks}
    options |= dict(zip(("k_scales", "v_scales"), scales, strict=True))
    out = kernels.ragged_attention(*tensors, **options)
    assert torch.equal(out, through_xla(tensors, kernels.ragged_attention, **options))
    assert out.shape == q.shape
    assert not out[231:].any()
    whole = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -tokens % 8))
    numbers = {"scale": 0.1, "window": window, "soft_cap": None}
    launch = ragged_kernel(whole, *tensors[1:], **numbers, sinks=sinks, scales=tuple(scales))
    assert launch is not None


@pytest.mark.parametrize("window", [None, 100])
def test_packed_queries_need_no_xla(window):
    _, keys, values, table, _ = decode_case(3, 32)
    q = torch.randn(256, 32, 128, dtype=torch.bfloat16, device=CUDA)
    lengths = torch.tensor([100, 512, 31], dtype=torch.int32, device=CUDA)
    bounds = torch.tensor([0, 100, 200, 231], dtype=torch.int32, device=CUDA)
    tensors = (q, keys, values, table, lengths, bounds)
    launch = ragged_kernel(*tensors, scale=0.1, window=window, soft_cap=None)
    tiles = [to_torch(array) for array in launch.plan(from_torch(lengths), from_torch(bounds))]
    out = launch(*tensors[:4], *tiles)
    wanted = through_xla(tensors, kernels.ragged_attention, scale=0.1, window=window)
    assert torch.equal(out, wanted)
    assert torch.equal(out, kernels.ragged_attention(*tensors, scale=0.1, window=window))
    assert not out[231:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_are_written_without_xla_and_nothing_else_is(dtype, tokens):
    pools = [torch.randint(256, (64, 16, 8, 128), device=CUDA).to(dtype) for _ in range(2)]
    values = [torch.randint(256, (tokens, 8, 128), device=CUDA).to(dtype) for _ in range(2)]
    slots = torch.randperm(1024, device=CUDA)[:tokens]
    wanted = [pool.clone() for pool in pools]
    for pool, new in zip(wanted, values, strict=True):
        pool.flatten(0, 1)[slots] = new
    tensors = (slots.to(torch.int32), *values, *pools)
    assert write_kernel(*tensors)(*tensors) == []
    assert all(torch.equal(pool, other) for pool, other in zip(pools, wanted, strict=True))


def test_the_kernel_runs_on_the_stream_that_torch_computes_on():
    tensors = decode_case(8, 32)
    launch = decode_kernel(*tensors, scale=0.1, window=None, soft_cap=None)
    wanted, sides = [], [torch.cuda.Stream() for _ in range(2)]
    q = tensors[0].clone()
    for index in range(4):
        wanted.append(launch(q * (index + 1), *tensors[1:]))
    torch.cuda.synchronize()
    got = []
    for index in range(4):
        with torch.cuda.stream(sides[index % 2]):
            torch.cuda._sleep(40 * SLEEP)
            late = q * (index + 1)
            got.append(launch(late, *tensors[1:]))
    # The default stream would have read `late` before it was written.
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_graph_of_torchs_records_the_kernel_and_none_is_loaded_meanwhile():
    tensors = decode_case(4, 16)
    options = {"window": None, "soft_cap": None}
    launch = decode_kernel(*tensors, scale=0.1, **options)
    launch(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_kernel(*tensors, scale=0.1, **options)(*tensors)
        with pytest.raises(RuntimeError, match="before the capture"):
            decode_kernel(*tensors, scale=0.123, **options)
    for _ in range(3):
        tensors[0].normal_()
        graph.replay()
        assert torch.equal(out, launch(*tensors))
