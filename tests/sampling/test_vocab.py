"""The sampler over several devices, each with a part of the token ids, against the NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import Mesh, PartitionSpec

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import allowed, gumbel_noise, sample
from jaxkv.sampling.token_mask import mask_of, num_words
from jaxkv.sampling.vocab import Vocab
from tests.devices import needs_devices
from tests.example_counts import examples
from tests.sampling import oracle
from tests.sampling.rows import FILTERS, GREEDY, at, batch_of, state_of

pytestmark = needs_devices(4)

PARTS, VOCAB, ROWS, TOP = 4, 20, 4, 7
EVERYTHING = Features(
    draws=True, penalties=True, min_tokens=True, logprobs=TOP, logprobs_modes=True
)
LOGITS = arrays.arrays(
    np.float32,
    (ROWS, VOCAB),
    # Few values, so that equal ones are on several devices.
    elements=st.one_of(
        st.sampled_from([-np.inf, -2.0, 0.0, 1.0, 4.0]),
        st.floats(-12, 12, width=32, allow_subnormal=False),
    ),
).map(
    # Without -0.0, which XLA's order puts before 0.0.
    lambda logits: np.where(np.isneginf(logits).all(1, keepdims=True), 0, logits) + np.float32(0)
)
OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 30.0]),
        "seed": st.integers(0, 9),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.25]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3),
    }
)
FILTERED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 1.0, 30.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 2**31 - 1]),
        "top_p": st.one_of(st.sampled_from([1e-40, 1e-9, 0.5, 0.999, 1.0]), st.floats(0.001, 1)),
        "min_p": st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def in_parts(function):
    """Returns a function that runs on four devices, each with a part of the logits; results have one entry of each."""
    mesh = Mesh(np.asarray(jax.devices()[:PARTS]), ("parts",))

    def run(logits, *arguments):
        divided = jax.shard_map(
            lambda *one: jax.tree.map(lambda x: x[None], function(*one, Vocab(PARTS, "parts"))),
            mesh=mesh,
            in_specs=(PartitionSpec(None, "parts"), *[PartitionSpec()] * len(arguments)),
            out_specs=PartitionSpec("parts"),
            check_vma=False,
        )
        return divided(logits, *arguments)

    return jax.jit(run)


def kept(logits, batch, vocab):
    """Returns which of its own tokens a device keeps."""
    return allowed(logits, batch, vocab.max(logits), vocab)


jit_noise = jax.jit(gumbel_noise, static_argnums=2)
sampled_in_parts, kept_in_parts = in_parts(sample), in_parts(kept)


def agreed(results):
    """Returns the results of one device; all devices have the same."""
    for one in jax.tree.leaves(results):
        assert all(np.array_equal(one[0], other, equal_nan=True) for other in one[1:])
    return jax.tree.map(lambda one: np.asarray(one[0]), results)


def log_probabilities(logits):
    wide = np.asarray(logits, np.float64)
    best = wide.max()
    return wide - best - np.log(np.exp(wide - best).sum())


@given(
    LOGITS,
    st.lists(OPTIONS, min_size=ROWS, max_size=ROWS),
    st.lists(TOKENS, min_size=ROWS, max_size=ROWS),
    st.lists(TOKENS, min_size=ROWS, max_size=ROWS),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
@settings(max_examples=examples(60), deadline=None)
def test_tokens_and_log_probabilities_are_those_of_the_oracle(
    logits, options, prompts, outputs, blocks
):
    params = [SamplingParams(**one) for one in options]
    stops = [[3, 11, VOCAB]] * ROWS
    batch = batch_of(params, EVERYTHING, stop_ids=stops, block=[int(one) for one in blocks])
    biases = [one.logit_bias for one in params]
    state = state_of(prompts, outputs, biases, vocab=VOCAB)
    positions = at(*range(5, 5 + ROWS))
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, state, positions))
    noise = np.asarray(jit_noise(batch, positions, VOCAB))
    for row, own in enumerate(params):
        blocked = (3, 11) if blocks[row] else ()
        told = {"prompt": prompts[row], "output": outputs[row], "blocked": blocked}
        wanted = oracle.adjusted(logits[row], own, **told)
        assert got.finite[row] == np.isfinite(wanted.max())
        if not got.finite[row]:
            assert got.tokens[row] == 0
            continue
        scores = wanted if own.temperature == 0 else wanted / own.temperature + noise[row]
        token = got.tokens[row]
        # Another token only where float32 cannot tell the two apart.
        assert scores[token] >= scores.max() - 1e-4
        raw = log_probabilities(logits[row])
        np.testing.assert_allclose(got.logprob[row], raw[token], atol=1e-5)
        order = np.argsort(-logits[row], kind="stable")[:TOP]
        assert got.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(got.top_logprobs[row], raw[order], atol=1e-5)


@given(LOGITS, st.lists(FILTERED, min_size=ROWS, max_size=ROWS), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_filters_keep_what_the_oracle_keeps(logits, options, negative):
    params = [SamplingParams(**one) for one in options]
    # Zeros of both signs are equal logits.
    signs = np.where(np.arange(VOCAB) % 2, 1, -1) if negative else 1
    logits = np.where(logits == 0, np.copysign(np.float32(0), signs), logits)
    parts = np.asarray(kept_in_parts(jnp.asarray(logits), batch_of(params, FILTERS)))
    for row, own, mask in zip(logits, params, np.concatenate(parts, axis=1), strict=True):
        wanted, doubtful = oracle.keep(row, own)
        # A token that cannot be drawn may be kept or not.
        matters = ~doubtful & ~np.isneginf(row)
        np.testing.assert_array_equal(mask[matters], wanted[matters])
        assert mask[np.argmax(row)]


@pytest.mark.parametrize(("scale", "p"), [(0.5, 0.9), (4.0, 0.9), (4.0, 0.9999)])
def test_filters_of_a_large_vocabulary_keep_as_many_tokens_as_float64(scale, p):
    logits = np.random.default_rng(0).normal(size=(3, 131072)).astype(np.float32) * scale
    wishes = [SamplingParams(top_p=p), SamplingParams(top_k=1000), SamplingParams(min_p=0.05)]
    parts = np.asarray(kept_in_parts(jnp.asarray(logits), batch_of(wishes, FILTERS)))
    nucleus, most_likely, near = np.concatenate(parts, axis=1)
    weights = -np.sort(-np.exp(logits[0].astype(np.float64)))
    size = 1 + np.searchsorted(np.cumsum(weights), p * weights.sum())
    # Float32 may decide otherwise on tokens whose sum of probabilities is next to p.
    assert abs(int(nucleus.sum()) - size) <= 5
    assert most_likely.sum() == 1000
    assert logits[1][most_likely].min() > logits[1][~most_likely].max()
    np.testing.assert_array_equal(near, logits[2] >= logits[2].max() + np.log(0.05))


def test_a_token_is_drawn_among_those_that_the_filters_keep():
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    params = [SamplingParams(top_k=3, seed=at, logprobs_mode="truncated") for at in range(ROWS)]
    features = Features(draws=True, filters=True, logprobs=0, logprobs_modes=True)
    batch, positions = batch_of(params, features), at(*range(ROWS))
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, None, positions))
    noise = np.asarray(jit_noise(batch, positions, VOCAB))
    for row in range(ROWS):
        likely = np.argsort(-logits[row])[:3]
        token = likely[np.argmax(logits[row][likely] + noise[row][likely])]
        assert got.tokens[row] == token
        left = log_probabilities(logits[row][likely])
        np.testing.assert_allclose(got.logprob[row], left[likely == token][0], atol=1e-5)


def test_equal_logits_on_several_devices_give_the_lowest_id():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [7, 13, 19]] = 4
    logits[1, 2:] = -np.inf
    batch = batch_of([GREEDY] * 2, Features())
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, None, at(1, 1)))
    assert got.tokens.tolist() == [7, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 9, VOCAB - 1])
def test_a_number_that_is_none_fails_its_row_on_every_device(bad, place):
    logits = np.ones((2, VOCAB), np.float32)
    logits[0, place] = bad
    batch = batch_of([GREEDY, GREEDY], Features())
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, None, at(1, 1)))
    assert got.finite.tolist() == [False, True]
    assert got.tokens.tolist() == [0, 0]


def test_a_given_token_is_taken_with_its_own_log_probability():
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    batch = batch_of([GREEDY] * 2, Features(logprobs=0), given=[17, NO_TOKEN])
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, None, at(1, 1)))
    assert got.tokens.tolist() == [17, int(np.argmax(logits[1]))]
    wanted = [log_probabilities(row)[token] for row, token in zip(logits, got.tokens, strict=True)]
    np.testing.assert_allclose(got.logprob, wanted, atol=1e-5)


def test_tokens_that_a_grammar_forbids_are_left_out_on_every_device():
    logits = np.tile(np.arange(VOCAB, dtype=np.float32), (2, 1))
    batch = batch_of([GREEDY] * 2, Features(grammar=True))
    masks = [mask_of([2, 12], num_words(VOCAB)), mask_of(range(VOCAB), num_words(VOCAB))]
    batch.values["token_mask"] = jnp.asarray(np.stack(masks).view(np.int32))
    got = agreed(sampled_in_parts(jnp.asarray(logits), batch, None, at(1, 1)))
    assert got.tokens.tolist() == [12, VOCAB - 1]
