"""Shapes: no request is cut off, waves keep their bounds, and what is declared is what runs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, sampling
from jaxkv.config import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.shapes import (
    WAVE_TOKENS,
    Shapes,
    prefill_chunks,
    row_of,
    serves,
    tokens_held,
)

LAYOUT = group_layers(
    (
        LayerSpec(0, gqa(1, 8, dtype="float32", page_size=16)),
        LayerSpec(1, sampling(50, penalties=True, bias_entries=4)),
    )
)
SHAPES = Shapes(LAYOUT, max_tokens=1000, max_rows=6)


def request(prompt_tokens, max_tokens=8, **wish):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **wish)
    return Request(prompt=(1,) * prompt_tokens, params=params, seed=0, stop_ids=())


@given(st.integers(1, 10_000), st.booleans())
@settings(max_examples=100)
def test_chunks_cover_a_prompt_once_and_in_order(tokens, whole):
    chunks = prefill_chunks(tokens, whole=whole)
    assert [position for chunk in chunks for position in chunk] == list(range(tokens))
    assert not whole or len(chunks) == 1


@given(st.lists(st.integers(1, 992), min_size=1, max_size=20))
@settings(max_examples=50)
def test_a_wave_holds_the_first_requests_within_its_bounds(lengths):
    requests = [request(length) for length in lengths]
    wave = SHAPES.wave(requests)
    assert 1 <= len(wave) <= 6
    assert list(wave) == requests[: len(wave)]
    assert len(wave) == 1 or sum(len(one.prompt) for one in wave) <= WAVE_TOKENS


@given(st.integers(1, 900), st.integers(1, 100))
@settings(max_examples=100)
def test_a_table_holds_every_token_that_will_be_written(prompt, new):
    """S1-15: the program is at least as wide as the sequence, and never wider than the longest one."""
    one = request(prompt, new)
    declared = SHAPES.loop([row_of(one, 0)], [one])
    assert declared.shape.table_widths[0] * 16 >= tokens_held(one)
    assert declared.shape.table_widths[0] <= -(-1000 // 16)
    assert declared.width >= new


def test_declared_programs_name_everything_once():
    kinds = [one.kind for one in SHAPES.declare([request(40)] * 9, whole=False)]
    assert sorted(kinds) == ["decode", "generate", "generate", "prefill"]
    kinds = [one.kind for one in SHAPES.declare([request(40, presence_penalty=1.0)], whole=False)]
    assert sorted(kinds) == ["admit", "decode", "generate", "prefill"]


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
