"""The packer: host values are the named arrays of the trace, and padding has no effect."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, mamba2, sampling, window
from jaxkv.config.sampling import SamplingParams
from jaxkv.runner import shared_rows
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.packer import Packer
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN, STOP_WIDTH, features_of, split_seed
from jaxkv.sampling.token_mask import mask_of, num_words
from tests.cache.layouts import slots_of
from tests.example_counts import examples

VOCAB = 100
LAYOUT = group_layers(
    (
        LayerSpec(0, gqa(2, 8, dtype="float32", page_size=4)),
        LayerSpec(1, window(2, 8, window=6, dtype="float32", page_size=2)),
        LayerSpec(2, mamba2(heads=2, head_dim=4, d_state=4, d_conv=4, groups=1, dtype="float32")),
        LayerSpec(3, sampling(VOCAB, penalties=True, bias_entries=4)),
    )
)
COUNTS = {"gqa": 12, "window": 24, "mamba2": 5, "sampling": 5}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def packer():
    return Packer(PackedLayout(LAYOUT, COUNTS, VOCAB), VOCAB)


def opened(allocator, sequence, num_tokens):
    allocator.open(sequence)
    allocator.reserve(sequence, num_tokens)


def round_trip(packer, rows, allocator):
    packed = [jnp.asarray(array) for array in packer.pack(shape_for(rows), rows, allocator)]
    return packer.packed_layout.unpack(shape_for(rows), *packed)


def shape_for(rows, tokens=16, count=4, **options):
    return StepSpec(tokens, count, (4, 8), features_of(rows), **options)


def test_every_field_comes_back_under_its_own_name(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 7, 5)
    opened(allocator, 8, 3)
    rows = [Row(7, [1, 2, 3, 4, 5], 0, GREEDY), Row(8, [9, 8, 7], 0, GREEDY)]
    batch = round_trip(packer, rows, allocator)
    np.testing.assert_array_equal(batch.tokens[:8], [1, 2, 3, 4, 5, 9, 8, 7])
    np.testing.assert_array_equal(batch.positions[:8], [0, 1, 2, 3, 4, 0, 1, 2])
    np.testing.assert_array_equal(batch.cu_q_lens, [0, 5, 8, 8, 8])
    np.testing.assert_array_equal(batch.seq_lens, [5, 3, 0, 0])
    np.testing.assert_array_equal(batch.paged[0].page_table[0, :2], allocator.pages(7, "gqa"))
    np.testing.assert_array_equal(
        batch.paged[1].write_slots[5:8], slots_of(allocator, LAYOUT.group("window"), 8, 0, 3)
    )
    assert int(batch.states[0].write_states[1]) == allocator.states(8, "mamba2")[1]
    assert int(batch.sampling.state_ids[0]) == allocator.states(7, "sampling")[1]


def test_padding_lies_past_the_end_and_no_two_rows_share_it(packer):
    """The slots of padding are distinct, past the end, and never negative."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 3)
    rows = [Row(1, [1, 2, 3], 0, GREEDY)]
    batch = round_trip(packer, rows, allocator)
    np.testing.assert_array_equal(batch.paged[0].write_slots[3:], 12 * 4 + np.arange(3, 16))
    np.testing.assert_array_equal(batch.paged[1].write_slots[3:], 24 * 2 + np.arange(3, 16))
    np.testing.assert_array_equal(batch.states[0].write_states[1:], 5 + np.arange(1, 4))
    np.testing.assert_array_equal(batch.sampling.state_ids[1:], 5 + np.arange(1, 4))
    assert int(batch.states[0].read_states[1]) == 0
    assert all(int(leaf.min()) >= 0 for leaf in jax.tree.leaves(batch.paged))


def test_a_long_batch_leaves_nothing_behind_for_a_short_one(packer):
    """The short batch packs to the same bytes before and after a long one."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    for sequence in range(4):
        opened(allocator, sequence, 4)
    long = [Row(sequence, [5, 6, 7, 8], 0, GREEDY) for sequence in range(4)]
    short = [Row(2, [9], 3, GREEDY)]
    shape = shape_for(long)
    before = packer.pack(shape, short, allocator)
    packer.pack(shape, long, allocator)
    after = packer.pack(shape, short, allocator)
    for first, second in zip(before, after, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_row_whose_prompt_goes_on_leaves_no_trace_in_the_sampling_group(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 8)
    rows = [Row(1, [1, 2, 3, 4], 0, GREEDY, emits=False)]
    batch = round_trip(packer, rows, allocator)
    assert int(batch.sampling.state_ids[0]) >= COUNTS["sampling"]


def test_a_greedy_step_sends_one_array(packer):
    """The metadata of a step is one int32 array; a float array is added only if a row draws or has penalties."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 1)
    ints, floats = packer.pack(
        shape_for([Row(1, [1], 0, GREEDY)]), [Row(1, [1], 0, GREEDY)], allocator
    )
    assert ints.dtype == np.int32
    assert ints.ndim == 1
    assert floats.dtype == np.float32
    assert floats.size == 0


