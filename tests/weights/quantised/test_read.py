"""Weights of 8 and 4 bits with scales become the numbers that they mean, exactly; anything else is refused."""

import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, load_params
from jaxkv.weights.quantised.config import read_quantised
from jaxkv.weights.quantised.join_scales import with_scales
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.quantised.weight_forms import is_few_bits, weight_forms
from jaxkv.weights.safetensors import open_checkpoint
from tests.weights.host_memory import fits_in

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
# As DeepSeek publishes it, but for the size, which cuts blocks at both edges of tiny matrices.
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | {
    "weight_block_size": [20, 28]
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
BLOCKS_OF_4 = Scheme("MXFP4", ("mxfp4",), "float4_e2m1fn", 32, experts_alone=True)
PLAIN = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj")


def in_blocks(weight, rows, columns, scale_dtype=np.float32):
    """Returns e4m3 numbers, their scales and what they mean, in float64, block by block."""
    numbers = np.zeros(weight.shape, E4M3)
    means = np.zeros(weight.shape)
    scales = np.zeros(
        [-(-side // of) for side, of in zip(weight.shape, (rows, columns), strict=True)]
    )
    for at in np.ndindex(*scales.shape):
        block = np.s_[at[0] * rows : (at[0] + 1) * rows, at[1] * columns : (at[1] + 1) * columns]
        scale = np.float32(np.abs(weight[block]).max() / 448)
        scales[at] = 2.0 ** math.ceil(math.log2(scale)) if scale_dtype == E8M0 else scale
        numbers[block] = (weight[block] / scales[at]).astype(E4M3)
        means[block] = numbers[block].astype(np.float64) * scales[at]
    return numbers, scales.astype(scale_dtype), means


def quantise(directory, kit, extra, *, scale_dtype=np.float32, config=FP8, **more):
    """Rewrites a saved model in place; returns the tensors that its weights now mean, in float32."""
    file = directory / "model.safetensors"
    stored, means = {}, {}
    for name, weight in load_file(file).items():
        stored[name] = means[name] = weight
        if weight.ndim == 2 and not any(part in name for part in PLAIN):
            stored[name], scales, exact = in_blocks(
                weight, *config["weight_block_size"], scale_dtype
            )
            stored[f"{name}_scale_inv"] = scales
            means[name] = exact.astype(np.float32)
    write(directory, kit, stored | extra)
    write_config(directory, quantization_config=config, **more)
    return means


def float8(rows, columns):
    return read_quantised({"quantization_config": FP8 | {"weight_block_size": [rows, columns]}})


def write(directory, kit, tensors):
    kit.write_raw(directory / "model.safetensors", *kit.layout(tensors))


def write_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(directory, dtype="float32"):
    network = build_model(load_config(directory))
    return network, load_params(directory, network, dtype=dtype, progress=False)


def widened(params):
    """Returns parameters of plain float32 arrays; no columns of these are ordered."""
    return jax.tree.map(
        lambda leaf: leaf.widened() if is_few_bits(leaf) else leaf, params, is_leaf=is_few_bits
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "scale_dtype", "scale_fmt"),
    # The one with scales of another form has layers of the other model, and more.
    [
        pytest.param("v3", np.dtype(np.float32), None, marks=pytest.mark.slow),
        ("v32", E8M0, "ue8m0"),
    ],
)
def test_a_published_deepseek_directory_gives_the_logits_of_its_dequantised_weights(
    tmp_path, kit, name, scale_dtype, scale_fmt
):
    torch = pytest.importorskip("torch")
    from tests.models.driver import Driver
    from tests.models.families import cases, latent_cases

    case = latent_cases.CASES[name]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    family = type(theirs).__name__.removesuffix("ForCausalLM")
    code = {
        "AutoConfig": f"configuration_deepseek.{family}Config",
        "AutoModel": f"modeling_deepseek.{family}Model",
        "AutoModelForCausalLM": f"modeling_deepseek.{family}ForCausalLM",
    }
    said = FP8 | ({} if scale_fmt is None else {"scale_fmt": scale_fmt})
    # What guesses further tokens is stored like the rest and left out like in Transformers.
    guess = dict.fromkeys(
        ("eh_proj.weight", "mlp.experts.0.up_proj.weight"), np.zeros((8, 8), E4M3)
    )
    scales = {f"{name}_scale_inv": np.ones((1, 1), np.float32) for name in guess}
    guess = {f"model.layers.2.{name}": array for name, array in (guess | scales).items()}
    means = quantise(tmp_path, kit, guess, scale_dtype=scale_dtype, config=said, auto_map=code)

    network, params = load(tmp_path)
    plain = tmp_path / "plain"
    theirs.save_pretrained(plain)
    save_file(means, plain / "model.safetensors")
    _, wanted = load(plain)
    jax.tree.map(np.testing.assert_array_equal, widened(params), wanted)

    with torch.no_grad():
        theirs = (
            type(theirs)
            .from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
    tokens = case.prompt(40)
    [got] = Driver(network, params, fresh=True).prefill([tokens])
    np.testing.assert_allclose(got, cases.logits(theirs, tokens), atol=1e-4)


def pack(codes):
    """Packs 4-bit codes [..., columns] as blocks [..., columns / 32, 16]."""
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low | high << 4).reshape(*codes.shape[:-1], -1, 16).astype(np.uint8)


@pytest.mark.torch
def test_a_published_gpt_oss_directory_gives_the_logits_of_transformers_own_conversion(
    tmp_path, kit
):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from tests.models.driver import Driver
    from tests.models.families import cases

    case = cases.CASES["gpt-oss"]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = pack(draw.integers(0, 16, (experts, outputs, inputs)))
        scales = draw.integers(122, 126, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        means = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        theirs.get_parameter(name).data.copy_(means)
    write(tmp_path, kit, tensors)
    write_config(tmp_path, quantization_config=MXFP4, dtype=None)

    network, params = load(tmp_path)
    assert network.config.dtype == "bfloat16"
    tokens = case.prompt(40)
    wanted = cases.logits(theirs, tokens)
    assert np.std(wanted) > 0.3
    [got] = Driver(network, params).prefill([tokens])
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def in_nvfp4(weight):
    """Returns the tensors of a matrix as ModelOpt writes them, by the ends of their names, and what they mean."""
    groups = weight.reshape(len(weight), -1, 16)
    whole = np.float32(np.abs(weight).max() / (6 * 448))
    scales = (np.abs(groups).max(axis=2) / 6 / whole).astype(E4M3)
    each = (scales.astype(np.float32) * whole)[..., None]
    codes = (groups / np.maximum(each, 1e-30)).astype(ml_dtypes.float4_e2m1fn)
    means = (codes.astype(np.float32) * each).reshape(weight.shape)
    octets = codes.reshape(weight.shape).view(np.uint8)
    packed = octets[:, ::2] & 15 | octets[:, 1::2] << 4
    return {"": packed, "_scale": scales, "_scale_2": whole}, means


@pytest.mark.torch
@pytest.mark.slow
def test_a_modelopt_directory_of_nvfp4_and_fp8_gives_the_logits_of_its_dequantised_weights(
    tmp_path, kit
):
    torch = pytest.importorskip("torch")
    from tests.models.driver import Driver
    from tests.models.families import cases

    sizes = {"moe_intermediate_size": 32, "mlp_only_layers": [0]}
    case = cases.Case("Qwen3Moe", cases.QWEN_EXPERTS | sizes)
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    stored, means, layers = {}, {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        module, kinds = name.removesuffix(".weight"), ("mlp.experts", "self_attn")
        kind = next((one for one in kinds if one in name and weight.ndim == 2), None)
        stored[name] = means[name] = weight
        if kind == "mlp.experts":
            parts, means[name] = in_nvfp4(weight)
            stored |= {f"{name}{end}": array for end, array in parts.items()}
            layers[module] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        elif kind is not None:
            numbers, scales, exact = in_blocks(weight, *weight.shape)
            means[name] = exact.astype(np.float32)
            stored |= {name: numbers, f"{name}_scale": scales.reshape(())}
            stored[f"{module}.input_scale"] = np.ones((), np.float32)
            layers[module] = {"quant_algo": "FP8"}
    assert len({str(layer) for layer in layers.values()}) == 2
    write(tmp_path, kit, stored)
    said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    said = {"quantization": said | {"quantized_layers": layers, "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))

    network, params = load(tmp_path)
    forms = weight_forms(params)
    assert any(form.startswith("float8_e4m3fn per row") for form in forms)
    assert not any("e2m1" in form for form in forms)
    plain = tmp_path / "plain"
    theirs.save_pretrained(plain)
    save_file(means, plain / "model.safetensors", {"format": "pt"})
    theirs = (
        type(theirs).from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    )
    tokens = case.prompt(40)
    wanted = cases.logits(theirs, tokens)
    [got] = Driver(network, params, fresh=True).prefill([tokens])
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert np.std(wanted) > 0.1


def read_one(directory, kit, tensors, quantised, name, dtype=np.float32):
    write(directory, kit, tensors)
    with open_checkpoint(directory) as stored:
        tensor = with_scales(stored, quantised)[name]
        target = np.empty(math.prod(tensor.shape), dtype)
        tensor.read(target)
    return target.reshape(tensor.shape)


@pytest.mark.parametrize("piece", [1, 100, 2**20])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    # Qwen publishes scales of bfloat16, DeepSeek of float32, those of its V4 are exponents.
    [
        (np.float32, np.float32),
        (ml_dtypes.bfloat16, np.float32),
        (np.float16, ml_dtypes.bfloat16),
        (np.float32, E8M0),
    ],
)
def test_each_8_bit_number_is_multiplied_by_the_scale_of_its_block_and_rounded_once(
    tmp_path, kit, monkeypatch, piece, dtype, scale_dtype
):
    # Also where what is decoded at once ends within a block.
    monkeypatch.setattr("jaxkv.weights.quantised.quantised_tensor.PIECE", piece)
    draw = np.random.default_rng(0)
    numbers, scales, _ = in_blocks(draw.standard_normal((45, 50)), 16, 24, scale_dtype)
    got = read_one(tmp_path, kit, {"a": numbers, "a_scale_inv": scales}, float8(16, 24), "a", dtype)
    exact = scales.astype(np.float64)
    each = np.array([[exact[row // 16, at // 24] for at in range(50)] for row in range(45)])
    # The product is exact in float64; float32 rounds it, then the wished dtype does.
    wanted = (numbers.astype(np.float64) * each).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("piece", [1, 2**20])
def test_every_4_bit_number_and_every_scale_means_what_the_format_says(
    tmp_path, kit, monkeypatch, piece
):
    monkeypatch.setattr("jaxkv.weights.quantised.quantised_tensor.PIECE", piece)
    codes = np.arange(16 * 253 * 2).reshape(2, 253, 16) % 16
    codes = np.concatenate((codes, codes[..., ::-1]), axis=-1).astype(np.uint8)
    exponents = np.stack((np.arange(253), np.arange(253)[::-1])).astype(np.uint8)[..., None]
    tensors = {"a_blocks": pack(codes), "a_scales": exponents}
    got = read_one(tmp_path, kit, tensors, BLOCKS_OF_4, "a")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.array(values + [-value for value in values])[codes]
    exact = np.ldexp(values, exponents.astype(np.int32) - 127)
    assert got.shape == (2, 253, 32)
    np.testing.assert_array_equal(got, exact.astype(np.float32))
    assert np.signbit(got[codes == 8]).all()


NUMBERS = np.ones((4, 6), E4M3)
SCALES = np.ones((2, 2), np.float32)
BLOCKS, EXPONENTS = np.zeros((2, 4, 3, 16), np.uint8), np.zeros((2, 4, 3), np.uint8)


def with_one(array, value, at=0):
    array = array.copy()
    array.reshape(-1)[at] = value
    return array


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a": NUMBERS, "a_scale_inv": SCALES[:1]}, r"F32 \[1, 2\], wanted .* \[2, 2\]"),
        ({"a": NUMBERS, "a_scale_inv": SCALES.astype(np.int32)}, "is I32"),
        ({"a": NUMBERS[None], "a_scale_inv": SCALES}, "wanted two axes"),
        ({"a": with_one(NUMBERS, np.nan, 23), "a_scale_inv": SCALES}, "'a' holds a NaN"),
        ({"a": NUMBERS, "a_scale_inv": with_one(SCALES, np.inf, 3)}, "'a_scale_inv' holds a NaN"),
        ({"a": NUMBERS, "a_scale_inv": with_one(SCALES, 1e6)}, "too large for float16"),
        ({"a_blocks": BLOCKS, "a_scales": EXPONENTS[..., :2]}, r"wanted U8 \[2, 4, 3\]"),
        ({"a_blocks": BLOCKS[..., :8], "a_scales": EXPONENTS}, r"blocks, 16\]"),
        ({"a_blocks": BLOCKS.astype(np.int8), "a_scales": EXPONENTS}, "is I8"),
        ({"a_blocks": BLOCKS, "a_scales": with_one(EXPONENTS, 255)}, "'a_scales' holds a NaN"),
        ({"a_blocks": BLOCKS + 7, "a_scales": with_one(EXPONENTS, 254)}, "too large for float16"),
        (
            {"a_blocks": BLOCKS, "a_scales": EXPONENTS, "a": SCALES},
            "twice, with scales and without",
        ),
    ],
)
def test_malformed_blocks_and_scales_are_refused_by_name(tmp_path, kit, tensors, told):
    quantised = float8(3, 5) if "a_scale_inv" in tensors else BLOCKS_OF_4
    with pytest.raises(BadCheckpoint, match=told):
        read_one(tmp_path, kit, tensors, quantised, "a", np.float16)


@pytest.mark.parametrize(
    ("config", "suffix"), [({}, "_scale_inv"), ({"quantization_config": FP8}, "")]
)
def test_8_bit_numbers_need_their_scales_and_a_config_that_describes_them(
    tmp_path, kit, config, suffix
):
    tensors, name = kit.checkpoint_tensors(kit.CONFIG), "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].astype(E4M3)
    scales = {f"{name}{suffix}": np.ones((1, 1), np.float32)} if suffix else {}
    write(tmp_path, kit, tensors | scales)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"F8_E4M3, wanted .*quantization_config"):
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)


def test_only_experts_of_gpt_oss_may_be_of_4_bits(tmp_path, kit):
    tensors, name = kit.checkpoint_tensors(kit.CONFIG), "model.layers.1.mlp.down_proj.weight"
    del tensors[name]
    extra = {f"{name}_blocks": BLOCKS, f"{name}_scales": EXPONENTS}
    write(tmp_path, kit, tensors | extra)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": MXFP4}))
    with pytest.raises(BadCheckpoint, match="only for experts of gpt_oss"):
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)


def test_decoding_holds_one_leaf_beside_the_parameters(tmp_path, kit, monkeypatch):
    layers = 16
    config = kit.replace(
        kit.CONFIG, ffn_size=16384, num_layers=layers, windows=(None,) * layers, pattern=()
    )
    monkeypatch.setitem(kit.Toy.param_shapes.__globals__, "FFN", 16384)
    monkeypatch.setattr("jaxkv.weights.quantised.quantised_tensor.PIECE", 2**13)
    # JAX would keep the memory itself as the parameter of a CPU.
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device: jax.numpy.copy(put(x, device)))
    tensors = kit.checkpoint_tensors(config)
    for name in [name for name in tensors if "_proj" in name]:
        tall, wide = tensors[name].shape
        tensors[name] = tensors[name].astype(E4M3)
        tensors[f"{name}_scale_inv"] = np.ones((-(-tall // 20), -(-wide // 28)), np.float32)
    write(tmp_path, kit, tensors)
    del tensors
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    largest = 2 * 16384 * config.hidden_size * 4
    monkeypatch.setattr("jaxkv.weights.staging.MOST_IN_FLIGHT", largest)
    assert layers > 8, "all layers together would not fit"

    def load():
        load_params(tmp_path, kit.Toy(config), dtype="float32", progress=False)

    assert fits_in(8 * largest, load)
