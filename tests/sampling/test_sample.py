"""Each option of the sampler against its NumPy oracle, and the distribution of the draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from jaxkv.config.sampling import SMALLEST_TEMPERATURE, SamplingParams
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import adjust, allowed, gumbel_noise, sample
from jaxkv.sampling.vocab import ALL_IDS
from tests.example_counts import examples
from tests.sampling import oracle
from tests.sampling.rows import (
    BLOCKS,
    DRAWS,
    FILTERS,
    GREEDY,
    PENALTIES,
    ROWS,
    VOCAB,
    at,
    batch_of,
    random_logits,
    state_of,
)

jit_sample = jax.jit(sample)
jit_allowed = jax.jit(lambda logits, batch: allowed(logits, batch, ALL_IDS.max(logits)))
jit_adjust = jax.jit(adjust)
jit_noise = jax.jit(gumbel_noise, static_argnums=2)

# Mixes ties, exact numbers, ordinary numbers and impossible tokens.
LOGITS = st.one_of(
    st.sampled_from([-np.inf, -2.0, 0.0, 1.0, 1.5, 2.0, 4.0]),
    st.floats(-12, 12, width=32, allow_subnormal=False),
)
LOGIT_ROWS = arrays.arrays(np.float32, (ROWS, VOCAB), elements=LOGITS).map(
    lambda logits: np.where(np.isneginf(logits).all(1, keepdims=True), np.float32(0), logits)
)
FILTERED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.5, 1.0, 1.7, 30.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 1000, 2**31 - 1]),
        "top_p": st.one_of(
            st.sampled_from([1e-9, 0.25, 0.5, 0.9, 0.999, 1.0]), st.floats(0.001, 1)
        ),
        "min_p": st.one_of(st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]), st.floats(1e-9, 1)),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
PENALISED = st.fixed_dictionaries(
    {
        "temperature": st.just(0.0),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    }
)


class TestGreedy:
    def test_it_takes_the_largest_logit_and_the_lowest_id_on_ties(self):
        logits = jnp.asarray([[0, 3, 1, 3], [5, 5, 5, 5], [-np.inf, -9, -np.inf, -9]], jnp.float32)
        sampled = jit_sample(logits, batch_of([GREEDY] * 3, Features()), None, at(1, 2, 3))
        assert sampled.tokens.tolist() == [1, 0, 1]
        assert sampled.finite.all()
        assert sampled.logprob is sampled.top_ids is sampled.top_logprobs is None

    def test_greedy_rows_are_exact_in_a_program_that_draws(self):
        """A mixed batch: greedy rows take the argmax, drawn rows draw as if they were alone."""
        logits = random_logits(4)
        params = [GREEDY, SamplingParams(seed=5), GREEDY, SamplingParams(seed=6, top_k=3)]
        mixed = jit_sample(logits, batch_of(params, FILTERS), None, at(9, 9, 9, 9)).tokens
        greedy = np.argmax(np.asarray(logits), axis=1)
        assert mixed[0] == greedy[0]
        assert mixed[2] == greedy[2]
        for row in (1, 3):
            batch = batch_of(params[row : row + 1], FILTERS)
            assert jit_sample(logits[row : row + 1], batch, None, at(9)).tokens[0] == mixed[row]

    @pytest.mark.parametrize("features", [DRAWS, FILTERS])
    @pytest.mark.parametrize("temperature", [1e-30, 2e-38, 1e-38, 1e-45])
    def test_a_vanishing_temperature_takes_the_largest_logit(self, temperature, features):
        logits = random_logits(2, scale=30.0)
        batch = batch_of([SamplingParams(temperature=temperature, seed=1, top_p=0.9)] * 2, features)
        sampled = jit_sample(logits, batch, None, at(3, 4))
        assert sampled.finite.all()
        np.testing.assert_array_equal(sampled.tokens, np.argmax(np.asarray(logits), axis=1))


class TestFilters:
    @given(LOGIT_ROWS, st.lists(FILTERED, min_size=ROWS, max_size=ROWS))
    @settings(max_examples=examples(200), deadline=None)
    def test_they_keep_what_the_oracle_keeps(self, logits, params):
        params = [SamplingParams(**options) for options in params]
        kept = np.asarray(jit_allowed(jnp.asarray(logits), batch_of(params, FILTERS)))
        for row, own, mask in zip(logits, params, kept, strict=True):
            wanted, doubtful = oracle.keep(row, own)
            # A token that cannot be drawn may be kept or not.
            matters = ~doubtful & ~np.isneginf(row)
            np.testing.assert_array_equal(mask[matters], wanted[matters])
            assert mask[np.argmax(row)]

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"top_k": 1}, [0]),
            ({"top_k": 2}, [0, 1, 2]),  # ties at the bound stay
            ({"top_k": 4}, [0, 1, 2, 3]),
            ({"top_k": 5}, [0, 1, 2, 3, 4]),
            ({"top_k": 99}, [0, 1, 2, 3, 4]),
            ({"top_p": 0.3}, [0]),
            ({"top_p": 0.41}, [0, 1, 2]),  # the token that crosses p stays, and its tie
            ({"top_p": 0.79}, [0, 1, 2]),
            ({"top_p": 0.81}, [0, 1, 2, 3]),
            ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
            ({"min_p": 1.0}, [0]),
            ({"min_p": 0.49}, [0, 1, 2]),
            ({"min_p": 0.51}, [0]),
            # Renormalised over the first three, the first holds 0.5.
            ({"top_k": 3, "top_p": 0.45}, [0]),
            ({"top_k": 3, "top_p": 0.55}, [0, 1, 2]),
        ],
    )
    def test_known_cases(self, options, kept):
        logits = jnp.log(jnp.asarray([[0.4, 0.2, 0.2, 0.15, 0.05]], jnp.float32))
        mask = jit_allowed(logits, batch_of([SamplingParams(**options)], FILTERS))
        assert np.flatnonzero(mask[0]).tolist() == kept

    def test_temperature_comes_before_top_p(self):
        logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]], jnp.float32))
        cold = batch_of([SamplingParams(temperature=0.1, top_p=0.9)], FILTERS)
        hot = batch_of([SamplingParams(temperature=9.0, top_p=0.9)], FILTERS)
        assert jit_allowed(logits, cold).sum() == 1
        assert jit_allowed(logits, hot).sum() == 4

    def test_they_see_the_adjusted_logits(self):
        logits = jnp.asarray([[9.0, 8.0] + [0.0] * (VOCAB - 2)], jnp.float32)
        params = SamplingParams(seed=1, top_k=1, presence_penalty=5.0)
        features = Features(draws=True, filters=True, penalties=True)
        sampled = jit_sample(logits, batch_of([params], features), state_of([[]], [[0]]), at(3))
        assert sampled.tokens.tolist() == [1]

    def test_a_large_vocabulary_keeps_float32_honest(self):
        """The bounds of 128k nearly flat tokens agree with float64 to a few tokens in 100 000."""
        logits = random_logits(1, vocab=131072, scale=0.5)
        mask = np.asarray(jit_allowed(logits, batch_of([SamplingParams(top_p=0.9)], FILTERS)))[0]
        weights = np.exp(np.asarray(logits[0], np.float64))
        order = np.argsort(-weights)
        wanted = 1 + np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())
        assert abs(int(mask.sum()) - wanted) <= 5


class TestPenalties:
    @given(
        LOGIT_ROWS,
        st.lists(PENALISED, min_size=ROWS, max_size=ROWS),
        st.lists(st.tuples(TOKENS, TOKENS), min_size=ROWS, max_size=ROWS),
    )
    @settings(max_examples=examples(150), deadline=None)
    def test_they_equal_the_oracle(self, logits, params, texts):
        params = [SamplingParams(**options) for options in params]
        prompts, outputs = zip(*texts, strict=True)
        state = state_of(prompts, outputs, [row.logit_bias for row in params])
        got = np.asarray(
            jit_adjust(jnp.asarray(logits), batch_of(params, PENALTIES), state, at(*[0] * ROWS))
        )
        for row, own, prompt, output, values in zip(
            logits, params, prompts, outputs, got, strict=True
        ):
            wanted = oracle.adjusted(row, own, prompt=prompt, output=output)
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)

    def test_rows_without_them_pass_bit_identical(self):
        logits = random_logits(2)
        state = state_of([[1, 2]] * 2, [[3, 3]] * 2, [{}, {}])
        got = jit_adjust(logits, batch_of([GREEDY] * 2, PENALTIES), state, at(0, 0))
        np.testing.assert_array_equal(got, logits)

    def test_a_cache_without_biases_serves_penalties(self):
        params = SamplingParams(temperature=0.0, presence_penalty=100.0)
        state = state_of([[]], [[2]])
        sampled = jit_sample(
            jnp.asarray([[0, 1, 9, 3] + [0] * (VOCAB - 4)], jnp.float32),
            batch_of([params], PENALTIES),
            state,
            at(1),
        )
        assert sampled.tokens.tolist() == [3]

    def test_a_missing_state_is_named(self):
        with pytest.raises(ValueError, match="read_choices"):
            sample(random_logits(1), batch_of([GREEDY], PENALTIES), None, at(1))


class TestStopIds:
    STOPS = ((2, 5, VOCAB + 2), (2, VOCAB + 1, VOCAB + 2))

    def test_they_are_blocked_only_while_the_row_is_short(self):
        logits = (
            jnp.zeros((2, VOCAB), jnp.float32).at[:, 2].set(9.0).at[:, 5].set(8.0).at[:, 7].set(7.0)
        )
        for block, wanted in (([1, 1], [7, 5]), ([0, 1], [2, 5]), ([1, 0], [7, 2])):
            batch = batch_of([GREEDY] * 2, BLOCKS, stop_ids=self.STOPS, block=block)
            assert jit_sample(logits, batch, None, at(1, 1)).tokens.tolist() == wanted

    def test_a_row_whose_every_token_is_blocked_fails(self):
        logits = jnp.full((2, VOCAB), -jnp.inf).at[:, 2].set(1.0)
        batch = batch_of([GREEDY] * 2, BLOCKS, stop_ids=self.STOPS, block=[1, 0])
        sampled = jit_sample(logits, batch, None, at(1, 1))
        assert sampled.finite.tolist() == [False, True]
        assert sampled.tokens.tolist() == [0, 2]

    def test_a_blocked_nan_still_fails_the_row(self):
        logits = random_logits(2).at[0, 2].set(jnp.nan).at[1, 2].set(jnp.inf)
        batch = batch_of([GREEDY] * 2, BLOCKS, stop_ids=self.STOPS, block=[1, 1])
        sampled = jit_sample(logits, batch, None, at(1, 1))
        assert sampled.finite.tolist() == [False, False]
        assert sampled.tokens.tolist() == [0, 0]


class TestDraws:
    @given(LOGIT_ROWS, st.lists(FILTERED, min_size=ROWS, max_size=ROWS), st.integers(0, 2**64 - 1))
    @settings(max_examples=examples(150), deadline=None)
    def test_they_equal_the_oracles_with_the_same_noise(self, logits, params, seed):
        params = [SamplingParams(**options, seed=seed) for options in params]
        batch, positions = batch_of(params, FILTERS), at(3, 0, 2**31 - 1, 77)
        noise = np.asarray(jit_noise(batch, positions, VOCAB), np.float64)
        tokens = jit_sample(jnp.asarray(logits), batch, None, positions).tokens.tolist()
        for row, own, drawn, token in zip(logits, params, noise, tokens, strict=True):
            row = row.astype(np.float64)
            kept, doubtful = oracle.keep(row, own)
            scores = row / own.temperature + drawn
            best = oracle.choose(row, own, drawn)
            # Where float32 cannot tell, any of the candidates will do.
            close = kept & (scores > scores[best] - 1e-4)
            assert token == best or close[token] or doubtful[token] or doubtful[best]

    @pytest.mark.parametrize("temperature", [1.0, 1.6, 2.5])
    def test_their_frequencies_are_the_probabilities(self, temperature):
        """Chi-square over 20 000 positions of one seed, and over as many seeds at one position."""
        draws = 20_000
        logits = np.asarray(random_logits(1, vocab=6, seed=3, scale=0.7))
        expected = oracle.probabilities(logits[0], temperature) * draws
        many = jnp.asarray(np.tile(logits, (draws, 1)))
        row = SamplingParams(temperature=temperature, seed=1234567890123)
        positions = jnp.arange(draws, dtype=jnp.int32)
        fixed_seed = batch_of([row], DRAWS)
        spread = jax.tree.map(lambda field: jnp.tile(field, draws), fixed_seed)
        for batch, where in (
            (spread, positions),
            (
                spread.replace(values=spread.values | {"seed_low": positions}),
                jnp.full_like(positions, 7),
            ),
            (
                spread.replace(values=spread.values | {"seed_high": positions}),
                jnp.full_like(positions, 7),
            ),
        ):
            tokens = np.asarray(jit_sample(many, batch, None, where).tokens)
            observed = np.bincount(tokens, minlength=6)
            assert stats.chisquare(observed, expected).pvalue > 1e-4
            # Neighbouring counters are independent: so are the pairs they give.
            pairs = np.bincount(tokens[:-1:2] * 6 + tokens[1::2], minlength=36)
            chance = np.outer(expected, expected).ravel() / draws**2
            assert stats.chisquare(pairs, chance * pairs.sum()).pvalue > 1e-4

    def test_filtered_frequencies_are_renormalised(self):
        draws = 20_000
        logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]], jnp.float32))
        batch = jax.tree.map(
            lambda field: jnp.tile(field, draws),
            batch_of([SamplingParams(top_k=2, seed=8)], FILTERS),
        )
        positions = jnp.arange(draws, dtype=jnp.int32)
        tokens = jit_sample(jnp.tile(logits, (draws, 1)), batch, None, positions).tokens
        observed = np.bincount(tokens, minlength=4)
        assert observed[2:].tolist() == [0, 0]
        wanted = np.array([4, 3]) / 7 * draws
        assert stats.chisquare(observed[:2], wanted).pvalue > 1e-4

    def test_the_noise_resolves_the_tail(self):
        """Noise from 23 random bits is coarse at its top, and repeats itself; ours does not."""
        noise = np.asarray(jit_noise(batch_of([SamplingParams(seed=2)], DRAWS), at(5), 2**22))
        top = noise[noise > 9.0]
        assert top.size > 400
        assert np.unique(top).size == top.size

    def test_the_noise_depends_on_each_part_of_the_counter_alone(self):
        seeds = [1, 1, 2, 1 + 2**32, 1]
        batch = batch_of([SamplingParams(seed=seed) for seed in seeds], DRAWS)
        noise = np.asarray(jit_noise(batch, at(4, 5, 4, 4, 4), 64))
        np.testing.assert_array_equal(noise[0], noise[4])
        for first in range(4):
            for second in range(first):
                assert (noise[first] != noise[second]).all()


class TestLogprobs:
    @pytest.mark.parametrize("top", [0, pytest.param(1, marks=pytest.mark.slow), 5])
    def test_they_are_those_of_the_raw_logits(self, top):
        """Before penalties, biases, temperature and filters; the chosen token's and the most likely ones'."""
        logits = np.asarray(random_logits(3)).copy()
        logits[0, :4] = -np.inf
        logits[1, 5] = logits[1, 6] = 20.0
        features = Features(draws=True, filters=True, penalties=True, logprobs=top)
        params = [
            SamplingParams(seed=row, temperature=3.0, top_k=4, presence_penalty=2.0)
            for row in range(3)
        ]
        state = state_of([[]] * 3, [[7]] * 3, [{1: 50.0}, {2: 50.0}, {3: 50.0}])
        sampled = jit_sample(jnp.asarray(logits), batch_of(params, features), state, at(1, 2, 3))
        assert sampled.top_ids.shape == sampled.top_logprobs.shape == (3, top)
        for row in range(3):
            wanted = oracle.log_probabilities(logits[row])
            np.testing.assert_allclose(
                sampled.logprob[row], wanted[int(sampled.tokens[row])], rtol=1e-5, atol=1e-5
            )
            best = np.argsort(-wanted, kind="stable")[:top]
            np.testing.assert_array_equal(sampled.top_ids[row], best)
            np.testing.assert_allclose(sampled.top_logprobs[row], wanted[best], atol=1e-5)

    def test_each_row_has_those_of_the_distribution_that_it_names(self):
        logits = random_logits(6, seed=3)
        features = Features(
            draws=True, filters=True, penalties=True, logprobs=4, logprobs_modes=True
        )
        params = [
            SamplingParams(
                seed=row,
                temperature=0.4 + row,
                top_k=6,
                top_p=0.9,
                frequency_penalty=1.5,
                logit_bias={2: 4.0},
                logprobs_mode=mode,
            )
            for row, mode in enumerate(("raw", "temperature", "truncated") * 2)
        ]
        state = state_of([[]] * 6, [[1, 1, 7]] * 6, [{2: 4.0}] * 6)
        sampled = jit_sample(logits, batch_of(params, features), state, at(*range(6)))
        for row, one in enumerate(params):
            wanted = oracle.reported(logits[row], one, output=[1, 1, 7])
            np.testing.assert_allclose(
                sampled.logprob[row], wanted[int(sampled.tokens[row])], rtol=1e-5, atol=1e-5
            )
            best = np.argsort(-wanted, kind="stable")[:4]
            told = np.where(np.isneginf(wanted[best]), -1, best)
            ids = np.where(np.isneginf(sampled.top_logprobs[row]), -1, sampled.top_ids[row])
            np.testing.assert_array_equal(ids, told)
            np.testing.assert_allclose(sampled.top_logprobs[row], wanted[best], atol=1e-5)
            if one.logprobs_mode == "truncated":
                kept = np.exp(wanted).sum()
                assert kept == pytest.approx(1)
                assert np.isneginf(wanted).any()

    @pytest.mark.parametrize("mode", ["temperature", "truncated"])
    def test_at_the_smallest_temperature_the_most_likely_token_has_all_of_the_probability(
        self, mode
    ):
        logits = random_logits(2, scale=30.0)
        features = Features(draws=True, filters=True, logprobs=4, logprobs_modes=True)
        params = SamplingParams(
            temperature=SMALLEST_TEMPERATURE, seed=1, top_p=0.9, logprobs_mode=mode
        )
        sampled = jit_sample(logits, batch_of([params] * 2, features), None, at(3, 4))
        np.testing.assert_array_equal(sampled.tokens, np.argmax(np.asarray(logits), axis=1))
        np.testing.assert_array_equal(sampled.logprob, [0.0, 0.0])
        np.testing.assert_array_equal(sampled.top_logprobs[:, 0], [0.0, 0.0])
        assert (sampled.top_logprobs[:, 1:] < -1e30).all()

    def test_a_given_token_is_taken_in_place_of_the_sampled_one_with_the_same_bits(self):
        logits = random_logits(3, seed=3)
        features = Features(draws=True, filters=True, logprobs=0, logprobs_modes=True)
        params = [SamplingParams(seed=row, top_k=3, logprobs_mode="truncated") for row in range(3)]
        positions = at(*range(3))
        free = jit_sample(logits, batch_of(params, features), None, positions)
        same = jit_sample(
            logits, batch_of(params, features, given=free.tokens.tolist()), None, positions
        )
        np.testing.assert_array_equal(same.tokens, free.tokens)
        np.testing.assert_array_equal(same.logprob, free.logprob)
        least = np.asarray(logits).argmin(1).tolist()
        given = [NO_TOKEN, least[1], least[2]]
        other = jit_sample(logits, batch_of(params, features, given=given), None, positions)
        assert other.tokens.tolist() == [int(free.tokens[0]), *least[1:]]
        assert other.logprob[0] == free.logprob[0]
        assert np.isneginf(other.logprob[1:]).all()
