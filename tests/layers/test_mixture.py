"""A mixture of experts against loops over tokens in float64, for every scoring and selection of experts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.blocks import MixtureConfig
from jaxkv.layers.mixture import choose_experts, mixture_of_experts, route
from jaxkv.layers.norm import gated_group_norm
from tests.layers.jaxprs import equations

HIDDEN, TOKENS = 12, 9
SIZES = {"experts": 6, "top_k": 2, "size": 8}
CASES = {
    "granite": MixtureConfig(**SIZES, gated=True),
    "nemotron": MixtureConfig(
        **(SIZES | {"top_k": 3}),
        gated=False,
        scoring="sigmoid",
        correction=True,
        groups=3,
        top_groups=2,
        scale=1.7,
    ),
    "latent": MixtureConfig(**SIZES, gated=False, latent_size=5, renormalise=False),
    "one": MixtureConfig(experts=1, top_k=1, size=8, gated=True),
}


def drawn(mixture, seed=0):
    """Returns parameters and tokens."""
    draw = np.random.default_rng(seed)
    width = mixture.latent_size or HIDDEN
    shapes = {
        "router": (mixture.experts, HIDDEN),
        "experts_up": (mixture.experts, (1 + mixture.gated) * mixture.size, width),
        "experts_down": (width, mixture.experts, mixture.size),
    }
    if mixture.correction:
        shapes["router_correction"] = (mixture.experts,)
    if mixture.latent_size:
        shapes |= {"latent_in": (width, HIDDEN), "latent_out": (HIDDEN, width)}
    params = {
        name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }
    return params, draw.normal(size=(TOKENS, HIDDEN)).astype(np.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def chosen_by_hand(scores, ranked, mixture):
    """Returns one token's experts and weights, by the words of DeepSeek-V3."""
    per_group = mixture.experts // mixture.groups
    if mixture.groups > 1:
        best = [sum(sorted(group)[-2:]) for group in ranked.reshape(mixture.groups, per_group)]
        allowed = np.argsort(best)[::-1][: mixture.top_groups]
    else:
        allowed = [0]
    order = [
        expert for expert in np.argsort(-ranked, kind="stable") if expert // per_group in allowed
    ]
    experts = order[: mixture.top_k]
    weights = scores[experts]
    if mixture.renormalise:
        weights = weights / weights.sum()
    return experts, weights * mixture.scale


def by_hand(params, x, mixture):
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    rows = []
    for token in x.astype(np.float64):
        logits = params["router"] @ token
        powers = np.exp(logits)
        scores = powers / (1 + powers) if mixture.scoring == "sigmoid" else powers / powers.sum()
        ranked = scores + params.get("router_correction", 0)
        total = 0
        given = params["latent_in"] @ token if "latent_in" in params else token
        for expert, weight in zip(*chosen_by_hand(scores, ranked, mixture), strict=True):
            inner = params["experts_up"][expert] @ given
            if mixture.gated:
                gate, up = np.split(inner, 2)
                inner = silu(gate) * up
            else:
                inner = silu(inner)
            total = total + weight * (params["experts_down"][:, expert] @ inner)
        rows.append(params["latent_out"] @ total if "latent_out" in params else total)
    return np.array(rows)


@pytest.mark.parametrize("tokens", [1, TOKENS], ids=["few", "many"])
@pytest.mark.parametrize("name", CASES)
def test_each_token_gets_the_weighted_answers_of_its_experts(name, tokens):
    mixture = CASES[name]
    params, x = drawn(mixture)
    x = x[:tokens]
    run = jax.jit(partial(mixture_of_experts, mixture=mixture, activation="silu"))
    np.testing.assert_allclose(run(params, x), by_hand(params, x, mixture), rtol=2e-5, atol=2e-4)


def test_an_epsilon_of_the_sum_lowers_the_weights_of_small_scores():
    # Sigmoids of these logits are 1e-6, 2e-6 and 4e-6; the sum of the best two is 6e-6.
    logits = jnp.log(jnp.asarray([[1e-6, 2e-6, 4e-6]]))
    sizes = {"experts": 3, "top_k": 2, "size": 8, "gated": True, "scoring": "sigmoid"}
    for eps, wanted in ((1e-20, [4 / 6, 2 / 6]), (1e-6, [4 / 7, 2 / 7])):
        chosen, weights = choose_experts(logits, None, mixture=MixtureConfig(**sizes, sum_eps=eps))
        assert chosen.tolist() == [[2, 1]]
        np.testing.assert_allclose(weights[0], wanted, rtol=1e-4)


def test_tokens_do_not_see_each_other_not_even_broken_ones():
    # Padding may hold anything.
    mixture = CASES["nemotron"]
    params, x = drawn(mixture)
    run = jax.jit(lambda x: mixture_of_experts(params, x, mixture=mixture, activation="silu"))
    clean = run(jnp.asarray(x))
    dirty = run(jnp.asarray(x).at[4:].set(jnp.nan))
    np.testing.assert_array_equal(dirty[:4], clean[:4])
    # In another order the sums of a matrix product may come out in another order too.
    np.testing.assert_allclose(run(jnp.asarray(x[::-1]))[::-1], clean, rtol=1e-5, atol=1e-5)


