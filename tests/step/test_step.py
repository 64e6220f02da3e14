"""One compiled step with changing data: lengths, slots and padding are arrays, and calls are independent."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.state import init_cache
from jaxkv.cache.variants import sampling
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.models.decoder import Decoder
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.packer import Packer
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from jaxkv.step.step import step
from pallas_kernels import page_write, paged_attention
from tests.cache.layouts import slots_of

MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=50,
        hidden_size=16,
        num_layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn_size=24,
        max_positions=64,
        rope=RopeConfig(rotary_dim=8),
        windows=(None, None),
    )
)
PAGE = 4
LAYOUT = group_layers(
    (*MODEL.cache_specs(page_size=PAGE, dtype="float32"), LayerSpec(2, sampling(50)))
)
COUNTS = {"gqa": 40, "sampling": 9}
GREEDY = SamplingParams(temperature=0.0)


def junk_cache():
    """Returns a cache whose free places hold NaN, so that reading one of them shows."""
    cache = init_cache(LAYOUT, COUNTS)
    junk = tuple(
        jnp.full_like(array, jnp.nan) if array.dtype == jnp.float32 else array
        for array in cache.arrays
    )
    return replace(cache, arrays=junk)


class Runner:
    """One compiled program for all steps of a test, or until `change_program`; a second trace fails it."""

    def __init__(self, shape):
        self.params = MODEL.init_params(jax.random.key(3), jnp.float32)
        self.allocator = PageAllocator(LAYOUT, COUNTS)
        self.packer = Packer(PackedLayout(LAYOUT, COUNTS, 50), 50)
        self.cache = junk_cache()
        self.change_program(shape)

    def change_program(self, shape):
        self.shape = shape

        @partial(jax.jit, donate_argnums=1)
        def run(params, cache, ints):
            return step(MODEL, params, cache, self.packer.packed_layout.unpack(shape, ints))

        self.run = run

    def __call__(self, *rows):
        for row in rows:
            if row.start == 0:
                self.allocator.open(row.sequence)
            self.allocator.reserve(row.sequence, row.start + len(row.tokens))
        ints, _ = self.packer.pack(self.shape, rows, self.allocator)
        self.cache, sampled = self.run(self.params, self.cache, ints)
        assert self.run._cache_size() == 1
        for row in rows:
            self.allocator.commit(row.sequence, row.start + len(row.tokens))
        return np.asarray(sampled.tokens)[: len(rows)].tolist()

    def bits(self):
        return [np.asarray(array).view(np.uint32).copy() for array in self.cache.arrays]

    def written(self, sequence, start, stop):
        """The (page, offset) of some tokens of a sequence."""
        group = self.packer.packed_layout.layout.group("gqa")
        return divmod(np.array(slots_of(self.allocator, group, sequence, start, stop)), PAGE)


def test_the_scalar_replay_probe_reads_the_second_key():
    """Replayed at length 2, keys read [1, 3]; a program that froze length 1 would read [3, 0]."""

    @jax.jit
    @partial(chex.assert_max_traces, n=1)
    def replay(keys, values, key, value, past, total):
        keys, values = page_write((keys, values), (key, value), past)
        table = jnp.zeros((1, 1), jnp.int32)
        q = jnp.ones((1, 1, 1), jnp.float32)
        out, lse = paged_attention(q, keys, values, table, total, scale=1.0, return_lse=True)
        return keys, values, out, lse

    def call(pools, key, value, past, total):
        given = (np.float32(key), np.float32(value))
        arrays = [jnp.full((1, 1, 1), number, jnp.float32) for number in given]
        counts = [jnp.asarray([number], jnp.int32) for number in (past, total)]
        return replay(*pools, *arrays, *counts)

    pools = (jnp.zeros((1, 4, 1, 1)), jnp.zeros((1, 4, 1, 1)))
    *pools, out, _ = call(pools, 1, 5, 0, 1)
    assert float(out[0, 0, 0]) == 5.0
    keys, _, out, lse = call(pools, 3, 7, 1, 2)
    np.testing.assert_array_equal(keys[0, :2, 0, 0], [1, 3])
    assert float(lse[0, 0]) == pytest.approx(np.log(np.exp(1.0) + np.exp(3.0)), rel=1e-6)
    weights = np.exp([1.0, 3.0]) / np.exp([1.0, 3.0]).sum()
    assert float(out[0, 0, 0]) == pytest.approx(weights @ [5.0, 7.0], rel=1e-6)


def assert_only_these_changed(run, before, rows):
    """Keys and values of the rows' new tokens are written whole, their last tokens may be; all else is as before."""
    wanted = np.zeros((COUNTS["gqa"], PAGE), bool)
    for row in rows:
        wanted[run.written(row.sequence, row.start, row.start + len(row.tokens))] = True
    *pools, last_tokens = [old != new for old, new in zip(before, run.bits(), strict=True)]
    assert len(pools) == 4
    for changed in pools:
        np.testing.assert_array_equal(changed.all(axis=(2, 3)), wanted)
        np.testing.assert_array_equal(changed.any(axis=(2, 3)), wanted)
    slots = {run.allocator.states(row.sequence, "sampling")[1] for row in rows}
    assert set(np.flatnonzero(last_tokens).tolist()) <= slots


