"""The program of a step with latent attention, chosen on the host: its sizes, and its form of attention."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import dsa, mla, place, window
from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.buckets import LOOSE_TOKENS, MOST_PADDING
from jaxkv.runner.rows import Row
from jaxkv.runner.step_shapes import COARSE, FINE, StepShapes
from jaxkv.sampling.features import Features

# As DeepSeek-V3 and V3.2 remember, and a model that has layers with a window beside latents.
MLA = mla(512, 64, dtype="bfloat16", page_size=64)
DSA = dsa(512, 64, 128, page_size=64, topk=2048)
BESIDE = window(8, 128, window=128, dtype="bfloat16", page_size=64)
LAYOUTS = {
    "dense": group_layers(place([MLA] * 2)),
    "sparse": group_layers(place([DSA] * 2)),
    "beside-window": group_layers(place([MLA, BESIDE])),
}
GREEDY = SamplingParams(temperature=0.0)


def shapes(kind, **options):
    limits = {"max_tokens": 8192, "max_rows": 16, "token_budget": 8192, "whole_prompts": False}
    return StepShapes(LAYOUTS[kind], **limits | options)


def row(count, start=0, number=0):
    return Row(number, (1,) * count, start, GREEDY)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("start", [0, 640], ids=["new", "behind-a-prefix"])
@given(count=st.integers(2, 8192))
@settings(max_examples=60, deadline=None)
def test_a_prompt_runs_in_the_smallest_program_that_holds_it(kind, start, count):
    """This holds expanded and absorbed. Exact sizes are met exactly, and more than the largest is refused."""
    served = shapes(kind, max_tokens=2**14)
    shape = served.declare([row(count, start)], total_tokens=2**14)
    assert shape.tokens == min(size for size in served.token_buckets if size >= count)
    assert served.declare([row(shape.tokens, start)], total_tokens=2**14).tokens == (shape.tokens)
    with pytest.raises(ValueError, match="largest bucket, 8192"):
        served.declare([row(8193, start)], total_tokens=2**14)
    with pytest.raises(ValueError, match="at least 1"):
        served.choose(0, 0, Features(), total_tokens=64, mixed=True, fresh=not start)


@pytest.mark.parametrize("grain", [FINE, COARSE], ids=["fine", "coarse"])
@given(
    kind=st.sampled_from(sorted(LAYOUTS)),
    counts=st.lists(st.integers(2, 3000), min_size=1, max_size=8),
    cached=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_step_of_more_than_64_tokens_is_padded_by_a_quarter_at_most(grain, kind, counts, cached):
    """This holds after the last prompt of the step was cut as the scheduler cuts it."""
    served = shapes(kind, grain=grain)
    left = served.fill(1, min(sum(counts), 8192))
    assert left is not None
    batch = []
    for number, count in enumerate(counts):
        if left:
            batch.append(row(min(count, left), 64 if cached else 0, number))
            left -= len(batch[-1].tokens)
    real = sum(len(one.tokens) for one in batch)
    shape = served.declare(batch, total_tokens=8192)
    assert shape.decode == (real == len(batch))
    assert real <= shape.tokens <= max(MOST_PADDING * real, LOOSE_TOKENS)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_3208_tokens_do_not_run_as_8192(kind):
    """They are cut by the sizes that a budget of 8192 makes."""
    served, left, cuts = shapes(kind), 3208, []
    while left:
        cuts.append(served.fill(1, left))
        left -= cuts[-1]
    assert cuts == [3072, 128, 8]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_largest_step_has_a_program_of_each_way_that_it_can_take(kind):
    """A budget that is no power of two is a size itself, and the declared programs are those that run."""
    served = shapes(kind, token_budget=1000)
    declared = served.declare_all(Features())
    largest = [one for one in declared if one.tokens == 1000]
    assert {shape.fresh for shape in largest} == {True, False}
    for start in (0, 64):
        for count in (2, 5, 130, 1000):
            assert served.declare([row(count, start)], total_tokens=8192) in declared


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("count", "start"), [(5, 0), (5, 64)])
def test_5_tokens_run_in_16_where_the_sizes_are_4_and_16(kind, count, start):
    """The smallest size has no bound on its padding, since its time is that of reading the weights."""
    served = shapes(kind)
    served.token_buckets = (4, 16)
    assert served.declare([row(count, start)], total_tokens=128).tokens == 16


@pytest.mark.parametrize("kind", LAYOUTS)
@given(count=st.integers(2, COARSE.whole_up_to))
@settings(max_examples=40, deadline=None)
def test_a_short_prompt_is_one_step_of_kernels_however_it_attends(kind, count):
    """A second step for the rest of it would take as long as all of it."""
    served = shapes(kind, grain=COARSE)
    assert served.fill(1, count) == count
    new, behind = (served.declare([row(count, start)], total_tokens=512) for start in (0, 64))
    assert (new.tokens, new.fresh) == (behind.tokens, True)
    assert not behind.fresh


@pytest.mark.parametrize(
    ("kind", "count", "expanded"),
    [
        ("dense", 8192, True),
        ("beside-window", 8192, True),
        # Up to as many tokens as are chosen there is nothing to choose; of padding too.
        ("sparse", 2048, True),
        ("sparse", 2049, False),
    ],
)
def test_a_step_of_new_prompts_is_expanded_and_no_other(kind, count, expanded):
    """The host alone makes this choice. With one cached token or one row that decodes, the step reads pages."""

    def fresh(*batch):
        return shapes(kind).declare(batch, total_tokens=8192).fresh

    assert fresh(row(count)) == expanded
    assert fresh(row(count - 100), row(100, number=1)) == expanded
    assert not fresh(row(count - 1, start=1))
    assert not fresh(row(count - 100), row(1, start=40, number=1))
    assert not shapes(kind, pinned=True).declare([row(count)], total_tokens=8192).fresh
