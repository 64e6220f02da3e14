"""Low-rank products in projections: each token gets its own adapter's, and tokens without one keep every bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.layers import feed_forward
from jaxkv.layers.adapted import Adapted, LowRank, with_adapters
from jaxkv.layers.feed_forward import gated_feed_forward
from jaxkv.layers.linear import Joining, Normed, linear, matmul
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.skinny_matmul.api import MOST_ROWS, Weighed
from tests.pallas_kernels.few_bits import drawn, exact

TOKENS, IN, OUT, ADAPTERS, RANK = 9, 16, 24, 3, 4
SLOTS = np.asarray([0, 1, 3, 0, 2, 2, 0, 1, 0], np.int32)
NONE = SLOTS == 0
PRODUCTS = [
    partial(linear, implementation=None),
    partial(matmul, implementation="xla"),
    partial(matmul, implementation=None),
]


def draw(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def adapted(out=OUT, seed=0, dtype="float32", width=IN):
    low = LowRank(
        draw(seed + 1, ADAPTERS, RANK, width, dtype=dtype),
        draw(seed + 2, out, ADAPTERS, RANK, dtype=dtype),
    )
    return Adapted(draw(seed, out, width, dtype=dtype), low, jnp.asarray(SLOTS))


def merged(weight, token):
    """Returns the weight that a token is multiplied by, in float64."""
    plain = np.asarray(weight.weight, np.float64)
    if not SLOTS[token]:
        return plain
    at = SLOTS[token] - 1
    inner, outer = (np.asarray(factor, np.float64) for factor in weight.low_rank)
    return plain + outer[:, at] @ inner[at]


def equal_bits(got, wanted):
    return np.array_equal(np.asarray(got).view(np.uint8), np.asarray(wanted).view(np.uint8))


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_token_is_multiplied_by_the_sum_of_its_own_adapter(product):
    weight, x, bias = adapted(), draw(5, TOKENS, IN), draw(6, OUT)
    got = jax.jit(lambda: product(weight, x, bias=bias))()
    wide = np.asarray(x, np.float64)
    wanted = [merged(weight, token) @ wide[token] for token in range(TOKENS)]
    np.testing.assert_allclose(got, np.asarray(wanted) + np.asarray(bias)[None], atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_tokens_without_an_adapter_keep_the_bits_of_the_plain_projection(dtype, product):
    weight, x = adapted(dtype=dtype), draw(5, TOKENS, IN, dtype=dtype)
    run = jax.jit(lambda one: product(one, x))
    got, plain = run(weight), run(weight.weight)
    assert equal_bits(np.asarray(got)[NONE], np.asarray(plain)[NONE])
    assert not np.any(np.all(np.asarray(got)[~NONE] == np.asarray(plain)[~NONE], axis=1))


def test_an_adapter_is_added_to_the_product_of_a_weight_in_few_bits():
    weight, x, bias = adapted(), draw(5, TOKENS, IN), draw(6, OUT)
    few = drawn("int8 by row", (OUT,), IN)
    wide = weight._replace(weight=exact(few))
    got = jax.jit(lambda one: linear(one, x, bias, implementation=None))
    wanted = [merged(wide, token) @ np.asarray(x[token], np.float64) for token in range(TOKENS)]
    found, plain = got(weight._replace(weight=few)), got(few)
    np.testing.assert_allclose(found, np.asarray(wanted) + np.asarray(bias)[None], atol=1e-4)
    assert equal_bits(np.asarray(found)[NONE], np.asarray(plain)[NONE])


def test_a_negative_zero_stays_one_beside_adapters():
    y = jnp.full((TOKENS, OUT), -0.0, jnp.float32)
    got = np.asarray(adapted().added_to(y, draw(5, TOKENS, IN)))
    assert equal_bits(got[NONE], np.asarray(y)[NONE])


def test_an_adapter_that_is_not_finite_reaches_no_other_token():
    weight = adapted()
    inner = weight.low_rank.inner.at[0].set(jnp.inf)
    broken = weight._replace(low_rank=weight.low_rank._replace(inner=inner))
    x = draw(5, TOKENS, IN)
    others = SLOTS != 1
    got, wanted = (linear(one, x, implementation=None) for one in (broken, weight))
    assert equal_bits(got[others], wanted[others])
    assert not np.isfinite(got[~others]).any()


def test_a_projection_between_norms_adds_the_adapters_before_the_next_norm():
    weight, stream, norms = adapted(IN), draw(7, TOKENS, IN), draw(8, 2, IN)
    rows = draw(9, TOKENS, IN)
    x = Normed(Weighed(rows, rows * norms[:1], jnp.sum(rows * rows, axis=1)[None]), 1e-6)

    def run(one):
        return matmul(one, x, joining=Joining(stream, norms, 1))

    got, plain = jax.jit(run)(weight), jax.jit(run)(weight.weight)
    wide = np.asarray(rows, np.float64)
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(norms[0])
    wanted = np.asarray(
        [stream[token] + merged(weight, token) @ wide[token] for token in range(TOKENS)]
    )
    np.testing.assert_allclose(got.result, wanted, atol=1e-4)
    np.testing.assert_allclose(got.weighed, wanted * np.asarray(norms[1]), atol=1e-4)
    np.testing.assert_allclose(got.squares.sum(axis=0), (wanted**2).sum(axis=1), rtol=1e-4)
    assert all(
        equal_bits(one[NONE], other[NONE])
        for one, other in ((got.result, plain.result), (got.weighed, plain.weighed))
    )


@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_gate_is_computed_of_the_sums_and_stays_as_it_is_without_an_adapter(implementation):
    ffn = 12
    params = {"gate_up": adapted(2 * ffn), "down": adapted(IN, seed=20, width=ffn)}
    plain = {name: one.weight for name, one in params.items()}
    x = draw(5, TOKENS, IN)

    @jax.jit
    def run(weights):
        return gated_feed_forward(weights, x, activation="silu", implementation=implementation)

    got, base = run(params), run(plain)
    assert equal_bits(np.asarray(got)[NONE], np.asarray(base)[NONE])
    for token in range(TOKENS):
        both = merged(params["gate_up"], token) @ np.asarray(x[token], np.float64)
        gates, ups = both[:ffn], both[ffn:]
        wanted = merged(params["down"], token) @ (gates / (1 + np.exp(-gates)) * ups)
        np.testing.assert_allclose(got[token], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("tokens", "few", "fixed"),
    [
        (MOST_ROWS, False, True),
        (MOST_ROWS + 1, False, True),
        (MOST_ROWS + 1, True, False),
        (MOST_ROWS, True, False),
    ],
)
def test_where_our_kernel_runs_any_number_of_tokens_without_an_adapter_keep_their_bits(
    tokens, few, fixed, monkeypatch
):
    """In the fixed order, and of a weight in few bits.

    The kernel rounds a gated product once, which XLA does not; here it adds one instead.
    """

    def rounded_once(weight, x, *, gated=False, **options):
        found = matmul(weight, x, gated=gated, **options)
        return found + 1 if gated else found

    monkeypatch.setattr(feed_forward, "matmul", rounded_once)
    slots = jnp.asarray(np.resize(SLOTS, tokens))
    params = {"gate_up": adapted(24), "down": adapted(IN, seed=20, width=12)}
    params = {name: one._replace(slots=slots) for name, one in params.items()}
    if few:
        weight = jax.tree.map(jnp.asarray, drawn("int8 by row", (24,), IN))
        params["gate_up"] = params["gate_up"]._replace(weight=weight)
    plain = {name: one.weight for name, one in params.items()}
    x = draw(5, tokens, IN)
    with fixed_order(fixed):
        run = partial(gated_feed_forward, activation="silu", implementation=None)
        got, base = (jax.jit(run)(weights, x) for weights in (params, plain))
    none = np.asarray(slots) == 0
    assert equal_bits(np.asarray(got)[none], np.asarray(base)[none])


def test_parameters_without_a_stack_stay_as_they_are():
    params = {
        "embed": draw(0, 4, IN),
        "layers": ({"o": draw(1, OUT, IN), "norms": draw(2, 1, IN)},),
    }
    stack = adapted().low_rank
    made = with_adapters(params, {"layers.0.o": stack}, jnp.asarray(SLOTS))
    assert made["layers"][0]["o"].low_rank is stack
    assert made["layers"][0]["o"].weight is params["layers"][0]["o"]
    assert made["embed"] is params["embed"]
    assert made["layers"][0]["norms"] is params["layers"][0]["norms"]
