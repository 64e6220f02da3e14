"""Logits processors on rows: those named apply, with their arguments, and no other row changes by a bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.features import Features, union
from jaxkv.sampling.fields import features_for
from jaxkv.sampling.processors import LogitsProcessors, Processor
from jaxkv.sampling.register_processors import register_processors
from jaxkv.sampling.sample import adjust, admit, read_choices, sample, write_choices
from tests.example_counts import examples
from tests.sampling.processors import FUNCTIONS, processed, registered
from tests.sampling.rows import GREEDY, VOCAB, at, batch_of, random_logits, state_of

LONGEST = 12
KNOWN = registered(VOCAB, LONGEST)
PROCESSORS = Features(processors=True)

CALLS = st.fixed_dictionaries(
    {},
    optional={
        "scaled": st.fixed_dictionaries(
            {}, optional={"scale": st.sampled_from([0.5, 2, -1.5]), "negative": st.booleans()}
        ),
        "digest": st.fixed_dictionaries({}, optional={"factor": st.integers(-9, 9)}),
        "no_repeat_ngram": st.fixed_dictionaries({"size": st.integers(0, 4)}),
        "min_new_tokens": st.fixed_dictionaries(
            {"least": st.integers(0, 4), "stops": st.tuples(*[st.integers(0, VOCAB + 3)] * 2)}
        ),
        "allowed_range": st.fixed_dictionaries(
            {"low": st.integers(0, 5)}, optional={"high": st.integers(6, VOCAB)}
        ),
    },
)
# Few different tokens, so that n-grams repeat.
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST)
ROWS = st.lists(st.tuples(CALLS, TEXTS, st.integers(1, LONGEST)), min_size=3, max_size=3)

applied = jax.jit(KNOWN.apply)


def batched(known, params, **options):
    """The sampling batch of these rows in a program with processors."""
    features = union([features_for(one) for one in params] + [PROCESSORS])
    batch = batch_of(params, features, **options)
    named = jnp.asarray([bool(one.logits_processors) for one in params], jnp.int32)
    return replace(batch, values=batch.values | {"processed": named}, processors=known)


@given(ROWS)
@settings(max_examples=examples(80), deadline=None)
def test_rows_of_any_mixture_equal_their_twins_in_numpy(rows):
    logits = np.asarray(random_logits(3))
    ids = np.full((3, LONGEST), 2**31 - 1, np.int32)
    words = []
    for row, (calls, text, prompt) in enumerate(rows):
        ids[row, : len(text)] = text
        words.append(KNOWN.words(calls, min(prompt, len(text))))
    lengths = np.asarray([len(text) for _, text, _ in rows], np.int32)
    made = np.asarray(applied(logits, ids, lengths, np.stack(words)))
    for row, (calls, text, prompt) in enumerate(rows):
        wanted = processed(logits[row], calls, text, min(prompt, len(text)))
        np.testing.assert_allclose(made[row], wanted, rtol=1e-6)
        if not calls:
            np.testing.assert_array_equal(made[row], logits[row])


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_processor_for_n_grams_equals_that_of_transformers(size):
    import torch
    from transformers import NoRepeatNGramLogitsProcessor

    draw = np.random.default_rng(size)
    ids = draw.integers(0, 3, (8, LONGEST)).astype(np.int32)
    logits = np.array(random_logits(8))
    wanted = NoRepeatNGramLogitsProcessor(size)(
        torch.as_tensor(ids, dtype=torch.long), torch.as_tensor(logits)
    )
    words = np.stack([KNOWN.words({"no_repeat_ngram": {"size": size}}, 1)] * 8)
    made = applied(logits, ids, np.full(8, LONGEST, np.int32), words)
    np.testing.assert_array_equal(made, wanted.numpy())
    assert np.isneginf(made).any()


def test_a_function_sees_its_own_row_up_to_its_length_and_the_arguments_of_the_request():
    """The result is what it saw: the sum of all ids, both lengths and its argument."""

    def watcher(logits, history, *, argument=5):
        numbers = (jnp.sum(history.ids), history.length, history.prompt_length, argument)
        return logits.at[:4].set(jnp.stack(numbers).astype(jnp.float32))

    known = register_processors({"watcher": watcher}, vocab_size=VOCAB, max_tokens=4)
    ids = jnp.asarray([[3, 4, 99, 99], [1, 1, 1, 1]], jnp.int32)
    words = np.stack([known.words({"watcher": {"argument": 9}}, 1), known.words({}, 3)])
    logits = random_logits(2)
    made = jax.jit(known.apply)(logits, ids, at(2, 4), words)
    assert made[0, :4].tolist() == [3 + 4 + 2 * VOCAB, 2, 1, 9]
    np.testing.assert_array_equal(made[1], logits[1])


def test_a_loop_over_what_a_former_owner_left_ends_at_once():
    def counted(logits, history, *, turns=0):
        return jax.lax.fori_loop(0, turns + history.length, lambda _, values: values + 1.0, logits)

    known = register_processors({"counted": counted}, vocab_size=VOCAB, max_tokens=4)
    junk = jnp.full((2, known.num_words), 2**31 - 1, jnp.int32)
    words = junk.at[0].set(jnp.asarray(known.words({"counted": {"turns": 2}}))).at[1, 1].set(0)
    logits = random_logits(2)
    made = jax.jit(known.apply)(logits, jnp.zeros((2, 4), jnp.int32), at(1, 2**30), words)
    np.testing.assert_allclose(made[0], logits[0] + 3.0, rtol=1e-6)
    np.testing.assert_array_equal(made[1], logits[1])


def test_33_processors_have_a_bit_each_and_apply_in_order():
    def adder(place):
        return lambda logits, history: (logits * 2.0).at[place % VOCAB].add(1.0)

    known = LogitsProcessors(tuple(Processor(f"p{at}", adder(at), ()) for at in range(33)))
    assert known.num_words == 3
    logits = jnp.zeros((1, VOCAB), jnp.float32)
    words = jnp.asarray(known.words({"p32": {}, "p31": {}, "p2": {}}, 0))[None, :]
    made = np.asarray(jax.jit(known.apply)(logits, jnp.zeros((1, 4), jnp.int32), at(0), words))[0]
    wanted = np.zeros(VOCAB)
    for place in (2, 31, 32):
        wanted = 2 * wanted
        wanted[place % VOCAB] += 1
    np.testing.assert_array_equal(made, wanted)


def test_processors_come_after_biases_and_before_the_masks():
    """A doubled bias, a grammar's mask and a stop id that a processor would allow again."""
    known = register_processors(
        {"double": lambda logits, history: jnp.maximum(logits * 2, -50.0)},
        vocab_size=VOCAB,
        max_tokens=4,
    )
    params = [replace(GREEDY, logit_bias={3: 5.0}, logits_processors={"double": {}})]
    features = Features(penalties=True, processors=True, grammar=True, min_tokens=True)
    batch = batch_of(params, features, stop_ids=[[6]], block=[1])
    mask = np.asarray([[~(1 << 4)]], np.int32)
    values = batch.values | {"processed": at(1), "token_mask": jnp.asarray(mask)}
    batch = replace(batch, values=values, processors=known)
    state = state_of([[]], [[]], [{3: 5.0, 7: -np.inf}])
    state = state.replace(
        token_history=jnp.zeros((1, 4), jnp.int32),
        processor_words=jnp.asarray(known.words({"double": {}}))[None, :],
    )
    ones = jnp.ones((1, VOCAB), jnp.float32)
    made = np.asarray(jax.jit(adjust)(ones, batch, state, at(1)))[0]
    assert made[3] == 12.0
    assert made[7] == -50.0
    assert made[4] == made[6] == -np.inf
    assert made[0] == 2.0


