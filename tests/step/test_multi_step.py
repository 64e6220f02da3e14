"""Several decode steps in one program: the tokens and slots that each writes, by a model that writes nothing else."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.step.loop import NOWHERE
from jaxkv.step.multi_step import batch_at, decode_steps
from pallas_kernels.shared_keys import SharedKeys

PAGES, PAGE, ROWS, STEPS = 6, 4, 3, 3


@dataclass(frozen=True)
class Scribe:
    """A model that writes the number of each token it computes, plus one, to its slot, and chooses token + 1."""

    vocab_size: int = 50
    num_layers: int = 1
    max_positions: int = PAGES * PAGE
    whole_prompts: bool = False
    batch_invariant: bool = False
    implementation: str | None = None

    def running(self, implementation):
        return self

    def cache_specs(self, *, page_size, dtype):
        return ()

    def init_params(self, key, dtype):
        return {}

    def forward(self, params, cache, batch):
        slots = (
            cache.layer(0)["k"].at[batch.paged[0].write_slots].set(batch.tokens + 1, mode="drop")
        )
        return cache.with_layer(0, {"k": slots}), batch.tokens[:, None].astype(jnp.float32)

    def logits(self, params, hidden):
        return jax.nn.one_hot(hidden[:, 0].astype(jnp.int32) + 1, self.vocab_size)


def at(*values):
    return jnp.asarray(values, jnp.int32)


def first_batch(starts, write_slots, given=None, shared=None):
    """The first token of row r is 10 * r + 10."""
    features = Features() if given is None else Features(logprobs=0)
    values = {} if given is None else {"given": given}
    table = at(0, 1, 2, 3, 4, 5).reshape(3, 2)
    tables = PagedTables(page_table=table, write_slots=write_slots, shared=shared)
    return StepBatch(
        tokens=at(10, 20, 30),
        positions=starts,
        cu_q_lens=at(0, 1, 2, 3),
        seq_lens=starts + 1,
        paged=(tables,),
        states=(),
        sampling=SamplingBatch(
            state_ids=at(0, 1, 2), carry=at(0, 0, 0), values=values, features=features
        ),
        decode=True,
    )


def written_by(starts, left, write_slots, given=None):
    """Returns the slots after several decode steps."""
    cache = Cache(
        arrays=(jnp.zeros(PAGES * PAGE, jnp.int32), jnp.zeros(ROWS, jnp.int32)),
        keys=((0, "k"), (1, "last_token")),
    )
    first = first_batch(starts, write_slots, given)
    cache, chosen = decode_steps(Scribe(), {}, cache, first, left, page_sizes=(PAGE,), steps=STEPS)
    return np.asarray(cache.arrays[0]), np.asarray(chosen.tokens)


def test_each_row_writes_as_many_tokens_as_it_takes_part_in_and_goes_on_to_its_next_page():
    slots, tokens = written_by(at(2, 3, 0), at(3, 2, 1), at(2, 11, 16))
    wanted = np.zeros(PAGES * PAGE, int)
    wanted[2:5] = 11, 12, 13
    wanted[11:13] = 21, 22
    wanted[16] = 31
    np.testing.assert_array_equal(slots, wanted)
    assert tokens[:, 0].tolist() == [11, 12, 13]
    assert tokens[:2, 1].tolist() == [21, 22]


def test_a_token_that_lies_in_anothers_page_already_is_not_written_again():
    """A recurrent model computes the token for its states alone. Others may read the page, and would get other bits."""
    slots, _ = written_by(at(3, 3, 0), at(3, 2, 1), at(NOWHERE, 11, 16))
    assert slots[:8].tolist() == [0, 0, 0, 0, 12, 13, 0, 0]


def test_rows_share_the_same_keys_in_all_steps():
    shared = SharedKeys(*(jnp.zeros(size, jnp.int32) for size in (8, ROWS, 1)))
    first = first_batch(at(2, 3, 0), at(2, 11, 16), shared=shared)
    assert batch_at(first, at(2)[0], at(1, 1, 1) > 0, (PAGE,)).paged[0].shared is shared


def test_each_step_takes_the_token_that_a_row_is_given_for_it():
    given = at(7, 8, 9, 5, NO_TOKEN, NO_TOKEN, *[NO_TOKEN] * 3).reshape(3, 3)
    slots, tokens = written_by(at(2, 3, 0), at(3, 2, 1), at(2, 11, 16), given)
    assert tokens[:, 0].tolist() == [7, 8, 9]
    assert tokens[:2, 1].tolist() == [5, 6]
    assert slots[2:5].tolist() == [11, 8, 9]
    assert slots[11:13].tolist() == [21, 6]
