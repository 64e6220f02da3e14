"""Launches without XLA, as far as they can be tested without a GPU: kernels, pointers, and the version of JAX."""

import ctypes
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch

from pallas_kernels.ragged_attention.mosaic_unpack import unpack
from tests.pallas_kernels.h200.reports import reports_of
from torch_bridge import kernels
from torch_bridge.ops import direct, launch
from torch_bridge.ops.direct import Decode, Packed
from torch_bridge.ops.launch import Launch, Lowered, lower_alone, why_not_launch
from torch_bridge.ops.unpacked_pages import Stored
from torch_bridge.sharing.dlpack import from_torch_all, to_torch

pytestmark = pytest.mark.torch


def test_this_jax_launches_kernels_for_torch_as_we_do():
    """Fails with a JAX whose compiler for torch has changed; calls then go through XLA until `launch.py` follows."""
    assert why_not_launch() is None


def test_another_jax_is_told_from_this_one(monkeypatch):
    def compile_otherwise(module):
        def launch(pointers, device):
            return module

        return launch, None

    monkeypatch.setattr(launch.core, "_compile_as_torch_gpu_kernel", compile_otherwise)
    assert "in another way" in str(why_not_launch.__wrapped__())
    monkeypatch.delattr(launch.core, "_compile_as_torch_gpu_kernel")
    assert "has no compiler" in str(why_not_launch.__wrapped__())


