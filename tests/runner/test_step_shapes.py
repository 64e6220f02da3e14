"""The shapes of steps: few, all declared, and padded by no more than the documented factor."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, sampling, window
from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.buckets import (
    LOOSE_TOKENS,
    MOST_PADDING,
    bucket,
    coarse_buckets,
    filled,
    token_buckets,
)
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.step_shapes import COARSE, FINE, StepShapes, grain_of, may_share_keys
from jaxkv.sampling.features import Features
from tests.example_counts import examples

SPEC = gqa(1, 8, dtype="float32", page_size=16)
LAYOUT = group_layers(
    (
        LayerSpec(0, SPEC),
        LayerSpec(1, sampling(50, penalties=True, bias_entries=4)),
    )
)


def shapes(layout=LAYOUT, **options):
    limits = {"max_tokens": 4096, "max_rows": 100, "token_budget": 2048, "whole_prompts": False}
    return StepShapes(layout, **limits | options)


def rows(*counts):
    params = SamplingParams(temperature=0.0)
    return [Row(number, (1,) * count, 0, params) for number, count in enumerate(counts)]


@given(st.integers(1, 5000), st.integers(1, 8))
def test_the_maximum_is_a_bucket_and_sizes_ascend(maximum, per_octave):
    sizes = token_buckets(maximum, per_octave=per_octave)
    assert sizes[-1] == maximum
    assert list(sizes) == sorted(set(sizes))


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_four_sizes_per_octave_pad_little(maximum, size):
    """This holds for prompts that cannot be cut."""
    size = min(size, maximum)
    held = bucket(size, token_buckets(maximum, per_octave=4))
    assert held <= max(MOST_PADDING * size, LOOSE_TOKENS)


@given(st.integers(LOOSE_TOKENS, 4000), st.integers(1, 4000), st.integers(0, 300))
@settings(max_examples=examples(300))
def test_any_number_of_tokens_is_served_by_steps_that_pad_little(maximum, tokens, decoding):
    """The rest goes on in the next step, and a step of one prompt always has room for some of it."""
    sizes = token_buckets(maximum, per_octave=2)
    left = tokens
    while left:
        most = min(left, maximum)
        step = filled(1, most, sizes)
        assert step is not None
        assert step <= LOOSE_TOKENS or bucket(step, sizes) <= MOST_PADDING * step
        left -= step
    together = min(decoding + tokens, maximum)
    if decoding < together:
        step = filled(decoding + 1, together, sizes)
        assert step is None or decoding < step <= together


def test_3208_tokens_are_never_padded_to_8192():
    assert filled(1, 3208, (2816, 3072, 8192)) == 3072
    assert filled(1, 136, (128, 144, 2816, 3072, 8192)) == 136
    assert filled(1, 136, (2816, 3072, 8192)) is None


def test_coarse_sizes_end_in_the_maximum():
    assert coarse_buckets(512, 40960, 4) == (640, 2560, 10240, 40960)
    assert coarse_buckets(512, 100, 4) == (100,)


@given(st.integers(1, 1024), st.integers(1, 1024), st.sampled_from([FINE, COARSE]))
@settings(deadline=None)
def test_rows_that_generate_are_padded_little(maximum, rows, grain):
    """No row that generates is left out to fit a smaller program, so there are enough sizes."""
    rows, sizes = min(rows, maximum), shapes(max_rows=maximum, grain=grain).decode_rows
    assert sizes[-1] == maximum
    assert list(sizes) == sorted(set(sizes))
    assert bucket(rows, sizes) <= (2 if rows <= LOOSE_TOKENS else MOST_PADDING) * rows


@given(st.data(), st.sampled_from([FINE, COARSE]), st.sampled_from([100, 256]))
@settings(max_examples=examples(300), deadline=None)
def test_no_step_is_padded_by_more_than_a_quarter_above_64_tokens(data, grain, max_rows):
    """The steps have rows that generate, and prompts cut as the scheduler cuts them."""
    served = shapes(max_rows=max_rows, grain=grain)
    decoding = data.draw(st.integers(0, max_rows))
    prompts = data.draw(st.lists(st.integers(2, 1500), max_size=min(8, max_rows - decoding)))
    counts = [1] * decoding
    if prompts:
        most = min(2048, decoding + sum(prompts))
        fits = served.fill(decoding + 1, most)
        if fits is None:
            counts, fits = [], served.fill(1, min(2048, sum(prompts)))
        assert fits is not None
        for prompt in prompts:
            counts.append(min(prompt, fits - sum(counts)))
            if sum(counts) == fits:
                break
    if not counts:
        return
    shape = served.declare(rows(*counts), total_tokens=4096)
    assert sum(counts) <= shape.tokens <= max(MOST_PADDING * sum(counts), LOOSE_TOKENS)


@given(st.integers(2, COARSE.whole_up_to))
def test_short_prompts_that_are_alone_are_not_cut_for_kernels(tokens):
    """The rest of a prompt of 100 tokens would take a second step as long as the first."""
    assert shapes(grain=COARSE).fill(1, tokens) == tokens


def test_kernels_that_skip_padding_get_fewer_programs():
    assert grain_of(LAYOUT, "xla") == FINE
    assert grain_of(LAYOUT, "mosaic_gpu") == grain_of(LAYOUT, "cudnn") == COARSE
    # XLA attends where heads are wider than the kernels take; the widest that they do take have 256 components.
    for width, grain in ((256, COARSE), (512, FINE)):
        wide = LayerSpec(1, gqa(1, width, dtype="bfloat16", page_size=16))
        assert grain_of(group_layers((LayerSpec(0, SPEC), wide)), "mosaic_gpu") == grain
    limits = {"max_tokens": 2048, "max_rows": 256}
    fine, coarse = (len(shapes(grain=g, **limits).declare_all(Features())) for g in (FINE, COARSE))
    assert coarse <= 30 < fine


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=100),
    st.integers(300, 4096),
    st.booleans(),
    st.booleans(),
    st.sampled_from([FINE, COARSE]),
)
@settings(max_examples=examples(200), deadline=None)
def test_every_step_has_a_declared_program_that_holds_it(counts, total, decode, pinned, grain):
    """The declared programs are those that run, also with every shape pinned."""
    served = shapes(pinned=pinned, grain=grain)
    batch = rows(*([1] * len(counts) if decode else counts[:6]))
    declared = served.declare(batch, total_tokens=total)
    assert declared in served.declare_all(Features())
    shape = declared
    assert shape.rows >= len(batch)
    assert shape.tokens >= sum(len(row.tokens) for row in batch)
    assert shape.table_widths[0] * 16 >= total
    assert shape.decode == (not pinned and all(len(row.tokens) == 1 for row in batch))


@given(st.integers(1, 31), st.integers(1, 31), st.integers(1, 32), st.sampled_from([FINE, COARSE]))
@settings(max_examples=examples(100), deadline=None)
def test_steps_that_verify_drafts_have_few_tokens_and_declared_programs(most, drafts, rows, grain):
    served = shapes(drafts=most, grain=grain)
    drafts = min(drafts, served.most_drafts(rows))
    shape = served.verify(rows, drafts, Features(), total_tokens=700)
    assert rows <= shape.rows
    assert drafts <= shape.drafts <= most
    assert shape.rows * (shape.drafts + 1) <= shape.tokens <= LOOSE_TOKENS
    declared = served.declare_all(Features())
    assert shape in declared
    assert shape in served.declare_all(Features(), rows=rows)
    assert shape not in shapes(grain=grain).declare_all(Features())
    # No step of more rows, and few programs.
    assert served.most_drafts(33) == 0
    assert len([one for one in declared if one.drafts]) <= 21 * len(served.lengths)


def test_fewer_drafts_run_in_smaller_programs_and_of_more_rows():
    served = shapes(drafts=4, grain=COARSE)

    def sizes(rows, drafts):
        shape = served.verify(rows, drafts, Features(), total_tokens=64)
        return shape.tokens, shape.rows, shape.drafts

    assert [served.most_drafts(rows) for rows in (1, 12, 13, 21, 22, 32)] == [4, 4, 2, 2, 1, 1]
    # One row has eight tokens at any rate, and a program for all of them.
    assert sizes(1, 1) == sizes(1, 4) == (8, 1, 4)
    assert [sizes(4, drafts) for drafts in (1, 2, 4)] == [(8, 4, 1), (16, 4, 2), (32, 4, 4)]
    assert [sizes(12, drafts) for drafts in (1, 2, 4)] == [(32, 16, 1), (64, 16, 2), (64, 12, 4)]
    assert sizes(32, 1) == (64, 32, 1)


def test_a_program_of_more_drafts_stands_in_for_one_of_fewer():
    served = shapes(drafts=4, grain=COARSE)
    few, many = (served.verify(4, drafts, Features(), total_tokens=64) for drafts in (1, 4))
    decode = served.choose(4, 4, Features(), total_tokens=64)
    assert many.serves(few)
    assert many.costs_like(few)
    assert not few.serves(many)
    assert not any(one.serves(decode) or decode.serves(one) for one in (few, many))


def test_the_number_of_programs_is_bounded():
    assert len(shapes().declare_all(Features())) <= 80
    assert [one.kind for one in shapes(pinned=True).declare_all(Features())] == [
        "prefill",
        "sample",
    ]
    many = shapes(max_tokens=32768, max_rows=256)
    assert len(many.declare_all(Features())) <= 200


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="largest bucket"):
        shapes().declare(rows(2049), total_tokens=4096)


@given(st.integers(1, 256), st.integers(0, 256), st.integers(1, 6), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_every_number_of_masks_has_declared_programs_that_hold_them(rows, masks, each, pinned):
    """The steps have drafts, one token per row, or prompts."""
    features, masks = Features(grammar=True), min(rows, masks)
    served = shapes(pinned=pinned, max_rows=256, drafts=3)
    first = served.choose(rows, each * rows, features, total_tokens=64)
    assert first.forward_only
    chosen = [first, served.sampler(first, features, masks)]
    if not pinned and (drafts := served.most_drafts(rows)):
        chosen.append(served.verify(rows, drafts, features, total_tokens=64, masks=masks))
    for most in (None, rows):
        assert set(chosen) <= set(served.declare_all(features, rows=most))
    assert first.rows == chosen[1].rows
    assert all(masks <= one.masks <= one.rows for one in chosen[1:])


def test_the_first_programs_of_steps_with_grammars_have_no_sampling_features_and_no_masks():
    served = shapes(max_rows=256)
    free, bound = (served.declare_all(Features(grammar=one)) for one in (False, True))
    first = [one for one in bound if isinstance(one, StepSpec)]
    assert [replace(one, forward_only=False) for one in first] == free
    drawn = served.declare_all(Features(grammar=True, draws=True, logprobs=5))
    assert [one for one in drawn if isinstance(one, StepSpec)] == first
    samplers = bound[len(first) :]
    assert {one.rows for one in samplers} == {one.rows for one in first}
    assert len(samplers) == len(set(samplers)) <= 2 * len({one.rows for one in first})


def test_few_masks_take_little_room():
    served, features = shapes(max_rows=256), Features(grammar=True)
    step = served.choose(256, 256, features, total_tokens=64)
    assert [served.sampler(step, features, count).masks for count in (16, 17)] == [16, 256]
    few = served.declare_all(features, rows=16)
    assert {one.masks for one in few if isinstance(one, SampleSpec)} <= {*range(1, 17)}


def test_adapters_are_for_the_first_of_two_programs_alone():
    features = Features(grammar=True, lora=True)
    step = shapes(lora=True).choose(4, 4, features, total_tokens=64)
    assert step.features == Features(lora=True)
    assert shapes(lora=True).sampler(step, features, 1).features == Features(grammar=True)


GREEDY = Features()


def test_decode_steps_may_read_shared_keys_once_in_few_more_programs():
    sizes = {"layout": WIDE, "max_rows": 256, "grain": COARSE}
    plain, sharing = shapes(**sizes), shapes(**sizes, shares=True)
    assert [plain.may_share(rows) for rows in (20, 256)] == [False, False]
    assert [sharing.may_share(rows) for rows in (4, 20, 256)] == [False, True, True]
    more = set(sharing.declare_all(GREEDY)) - set(plain.declare_all(GREEDY))
    assert {spec.rows for spec in more if spec.shares} == {64, 128, 256}
    assert sharing.declare_all(GREEDY, rows=3) == plain.declare_all(GREEDY, rows=3)
    few = sharing.declare_all(GREEDY, rows=20)
    assert {spec.rows for spec in few if spec.shares} == {64}
    short = sharing.declare_all(GREEDY, total_tokens=1024)
    assert {spec.rows for spec in short if spec.shares} == {128, 256}, "64 rows save 7/8 of 256 MiB"


@given(st.integers(19, 200), st.integers(1, 4096), st.booleans())
def test_every_step_that_shares_keys_has_a_declared_program(rows, total, grammar):
    made = shapes(WIDE, max_rows=200, grain=COARSE, shares=True)
    features = Features(grammar=grammar)
    spec = made.choose(rows, rows, features, total_tokens=total, shares=True)
    assert spec.shares
    assert spec.rows >= rows
    assert spec in made.declare_all(features)


@pytest.mark.parametrize("options", [{"pinned": True}, {"max_rows": 3}], ids=str)
def test_steps_that_must_not_share_have_no_such_program(options):
    made = shapes(WIDE, grain=COARSE, shares=True, **options)
    assert not made.may_share(100 if "pinned" in options else 3)
    assert not any(getattr(spec, "shares", False) for spec in made.declare_all(GREEDY))


def test_a_program_without_shared_reads_runs_any_step_but_not_the_other_way_round():
    made = shapes(WIDE, max_rows=256, grain=COARSE, shares=True)
    plain, sharing = (
        made.choose(256, 256, GREEDY, total_tokens=10, shares=shares) for shares in (False, True)
    )
    assert plain.serves(sharing)
    assert not sharing.serves(plain)
    assert not plain.costs_like(sharing)
    assert sharing.order_of_cost < plain.order_of_cost
    assert (plain.name, sharing.name) == ("decode_256x256x256", "sharing_decode_256x256x256")


WIDE, LONG = (
    group_layers((LayerSpec(0, gqa(8, 128, dtype=dtype, page_size=16)),))
    for dtype in ("bfloat16", "float32")
)


@pytest.mark.parametrize(
    ("layout", "implementation", "invariant", "shares"),
    [
        (WIDE, "mosaic_gpu", False, True),
        (WIDE, "xla", False, False),
        (WIDE, "mosaic_gpu", True, False),
        (LONG, "mosaic_gpu", False, False),
        (
            group_layers((LayerSpec(0, gqa(1, 8, dtype="int8", page_size=16)),)),
            "mosaic_gpu",
            False,
            False,
        ),
        (
            group_layers((LayerSpec(0, window(1, 8, window=4, dtype="bfloat16", page_size=16)),)),
            "mosaic_gpu",
            False,
            False,
        ),
    ],
    ids=["16 bits", "xla", "batch invariant", "32 bits", "8 bits", "a window"],
)
def test_only_kernels_read_shared_keys_and_only_of_16_bits_without_a_window(
    layout, implementation, invariant, shares
):
    assert may_share_keys(layout, implementation, batch_invariant=invariant) is shares