@pytest.mark.parametrize(
    ("row", "shape", "message"),
    [
        (Row(1, [VOCAB], 0, GREEDY), (16, 4), "token ids"),
        (Row(1, [-1], 0, GREEDY), (16, 4), "token ids"),
        (Row(1, [2**40], 0, GREEDY), (16, 4), "token ids"),
        (Row(1, [], 0, GREEDY), (16, 4), "token ids"),
        (Row(1, [1, 2, 3], 0, GREEDY), (2, 4), "larger bucket"),
        (Row(1, [1], 8, GREEDY), (16, 4), "reserve pages first"),
        (Row(1, [1], -1, GREEDY), (16, 4), "starts at -1"),
        (Row(2, [1], 0, GREEDY), (16, 4), "not open"),
    ],
)
@pytest.mark.parametrize("decode", [False, True])
def test_what_does_not_fit_is_refused_on_the_host(packer, row, shape, message, decode):
    """Nothing is cut off, and no id or position reaches the device unchecked."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 8)
    with pytest.raises(ValueError, match=message):
        packer.pack(StepSpec(*shape, (4, 8), decode=decode), [row], allocator)


def test_a_decode_step_refuses_two_tokens_of_a_row_and_more_rows_than_it_has(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 8)
    shape = StepSpec(4, 4, (4, 8), decode=True)
    with pytest.raises(ValueError, match="exactly one new token"):
        packer.pack(shape, [Row(1, [1, 2], 0, GREEDY)], allocator)
    with pytest.raises(ValueError, match="5 rows and 5 tokens"):
        packer.pack(shape, [Row(1, [1], 0, GREEDY)] * 5, allocator)
    with pytest.raises(ValueError, match="exactly one new token"):
        packer.pack(shape, [], allocator)


def test_several_steps_need_pages_for_all_tokens_and_say_who_takes_part_in_how_many(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    for sequence in (1, 2):
        opened(allocator, sequence, 8)
    shape = StepSpec(4, 4, (4, 8), decode=True, steps=3)
    told = StepRows.of([Row(1, [5], 5, GREEDY), Row(2, [6], 7, GREEDY)])
    ints, _ = packer.pack(shape, told._replace(left=[3, 1]), allocator)
    np.testing.assert_array_equal(packer.packed_layout.left(shape, jnp.asarray(ints)), [3, 1, 0, 0])
    batch = packer.packed_layout.unpack(shape, jnp.asarray(ints))
    np.testing.assert_array_equal(batch.seq_lens, [6, 8, 0, 0])
    with pytest.raises(ValueError, match="do not hold 9 tokens"):
        packer.pack(shape, told._replace(left=[3, 2]), allocator)
    for left in ([], [3], [0, 1], [4, 1]):
        with pytest.raises(ValueError, match="in 1 to 3 of them"):
            packer.pack(shape, told._replace(left=left), allocator)


def test_a_row_has_no_more_drafts_than_its_program_verifies(packer):
    """Stop ids are blocked at each position before `min_tokens`."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    held = replace(GREEDY, min_tokens=4)
    told = [Row(1, [5, 6, 7], 2, held, generated=2), Row(2, [8], 0, held, generated=4)]
    for row in told:
        allocator.open(row.sequence)
        allocator.reserve(row.sequence, row.start + len(row.tokens))
    shape = StepSpec(16, 4, (4, 8), Features(min_tokens=True), drafts=3)
    rows = StepRows.of(told)._replace(drafts=[2, 0])
    ints, _ = packer.pack(shape, rows, allocator)
    fields = packer.packed_layout.arrangements(shape)[0].split(ints)
    assert fields["drafts"].tolist() == [2, 0, 0, 0]
    assert fields["block_stop"].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    ints, _ = packer.pack(shape, rows._replace(drafts=()), allocator)
    assert not packer.packed_layout.arrangements(shape)[0].split(ints)["drafts"].any()
    for drafts, one in (([3, 0], shape), ([2], shape), ([2, 0], replace(shape, drafts=0))):
        with pytest.raises(ValueError, match="drafts needs rows with up to that many"):
            packer.pack(one, rows._replace(drafts=drafts), allocator)