@pytest.fixture
def launched(monkeypatch):
    """Lets JAX load kernels from a library that launches nothing, and returns what it would have been given.

    A loaded kernel has the number of its bytes as its function.
    """
    calls = []
    pointers = ctypes.POINTER(ctypes.c_void_p)
    kinds = [ctypes.c_void_p, ctypes.c_void_p, pointers]
    if launch._HAS_KERNEL:
        kinds = [ctypes.c_void_p, *kinds, ctypes.c_int]

    def note(*given):
        # The pointers' array lives as long as the call.
        calls.append([one[:4] if isinstance(one, pointers) else one for one in given])

    launch_c = ctypes.CFUNCTYPE(None, *kinds)(note)
    address = ctypes.cast(launch_c, ctypes.c_void_p).value

    class Function:
        def __call__(self, module, size):
            return size.value, address, 5

    library = SimpleNamespace(MosaicGpuCompile=Function(), MosaicGpuUnload=Function())
    monkeypatch.setattr(launch.core.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    yield lambda: [unpacked(given) for given in calls]
    assert launch_c is not None, "the function lives as long as it may be called"


def unpacked(given):
    """Returns function, stream and pointers of a launch; the kernel and the device are the expected ones."""
    if launch._HAS_KERNEL:
        kernel, *given, device = given
        assert (kernel, device) == (5, 3)
    function, stream, pointers = given
    return function, stream, pointers


def test_a_launch_is_given_arguments_then_results_on_the_current_stream(launched):
    out = (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((5,), jnp.float32))
    made = Launch(Lowered(b"twelve bytes", ()), out, torch.device("cpu", 3))
    tensors = torch.zeros(4), torch.zeros(2)
    first, second = made(*tensors)
    assert (first.shape, first.dtype) == ((2, 3), torch.bfloat16)
    assert (second.shape, second.dtype) == ((5,), torch.float32)
    pointers = [tensor.data_ptr() for tensor in (*tensors, first, second)]
    assert launched() == [(12, 77, pointers)]


def test_results_in_place_are_the_arguments_own_memory(launched):
    made = Launch(Lowered(b"", (1, 0)), (), torch.device("cpu", 3))
    left, right = torch.zeros(4), torch.zeros(4)
    assert made(left, right) == []
    pointers = [left.data_ptr(), right.data_ptr()]
    assert launched()[0][2] == [*pointers, *reversed(pointers)]


def test_a_function_that_does_more_than_launch_a_kernel_is_not_launched():
    assert lower_alone(lambda x: x + 1, [jax.ShapeDtypeStruct((4,), jnp.float32)]) is None
    assert lower_alone(lambda x: x, [jax.ShapeDtypeStruct((4,), jnp.float32)]) is None


def test_shares_of_a_row_are_joined_by_their_sums():
    """Against float64; one share has no keys, and one row has none at all."""
    rows, parts, kv_heads, dim, width = 3, 4, 2, 16, 8
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(rows, parts, kv_heads, dim, width, generator=generator)
    lse = 9 * torch.randn(rows, parts, kv_heads, width, generator=generator)
    lse[0, 2], lse[1] = -math.inf, -math.inf
    out[0, 2], out[1] = 0, 0
    columns = torch.tensor([0, 1, 2, 8, 9, 10])
    got = Decode(lambda *_: [out, lse], 0, columns.numpy(), torch.device("cpu"))(torch.zeros(1))
    for row in range(rows):
        for head, column in enumerate(columns.tolist()):
            kv, at = divmod(column, width)
            weight = torch.exp2(lse[row, :, kv, at].double())
            total = (weight[:, None] * out[row, :, kv, :, at].double()).sum(0)
            wanted = total / weight.sum() if weight.sum() else total
            torch.testing.assert_close(got[row, head].double(), wanted, rtol=1e-5, atol=1e-6)


def test_heads_that_a_kernel_wants_more_are_zeros():
    seen = []
    decode = Decode(lambda *tensors: [seen.append(tensors) or tensors[0]], 3, None, None)
    q = torch.ones(2, 5, 4)
    assert decode(q, q).shape == (2, 8, 4)
    assert torch.equal(seen[0][0][:, :5], q)
    assert not seen[0][0][:, 5:].any()


def test_sinks_of_heads_are_laid_out_as_kernels_want_them():
    """As many as there are heads for decode; for packed queries once for each row of a tile, in groups of heads."""
    seen = []
    sinks = torch.arange(6, dtype=torch.bfloat16)
    decode = Decode(lambda *tensors: [seen.append(tensors) or tensors[0]], 2, None, None)
    q = torch.ones(2, 6, 4)
    decode(q, q, sinks=sinks, scales=(q + 1, q + 2))
    assert seen[0][2].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]
    assert seen[0][2].dtype == torch.float32
    assert [one.max() for one in seen[0][3:]] == [2, 3]
    packed = Packed(lambda *tensors: [tensors[-1]], None, 64, 2, 3, None)
    pools = (q, q, q)
    assert packed(q, *pools, sinks=sinks).tolist() == [
        [0, 0, 0, 1, 1, 1],
        [2, 2, 2, 3, 3, 3],
        [4, 4, 4, 5, 5, 5],
    ]
    assert packed(q, *pools) is q


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("window", [None, 9])
def test_pages_of_8_bits_are_converted_as_xla_converts_them(stored, window):
    """Bit for bit what the kernel gets inside XLA, whose interpreter the kernel's own tests run."""
    generator = torch.Generator().manual_seed(0)
    pools = [(40 * torch.randn(7, 4, 2, 8, generator=generator)).to(stored) for _ in range(2)]
    scales = [torch.rand(7, 4, 2, generator=generator) for _ in range(2)]
    table = torch.tensor([[3, 1, 0], [6, 9, -1], [2, 5, 4]], dtype=torch.int32)
    lengths = torch.tensor([9, 4, 12], dtype=torch.int32)
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    seen = []
    packed = Packed(lambda *tensors: [seen.append(tensors) or tensors[0]], None, 8, 1, 1, window)
    q = torch.zeros(16, 4, 8, dtype=torch.bfloat16)
    packed(q, *pools, table, table, stored=Stored(*scales, lengths, bounds))
    [(_, k_pages, v_pages, numbers, tiles, *by_tile)] = seen
    assert tiles is table
    arrays = from_torch_all([*pools, table, lengths, bounds, *scales], copy=True)
    wanted = unpack(*arrays, keys=8, window=window)
    for ours, theirs in zip((k_pages, v_pages, numbers, *by_tile), wanted, strict=True):
        assert str(ours.dtype)[6:] == theirs.dtype.name
        assert ours.is_contiguous()
        assert torch.equal(ours.float(), to_torch(theirs).float())


