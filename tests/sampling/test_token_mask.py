"""The mask of a grammar: forbidden tokens are never sampled, and other rows keep their tokens bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import sample
from jaxkv.sampling.token_mask import mask_of, num_words
from tests.sampling import oracle

ROWS, VOCAB = 5, 77
LOGITS = np.random.default_rng(7).normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
LOGITS[3, [0, 75]] = 1.5, 1.0
ALLOWED = [range(VOCAB), [76], [3, 31, 32, 63, 64], [0, 75], range(1, VOCAB, 2)]


def batch(features, **values):
    masks = np.stack([mask_of(allowed, num_words(VOCAB)) for allowed in ALLOWED])
    values |= {"token_mask": jnp.asarray(masks.view(np.int32))} if features.grammar else {}
    if features.logprobs is not None:
        values["given"] = jnp.full((ROWS, 1), NO_TOKEN, jnp.int32)
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    return SamplingBatch(state_ids=rows, carry=rows * 0, values=values, features=features)


def positions():
    return jnp.full(ROWS, 3, jnp.int32)


def test_greedy_rows_take_the_likeliest_token_that_is_allowed():
    chosen = sample(jnp.asarray(LOGITS), batch(Features(grammar=True)), None, positions())
    assert chosen.finite.all()
    for row, allowed in enumerate(ALLOWED):
        blocked = set(range(VOCAB)) - set(allowed)
        assert chosen.tokens[row] == np.argmax(
            [-np.inf if token in blocked else LOGITS[row, token] for token in range(VOCAB)]
        )


def test_log_probabilities_stay_those_of_the_raw_logits():
    features = Features(grammar=True, logprobs=5)
    chosen = sample(jnp.asarray(LOGITS), batch(features), None, positions())
    for row in range(ROWS):
        wanted = oracle.log_probabilities(LOGITS[row])
        assert abs(chosen.logprob[row] - wanted[chosen.tokens[row]]) < 1e-5
        assert chosen.top_ids[row].tolist() == np.argsort(-wanted)[:5].tolist()


def drawn(features, seeds):
    tokens = []
    for seed in range(seeds):
        seeded = jnp.full(ROWS, seed, jnp.int32)
        values = {
            "seed_low": seeded,
            "seed_high": seeded,
            "temperature": jnp.full(ROWS, 2.0, jnp.float32),
            "top_k": jnp.asarray([0, 0, 2, 0, 3], jnp.int32),
            "top_p": jnp.ones(ROWS, jnp.float32),
            "min_p": jnp.zeros(ROWS, jnp.float32),
        }
        chosen = sample(jnp.asarray(LOGITS), batch(features, **values), None, positions())
        tokens.append(np.asarray(chosen.tokens))
    return np.array(tokens)


def test_drawn_tokens_are_allowed_and_filters_see_the_masked_logits():
    with_masks = drawn(Features(draws=True, filters=True, grammar=True), 40)
    for row, allowed in enumerate(ALLOWED):
        assert set(with_masks[:, row]) <= set(allowed)
    allowed = list(ALLOWED[2])
    likeliest = sorted(allowed, key=lambda token: -LOGITS[2, token])[:2]
    assert set(with_masks[:, 2]) == set(likeliest), "top-k keeps two of the allowed tokens"
    assert len(set(with_masks[:, 3])) == 2


def test_a_row_without_a_grammar_draws_the_same_tokens_in_a_program_with_masks():
    with_masks = drawn(Features(draws=True, filters=True, grammar=True), 20)
    without = drawn(Features(draws=True, filters=True), 20)
    assert (with_masks[:, 0] == without[:, 0]).all()
    assert (with_masks[:, 1] != without[:, 1]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_forbidden_token_does_not_hide_that_logits_are_no_numbers(bad):
    logits = LOGITS.copy()
    logits[1, 5] = bad
    chosen = sample(jnp.asarray(logits), batch(Features(grammar=True)), None, positions())
    assert chosen.finite.tolist() == [True, False, True, True, True]


def test_a_mask_has_a_bit_per_token():
    mask = mask_of([0, 31, 32, 95, 96], 3)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [1 + 2**31, 1, 2**31]
    assert (num_words(32), num_words(33)) == (1, 2)
