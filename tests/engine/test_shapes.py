"""Shapes: no request is cut off, and a program stands in for another only where it serves as well."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, sampling
from jaxkv.config import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.shapes import Declared, Shapes, costs_alike, row_of, serves, tokens_held

LAYOUT = group_layers(
    (
        LayerSpec(0, gqa(1, 8, dtype="float32", page_size=16)),
        LayerSpec(1, sampling(50, penalties=True, bias_entries=4)),
    )
)
SHAPES = Shapes(LAYOUT, max_tokens=1000, max_rows=6)
LARGE = Shapes(LAYOUT, max_tokens=1000, max_rows=128)


def request(prompt_tokens, max_tokens=8, **wish):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **wish)
    return Request(prompt=(1,) * prompt_tokens, params=params, seed=0, stop_ids=())


@given(st.integers(1, 900), st.integers(1, 100))
@settings(max_examples=100)
def test_a_table_holds_every_token_that_will_be_written(prompt, new):
    """S1-15: the program is at least as wide as the sequence, and never wider than the longest one."""
    one = request(prompt, new)
    declared = SHAPES.loop([row_of(one, 0)], [one])
    assert declared.shape.table_widths[0] * 16 >= tokens_held(one)
    assert declared.shape.table_widths[0] <= -(-1000 // 16)
    assert declared.width >= new


def test_few_programs_serve_all_numbers_of_logprobs():
    rows = [row_of(request(4, logprobs=number), 0) for number in range(21)]
    assert len({SHAPES.shape([row], total_tokens=8).features for row in rows}) == 3


def test_only_a_program_that_is_larger_and_abler_in_everything_stands_in_for_another():
    def loop(prompt, new=8, **wish):
        one = request(prompt, new, **wish)
        return SHAPES.loop([row_of(one, 0)], [one])

    small, large = loop(10), loop(300, 100)
    assert serves(large, small)
    assert not serves(small, large)
    assert not serves(loop(300, 100, presence_penalty=1.0), small)
    assert serves(loop(300, 100, logprobs=5), small)
    assert not serves(large, loop(10, logprobs=0))
    assert not serves(large, SHAPES.score(row_of(request(10), 0)))


def test_without_strict_mode_only_a_few_more_rows_are_better_than_a_compilation():
    def step(count, total=100, **wish):
        rows = [row_of(request(1, **wish), 0)] * count
        shape = LARGE.shape(rows, total_tokens=total, decode=True)
        return Declared("decode", shape)

    assert serves(step(8), step(1))
    assert costs_alike(step(8), step(1))
    assert costs_alike(step(64), step(8))
    # Each of these serves as well, but takes longer.
    for able, needed in (
        (step(16), step(1)),
        (step(128), step(64)),
        (step(1, 900), step(1)),
        (step(1, logprobs=5), step(1)),
    ):
        assert serves(able, needed)
        assert not costs_alike(able, needed)
