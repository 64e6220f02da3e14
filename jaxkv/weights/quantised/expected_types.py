"""The types of a model's parameters as a config leads one to expect them, before its weights are there."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.weights.quantised.few_bits_leaf import may_round_rows, moves_rows, suits_group
from jaxkv.weights.quantised.rounding import ROUNDINGS, scales_for
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.rules import Recipe
from pallas_kernels.formats.few_bits import CODES, FewBits


def expected_type(
    plain: jax.ShapeDtypeStruct, recipe: Recipe, scheme: Scheme | None, quantization: str | None
) -> Any:  # noqa: ANN401 - the type of an array, or a `FewBits` of such types
    """Returns the type of a parameter that may be a `FewBits`.

    Args:
        plain: its type in a checkpoint that is not quantised.
        recipe: how it is made of a checkpoint's tensors.
        scheme: the checkpoint's format; `None` if it is not quantised.
        quantization: name in `ROUNDINGS` of the form that a plain checkpoint is rounded to; `None` for none.
    """
    inner = plain.shape[-1]
    if quantization is not None:
        rounding = ROUNDINGS[quantization]
        if not moves_rows(recipe.combine, len(plain.shape)):
            return plain
        scales = scales_for(np.dtype(plain.dtype))
        group = rounding.group(inner)
        return _few_bits(
            plain.shape, rounding.code, group, scales, rounds_rows=rounding.rounds_rows
        )
    if scheme is None or any(scheme.ignores(name) for name in recipe.sources):
        return plain
    group = inner if scheme.group is None else math.gcd(inner, scheme.group)
    if scheme.code not in CODES or not suits_group(group, inner) or recipe.offset:
        return plain
    scales = {"float8_e4m3fn": jnp.float32, "float4_e2m1fn": jnp.float8_e8m0fnu}
    dtype = scales.get(scheme.code, plain.dtype)
    return _few_bits(
        plain.shape,
        scheme.code,
        group,
        dtype,
        zeros=scheme.readers == ("awq",),
        rounds_rows=scheme.rounds_rows,
    )


def _few_bits(
    shape: tuple[int, ...],
    code: str,
    group: int,
    scale_dtype: Any,  # noqa: ANN401 - anything that names a dtype
    *,
    zeros: bool = False,
    rounds_rows: bool,
) -> FewBits:
    rows, inner = shape[:-1], shape[-1]
    made: Any = jax.ShapeDtypeStruct((*rows, inner * CODES[code].bits // 8), CODES[code].stored)
    scales: Any = jax.ShapeDtypeStruct((*rows, inner // group), scale_dtype)
    points: Any = jax.ShapeDtypeStruct(scales.shape, jnp.uint8) if zeros else None
    rounds_rows = rounds_rows and may_round_rows(shape, group)
    return FewBits(made, scales, points, None, code, rounds_rows)