def test_given_tokens_come_back_and_the_steps_of_other_rows_sample(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    for sequence in (1, 2):
        opened(allocator, sequence, 8)
    shape = StepSpec(4, 4, (4, 8), Features(logprobs=0), decode=True, steps=3)
    rows = StepRows.of([Row(1, [5], 2, GREEDY), Row(2, [6], 2, GREEDY)])._replace(left=[3, 3])
    for told, wanted in (([(), (8, 9)], [8, 9, NO_TOKEN]), ((), [NO_TOKEN] * 3)):
        ints, _ = packer.pack(shape, rows._replace(given=told), allocator)
        batch = packer.packed_layout.unpack(shape, jnp.asarray(ints))
        found = np.asarray(batch.sampling["given"])
        assert found[1].tolist() == wanted
        assert (found[[0, 2, 3]] == NO_TOKEN).all()


WORDS = num_words(VOCAB)
EVERYTHING = np.full(WORDS, -1, np.int32)


def packed_masks(packer, masks, *, room, change=lambda fields: None):
    """Returns the mask of each of 4 rows as the program sees it, after `change` of what was packed."""
    allocator = PageAllocator(LAYOUT, COUNTS)
    for sequence in range(len(masks)):
        opened(allocator, sequence, 1)
    shape = StepSpec(4, 4, (4, 8), Features(grammar=True), decode=True, masks=room)
    rows = StepRows.of([Row(sequence, [5], 0, GREEDY) for sequence in range(len(masks))])
    ints, _ = packer.pack(shape, rows._replace(masks=masks), allocator)
    change(packer.packed_layout.arrangements(shape)[0].split(ints))
    batch = packer.packed_layout.unpack(shape, jnp.asarray(ints))
    return np.asarray(batch.sampling["token_mask"])


def masks_of(*tokens):
    return [None if one is None else mask_of([one], WORDS) for one in tokens]


def test_each_row_has_its_own_mask_and_rows_without_one_allow_every_token(packer):
    masks = masks_of(None, 70, 3)
    first, second, third, padding = packed_masks(packer, masks, room=3)
    np.testing.assert_array_equal(second.view(np.uint32), masks[1])
    np.testing.assert_array_equal(third.view(np.uint32), masks[2])
    np.testing.assert_array_equal(first, EVERYTHING)
    np.testing.assert_array_equal(padding, EVERYTHING)


def test_unused_masks_reach_no_row(packer):
    def fill_unused(fields):
        fields["token_masks"][1:] = 1 << 7

    found = packed_masks(packer, masks_of(None, 70), room=4, change=fill_unused)
    assert found[1].view(np.uint32).tolist() == [0, 0, 1 << 6, 0]
    assert (found[[0, 2, 3]] == -1).all()


def test_the_masks_of_a_step_do_not_depend_on_the_step_before(packer):
    packed_masks(packer, masks_of(1, 2, 3, 4), room=4)
    found = packed_masks(packer, masks_of(None, 9, None), room=4)
    assert found[1].view(np.uint32).tolist() == [1 << 9, 0, 0, 0]
    assert (found[[0, 2, 3]] == -1).all()


def test_rows_with_one_array_in_common_take_one_place(packer):
    one, other = masks_of(70, 3)
    found = packed_masks(packer, [one, other, one, None], room=2).view(np.uint32)
    np.testing.assert_array_equal(found[:3], [one, other, one])
    with pytest.raises(ValueError, match="3 masks does not fit a program of 2"):
        packed_masks(packer, [one, other, one.copy()], room=2)


@pytest.mark.parametrize("decode", [False, True])
def test_more_stop_ids_than_fit_are_refused(packer, decode):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 8)
    row = Row(1, [1], 0, GREEDY, stop_ids=tuple(range(STOP_WIDTH + 1)))
    shape = StepSpec(16, 4, (4, 8), Features(min_tokens=True), decode=decode)
    with pytest.raises(ValueError, match="stop ids"):
        packer.pack(shape, [row], allocator)


