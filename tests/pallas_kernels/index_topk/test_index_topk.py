"""The contract of `index_topk`, signed by every implementation."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, index_topk
from pallas_kernels.formats.index_keys import read_index_keys, write_index_keys
from pallas_kernels.index_topk import (
    mosaic_gpu,
    mosaic_one_pass,
    mosaic_scores,
    mosaic_select,
    reference,
    xla,
)
from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.index_topk.cases import CASES
from pallas_kernels.index_topk.mosaic_places import CHUNK
from pallas_kernels.mosaic.teams import LARGE, MEDIUM
from pallas_kernels.mosaic.teams import SMALL as SMALL_TEAM
from pallas_kernels.workbench.tolerances import SCORE
from tests.pallas_kernels.contract import (
    bits,
    by_name,
    cases,
    compiled,
    device,
    grouped,
    implementations,
)

SMALL = [case for case in CASES if case.ci]
every_implementation = implementations("mosaic_gpu", "xla")


def seen_by(inputs):
    """For each token, its row and how many keys it sees, counted by hand."""
    tokens, bounds = len(inputs["q"]), inputs.get("cu_q_lens")
    if bounds is None:
        return [(row, int(keys)) for row, keys in enumerate(inputs["seq_lens"])]
    seen = [(0, 0)] * tokens
    for row, keys in enumerate(inputs["seq_lens"]):
        queries = range(bounds[row], bounds[row + 1])
        for place, token in enumerate(queries):
            seen[token] = (row, int(keys) - len(queries) + place + 1)
    return seen


def scores_of(inputs, token, row, seen):
    """The scores of the keys that a token sees, in float64, and their slots."""
    page_size = inputs["index_pages"].shape[1]
    position = np.arange(seen)
    slots = inputs["page_table"][row][position // page_size] * page_size + position % page_size
    keys = np.asarray(read_index_keys(jnp.asarray(inputs["index_pages"])), np.float64)
    keys = keys.reshape(-1, keys.shape[-1])[slots]
    products = np.maximum(inputs["q"][token].astype(np.float64) @ keys.T, 0)
    return inputs["weights"][token].astype(np.float64) @ products, slots


@cases(SMALL)
@every_implementation
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_chooses_the_best_that_a_query_sees(implementation, case, dtype):
    """What is left out scores no more than what was chosen, but for rounding; places nobody sees hold NaN."""
    inputs = case.inputs(1, dtype)
    slots, counts = map(
        np.asarray, compiled(partial(index_topk, implementation=implementation), inputs)
    )
    num_slots = inputs["index_pages"].shape[0] * case.page_size
    for token, (row, seen) in enumerate(seen_by(inputs)):
        count = min(seen, case.topk)
        assert counts[token] == count
        assert (slots[token, count:] == num_slots).all()
        scores, known = scores_of(inputs, token, row, seen)
        positions = [int(np.flatnonzero(known == slot)[0]) for slot in slots[token, :count]]
        assert positions == sorted(set(positions))
        left = np.delete(scores, positions)
        if len(left):
            slack = SCORE * np.abs(scores).max()
            assert left.max() <= scores[positions].min() + slack


@every_implementation
def test_equal_scores_go_to_the_lower_position(implementation):
    """Exactly as the reference, which sorts by score and position; many scores are equal."""
    case = next(case for case in CASES if case.name == "ties")
    inputs = case.inputs(3, "float32")
    # Sums of small integers and powers of two are exact, whatever their order.
    inputs["q"], inputs["weights"] = np.sign(inputs["q"]), np.sign(inputs["weights"])
    inputs["index_pages"] = np.array(_ones(inputs))
    found = compiled(partial(index_topk, implementation=implementation), inputs)
    wanted = compiled(reference.index_topk, inputs)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other)
    row, seen = 0, int(inputs["seq_lens"][0])
    scores, known = scores_of(inputs, 0, row, seen)
    order = np.lexsort((np.arange(seen), -scores))[: case.topk]
    assert np.array_equal(found[0][0], known[np.sort(order)])
    assert len(np.unique(scores)) < seen / 3


def _ones(inputs):
    """Keys of -1, 0 and 1 in the pages' bytes, scale 1."""
    signs = jnp.sign(read_index_keys(jnp.asarray(inputs["index_pages"])))
    pages = jnp.zeros(inputs["index_pages"].shape, jnp.uint8)
    keys = jnp.nan_to_num(signs).reshape(-1, signs.shape[-1]) * 448
    return write_index_keys(pages, keys, jnp.arange(len(keys), dtype=jnp.int32))