def test_many_tokens_are_taken_a_block_at_a_time(monkeypatch):
    mixture = CASES["nemotron"]
    params, x = drawn(mixture)
    wanted = mixture_of_experts(params, jnp.asarray(x), mixture=mixture, activation="silu")
    monkeypatch.setattr("jaxkv.layers.mixture._MOST_INNER", 4 * mixture.experts * mixture.size)
    got = mixture_of_experts(params, jnp.asarray(x), mixture=mixture, activation="silu")
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_all_tokens_may_ask_one_expert():
    mixture = CASES["granite"]
    params, x = drawn(mixture)
    params["router"] = params["router"] * 0
    logits = jnp.zeros((TOKENS, mixture.experts)).at[:, 4].set(9.0).at[:, 1].set(8.0)
    chosen, weights = choose_experts(logits, None, mixture=mixture)
    np.testing.assert_array_equal(chosen, [[4, 1]] * TOKENS)
    np.testing.assert_allclose(jnp.sum(weights, axis=1), 1.0, rtol=1e-6)
    # Equal logits: ties go to the lowest numbers, and every token has its experts.
    run = jax.jit(partial(mixture_of_experts, mixture=mixture, activation="silu"))
    np.testing.assert_allclose(run(params, x), by_hand(params, x, mixture), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("tokens", [3, TOKENS], ids=["few", "many"])
def test_narrow_experts_answer_in_their_own_dtype(tokens):
    mixture = CASES["granite"]
    params, x = drawn(mixture)
    x = x[:tokens]
    narrow = {name: jnp.asarray(value, jnp.bfloat16) for name, value in params.items()}
    got = mixture_of_experts(
        narrow, jnp.asarray(x, jnp.bfloat16), mixture=mixture, activation="silu"
    )
    wanted = by_hand(narrow, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32), mixture)
    assert got.dtype == jnp.bfloat16
    assert np.max(np.abs(np.asarray(got, np.float64) - wanted)) < 0.03 * np.max(np.abs(wanted))


def test_a_wide_router_chooses_by_float32_weights_in_a_narrow_model():
    mixture = replace(CASES["granite"], wide_router=True)
    params, x = drawn(mixture)
    narrow = jnp.asarray(x, jnp.bfloat16)
    logits = np.asarray(narrow, np.float64) @ np.asarray(params["router"], np.float64).T
    chosen, weights = route({"router": jnp.asarray(params["router"])}, narrow, mixture=mixture)
    wanted, shares = choose_experts(jnp.asarray(logits, jnp.float32), None, mixture=mixture)
    np.testing.assert_array_equal(chosen, wanted)
    np.testing.assert_allclose(weights, shares, rtol=1e-5)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_gated_norm_takes_each_group_by_itself(groups, gate_first):
    draw = np.random.default_rng(1)
    weight, x, gate = (draw.normal(size=size).astype(np.float32) for size in (12, (4, 12), (4, 12)))
    wide = x.astype(np.float64) * (silu(gate.astype(np.float64)) if gate_first else 1)
    parts = wide.reshape(4, groups, -1)
    unit = parts / np.sqrt(np.mean(parts**2, axis=2, keepdims=True) + 1e-5)
    wanted = unit.reshape(4, 12) * weight * (1 if gate_first else silu(gate.astype(np.float64)))
    got = gated_group_norm(
        jnp.asarray(weight),
        jnp.asarray(x),
        jnp.asarray(gate),
        groups=groups,
        gate_first=gate_first,
        eps=1e-5,
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_weights_of_a_softmax_over_the_chosen_are_those_over_all_renormalised():
    """With logits whose powers are no float32, and an epsilon of the sum that is too large to be left out."""
    draw = np.random.default_rng(4)
    logits = draw.normal(size=(5, 12)) * 8 + 300
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    wanted = np.argsort(-scores, axis=1)[:, :3]
    taken = np.take_along_axis(scores, wanted, axis=1)
    for eps in (1e-20, 0.5):
        mixture = MixtureConfig(experts=12, top_k=3, size=8, gated=True, scale=2.0, sum_eps=eps)
        chosen, weights = choose_experts(jnp.asarray(logits, jnp.float32), None, mixture=mixture)
        np.testing.assert_array_equal(chosen, wanted)
        total = taken.sum(axis=1, keepdims=True) + eps
        np.testing.assert_allclose(weights, 2 * taken / total, rtol=1e-4, atol=1e-30)
    # All logits are added up only where that is needed: XLA's softmax of the chosen adds up three.
    for eps, added in ((1e-20, {3}), (0.5, {12})):
        run = partial(choose_experts, correction=None, mixture=replace(mixture, sum_eps=eps))
        steps = equations(run, jnp.zeros((5, 12), jnp.float32))
        sums = [
            step.invars[0].aval.shape[1] for step in steps if step.primitive.name == "reduce_sum"
        ]
        assert set(sums) == added