@pytest.mark.parametrize("decode", [False, True])
def test_a_table_wider_than_the_program_is_refused(packer, decode):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 9)
    with pytest.raises(ValueError, match="wider bucket"):
        packer.pack(StepSpec(16, 4, (2, 8), decode=decode), [Row(1, [1], 8, GREEDY)], allocator)


def test_a_program_is_only_as_able_as_its_rows_need():
    rows = [
        Row(0, [1], 0, GREEDY),
        Row(1, [1], 0, SamplingParams(temperature=0.5, top_k=3)),
        Row(2, [1], 0, SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=2)),
    ]
    assert features_of(rows[:1]) == Features()
    assert features_of(rows[:2]) == Features(draws=True, filters=True)
    assert features_of(rows) == Features(draws=True, filters=True, penalties=True, logprobs=5)


def test_packing_changes_nothing_of_the_allocator(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 7)
    before = {name: allocator.pages(1, name) for name in ("gqa", "window")}
    for decode in (True, False):
        shape = StepSpec(4, 4, (4, 8), decode=decode)
        ints, _ = packer.pack(shape, [Row(1, [1], 6, GREEDY)], allocator)
        ints[...] = 99
    assert {name: allocator.pages(1, name) for name in before} == before
    allocator.check()


def test_pages_are_asked_for_by_an_open_sequence_and_a_paged_group():
    allocator = PageAllocator(LAYOUT, COUNTS)
    opened(allocator, 1, 7)
    for sequence, name, message in (
        (2, "gqa", "not open"),
        (1, "mamba2", "holds states"),
        (1, "mla", "no group 'mla'"),
    ):
        with pytest.raises(ValueError, match=message):
            allocator.pages(sequence, name)


WISHES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.integers(1, 50),
    top_p=st.floats(0.1, 1.0),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_tokens=st.integers(0, 4),
)


CHOICES = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=1),
        "start": st.integers(0, 11),
        "params": WISHES,
        "seed": st.integers(-1, 2**65),
        "emits": st.booleans(),
        "carry": st.booleans(),
        "generated": st.integers(0, 5),
        "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    }
)


@given(
    order=st.permutations(range(4)),
    drawn=st.lists(CHOICES, min_size=1, max_size=4),
)
@settings(max_examples=examples(150), deadline=None)
def test_rows_of_one_token_pack_to_the_same_bytes_by_either_path(order, drawn):
    """The path of decode steps is another only for speed; a third way to the slots and seeds agrees with both."""
    rows = [Row(sequence=order[index], **fields) for index, fields in enumerate(drawn)]
    packer, allocator = (
        Packer(PackedLayout(LAYOUT, COUNTS, VOCAB), VOCAB),
        PageAllocator(LAYOUT, COUNTS),
    )
    for row in rows:
        allocator.open(row.sequence)
    for tokens_of in (lambda row: row.start, lambda row: row.start + 1):
        for row in sorted(rows, key=lambda row: row.sequence):
            allocator.reserve(row.sequence, tokens_of(row))
            if tokens_of(row) == row.start:
                allocator.commit(row.sequence, row.start)
    shape = StepSpec(5, 5, (4, 8), features_of(rows), decode=True)
    fast = packer.pack(shape, rows, allocator)
    general = packer.pack(replace(shape, decode=False), rows, allocator)
    for one, other in zip(fast, general, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    fields = packer.packed_layout.arrangements(shape)[0].split(fast[0])
    for index, row in enumerate(rows):
        (slot,) = slots_of(
            allocator, LAYOUT.group("window"), row.sequence, row.start, row.start + 1
        )
        assert fields["window.write_slots"][index] == slot
        if "seed_low" in fields:
            halves = (fields["seed_low"][index], fields["seed_high"][index])
            assert halves == split_seed(row.seed)


VERBS = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "fork", "end", "pack", "pack"]), st.integers(0, 3)),
    min_size=5,
    max_size=30,
)