@every_implementation
def test_a_broken_key_is_always_chosen(implementation):
    """A key that was no number when it was written scores above all others."""
    case = next(case for case in CASES if case.name == "decode")
    inputs = case.inputs(4, "float32")
    slot = inputs["page_table"][3, 2] * case.page_size + 5
    pages = jnp.asarray(inputs["index_pages"])
    broken = jnp.full((1, case.index_dim), jnp.nan)
    inputs["index_pages"] = np.asarray(write_index_keys(pages, broken, jnp.array([slot])))
    slots, _ = compiled(partial(index_topk, implementation=implementation), inputs)
    assert slot in np.asarray(slots[3])
    assert slot not in np.asarray(slots[0])


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """Permuted rows give permuted results, bit by bit."""
    case = next(case for case in CASES if case.name == "decode")
    inputs = case.inputs(5, "bfloat16")
    op = partial(index_topk, implementation=implementation)
    order = np.random.default_rng(0).permutation(len(case.rows))
    moved = {
        name: value[order] if name in ("q", "weights", "page_table", "seq_lens") else value
        for name, value in inputs.items()
    }
    for one, other in zip(compiled(op, inputs), compiled(op, moved), strict=True):
        assert bits(np.asarray(one)[order]) == bits(other)


def test_turns_of_tiles_change_nothing():
    """Where memory is short, XLA takes tiles in turns."""
    for name in ("decode", "ragged"):
        inputs = next(case for case in CASES if case.name == name).inputs(6, "float32")
        run = by_name(xla.index_topk, IndexArrays)
        whole = compiled(run, inputs)
        turns = compiled(partial(run, temporary_bytes=5000), inputs)
        for one, other in zip(whole, turns, strict=True):
            assert np.array_equal(one, other)


def test_queries_of_eight_bits_give_what_their_numbers_say():
    inputs = SMALL[0].inputs(7, "float32")
    inputs["q"] = inputs["q"].astype(jnp.float8_e4m3fn)
    wide = {**inputs, "q": inputs["q"].astype(np.float32)}
    for one, other in zip(compiled(index_topk, inputs), compiled(index_topk, wide), strict=True):
        assert np.array_equal(one, other)


@pytest.fixture
def ways(monkeypatch):
    """Says which of its ways the choosing kernel is built for, and of how many warpgroups, whatever the sizes."""
    select: Any = mosaic_select.select

    def say(in_one_pass, team):
        monkeypatch.setattr(mosaic_select, "supports", lambda keys, topk: in_one_pass)
        monkeypatch.setattr(mosaic_select, "_team_for", lambda tokens, keys, topk: team)
        select.clear_cache()

    yield say
    select.clear_cache()


every_way = pytest.mark.parametrize(
    ("in_one_pass", "team"),
    [(way, team) for way in (True, False) for team in (LARGE, MEDIUM, SMALL_TEAM)],
    ids=[
        f"{way}, {team} team"
        for way in ("lists", "longer way")
        for team in ("large", "medium", "small")
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "few_values"),
    [
        (((None, 700), (None, 0), (None, 300)), False),
        (((3, 400), (1, 70), (0, 0)), True),
    ],
)
@every_way
def test_interpreted_kernels_choose_what_a_sort_chooses(
    rows, few_values, in_one_pass, team, ways, races
):
    """Keys and queries are small integers, so that both score exactly alike; many scores are equal."""
    ways(in_one_pass, team)
    case = replace(
        SMALL[0],
        rows=rows,
        topk=300,
        index_heads=8,
        page_size=64,
        padding_tokens=len(rows) % 2 if few_values else 0,
        few_values=few_values,
    )
    inputs: dict[str, Any] = device(case.inputs(8, "float32"))
    inputs["weights"] = jnp.sign(inputs["weights"])
    inputs["q"] = jnp.sign(inputs["q"])
    if few_values:
        inputs["q"] = inputs["q"].astype(jnp.float8_e4m3fn)
    (arrays,), options = grouped(inputs, IndexArrays)
    found = jax.block_until_ready(mosaic_gpu.index_topk(arrays, **options, interpret=True))
    for one, other in zip(found, xla.index_topk(arrays, **options), strict=True):
        assert np.array_equal(one, other)
    assert not races()


