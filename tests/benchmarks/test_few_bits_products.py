"""The benchmark of products in few bits times right results alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import few_bits_products
from benchmarks.few_bits_products import FORMS, draw, measure
from benchmarks.timing import Effort

QUICK = Effort(seconds=0.001, trials=1)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_drawn_weights_have_magnitudes_around_one(form):
    x = np.random.default_rng(0).normal(size=(64, 256))
    products = x @ np.asarray(draw(form, (256, 256), jax.random.key(0)).widened(), np.float64).T
    assert 0.3 < products.std() < 3


def test_a_row_tells_the_bytes_of_codes_and_scales():
    row = measure("int4 by 128", 256, 1, QUICK)
    assert row["weight_bytes"] == 256 * 128 + 256 * 2 * 2
    assert row["gb_per_s"] == pytest.approx(row["weight_bytes"] / row["us"] / 1e3)


def test_a_wrong_product_is_not_timed(monkeypatch):
    right = few_bits_products.skinny_matmul

    def wrong(weight, x):
        return right(weight, x).at[0, 5].add(jnp.bfloat16(1))

    monkeypatch.setattr(few_bits_products, "skinny_matmul", wrong)
    with pytest.raises(RuntimeError, match="a result differs by"):
        measure("bfloat16", 256, 2, QUICK)
