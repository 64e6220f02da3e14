"""Norm, linear, embedding and feed-forward against plain NumPy, without conversions of large arrays."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.layers.embedding import embed, unembed
from jaxkv.layers.feed_forward import gated_feed_forward
from jaxkv.layers.linear import linear
from jaxkv.layers.norm import rms_norm
from pallas_kernels.activations import ACTIVATIONS
from tests.layers.jaxprs import equations

DRAW = np.random.default_rng(0)
best_linear = partial(linear, implementation=None)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(DRAW.normal(size=shape), dtype)


def wide(array):
    return np.asarray(array, np.float64)


def test_linear_contracts_the_weights_last_axis_and_adds_the_bias():
    weight, x, bias = normal(5, 7), normal(3, 7), normal(5)
    wanted = wide(x) @ wide(weight).T + wide(bias)
    np.testing.assert_allclose(best_linear(weight, x, bias), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_plain_product_neither_converts_nor_transposes_anything(dtype):
    found = equations(best_linear, normal(5, 7, dtype=dtype), normal(3, 7, dtype=dtype))
    assert [equation.primitive.name for equation in found] == ["dot_general"]
    assert found[0].outvars[0].aval.dtype == dtype


def test_only_float32_weights_ask_for_float32_products():
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    [exact] = equations(best_linear, normal(5, 7), normal(3, 7))
    [fast] = equations(
        best_linear, normal(5, 7, dtype=jnp.bfloat16), normal(3, 7, dtype=jnp.bfloat16)
    )
    assert exact.params["precision"] == highest
    assert fast.params["precision"] is None


def test_logits_are_float32_and_the_table_is_not_converted_for_them():
    table, hidden = normal(11, 8, dtype=jnp.bfloat16), normal(3, 8, dtype=jnp.bfloat16)
    found = equations(unembed, table, hidden)
    assert [equation.primitive.name for equation in found] == ["dot_general"]
    got = unembed(table, hidden)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wide(hidden) @ wide(table).T, atol=1e-4)


def test_norm_rounds_to_the_inputs_dtype_before_it_weighs():
    weight, x = normal(16, dtype=jnp.bfloat16), normal(3, 16, dtype=jnp.bfloat16)
    unit = wide(x) / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + 1e-6)
    rounded = jnp.asarray(unit, jnp.bfloat16)
    got = rms_norm(weight, x, eps=1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rounded * weight[None])


def test_norm_takes_any_leading_axes_and_zeros_stay_zero():
    weight, x = normal(6), normal(2, 3, 6)
    got = rms_norm(weight, x, eps=1e-6)
    np.testing.assert_allclose(got[1, 2], rms_norm(weight, x[1, 2], eps=1e-6), rtol=1e-6)
    assert not np.any(rms_norm(weight, jnp.zeros((2, 6)), eps=1e-6))


@pytest.mark.parametrize("token", [-1, 11, 2**31 - 1])
def test_an_id_outside_the_table_gives_zeros_and_no_neighbours_row(token):
    # -1 would wrap around to the last row.
    table = normal(11, 8)
    got = embed(table, jnp.asarray([3, token], jnp.int32))
    np.testing.assert_array_equal(got[0], table[3])
    assert not np.any(got[1])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_gates_the_second_half_by_the_first(activation, biased):
    curves = {
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: (
            x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        ),
        "relu2": lambda x: np.maximum(x, 0) ** 2,
    }
    params = {"gate_up": normal(10, 6), "down": normal(6, 5)}
    if biased:
        params |= {"gate_up_bias": normal(10), "down_bias": normal(6)}
    x = normal(3, 6)
    gate, up = np.split(
        wide(x) @ wide(params["gate_up"]).T + wide(params.get("gate_up_bias", 0)), 2, 1
    )
    inner = curves[activation](gate) * up
    wanted = inner @ wide(params["down"]).T + wide(params.get("down_bias", 0))
    got = gated_feed_forward(params, x, activation=activation, implementation="xla")
    np.testing.assert_allclose(got, wanted, atol=1e-4)
