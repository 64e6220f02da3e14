"""Properties of the sampler for all options: independent rows, failures, number of programs."""

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import sample
from tests.fast_cases import fast_cases
from tests.sampling.rows import (
    ALL,
    BLOCKS,
    DRAWS,
    FILTERS,
    PENALTIES,
    ROWS,
    VOCAB,
    at,
    batch_of,
    random_logits,
    state_of,
)

jit_sample = jax.jit(sample)


def primitives(jaxpr):
    """The names of all primitives of a jaxpr, those of inner jaxprs included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            names |= primitives(inner)
    return names


class TestRows:
    # A number that is no bucket, and all. Rows are permuted, removed and padded in these two already.
    @pytest.mark.parametrize("rows", fast_cases([1, 2, 3, 5, 8, 16, 33], 3, 33))
    def test_neither_neighbours_nor_place_nor_bucket_change_a_row(self, rows):
        """Rows are permuted, removed and padded. The bits of the others stay equal."""
        total, vocab = 33, 1000
        rng = np.random.default_rng(1)
        logits = np.asarray(random_logits(total, vocab))
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_k=int(rng.choice([0, 50])),
                top_p=float(rng.choice([0.9, 1.0])),
                min_p=float(rng.choice([0.0, 0.02])),
                presence_penalty=0.5,
                seed=int(seed),
            )
            for seed in rng.integers(2**62, size=total)
        ]
        positions = rng.integers(0, 2**31 - 1, size=total)
        texts = rng.integers(vocab, size=(total, 9))

        def run(chosen):
            batch = batch_of(
                [params[row] for row in chosen],
                ALL,
                stop_ids=np.full((len(chosen), 1), 3),
                block=np.asarray(chosen) % 2,
            )
            state = state_of(texts[chosen], texts[chosen, :4], vocab=vocab)
            return jit_sample(jnp.asarray(logits[chosen]), batch, state, at(*positions[chosen]))

        everyone = run(np.arange(total))
        chosen = rng.permutation(total)[:rows]
        chex.assert_trees_all_equal(
            run(chosen), jax.tree.map(lambda field: field[chosen], everyone)
        )


class TestFailure:
    # The greedy program, and the one with everything that others have a part of.
    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
    @pytest.mark.parametrize(
        "features", fast_cases([Features(), DRAWS, FILTERS, ALL], Features(), ALL)
    )
    def test_a_row_that_is_not_finite_fails_alone(self, features, bad):
        """NaN must not become a plausible token, and changes nothing for the neighbours."""
        rows, vocab = 6, 131
        logits = np.array(random_logits(rows, vocab))
        broken = logits.copy()
        for row, column in ((0, 0), (2, 64), (3, 130)):
            broken[row, column] = bad
        broken[5] = -np.inf
        stops = np.full((rows, 1), 3)
        params = [SamplingParams(seed=row, top_k=40, top_p=0.95) for row in range(rows)]
        batch = batch_of(params, features, stop_ids=stops, block=[0] * rows)
        state = state_of([[1]] * rows, [[2]] * rows, vocab=vocab) if features.penalties else None
        healthy = jit_sample(jnp.asarray(logits), batch, state, at(*range(rows)))
        sampled = jit_sample(jnp.asarray(broken), batch, state, at(*range(rows)))
        assert healthy.finite.all()
        assert sampled.finite.tolist() == [False, True, False, False, True, False]
        assert sampled.tokens[jnp.asarray([0, 2, 3, 5])].tolist() == [0, 0, 0, 0]
        others = jnp.asarray([1, 4])
        chex.assert_trees_all_equal(
            jax.tree.map(lambda field: field[others], sampled),
            jax.tree.map(lambda field: field[others], healthy),
        )

    def test_a_nan_is_found_among_many_tokens(self):
        """The largest of many numbers hides a NaN where XLA compiles for CPUs (jax 0.11.2)."""
        logits = random_logits(2, 4000).at[1, 2345].set(jnp.nan)
        params = [SamplingParams(seed=seed) for seed in range(2)]
        sampled = jit_sample(logits, batch_of(params, FILTERS), None, at(0, 1))
        assert sampled.finite.tolist() == [True, False]

    def test_logits_that_a_penalty_drives_past_float32_fail_the_row(self):
        params = SamplingParams(temperature=0.0, repetition_penalty=0.01)
        logits = jnp.full((1, VOCAB), 1e37)
        sampled = jit_sample(logits, batch_of([params], PENALTIES), state_of([[4]], [[]]), at(1))
        assert not sampled.finite[0]

    def test_impossible_tokens_are_legal_and_never_drawn(self):
        logits = jnp.full((64, VOCAB), -jnp.inf).at[:, 3].set(-5.0).at[:, 9].set(-5.0)
        params = [SamplingParams(seed=seed, temperature=9.0) for seed in range(64)]
        for features in (DRAWS, FILTERS):
            sampled = jit_sample(logits, batch_of(params, features), None, at(*range(64)))
            assert sampled.finite.all()
            assert set(sampled.tokens.tolist()) == {3, 9}


class TestPrograms:
    NEEDS = (
        ("draws", {"random_bits", "random_wrap", "random_fold_in"}),
        ("filters", {"sort", "cumsum"}),
        ("penalties", {"scatter-add"}),
        ("min_tokens", {"scatter"}),
        ("logprobs", {"top_k"}),
    )

    def program(self, features):
        stops, block = [[2]] * ROWS, [1] * ROWS
        batch = batch_of([SamplingParams(seed=1)] * ROWS, features, stop_ids=stops, block=block)
        state = state_of([[1]] * ROWS, [[1]] * ROWS, [{}] * ROWS) if features.penalties else None
        return jax.make_jaxpr(sample)(random_logits(ROWS), batch, state, at(*range(ROWS)))

    @pytest.mark.parametrize(
        "features",
        [Features(), DRAWS, FILTERS, PENALTIES, BLOCKS, Features(logprobs=2), ALL],
        ids=str,
    )
    def test_they_hold_no_code_for_a_feature_that_is_off(self, features):
        """The greedy program holds neither a sort nor random bits."""
        names = primitives(self.program(features).jaxpr)
        for feature, signs in self.NEEDS:
            on = getattr(features, feature)
            if on is not None and on is not False:
                assert names & signs
            else:
                assert not names & signs

    def test_they_sort_once_at_most(self):
        text = str(self.program(ALL))
        assert text.count(" sort[") == 1
        assert text.count(" top_k[") == 1

    def test_one_serves_all_values(self):
        """Seeds, options, slots and positions are arrays, so nothing is traced again."""
        chex.clear_trace_counter()
        traced = jax.jit(chex.assert_max_traces(sample, n=1))
        for seed in range(3):
            params = [
                SamplingParams(
                    seed=seed + row, temperature=float(row), top_k=row + seed, top_p=0.5 + row / 8
                )
                for row in range(ROWS)
            ]
            stops, block = np.full((ROWS, 2), seed), np.arange(ROWS) % 2
            batch = batch_of(params, ALL, state_ids=[3, 1, 2, 9], stop_ids=stops, block=block)
            state = state_of([[seed]] * ROWS, [[seed, 1]] * ROWS)
            traced(random_logits(ROWS, seed=seed), batch, state, at(seed, 1, 2, 3))

    def test_results_are_typed(self):
        """A weakly typed result would split the key of the next step's program."""
        for features in (Features(), ALL):
            for aval in self.program(features).out_avals:
                assert not aval.weak_type
        dtypes = [aval.dtype.name for aval in self.program(ALL).out_avals]
        assert dtypes == ["int32", "bool", "float32", "int32", "float32"]