def test_packed_queries_of_the_op_are_launched_with_tiles_and_scales(monkeypatch):
    """The op gives the launch its tiles, scales and lengths; without a GPU the launch is one that writes them down."""
    seen, asked = [], []

    def found(*tensors, **options):
        asked.append(options)
        plan = lambda seq_lens, cu_q_lens: (seq_lens + 1, cu_q_lens + 2)  # noqa: E731
        return Packed(lambda *given: [seen.append(given) or 2 * given[0]], plan, 8, 1, 1, None)

    monkeypatch.setattr(kernels, "ragged_kernel", found)
    q = torch.ones(5, 2, 8, dtype=torch.bfloat16)
    pools = [torch.ones(3, 4, 2, 8).to(torch.int8)] * 2
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    lengths, bounds = torch.tensor([8], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    scales = {"k_scales": torch.ones(3, 4, 2), "v_scales": torch.full((3, 4, 2), 2.0)}
    out = kernels.ragged_attention(q, *pools, table, lengths, bounds, scale=1.0, **scales)
    assert torch.equal(out, 2 * q)
    [(wide, k_pages, _, numbers, tiles, count, k_scales, v_scales)] = seen
    assert (k_pages.dtype, numbers.tolist()) == (torch.bfloat16, [[0, 1]])
    assert (len(wide), float(wide[5:].abs().max())) == (8, 0.0)
    assert (tiles.tolist(), count.tolist()) == ([9], [2, 7])
    assert (float(k_scales.max()), float(v_scales.max())) == (1.0, 2.0)
    assert [float(one.max()) for one in asked[0]["scales"]] == [1.0, 2.0]


def test_what_lies_otherwise_than_kernels_read_is_copied():
    whole = torch.arange(48, dtype=torch.float32).view(6, 8)
    assert direct.fitted(whole) is whole
    for odd in (whole.T, whole[:, :4], whole.view(-1)[1:]):
        copy = direct.fitted(odd)
        assert direct.fits(copy)
        assert not direct.fits(odd)
        assert torch.equal(copy, odd)


def test_on_the_cpu_xla_serves_everything():
    q, pool = torch.zeros(2, 4, 16), torch.zeros(4, 4, 2, 16)
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    options = {"scale": 1.0, "window": None, "soft_cap": None}
    assert direct.decode_kernel(q, pool, pool, table, lengths, **options) is None
    bounds = torch.arange(3, dtype=torch.int32)
    assert direct.ragged_kernel(q, pool, pool, table, lengths, bounds, **options) is None
    assert direct.write_kernel(lengths, q[:, :2], q[:, :2], pool, pool) is None


def compiled(part):
    return reports_of("../../torch_bridge/ops/h200_direct.py", part)


@pytest.fixture(scope="module")
def reports():
    return compiled("few")


@pytest.fixture(scope="module")
def others():
    return compiled("rest")


def test_an_h200_would_launch_kernels_whose_arguments_are_the_tensors(reports):
    kernel = {"runs": ["mosaic_gpu_v2"]}
    out = {"in_place": [], "out": [[[8, 32, 128], "bfloat16"]], "missing": 0, "columns": None}
    assert reports["decode"] == out | kernel
    assert reports["write"] == {"in_place": [3, 4], "out": []} | kernel
    # Copies take whole tiles of 8 tokens.
    assert reports["ragged odd"] is None


def assert_kernels(reports, left):
    """Each launch is one kernel, but for those that are left to XLA."""
    assert {name for name, report in reports.items() if report is None} == left
    for name in reports.keys() - left:
        assert reports[name]["runs"] == ["mosaic_gpu_v2"], name


def test_a_launch_compiles_into_one_kernel_or_is_left_to_xla(reports):
    """From shapes and dtypes, under the checks of annotations."""
    assert_kernels(reports, {"ragged odd", "decode float32", "write float64"})


@pytest.mark.slow
def test_launches_at_the_sizes_of_the_tests_on_a_gpu_compile_into_one_kernel(others):
    assert len(others) == 23
    assert_kernels(others, set())
    assert others["ragged"]["in_place"] == []
    assert others["ragged"]["out"] == [[[64, 32, 128], "bfloat16"]]


@pytest.mark.slow
def test_an_h200_would_split_long_rows_and_pad_odd_groups(others):
    split = others["decode split"]
    (rows, parts, kv_heads, dim, width), dtype = split["out"][0]
    assert (rows, kv_heads, dim, dtype) == (1, 8, 128, "float32")
    assert parts > 1
    assert split["out"][1] == [[1, parts, 8, width], "float32"]
    assert split["columns"] == [
        head // 4 * width + head // 4 * 4 % 8 + head % 4 for head in range(32)
    ]
    assert others["decode odd group"]["missing"] == 4