def test_a_step_writes_where_its_own_lengths_say_and_nowhere_else():
    """One executable at lengths [0, 3, 7], then [1, 4, 8], changes the places (row, length) alone."""
    run = Runner(StepSpec(16, 4, (4,)))
    run(Row(1, [5, 6, 7], 0, GREEDY), Row(2, [8, 9, 10, 11, 12, 13, 14], 0, GREEDY))
    run.change_program(StepSpec(3, 3, (4,), decode=True))
    decode = run.run
    for lengths in ([0, 3, 7], [1, 4, 8]):
        before = run.bits()
        rows = [Row(row, [row + 20], length, GREEDY) for row, length in enumerate(lengths)]
        run(*rows)
        assert [run.allocator.num_tokens(row) - 1 for row in range(3)] == lengths
        assert_only_these_changed(run, before, rows)
    assert run.run is decode
    assert decode._cache_size() == 1


def test_a_row_at_capacity_is_refused_on_the_host_with_the_numbers():
    """Its two pages are full, so its next token has no place; nothing runs, and the other row goes on."""
    run = Runner(StepSpec(16, 4, (2,)))
    run(Row(0, [1, 2, 3, 4, 5], 0, GREEDY), Row(1, [8, 9, 10, 11, 12, 13, 14, 15], 0, GREEDY))
    run.change_program(StepSpec(2, 2, (2,), decode=True))
    rows, before = [Row(0, [20], 5, GREEDY), Row(1, [21], 8, GREEDY)], run.bits()
    run.allocator.reserve(0, 6)
    with pytest.raises(
        ValueError, match=r"sequence 1 has 2 pages of 4 tokens .* not hold 9 tokens"
    ):
        run.packer.pack(run.shape, rows, run.allocator)
    run.allocator.reserve(1, 9)
    with pytest.raises(ValueError, match=r"sequence 1 holds 3 pages .* table has 2"):
        run.packer.pack(run.shape, rows, run.allocator)
    run(rows[0])
    assert_only_these_changed(run, before, rows[:1])


def test_padding_rows_of_a_short_batch_touch_nothing():
    """After 8 rows, 3 rows in the same program change 3 places and no others."""
    run = Runner(StepSpec(8, 8, (4,), decode=True))
    run(*(Row(sequence, [sequence], 0, GREEDY) for sequence in range(8)))
    before = run.bits()
    rows = [Row(sequence, [0], 1, GREEDY, carry=True) for sequence in (1, 4, 6)]
    run(*rows)
    assert_only_these_changed(run, before, rows)


def test_rows_answer_the_same_in_any_company_and_place():
    """The bits are equal, since the program is the same."""
    shape = StepSpec(16, 4, (4,))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    together = Runner(shape)(*(Row(n, p, 0, GREEDY) for n, p in enumerate(prompts)))
    backwards = Runner(shape)(*(Row(n, p, 0, GREEDY) for n, p in enumerate(prompts[::-1])))
    np.testing.assert_array_equal(together, backwards[::-1])
    alone = [Runner(shape)(Row(0, prompt, 0, GREEDY))[0] for prompt in prompts]
    np.testing.assert_array_equal(together, alone)


def test_a_carried_token_is_the_one_sampled_last():
    """The next step may be sent before the host has read this one's token."""
    shape = StepSpec(8, 2, (4,))
    told, carried = Runner(shape), Runner(shape)
    first = told(Row(0, [3, 1, 4], 0, GREEDY), Row(1, [1, 5], 0, GREEDY))
    carried(Row(0, [3, 1, 4], 0, GREEDY), Row(1, [1, 5], 0, GREEDY))
    by_host = told(Row(0, [first[0]], 3, GREEDY), Row(1, [first[1]], 2, GREEDY))
    by_device = carried(Row(0, [0], 3, GREEDY, carry=True), Row(1, [0], 2, GREEDY, carry=True))
    np.testing.assert_array_equal(by_host, by_device)


def test_a_prompt_in_chunks_mixed_with_decode_equals_the_whole():
    """A chunk with a cached prefix and a decode row share a step and agree with separate runs."""
    whole = Runner(StepSpec(16, 4, (4,)))
    wanted = whole(Row(0, list(range(10)), 0, GREEDY))
    run = Runner(StepSpec(16, 4, (4,)))
    first = run(Row(1, [7, 8], 0, GREEDY), Row(0, list(range(6)), 0, GREEDY, emits=False))
    mixed = run(Row(1, [0], 2, GREEDY, carry=True), Row(0, list(range(6, 10)), 6, GREEDY))
    assert mixed[1] == wanted[0]
    again = Runner(StepSpec(16, 4, (4,)))
    assert again(Row(1, [7, 8, first[0]], 0, GREEDY))[0] == mixed[0]


def test_layers_keep_leaves_of_their_own():
    """Each layer and role has one leaf: an update of a slice of a stacked pool could copy the pool."""
    cache = init_cache(LAYOUT, COUNTS)
    assert cache.keys == (
        (0, "key"),
        (0, "value"),
        (1, "key"),
        (1, "value"),
        (2, "last_token"),
    )
