"""The sampling group of the cache: reading and writing a slot, and reusing it for another request."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import admit, read_choices, sample, write_choices
from tests.sampling.rows import GREEDY, PENALTIES, VOCAB, at, batch_of, state_of


def choices_of(slots=5, vocab=VOCAB, width=2, *, junk=False):
    """The sampling group's arrays, zero or filled with what former owners left."""

    def array(shape, dtype, value):
        return jnp.full(shape, value if junk else 0, dtype)

    return {
        "last_token": array((slots,), jnp.int32, 13),
        "output_counts": array((slots, vocab), jnp.int32, 6),
        "prompt_seen": array((slots, vocab), jnp.uint8, 1),
        "bias_ids": array((slots, width), jnp.int32, 4),
        "bias_values": array((slots, width), jnp.float32, 50),
    }


class TestSlots:
    def test_reading_follows_the_slots_and_padding_reads_zeros(self):
        choices = choices_of(junk=True) | {"output_counts": jnp.arange(5 * VOCAB).reshape(5, VOCAB)}
        batch = batch_of([GREEDY] * 3, PENALTIES, state_ids=[4, 0, 5 + 2])
        state = read_choices(choices, batch)
        np.testing.assert_array_equal(
            state.output_counts[:2], choices["output_counts"][jnp.asarray([4, 0])]
        )
        for field in jax.tree.leaves(state):
            assert not np.asarray(field[2]).any()
        assert read_choices(choices, batch_of([GREEDY], Features())) is None

    def test_a_cache_without_counts_is_refused_by_name(self):
        with pytest.raises(ValueError, match=r"output_counts.*last_token"):
            read_choices({"last_token": jnp.zeros(3, jnp.int32)}, batch_of([GREEDY], PENALTIES))

    def test_writing_counts_the_token_and_drops_padding(self):
        choices = choices_of(junk=True)
        batch = batch_of([GREEDY] * 3, PENALTIES, state_ids=[3, 1, 5 + 2])
        written = write_choices(choices, batch, at(8, 0, 2), at(1, 1, 1))
        wanted = np.full((5, VOCAB), 6)
        wanted[3, 8] += 1
        wanted[1, 0] += 1
        np.testing.assert_array_equal(written["output_counts"], wanted)
        assert written["last_token"].tolist() == [13, 0, 13, 8, 13]
        for role in ("prompt_seen", "bias_ids", "bias_values"):
            assert written[role] is choices[role]

    def test_writing_without_penalties_touches_the_last_token_alone(self):
        choices = choices_of(junk=True)
        batch = batch_of([GREEDY], Features(), state_ids=[2])
        written = write_choices(choices, batch, at(8), at(1))
        assert written["last_token"].tolist() == [13, 13, 8, 13, 13]
        assert written["output_counts"] is choices["output_counts"]

    def test_a_new_owner_finds_nothing_of_the_former_one(self):
        """Slots 3 and 0 are taken over (slot 0 by a request that was preempted); all others stay as they are."""
        choices = choices_of(junk=True)
        admitted = jax.jit(admit)(
            choices,
            at(3, 0, 5 + 2),
            jnp.asarray([[2, 2, 9], [1, VOCAB + 1, VOCAB + 2], [4, 4, 4]], jnp.int32),
            jnp.asarray([[VOCAB, VOCAB + 1], [7, 7], [4, 4]], jnp.int32),
            jnp.asarray([[5, VOCAB + 1], [VOCAB, VOCAB + 1], [0, 0]], jnp.int32),
            jnp.asarray([[-3.0, 0.0], [0.0, 0.0], [1.0, 1.0]], jnp.float32),
        )
        for role, old in choices.items():
            np.testing.assert_array_equal(
                admitted[role][jnp.asarray([1, 2, 4])], old[jnp.asarray([1, 2, 4])]
            )
        batch = batch_of([GREEDY] * 2, PENALTIES, state_ids=[3, 0])
        wanted = state_of([[2, 9], [1]], [[], [7, 7]], [{5: -3.0}, {}], width=2)
        chex.assert_trees_all_equal(read_choices(admitted, batch), wanted)
        assert admitted["last_token"].tolist() == [0, 13, 13, 0, 13]

    def test_admission_serves_a_cache_that_holds_less(self):
        choices = {"last_token": jnp.full(3, 13, jnp.int32)}
        admitted = admit(choices, at(1), jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 0), jnp.int32))
        assert admitted.keys() == choices.keys()
        assert admitted["last_token"].tolist() == [13, 0, 13]

    def test_biases_that_the_cache_cannot_hold_are_refused(self):
        tokens = jnp.zeros((1, 2), jnp.int32)
        with pytest.raises(ValueError, match="bias_ids must be given"):
            admit(choices_of(), at(1), tokens, tokens)
        small = {"last_token": jnp.zeros(3, jnp.int32)}
        with pytest.raises(ValueError, match="bias_ids must be given"):
            admit(small, at(1), tokens, tokens, tokens, jnp.zeros((1, 2), jnp.float32))

    def test_a_step_of_choices_allocates_no_second_pool(self):
        """Donated, the sampling group is updated in place: every byte aliased, no scratch of its size."""
        choices = choices_of(slots=64, vocab=4096)
        batch = batch_of([GREEDY] * 2, PENALTIES, state_ids=[3, 1])

        def choose(choices, logits, batch, positions):
            sampled = sample(logits, batch, read_choices(choices, batch), positions)
            return write_choices(choices, batch, sampled.tokens, positions), sampled.tokens

        def enter(choices, slots, prompts):
            biases = jnp.zeros((2, 2), jnp.float32)
            return admit(choices, slots, prompts, prompts, prompts, biases)

        size = sum(array.nbytes for array in choices.values())
        logits = jnp.zeros((2, 4096), jnp.float32)
        for compiled in (
            jax.jit(choose, donate_argnums=0).lower(choices, logits, batch, at(1, 2)).compile(),
            jax.jit(enter, donate_argnums=0)
            .lower(choices, at(1, 2), jnp.zeros((2, 2), jnp.int32))
            .compile(),
        ):
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes == size
            assert memory.temp_size_in_bytes < size // 4

    def test_generated_tokens_are_penalised_through_the_cache(self):
        """Three steps end to end: the presence penalty drives the row to another token each time."""
        params = SamplingParams(temperature=0.0, presence_penalty=10.0)
        batch = batch_of([params], PENALTIES, state_ids=[2])
        logits = jnp.asarray([np.arange(VOCAB, 0, -1)], jnp.float32)
        choices = choices_of(slots=3)
        nothing = jnp.full((1, 2), VOCAB, jnp.int32)
        choices = admit(choices, at(2), nothing, nothing, nothing, jnp.zeros((1, 2), jnp.float32))
        tokens = []
        for position in range(3):
            sampled = sample(logits, batch, read_choices(choices, batch), at(position))
            choices = write_choices(choices, batch, sampled.tokens, at(position))
            tokens += sampled.tokens.tolist()
        assert tokens == [0, 1, 2]