class TestThroughTheCache:
    """Entries of the sampling group: admission, sampled tokens, and reuse by another row."""

    def choices(self, entries=4):
        return {
            "last_token": jnp.zeros(entries, jnp.int32),
            "token_history": jnp.full((entries, LONGEST), 2**31 - 1, jnp.int32),
            "processor_words": jnp.full((entries, KNOWN.num_words), 2**31 - 1, jnp.int32),
        }

    def admitted(self, choices, entry, prompt, output, calls):
        pad = lambda ids, width: jnp.asarray([[*ids, *[VOCAB] * (width - len(ids))]], jnp.int32)  # noqa: E731
        words = jnp.asarray(KNOWN.words(calls, len(prompt)))[None, :]
        return admit(
            choices,
            at(entry),
            pad(prompt, 8),
            pad(output, 8),
            processor_words=words,
            prompt_lengths=at(len(prompt)),
        )

    def test_a_returning_row_has_its_prompt_and_what_it_generated(self):
        choices = self.admitted(self.choices(), 2, [1, 2, 3], [7, 8], {"digest": {}})
        assert choices["token_history"][2, :5].tolist() == [1, 2, 3, 7, 8]
        assert choices["processor_words"][2, 0] == 3
        untouched = self.choices()
        for role in ("token_history", "processor_words"):
            np.testing.assert_array_equal(choices[role][1], untouched[role][1])

    def test_sampled_tokens_are_seen_by_the_next_step(self):
        params = [replace(GREEDY, logits_processors={"digest": {}})]
        batch = batched(KNOWN, params, state_ids=[2])
        choices, tokens = self.choices(), [5, 3, 5]
        choices = self.admitted(choices, 2, tokens, [], {"digest": {}})
        logits = random_logits(1)

        @jax.jit
        def step(choices, position):
            sampled = sample(logits, batch, read_choices(choices, batch), position)
            return write_choices(choices, batch, sampled.tokens, position), sampled.tokens

        for _ in range(5):
            choices, sampled = step(choices, at(len(tokens)))
            wanted = processed(logits[0], {"digest": {}}, tokens, 3).argmax()
            assert sampled.tolist() == [wanted]
            tokens.append(int(wanted))

    def test_a_row_without_processors_in_a_used_entry_keeps_its_logits(self):
        choices = self.admitted(self.choices(), 2, [5, 3], [], {"allowed_range": {"high": 2}})
        params = [GREEDY, replace(GREEDY, logits_processors={"digest": {}})]
        batch = batched(KNOWN, params, state_ids=[2, 4 + 1])
        logits = random_logits(2)
        made = jax.jit(adjust)(logits, batch, read_choices(choices, batch), at(2, 2))
        np.testing.assert_array_equal(made, logits)

    def test_a_token_past_the_longest_text_is_dropped(self):
        choices = self.choices()
        batch = batched(KNOWN, [replace(GREEDY, logits_processors={"digest": {}})], state_ids=[1])
        written = write_choices(choices, batch, at(3), at(LONGEST))
        np.testing.assert_array_equal(written["token_history"], choices["token_history"])

    def test_a_cache_without_histories_is_refused_by_name(self):
        batch = batched(KNOWN, [replace(GREEDY, logits_processors={"digest": {}})])
        with pytest.raises(ValueError, match=r"processors needs token_history.*last_token"):
            read_choices({"last_token": jnp.zeros(3, jnp.int32)}, batch)
        entry, tokens, nothing = at(1), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 0), jnp.int32)
        with pytest.raises(ValueError, match="processor_words must be given"):
            admit(self.choices(), entry, tokens, nothing, prompt_lengths=at(2))
        with pytest.raises(ValueError, match="token histories needs prompt_lengths"):
            admit(self.choices(), entry, tokens, nothing)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"digests": {}}, r"'digests', which is not registered; registered are: scaled, digest"),
        ({"digest": {"facto": 1}}, r"'digest' has no argument 'facto'; it has factor"),
        ({"digest": {"factor": 1.5}}, r"'factor' of .*'digest' must be int32\[\], got float32"),
        ({"digest": {"factor": True}}, r"must be int32\[\], got bool"),
        ({"digest": {"factor": 2**31}}, r"must be int32\[\]: its ints must fit into 32 bits"),
        ({"scaled": {"scale": float("nan")}}, "it holds NaN"),
        ({"scaled": {"negative": 1}}, r"must be bool\[\], got int32"),
        ({"min_new_tokens": {"stops": (1, 2, 3)}}, r"must be int32\[2\], got int32\[3\]"),
    ],
)
def test_a_request_with_other_names_or_arguments_is_refused(calls, message):
    with pytest.raises(ValueError, match=message):
        KNOWN.check(SamplingParams(logits_processors=calls).logits_processors)


def test_where_none_is_registered_every_name_is_refused():
    with pytest.raises(ValueError, match="registered are: none"):
        LogitsProcessors().check({"digest": {}})
    LogitsProcessors().check({})


def test_equal_functions_make_equal_processors():
    """So jaxkv.generate finds its program again."""
    again = register_processors(FUNCTIONS, vocab_size=VOCAB, max_tokens=LONGEST)
    assert again == KNOWN
    assert hash(again) == hash(KNOWN)
    assert register_processors({}, vocab_size=VOCAB, max_tokens=LONGEST) == LogitsProcessors()
