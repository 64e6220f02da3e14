"""Random weights in 8 and 4 bits with hostile scales, and the same weights in float64 by NumPy alone."""

from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.formats.few_bits import CODES, FewBits

KINDS = {
    "e4m3 by row": ("float8_e4m3fn", None, "float32", False),
    "e4m3 by 128": ("float8_e4m3fn", 128, "float32", False),
    "int8 by row": ("int8", None, "bfloat16", False),
    "int8 by 32": ("int8", 32, "float32", False),
    "int4 by row": ("int4", None, "float16", False),
    "int4 by 128": ("int4", 128, "bfloat16", False),
    "int4 by 128, zeros": ("int4", 128, "float16", True),
    "int4 by 64, zeros": ("int4", 64, "float32", True),
    "int4 by 32": ("int4", 32, "bfloat16", False),
    "mxfp4": ("float4_e2m1fn", 32, "float8_e8m0fnu", False),
}
"""Name -> code, columns per scale (`None` for all), dtype of the scales, whether there are zero points."""
ODD_KINDS = {
    "int4 by 96": ("int4", 96, "float32", False),
    "int4 by 32, float32": ("int4", 32, "float32", True),
    "int4 by 32, float16": ("int4", 32, "float16", False),
    "int4 by 32, powers": ("int4", 32, "float8_e8m0fnu", False),
    "e2m1 by 64, powers": ("float4_e2m1fn", 64, "float8_e8m0fnu", False),
    "e2m1 by row, powers": ("float4_e2m1fn", None, "float8_e8m0fnu", False),
}
"""Likewise, forms that no checkpoint has, or none that most tests need."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def drawn(kind, lead, inner, seed=0, hostile=False):
    """Returns a weight [*lead, inner] of NumPy arrays; products with it have magnitudes around 1.

    Hostile scales are 0, tiny, huge and powers of two, with zero points of 0 and 15.
    """
    code, group, dtype, has_zeros = (KINDS | ODD_KINDS)[kind]
    rng = np.random.default_rng(seed)
    groups = 1 if group is None else inner // group
    if CODES[code].bits == 8:
        numbers = np.clip(rng.normal(size=(*lead, inner)) * 40, -127, 127)
        stored = np.int8 if code == "int8" else ml_dtypes.float8_e4m3fn
        codes, size = np.round(numbers).astype(stored), 40
    else:
        nibbles = rng.integers(0, 16, (*lead, inner), dtype=np.uint8)
        codes, size = nibbles[..., 0::2] | nibbles[..., 1::2] << 4, 4
    scales = np.exp2(rng.integers(-2, 2, (*lead, groups))) / (size * inner**0.5)
    if dtype != "float8_e8m0fnu":
        scales = scales * rng.uniform(0.5, 1, scales.shape)
    if hostile:
        choices = [0.0, 2.0**-14, 2.0**-8, 1.0, 2.0**6]
        chosen = rng.choice(choices[1:] if dtype == "float8_e8m0fnu" else choices, scales.shape)
        scales = scales * chosen
    zeros = None
    if has_zeros:
        zeros = rng.choice([0, 15], scales.shape) if hostile else rng.integers(6, 11, scales.shape)
        zeros = zeros.astype(np.uint8)
    parts: dict[str, Any] = {
        "codes": codes,
        "scales": scales.astype(np.dtype(dtype)),
        "zeros": zeros,
    }
    return FewBits(**parts, order=None, code=code)


def exact(weight):
    """Returns a weight in float64, by its format's definition."""
    codes = np.asarray(weight.codes)
    if CODES[weight.code].bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1).astype(int)
    group = codes.shape[-1] // weight.scales.shape[-1]
    if weight.code == "float4_e2m1fn":
        numbers = np.where(codes >> 3, -1, 1) * E2M1[codes & 7]
    elif weight.code == "int4":
        numbers = codes - (
            8
            if weight.zeros is None
            else np.repeat(np.asarray(weight.zeros), group, -1).astype(int)
        )
    else:
        numbers = codes.astype(np.float64)
    return numbers * np.repeat(np.asarray(weight.scales, np.float64), group, -1)


def rounded(weight, dtype=ml_dtypes.bfloat16):
    """Returns the weight in float64, as the product of many rows has it: rounded to x's dtype if groups have scales."""
    wide = exact(weight)
    if weight.scales.shape[-1] == 1:
        return wide
    return wide.astype(np.float32).astype(dtype).astype(np.float64)


def rounded_rows(x):
    """Returns the rows of x in float64 as `FewBits.rounds_rows` has them: e4m3, the largest of a row 448."""
    wide = x.astype(np.float32)
    scales = np.abs(wide).max(axis=1, keepdims=True) * np.float32(1 / 448)
    codes = (wide / scales).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * scales
