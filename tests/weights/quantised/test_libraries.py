"""Files that the formats' own libraries write mean here what they mean there. Each test needs its library."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import skinny_matmul
from tests.weights.quantised.definitions import FILES, File, eight_bit
from tests.weights.quantised.test_formats import in_few_bits, meant, opened, weight_of

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_weights_packed_by_compressed_tensors(tmp_path, kit, bits, symmetric, ordered):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    draw = torch.Generator().manual_seed(bits)
    rows, columns, group = 24, 128, 32
    said = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    said |= {"strategy": "group", "group_size": group}
    settings = quantization.QuantizationArgs(**said)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=settings)
    state = {
        "weight": torch.randn((rows, columns), generator=draw),
        "weight_scale": torch.rand((rows, columns // group), generator=draw) / 4 + 0.01,
    }
    if not symmetric:
        middle = 1 << bits - 1
        shape = (rows, columns // group)
        state["weight_zero_point"] = torch.randint(-middle, middle, shape, generator=draw).to(
            torch.int8
        )
    if ordered:
        places = torch.arange(columns)[torch.randperm(columns, generator=draw)] // group
        state["weight_g_idx"] = places.to(torch.int32)
    compressor = library.PackedQuantizationCompressor
    packed = compressor.compress(state, scheme)
    if ordered:
        # The library forgets the order; each column's own group says what the codes mean.
        codes = library.unpack_from_int32(
            packed["weight_packed"], bits, torch.Size((rows, columns))
        )
        points = state.get("weight_zero_point", torch.zeros((rows, columns // group)))
        wanted = (codes.float() - points.float()[:, places]) * state["weight_scale"][:, places]
    else:
        wanted = compressor.decompress(packed, scheme)["weight"]
    tensors = {f"a.{name}": value.numpy() for name, value in packed.items()}
    tensors["a.weight_shape"] = tensors["a.weight_shape"].astype(np.int32)
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    file = File(config | {"config_groups": {"x": {"weights": said}}}, tensors, wanted.numpy())
    with opened(tmp_path, kit, file) as stored:
        weight = weight_of(stored, file)
        got = np.empty(rows * columns, np.float32)
        weight.read(got)
        np.testing.assert_array_equal(got.reshape(rows, columns), file.means)
        few = in_few_bits(weight)
    if isinstance(few, str):
        assert (bits, symmetric) == (8, False)
        return
    np.testing.assert_array_equal(meant(few), file.means)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_floats_of_4_bits_packed_by_compressed_tensors(tmp_path, kit, form):
    library = pytest.importorskip(f"compressed_tensors.compressors.{form}.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressor = getattr(library, f"{form.upper()}PackedCompressor")
    scheme = quantization.preset_name_to_scheme(f"{form.upper()}A16", ["Linear"])
    draw, group = torch.Generator().manual_seed(3), scheme.weights.group_size
    scales = torch.rand((24, 128 // group), generator=draw) * 30 + 1
    # MXFP4 has powers of two.
    scales = torch.exp2(scales.log2().round()) if form == "mxfp4" else scales
    state = {
        "weight": torch.randn((24, 128), generator=draw),
        "weight_scale": scales.to(torch.float8_e4m3fn).float(),
    }
    if form == "nvfp4":
        # The library divides in bfloat16, which has all bits of a quotient by a power of two.
        state["weight_global_scale"] = torch.tensor([32.0])
    packed = compressor.compress(state, scheme)
    wanted = compressor.decompress(packed, scheme)["weight"].float()
    assert wanted.unique().numel() > 8
    tensors = {
        f"a.{name}": value.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        if value.dtype == torch.float8_e4m3fn
        else value.numpy()
        for name, value in packed.items()
        if name.startswith("weight_")
    }
    file = File(FILES[form].config, tensors, wanted.numpy())
    with opened(tmp_path, kit, file) as stored:
        got = np.empty(24 * 128, np.float32)
        weight_of(stored, file).read(got)
    np.testing.assert_array_equal(got.reshape(24, 128), file.means)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_matrices_in_4_bits_of_bitsandbytes(tmp_path, kit, kind, nested):
    # Version 0.50 takes other scales on CPUs, not those of which it made the codes, where a row is no whole blocks.
    library = pytest.importorskip("bitsandbytes.functional")
    draw = torch.Generator().manual_seed(3)
    codes, state = library.quantize_4bit(
        torch.randn((24, 128), generator=draw), quant_type=kind, compress_statistics=nested
    )
    wanted = library.dequantize_4bit(codes, state)
    tensors = {f"a.weight.{name}": one.numpy() for name, one in state.as_dict(packed=True).items()}
    file = File(FILES["nf4"].config, tensors | {"a.weight": codes.numpy()}, wanted.numpy())
    with opened(tmp_path, kit, file) as stored:
        got = np.empty(24 * 128, np.float32)
        weight_of(stored, file).read(got)
    np.testing.assert_allclose(got.reshape(24, 128), file.means, rtol=3e-7)


def test_rows_in_int8_of_bitsandbytes(tmp_path, kit):
    library = pytest.importorskip("bitsandbytes.functional")
    draw = torch.Generator().manual_seed(3)
    codes, largest, _ = library.int8_vectorwise_quant(
        torch.randn((24, 96), generator=draw, dtype=torch.float16)
    )
    wanted = library.int8_vectorwise_dequant(codes, largest)
    tensors = {"a.weight": codes.numpy(), "a.SCB": largest.numpy()}
    file = File(FILES["bnb-int8"].config, tensors, wanted.numpy())
    with opened(tmp_path, kit, file) as stored:
        few = in_few_bits(weight_of(stored, file))
    np.testing.assert_allclose(meant(few), file.means, rtol=3e-7)


def test_nvfp4_as_modelopt_widens_it():
    library = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    file = FILES["nvfp4-modelopt"]
    codes, scales = file.tensors["a.weight"], file.tensors["a.weight_scale"]
    theirs = library.NVFP4QTensor(file.means.shape, torch.float32, torch.from_numpy(codes))
    wide = theirs.dequantize(
        scale=torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn),
        double_scale=torch.tensor(file.tensors["a.weight_scale_2"]),
        block_sizes={-1: 16},
    )
    np.testing.assert_array_equal(wide.numpy(), file.means)


def test_rows_of_activations_as_compressed_tensors_rounds_those_of_fp8_dynamic(tmp_path, kit):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    library = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    said = quantization.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).input_activations
    file = eight_bit(9, 128, shape=(9, 1))
    x = np.random.default_rng(3).normal(size=(70, file.means.shape[1])).clip(-3.5, 3.5)
    # Scales that are powers of two leave no rounding of them to differ by.
    x[:, 5] = 3.5
    x = (x * np.exp2(np.arange(70) % 9 - 4)[:, None]).astype(ml_dtypes.bfloat16)
    plain = torch.from_numpy(x.astype(np.float32))[None]
    scales, zeros = library.compute_dynamic_scales_and_zp(plain, said, torch.nn.Linear(1, 1))
    rows = library.fake_quantize(plain, scales, zeros, args=said)[0].double().numpy()
    with opened(tmp_path, kit, file) as stored:
        found = skinny_matmul(in_few_bits(weight_of(stored, file)), x, result="float32")
    weights = file.means.astype(np.float64)
    error = np.abs(np.asarray(found, np.float64) - rows @ weights.T)
    assert np.all(error <= 1e-6 * (np.abs(rows) @ np.abs(weights).T))


def test_weights_as_autoawq_widens_them():
    library = pytest.importorskip("awq.utils.packing_utils", exc_type=ImportError)
    file = FILES["awq-128"]
    words, zeros, scales = (
        torch.from_numpy(file.tensors[f"a.{name}"]) for name in ("qweight", "qzeros", "scales")
    )
    theirs = library.dequantize_gemm(words, zeros, scales.float(), 4, 128)
    np.testing.assert_array_equal(theirs.numpy().T, file.means)
