"""Decode steps of few rows: attention, and one kernel between two attentions. The kernel has a suite of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import chained, decoder
from jaxkv.models.registry import build_model, read_config
from pallas_kernels.skinny_matmul.mosaic_tail import Tail
from pallas_kernels.skinny_matmul.reference import skinny_matmul
from tests.models.driver import Driver, run_step
from tests.models.test_decoder import SMALL, TINY, prompt
from tests.models.test_joined_norms import drawn

QWEN3 = {name: value for name, value in TINY.items() if "window" not in name}
QWEN3 |= {"model_type": "qwen3", "head_dim": 16}


def plain_tail(mixed, hidden, weights, met, *, activation, norms):
    """What `layer_tail` means, product by product."""

    def normed(rows, names, row):
        weights_of = weights[names].astype(jnp.float32)[row]
        root = jax.lax.rsqrt(jnp.mean(rows**2, axis=1, keepdims=True) + norms.eps)
        return rows * root * weights_of[None]

    hidden = skinny_matmul(weights["o"], mixed, residual=hidden)
    x = normed(hidden, "norms", norms.here)
    x = skinny_matmul(weights["gate_up"], x, gated=True, activation=activation)
    hidden = skinny_matmul(weights["down"], x, residual=hidden)
    if "qkv" not in weights:
        return Tail(hidden, None, met + 1)
    return Tail(
        hidden, skinny_matmul(weights["qkv"], normed(hidden, "next_norms", norms.after)), met + 1
    )


@pytest.fixture
def on_tails(monkeypatch):
    """Lets decode steps run on tails, made of XLA's products; counts them."""
    tails = []

    def tail(*arrays, **options):
        tails.append(arrays[0].shape)
        return plain_tail(*arrays, **options)

    monkeypatch.setattr(chained, "IS_ON", True)
    monkeypatch.setattr(chained, "layer_tail", tail)
    monkeypatch.setattr(chained, "why_not", lambda *_: None)
    monkeypatch.setattr(chained, "_FAMILY", "xla")
    run_step.clear_cache()
    yield tails
    run_step.clear_cache()


def answers(model, params):
    driver = Driver(model, params, **SMALL)
    driver.prefill([prompt(5), prompt(7, 1), prompt(3, 2)])
    return driver.decode([3, 4, 5])


def test_logits_are_those_of_layers_product_by_product(on_tails, monkeypatch):
    """In float32 within 1e-5; each layer's tail is called once for each program."""
    model = build_model(read_config(QWEN3), implementation="xla")
    params = drawn(model)
    said = answers(model, params)
    assert len(on_tails) == model.num_layers
    monkeypatch.setattr(decoder, "is_chained", lambda *_: False)
    run_step.clear_cache()
    wanted = answers(model, params)
    np.testing.assert_allclose(said, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert len(on_tails) == model.num_layers


def test_layers_with_anything_else_in_them_run_block_by_block(on_tails):
    """A bias, a mixture, a norm more, or prompts."""
    qwen2 = build_model(read_config(TINY), implementation="xla")
    answers(qwen2, drawn(qwen2))
    assert not on_tails
    gemma = QWEN3 | {"model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 16}
    gemma = build_model(read_config(gemma), implementation="xla")
    answers(gemma, drawn(gemma))
    assert not on_tails