@given(VERBS)
@settings(max_examples=examples(150), deadline=None)
def test_what_a_packer_remembers_of_earlier_steps_never_shows(verbs):
    """Pages grow, are copied or get another holder, and entries get another owner; a new packer packs the same."""
    old, allocator = (
        Packer(PackedLayout(LAYOUT, COUNTS, VOCAB), VOCAB),
        PageAllocator(LAYOUT, COUNTS),
    )
    numbers, tokens, wishes = list(range(4)), {}, {}
    for verb, at in verbs:
        number = numbers[at]
        if verb == "end" and number in tokens:
            allocator.release(number)
            del tokens[number]
            numbers[at] = max(numbers) + 1
        elif verb == "fork" and number in tokens and numbers[at - 1] not in tokens:
            child = numbers[at - 1]
            allocator.fork(number, child)
            tokens[child], wishes[child] = tokens[number], wishes[number]
        elif verb == "grow" and tokens.get(number, 0) < 13:
            if number not in tokens:
                allocator.open(number)
                wishes[number] = SamplingParams(temperature=0.5, top_k=number % 50 + 1, seed=number)
                tokens[number] = 0
            try:
                allocator.reserve(number, tokens[number] + 3)
            except RuntimeError:
                continue
            allocator.commit(number, tokens[number] + 3)
            tokens[number] += 3
        rows = []
        for one in tokens:
            try:
                allocator.reserve(one, tokens[one] + 1)
            except RuntimeError:
                continue
            rows.append(Row(one, [one % VOCAB], tokens[one], wishes[one], seed=one))
        if rows and verb == "pack":
            shape = StepSpec(4, 4, (12, 24), features_of(rows), decode=at % 2 == 0)
            fresh = Packer(PackedLayout(LAYOUT, COUNTS, VOCAB), VOCAB).pack(shape, rows, allocator)
            for one, other in zip(old.pack(shape, rows, allocator), fresh, strict=True):
                assert one.tobytes() == other.tobytes()
        for row in rows:
            allocator.commit(row.sequence, tokens[row.sequence] + 1)
            tokens[row.sequence] += 1


@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=examples(50))
def test_a_seed_survives_its_two_halves(seed):
    low, high = np.asarray(split_seed(seed), np.int32).view(np.uint32).tolist()
    assert (high << 32) | low == seed


def test_every_field_begins_where_a_kernel_may_read_it(packer):
    """A Mosaic kernel refused a page table that XLA had passed as an unaligned piece of the packed array."""
    shape = StepSpec(3, 3, (5, 7), Features(draws=True, filters=True))
    for packed, places in zip(
        packer.packed_layout.blank(shape), packer.packed_layout.arrangements(shape), strict=True
    ):
        for piece in places.split(packed).values():
            offset = piece.__array_interface__["data"][0] - packed.__array_interface__["data"][0]
            assert offset % 256 == 0


def test_a_sampler_reads_what_a_whole_step_would_sample_by(packer):
    allocator = PageAllocator(LAYOUT, COUNTS)
    for sequence in (1, 2, 3):
        opened(allocator, sequence, 8)
    one = SamplingParams(temperature=0.5, top_k=3, min_tokens=2, presence_penalty=1.0, logprobs=1)
    rows = StepRows.of(
        [
            Row(1, [5, 6], 3, one, seed=2**40 + 3, stop_ids=(4, 9)),
            Row(2, [6], 2, GREEDY, emits=False),
            Row(3, [7], 4, GREEDY, carry=True, generated=5),
        ]
    )._replace(given=[(8,), (), ()], masks=masks_of(70, None, 3))
    features = replace(features_of([one_row(one), one_row(GREEDY)]), grammar=True)
    whole = StepSpec(16, 4, (4, 8), features, masks=4)
    packed = packer.pack(whole, rows, allocator)
    batch = packer.packed_layout.unpack(whole, *map(jnp.asarray, packed))
    sampler = SampleSpec(4, features, 2)
    ints, floats = packer.pack_sampling(sampler, rows, allocator)
    masks = packer.pack_masks(sampler, rows.masks)
    found, positions = packer.packed_layout.unpack_sampling(
        sampler, *map(jnp.asarray, (ints, masks, floats))
    )
    np.testing.assert_array_equal(positions, batch.seq_lens)
    np.testing.assert_array_equal(found.state_ids, batch.sampling.state_ids)
    assert found.features == features
    assert found.values.keys() == batch.sampling.values.keys() > {"given", "block_stop", "seed_low"}
    for name, values in batch.sampling.values.items():
        np.testing.assert_array_equal(found[name], values, name)


def one_row(params):
    return Row(0, [1], 0, params)


