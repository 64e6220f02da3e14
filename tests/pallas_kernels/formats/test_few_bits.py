"""`FewBits` stands for the weights that its formats define."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats.few_bits import CODES, FewBits


def packed(codes):
    return jnp.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, jnp.uint8)


@pytest.mark.parametrize("with_zeros", [False, True])
def test_int4_codes_are_shifted_by_their_zero_points(with_zeros):
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 16, (2, 6, 64))
    scales = draw.normal(size=(2, 6, 2)).astype(np.float32)
    zeros = draw.integers(0, 16, scales.shape) if with_zeros else None
    found = FewBits(
        packed(codes),
        jnp.asarray(scales),
        None if zeros is None else jnp.asarray(zeros, jnp.uint8),
        None,
        "int4",
    )
    assert found.shape == (2, 6, 64)
    assert found.group == 32
    shift = 8 if zeros is None else zeros.repeat(32, -1)
    np.testing.assert_array_equal(
        found.widened(), (codes - shift).astype(np.float32) * scales.repeat(32, -1)
    )


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("float4_e2m1fn", ml_dtypes.float4_e2m1fn), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)],
)
def test_floating_codes_are_those_of_ml_dtypes(code, dtype):
    every = np.arange(2 ** CODES[code].bits, dtype=np.uint8)[None]
    numbers = every.view(dtype).astype(np.float32)
    codes = packed(every) if CODES[code].bits == 4 else jnp.asarray(every.view(dtype))
    scales = jnp.asarray([[0.5]], jnp.float8_e8m0fnu)
    np.testing.assert_array_equal(
        FewBits(codes, scales, None, None, code).widened(), numbers * np.float32(0.5)
    )


def test_it_is_a_pytree_whose_code_is_static():
    weight = FewBits(jnp.zeros((4, 8), jnp.int8), jnp.ones((4, 1)), None, None, "int8")
    leaves, tree = jax.tree.flatten(weight)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).code == "int8"
    assert jax.jit(lambda one: one.widened(jnp.bfloat16))(weight).dtype == jnp.bfloat16