@pytest.mark.gpu
@every_way
@pytest.mark.parametrize(("keys", "topk"), [(4 * CHUNK, 2048), (CHUNK, 1000), (8 * CHUNK, 2048)])
def test_on_a_card_each_way_chooses_what_a_stable_sort_does(in_one_pass, team, keys, topk, ways):
    """Rows of all kinds, seen in part, by more blocks than there are multiprocessors; the same bits again."""
    ways(in_one_pass, team)
    rng = np.random.default_rng(5)
    plain = rng.standard_normal((290, keys)).astype(np.float32)
    plain[10:20] = np.round(plain[10:20])
    plain[20:25] = 0.5
    plain[25:30] = np.sort(plain[25:30])
    plain[30:35] **= 9
    plain[35:40] *= 1e-38
    plain[40:45] = np.where(plain[40:45] > 1, np.inf, plain[40:45])
    plain[45:50, :4096] += 9
    # All that is large is in two of the lists, or in one, which cannot hold it.
    plain[50:55, np.arange(keys) // 128 % 8 == 3] += 9
    seen = rng.integers(topk + 1, keys + 1, len(plain)).astype(np.int32)
    seen[:60], seen[60:70] = keys, rng.integers(0, topk + 2, 10)
    table = jnp.arange(keys // 64, dtype=jnp.int32)[None]
    rows = jnp.zeros(len(plain), jnp.int32)
    options = {"topk": topk, "page_size": 64, "num_slots": keys}
    select: Any = mosaic_select.select
    found = [
        np.asarray(select(jnp.asarray(plain), jnp.asarray(seen), rows, table, **options))
        for _ in range(2)
    ]
    assert np.array_equal(found[0], found[1])
    for row, known, slots in zip(plain, seen, found[0], strict=True):
        best = np.sort(np.argsort(-row[:known], kind="stable")[:topk])
        assert np.array_equal(slots[: len(best)], best)
        assert (slots[len(best) :] == keys).all()


@pytest.mark.parametrize(
    ("tokens", "keys", "topk", "team"),
    [
        (132, 2**15, 2048, MEDIUM),
        (132, 2**15, 2049, LARGE),
        (133, 2**15, 2048, SMALL_TEAM),
        (133, 2**13, 2049, LARGE),
        (133, 2**16, 2048, SMALL_TEAM),
        (133, 2**16 + CHUNK, 2048, MEDIUM),
        (133, 2**18, 2048, LARGE),
    ],
)
def test_lists_are_short_and_teams_small_where_that_was_fastest(tokens, keys, topk, team):
    assert mosaic_select._team_for(tokens, keys, topk) == team


def test_rows_and_lists_that_shared_memory_cannot_hold_go_the_longer_way():
    assert mosaic_one_pass.supports(2**17, 2048)
    assert mosaic_one_pass.supports(2**13, mosaic_one_pass.MOST_CHOSEN)
    assert not mosaic_one_pass.supports(2**17 + CHUNK, 2048)
    assert not mosaic_one_pass.supports(2**13, mosaic_one_pass.MOST_CHOSEN + 1)


@pytest.mark.parametrize(
    ("page_size", "queries", "kernels", "told"),
    [
        (64, "float8_e4m3fn", {"index_scores", "index_topk"}, []),
        (64, "bfloat16", {"index_topk"}, ["queries must be float8_e4m3fn"]),
        (12, "float8_e4m3fn", set(), ["page_size must be a power of two, got 12"]),
    ],
)
def test_on_hopper_the_kernels_are_taken_and_what_they_refuse_is_counted(
    monkeypatch, page_size, queries, kernels, told
):
    """Traced alone, as on an H200."""
    monkeypatch.setattr(mosaic_gpu, "why_not_mosaic", lambda: None)
    case = replace(SMALL[0], index_heads=8, page_size=page_size, queries=queries)
    inputs = case.inputs()
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    before = Counter(dispatch.fallbacks())
    traced = jax.make_jaxpr(partial(index_topk, topk=case.topk))(**arrays)
    counted = Counter(dispatch.fallbacks()) - before
    assert sum(counted.values()) == len(told)
    for said, (op, _, reason) in zip(told, counted, strict=True):
        assert op == "index_topk"
        assert said in reason
    assert set(re.findall(r"\bindex_\w+", str(traced))) == kernels


def test_the_kernels_say_what_they_cannot_take():
    (arrays,), _ = grouped(SMALL[0].inputs(), IndexArrays)
    arrays = jax.tree.map(jnp.asarray, arrays)
    assert mosaic_gpu.refusal(arrays, 2048) is None
    odd = arrays._replace(index_pages=jnp.zeros((3, 12, 132), jnp.uint8))
    assert "power of two, got 12" in str(mosaic_gpu.refusal(odd, 8))
    assert "topk must be at most 16384" in str(mosaic_gpu.refusal(arrays, 2**15))
    assert "must be float8_e4m3fn" in str(mosaic_scores.refusal(arrays.q, arrays.index_pages))
    many = jnp.zeros((2**16, 8, 128), jnp.float8_e4m3fn)
    assert "at most 65535 queries" in str(mosaic_scores.refusal(many, arrays.index_pages))
    # Rows of scores are padded before they are written.
    most = arrays._replace(q=jnp.zeros((2**17 + 1, 1, 1), jnp.bfloat16))
    assert "at most 1073741824" in str(mosaic_gpu.refusal(most, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 0}, "topk must be at least 1, got 0"),
        ({"weights": np.zeros((4, 3), np.float32)}, r"weights must have shape \[4, 4\]"),
        ({"weights": np.zeros((4, 4), np.float16)}, "weights must be float32, got float16"),
        ({"index_pages": np.zeros((9, 8, 128), np.uint8)}, r"\[any, any, 132\], got \[9, 8, 128\]"),
        ({"seq_lens": np.full(4, -1, np.int32)}, "seq_lens holds a negative number"),
        ({"implementation": "cudnn"}, "has no implementation 'cudnn'"),
    ],
)
def test_wrong_arguments_are_refused(change, message, as_in_production):
    with pytest.raises(ValueError, match=message):
        index_topk(**{**SMALL[0].inputs(), **change})


def test_no_row_and_no_page_is_no_mistake():
    inputs = replace(SMALL[0], rows=((None, 0),)).inputs()
    slots, counts = jax.jit(partial(index_topk, topk=4))(
        **{
            name: value[:0] if name != "index_pages" else value
            for name, value in inputs.items()
            if name != "topk"
        }
    )
    assert slots.shape == (0, 4)
    assert counts.shape == (0,)
