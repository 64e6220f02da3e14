"""Formats of quantised weights, written from their definitions: random files, and what each number in them means.

Every reader here goes element by element over bits of words, and shares nothing with those under test.
"""

import json
from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


class File(NamedTuple):
    """The tensors of one weight, the config that describes them, and what they mean in float32."""

    config: dict
    tensors: dict
    means: np.ndarray


def hostile(draw, shape, dtype):
    """Returns scales from far below one to far above it, of both signs."""
    return (np.exp2(draw.uniform(-12, 8, shape)) * draw.choice([-1, 1], shape)).astype(dtype)


def bits_at(words, element, bits):
    """Returns a code in a row of 32-bit words, of which the first codes are in the lowest bits."""
    at = element * bits
    return int(words[at // 32]) >> at % 32 & (1 << bits) - 1


def words_of(codes, bits):
    """Packs rows of codes into words; what is left of the last word of a row is zero."""
    per = 32 // bits
    rows = []
    for row in codes:
        padded = [int(code) for code in row] + [0] * (-len(row) % per)
        rows.append(
            [
                sum(code << bits * at for at, code in enumerate(padded[begin : begin + per]))
                for begin in range(0, len(padded), per)
            ]
        )
    return np.array(rows, np.uint32)


def product(number, scale):
    return np.float32(number) * np.float32(scale)


def packed(rows, columns, *, bits=4, group=32, zeros=False, ordered=False, scale=BF16, seed=0):
    """compressed-tensors, pack-quantized."""
    draw = np.random.default_rng(seed)
    group = columns if group is None else group
    count = -(-columns // group)
    words = words_of(draw.integers(0, 1 << bits, (rows, columns)), bits)
    scales = hostile(draw, (rows, count), scale)
    tensors = {"a.weight_packed": words.view(np.int32), "a.weight_scale": scales}
    tensors["a.weight_shape"] = np.array([rows, columns], np.int32)
    middle, places = 1 << bits - 1, np.arange(columns) // group
    if ordered:
        places = draw.permutation(places).astype(np.int32)
        tensors["a.weight_g_idx"] = places
    if zeros:
        points = words_of(draw.integers(0, 1 << bits, (count, rows)), bits)
        tensors["a.weight_zero_point"] = np.ascontiguousarray(points.T).view(np.int32)
    means = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        at = places[column]
        point = bits_at(points[at], row, bits) if zeros else middle
        number = bits_at(words[row], column, bits) - point
        means[row, column] = product(number, scales[row, at])
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros}
    weights |= {"strategy": "group", "group_size": group} if count > 1 else {"strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return File(config | {"config_groups": {"x": {"weights": weights}}}, tensors, means)


def gptq(rows, columns, *, bits=4, group=32, version=1, symmetric=False, ordered=False, seed=0):
    """GPTQ: packed along the inputs; the first version stores words of zero points less one in each."""
    draw = np.random.default_rng(seed)
    group_size, group = (-1, columns) if group is None else (group, group)
    count = -(-columns // group)
    words = words_of(draw.integers(0, 1 << bits, (rows, columns)), bits)
    codes = draw.integers(1, 1 << bits, (count, rows))
    points = np.full((count, rows), 1 << bits - 1) if symmetric else codes
    scales = hostile(draw, (count, rows), np.float16)
    places = np.arange(columns) // group
    if ordered:
        places = draw.permutation(places)
    tensors = {"a.qweight": np.ascontiguousarray(words.T).view(np.int32), "a.scales": scales}
    tensors["a.qzeros"] = words_of(points - (version == 1), bits).view(np.int32)
    tensors["a.g_idx"] = places.astype(np.int32)
    means = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        at = places[column]
        number = bits_at(words[row], column, bits) - int(points[at, row])
        means[row, column] = product(number, scales[at, row])
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric}
    config |= {"desc_act": ordered} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})
    return File(config, tensors, means)


def awq(rows, columns, *, group=32, seed=0):
    """AWQ: packed along the outputs, of which a word's codes are 0, 2, 4, 6, 1, 3, 5 and 7."""
    draw = np.random.default_rng(seed)
    count = columns // group
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def in_words(codes):
        by_place = codes.reshape(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1)
        return words_of(by_place, 4).view(np.int32)

    codes = draw.integers(0, 16, (columns, rows))
    points = draw.integers(0, 16, (count, rows))
    scales = hostile(draw, (count, rows), np.float16)
    tensors = {"a.qweight": in_words(codes), "a.qzeros": in_words(points), "a.scales": scales}
    means = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        at = column // group
        means[row, column] = product(
            int(codes[column, row]) - int(points[at, row]), scales[at, row]
        )
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return File(config | {"zero_point": True}, tensors, means)


def eight_bit(
    rows, columns, *, dtype=E4M3, shape=None, block=None, zeros=False, end="_scale", seed=0
):
    """`weight` of 8 bits and a scale of the given shape; with a block, DeepSeek's or that of compressed-tensors."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 256, (rows, columns)).astype(np.uint8)
    if dtype == E4M3:
        codes = np.where((codes & 127) == 127, 0, codes).astype(np.uint8)
    if block is not None:
        shape = tuple(-(-side // of) for side, of in zip((rows, columns), block, strict=True))
    scales = hostile(draw, shape, np.float32)
    tensors = {"a.weight": codes.view(dtype), f"a.weight{end}": scales}
    points = np.zeros((rows, 1), np.int8)
    if zeros:
        points = draw.integers(-128, 128, (rows, 1)).astype(np.int8)
        tensors["a.weight_zero_point"] = points
    means = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        if block is not None:
            scale = scales[row // block[0], column // block[1]]
        elif scales.size == 1:
            scale = scales.reshape(())
        else:
            wide = scales.reshape(rows, -1)
            scale = wide[row, column * wide.shape[1] // columns]
        means[row, column] = product(
            codes.view(dtype)[row, column].astype(np.float32) - points[row, 0], scale
        )
    config = {"quant_method": "fp8"} | ({} if block is None else {"weight_block_size": list(block)})
    return File(config, tensors, means)


def packed_floats(rows, columns, *, form, seed=0):
    """NVFP4 of ModelOpt ("modelopt") or compressed-tensors ("nvfp4"), or MXFP4 of compressed-tensors ("mxfp4").

    A code is a sign, two bits of an exponent whose bias is 1, and one of a mantissa (OCP Microscaling Formats 1.0).
    """
    draw = np.random.default_rng(seed)
    octets = draw.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    group = 32 if form == "mxfp4" else 16
    shape, whole = (rows, columns // group), np.float32(draw.uniform(0.001, 0.01))
    codes = "a.weight" if form == "modelopt" else "a.weight_packed"
    if form == "mxfp4":
        scales = draw.integers(0, 250, shape).astype(np.uint8)
        tensors = {}
    else:
        scales = draw.integers(0, 127, shape).astype(np.uint8).view(E4M3)
        name = "a.weight_scale_2" if form == "modelopt" else "a.weight_global_scale"
        tensors = {name: whole if form == "modelopt" else 1 / whole[None]}
    tensors |= {codes: octets, "a.weight_scale": scales}
    means = np.zeros((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        code = int(octets[row, column // 2]) >> 4 * (column % 2) & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        number = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        scale = scales[row, column // group]
        if form == "mxfp4":
            scale = np.ldexp(1.0, int(scale) - 127)
        elif form == "modelopt":
            scale = product(scale, whole)
        else:
            scale = np.float32(scale) / tensors["a.weight_global_scale"][0]
        means[row, column] = product(-number if code > 7 else number, scale)
    if form == "modelopt":
        return File({"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, means)
    weights = {"num_bits": 4, "type": "float", "group_size": group, "symmetric": True}
    weights |= {"strategy": "group" if form == "mxfp4" else "tensor_group"}
    config = {"quant_method": "compressed-tensors", "format": f"{form}-pack-quantized"}
    return File(config | {"config_groups": {"x": {"weights": weights}}}, tensors, means)


def four_bits(rows, columns, *, kind="nf4", block=64, nested=False, seed=0):
    """bitsandbytes in 4 bits: a run of codes, whose numbers the file has, and a scale for each block of the run."""
    draw = np.random.default_rng(seed)
    count = rows * columns
    blocks, inner = -(-count // block), 5
    numbers = draw.uniform(-1, 1, 16).astype(np.float32)
    octets = draw.integers(0, 256, (-(-count // 2), 1)).astype(np.uint8)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors = {"a.weight": octets, "a.weight.quant_map": numbers}
    if nested:
        codes = draw.integers(0, 256, blocks).astype(np.uint8)
        table = draw.uniform(-1, 1, 256).astype(np.float32)
        factors = draw.uniform(0.1, 2, -(-blocks // inner)).astype(np.float32)
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": 0.375}
        tensors |= {"a.weight.absmax": codes, "a.weight.nested_quant_map": table}
        tensors["a.weight.nested_absmax"] = factors
        scales = [
            product(table[code], factors[at // inner]) + np.float32(0.375)
            for at, code in enumerate(codes)
        ]
    else:
        scales = hostile(draw, blocks, np.float32)
        tensors["a.weight.absmax"] = scales
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"a.weight.quant_state.bitsandbytes__{kind}"] = text
    means = np.zeros((rows, columns), np.float32)
    for at in range(count):
        code = int(octets[at // 2, 0]) >> (0 if at % 2 else 4) & 15
        means[divmod(at, columns)] = product(numbers[code], scales[at // block])
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return File(config, tensors, means)


def int8_by_row(rows, columns, seed=0):
    """bitsandbytes in 8 bits: the code 127 stands for the largest magnitude of a row."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = draw.uniform(0.01, 9, rows).astype(np.float32)
    means = codes.astype(np.float32) * (largest / np.float32(127))[:, None]
    tensors = {"a.weight": codes, "a.SCB": largest, "a.weight_format": np.zeros((), np.uint8)}
    return File({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, means)


FILES = {
    "packed-4": packed(13, 96),
    "packed-4-zeros": packed(13, 96, zeros=True, scale=np.dtype(np.float16)),
    "packed-4-row": packed(9, 40, group=None),
    "packed-4-ordered": packed(11, 128, ordered=True, zeros=True, scale=np.dtype(np.float32)),
    "packed-4-cut": packed(5, 160, group=128),
    "packed-8": packed(7, 64, bits=8),
    "packed-8-zeros": packed(7, 64, bits=8, zeros=True),
    "gptq-4": gptq(16, 96, symmetric=True),
    "gptq-4-zeros": gptq(24, 96),
    "gptq-4-ordered": gptq(8, 128, ordered=True),
    "gptq-4-v2": gptq(16, 64, version=2, ordered=True, symmetric=True),
    "gptq-4-row": gptq(16, 64, group=None),
    "gptq-4-cut": gptq(8, 160, group=128),
    "gptq-8": gptq(12, 64, bits=8, symmetric=True),
    "gptq-8-zeros": gptq(12, 64, bits=8),
    "awq": awq(16, 96),
    "awq-128": awq(24, 256, group=128),
    "fp8-matrix": eight_bit(9, 40, shape=()),
    "fp8-matrix-1": eight_bit(9, 40, shape=(1,)),
    "fp8-row": eight_bit(9, 40, shape=(9, 1)),
    "fp8-row-1": eight_bit(9, 40, shape=(9,)),
    "fp8-group": eight_bit(9, 96, shape=(9, 3)),
    "fp8-block": eight_bit(70, 160, block=(32, 128), end="_scale_inv"),
    "fp8-block-scale": eight_bit(70, 160, block=(32, 64)),
    "int8-row": eight_bit(9, 40, dtype=np.dtype(np.int8), shape=(9, 1)),
    "int8-zeros": eight_bit(9, 40, dtype=np.dtype(np.int8), shape=(9, 1), zeros=True),
    "nvfp4-modelopt": packed_floats(9, 96, form="modelopt"),
    "nvfp4": packed_floats(9, 96, form="nvfp4"),
    "mxfp4": packed_floats(9, 96, form="mxfp4"),
    "nf4": four_bits(9, 128),
    "nf4-nested": four_bits(9, 192, nested=True),
    # Blocks that end within rows, and rows that begin within bytes.
    "fp4-cut": four_bits(7, 75, kind="fp4", block=100, nested=True),
    "bnb-int8": int8_by_row(9, 40),
}
WIDE = {
    **dict.fromkeys(("packed-8-zeros", "gptq-8-zeros", "int8-zeros"), "zero points"),
    **dict.fromkeys(("nvfp4-modelopt", "nvfp4"), "scales are of 16 columns"),
    **dict.fromkeys(("nf4", "nf4-nested"), "weights are nf4"),
    "fp4-cut": "weights are fp4",
}
"""Files whose weights are widened -> what `FewBits` has no place for, or the kernels do not take."""
