"""Torch inside a jitted program: equal to JAX, in place, and no reference is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.inside import torch_function, torch_layer, why_not_captured

pytestmark = pytest.mark.torch


def test_a_module_is_a_layer_of_a_jitted_step():
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    weight, bias = (p.detach().numpy() for p in layer.parameters())
    x = jnp.arange(24.0).reshape(3, 8) / 10
    step = jax.jit(lambda x: torch_layer(layer)(x * 2) + 1)
    np.testing.assert_allclose(
        step(x), (np.asarray(x) * 2) @ weight.T + bias + 1, rtol=1e-5, atol=1e-5
    )
    narrow = torch.nn.Linear(8, 2, bias=False)
    out = jax.jit(torch_layer(narrow, jax.ShapeDtypeStruct((3, 2), jnp.float32)))(x)
    np.testing.assert_allclose(
        out, np.asarray(x) @ narrow.weight.detach().numpy().T, rtol=1e-5, atol=1e-5
    )


def test_arrays_are_updated_where_they_lie_and_results_come_first():
    def remember(total, pages, new):
        pages[1] = new
        total.copy_(pages.sum())

    call = torch_function(remember, jax.ShapeDtypeStruct((), jnp.float32), in_place=[0])
    step = jax.jit(lambda pages, new: call(pages, new)[::-1], donate_argnums=0)
    pages, new = jnp.zeros((4, 16)), jnp.ones(16)
    pointer = pages.unsafe_buffer_pointer()
    for times in (1, 2, 3):
        pages, total = step(pages, new * times)
        assert float(total) == 16.0 * times
    assert pages.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(pages[1], np.full(16, 3.0))
    assert float(pages[0].sum() + pages[2:].sum()) == 0.0


def test_bytes_come_as_bytes_inside_too():
    seen = []

    def look(out, numbers):
        seen.append(numbers.dtype)
        out.copy_(numbers.view(torch.float8_e4m3fn).float())

    numbers = jnp.asarray([1.5, -2.0] * 8, "float8_e4m3fn")
    call = torch_function(look, jax.ShapeDtypeStruct((16,), jnp.float32))
    np.testing.assert_array_equal(jax.jit(call)(numbers)[0], [1.5, -2.0] * 8)
    assert seen == [torch.uint8]


def test_a_kept_tensor_and_an_error_end_the_program_with_their_names():
    kept = []

    def keep(out, x):
        kept.append(x[:2])
        out.copy_(x)

    like = jax.ShapeDtypeStruct((16,), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="kept a tensor"):
        jax.jit(torch_function(keep, like))(jnp.ones(16))[0].block_until_ready()

    def fail(out, x):
        raise ZeroDivisionError("inside")

    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: inside"):
        jax.jit(torch_function(fail, like))(jnp.ones(16))[0].block_until_ready()


def test_positions_that_are_no_arguments_are_refused():
    with pytest.raises(ValueError, match=r"in_place names \[1\] of 1 arguments"):
        torch_function(lambda x: None, in_place=[1])(jnp.ones(16))


def test_the_probe_says_why_nothing_is_captured_here():
    if jax.default_backend() != "gpu":
        assert "no CUDA graphs" in why_not_captured()