def test_masks_that_a_sampler_has_no_room_for_are_refused(packer):
    sampler = SampleSpec(4, Features(grammar=True), 2)
    with pytest.raises(ValueError, match="a step with 3 masks does not fit a program of 2"):
        packer.pack_masks(sampler, masks_of(1, 2, 3))


SHARED = group_layers(
    (
        LayerSpec(0, window(2, 8, window=6, dtype="bfloat16", page_size=2)),
        LayerSpec(1, gqa(2, 8, dtype="bfloat16", page_size=32)),
        LayerSpec(2, sampling(VOCAB)),
    )
)
SHARED_COUNTS = {"gqa": 60, "window": 900, "sampling": 20}


@pytest.fixture
def any_saving(monkeypatch):
    """Sharing is worth a launch also for few small heads."""
    monkeypatch.setattr(shared_rows, "_LEAST_BYTES_SAVED", 1)


def rows_that_share(allocator, count):
    """Sequences of 160 tokens that begin with the pages of the first one, and a row of each with a new token."""
    allocator.open(0)
    allocator.reserve(0, 160)
    allocator.commit(0, 160)
    for number in range(1, count):
        allocator.fork(0, number)
        allocator.reserve(number, 161)
    allocator.reserve(0, 161)
    return [Row(number, [1], 160, GREEDY) for number in range(count)]


@pytest.mark.usefixtures("any_saving")
def test_rows_that_begin_with_the_same_pages_are_packed_as_tiles():
    packer = Packer(PackedLayout(SHARED, SHARED_COUNTS, VOCAB), VOCAB)
    allocator = PageAllocator(SHARED, SHARED_COUNTS)
    rows = rows_that_share(allocator, 10)
    spec = StepSpec(12, 12, (81, 6), features_of(rows), decode=True, shares=True)
    ints, floats = packer.pack(spec, rows, allocator)
    batch = packer.packed_layout.unpack(spec, jnp.asarray(ints), jnp.asarray(floats))
    assert batch.paged[0].shared is None, "a group with a window is read row by row"
    shared = batch.paged[1].shared
    assert shared.lens.tolist() == [128, 128, 0], (
        "whole tiles of keys, a tile of 8 rows and one of 2"
    )
    assert sorted(shared.places.tolist()) == [*range(10), 24, 24]
    for row in range(10):
        assert shared.rows[shared.places[row]] == row
    assert shared.rows[10:].tolist() == [12] * 14, "past the last row"
    table = batch.paged[1].page_table
    assert len({tuple(table[row, :4].tolist()) for row in range(10)}) == 1
    plain = replace(spec, shares=False)
    assert packer.pack(plain, rows, allocator)[0].size < ints.size


@pytest.mark.usefixtures("any_saving")
def test_tiles_are_looked_for_again_when_rows_change():
    packer = Packer(PackedLayout(SHARED, SHARED_COUNTS, VOCAB), VOCAB)
    allocator = PageAllocator(SHARED, SHARED_COUNTS)
    rows = rows_that_share(allocator, 6)

    def found(rows):
        shared = packer.shared_rows(
            [row.sequence for row in rows], [row.start for row in rows], allocator
        )
        return None if shared is None else (shared.rows.tolist(), shared.places.tolist())

    assert found(rows) == ([*range(6)], [*range(6)])
    assert found(rows[:3]) is None
    assert found([*rows[3:], *rows[:2]]) == ([*range(5)], [*range(5)])
    allocator.release(5)
    allocator.open(5)
    allocator.reserve(5, 161)
    assert found(rows) == ([*range(5)], [*range(5)]), "its number has pages of its own now"


@pytest.mark.usefixtures("any_saving")
def test_tiles_of_rows_with_other_pages_are_refused(monkeypatch):
    """A seeded defect of the records: the device would read another row's keys without a word."""
    packer = Packer(PackedLayout(SHARED, SHARED_COUNTS, VOCAB), VOCAB)
    allocator = PageAllocator(SHARED, SHARED_COUNTS)
    rows = rows_that_share(allocator, 6)
    right = packer.shared_rows(range(6), [160] * 6, allocator)
    spec = StepSpec(8, 8, (81, 6), features_of(rows), decode=True, shares=True)
    for wrong in (
        right._replace(lens=right.lens + 64),
        right._replace(lens=np.full_like(right.lens, 192)),
    ):
        monkeypatch.setattr(packer, "shared_rows", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ValueError, match="does not begin with the same 192 tokens"):
            packer.pack(spec, rows, allocator)
