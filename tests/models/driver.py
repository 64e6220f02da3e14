"""Runs a model's steps from hand-built metadata: shuffled pages and states, padding on all axes, one program each."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import init_cache
from jaxkv.sampling.batch import SamplingBatch


@partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def run_step(model, params, cache, batch):
    """Returns the next cache and the logits of every token, padding included. Donates `cache`."""
    cache, hidden = model.forward(params, cache, batch)
    return cache, model.logits(params, hidden)


class Driver:
    """A few rows that grow step by step, each with pages and states of its own drawn at random from the pools.

    Args:
        model: a `Decoder` or anything that follows `jaxkv.models.protocol.Model`.
        params: its parameters.
        rows: rows of every step; those given no tokens are padding.
        page_size: tokens per page.
        max_tokens: longest row.
        step_tokens: padded number of tokens of a step that is not a decode step.
        cache_dtype: dtype name of keys and values.
        seed: draws the pages.
        fresh: steps of nothing but new rows say that they are.
    """

    def __init__(
        self,
        model,
        params,
        *,
        rows=3,
        page_size=8,
        max_tokens=128,
        step_tokens=64,
        cache_dtype="float32",
        seed=0,
        fresh=False,
    ):
        self.model, self.params, self.fresh = model, params, fresh
        self.rows, self.page_size, self.step_tokens = rows, page_size, step_tokens
        specs = model.cache_specs(page_size=page_size, dtype=cache_dtype)
        self.layout = group_layers(specs)
        width = -(-max_tokens // page_size)
        # One page is nobody's: padding of the tables names it.
        self.num_pages = rows * width + 1
        self.num_states = 2 * rows + 1
        counts = {"page": self.num_pages, "state": self.num_states}
        self.cache = init_cache(self.layout, {g.name: counts[g.unit] for g in self.layout.groups})
        draw = np.random.default_rng(seed)
        self.tables = [
            draw.permutation(self.num_pages)[: rows * width].reshape(rows, width).astype(np.int32)
            for _ in self.layout.paged_groups
        ]
        # Each row has two states of its own and goes from one to the other.
        self.states = [
            1 + draw.permutation(2 * rows).reshape(rows, 2).astype(np.int32)
            for _ in self.layout.state_groups
        ]
        self.lengths, self.steps = [0] * rows, [0] * rows

    def prefill(self, new: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Feeds row r the tokens `new[r]`; returns each row's logits [new tokens, vocab]."""
        return self._run(new, decode=False)

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Feeds row r the one token `tokens[r]`; returns logits [rows given, vocab]."""
        return np.concatenate(self._run([[token] for token in tokens], decode=True))

    def batch(self, new: Sequence[Sequence[int]], *, decode: bool = False) -> StepBatch:
        """Describes a step that appends `new[r]` to row r."""
        new = [list(tokens) for tokens in new] + [[] for _ in range(self.rows - len(new))]
        size = self.rows if decode else self.step_tokens
        counts = np.array([len(tokens) for tokens in new])
        bounds = np.concatenate(([0], np.cumsum(counts)))
        assert bounds[-1] <= size, f"{bounds[-1]} tokens exceed the step's {size}"
        owner = np.repeat(np.arange(self.rows), counts)
        positions = np.concatenate(
            [
                np.arange(start, start + count)
                for start, count in zip(self.lengths, counts, strict=True)
            ]
        )
        # Empty rows show nothing, as the packer leaves them.
        visible = np.where(counts > 0, np.array(self.lengths) + counts, 0)
        return StepBatch(
            tokens=_padded(np.concatenate([np.array(t, int) for t in new]), size),
            positions=_padded(positions, size),
            cu_q_lens=jnp.asarray(bounds, jnp.int32),
            seq_lens=jnp.asarray(visible, jnp.int32),
            paged=tuple(self._tables(table, owner, positions, size) for table in self.tables),
            states=tuple(self._states(states, counts) for states in self.states),
            # Nothing is sampled here: every row's slot lies past the end.
            sampling=SamplingBatch(
                state_ids=jnp.arange(self.rows), carry=jnp.zeros(self.rows, int)
            ),
            decode=decode,
            fresh=self.fresh and not decode and not any(np.array(self.lengths)[counts > 0]),
        )

    def _tables(self, table, owner, positions, size):
        pages = table[owner, positions // self.page_size]
        slots = self.num_pages * self.page_size + np.arange(size)
        slots[: len(owner)] = pages * self.page_size + positions % self.page_size
        return PagedTables(page_table=jnp.asarray(table), write_slots=jnp.asarray(slots, jnp.int32))

    def _states(self, states, counts):
        """A row reads what it wrote last, the zero state if nothing; a row without tokens is padding."""
        rows, steps = np.arange(self.rows), np.array(self.steps)
        read = np.where((counts > 0) & (steps > 0), states[rows, (steps + 1) % 2], 0)
        write = np.where(counts > 0, states[rows, steps % 2], self.num_states + rows)
        return StateTables(
            read_states=jnp.asarray(read, jnp.int32), write_states=jnp.asarray(write, jnp.int32)
        )

    def _run(self, new, *, decode):
        batch = self.batch(new, decode=decode)
        self.cache, logits = run_step(self.model, self.params, self.cache, batch)
        logits, split, start = np.asarray(logits), [], 0
        for row, tokens in enumerate(new):
            split.append(logits[start : start + len(tokens)])
            start += len(tokens)
            self.lengths[row] += len(tokens)
            self.steps[row] += len(tokens) > 0
        return split


def _padded(values, size):
    filled = np.zeros(size, np.int32)
    filled[: len(values)] = values
    return jnp.asarray(filled)
