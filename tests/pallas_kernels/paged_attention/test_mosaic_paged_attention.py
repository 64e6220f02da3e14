"""The Mosaic GPU kernel of `paged_attention` itself: interpreted, lowered without a GPU, under every schedule on one.

What it shares with other implementations is tested in test_paged_attention.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.device import NEWEST_JAX, gpu_arch
from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.mosaic_schedule import MAX_ACCUMULATOR, Geometry, Schedule
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import bits, by_name
from tests.tolerances import assert_lse, assert_output

ARRAYS = AttentionArrays._fields
SMALL = Case("", (), heads=8, kv_heads=2, head_dim=64)


def small(*seq_lens, **changes):
    return dataclasses.replace(SMALL, seq_lens=seq_lens, **changes)


def attend(case, schedule, inputs, *, interpret=False):
    """Runs the kernel under a schedule of our choice."""
    arrays = AttentionArrays(*(inputs.get(name) for name in ARRAYS))
    return mosaic_gpu.attend(
        jax.tree.map(jnp.asarray, arrays),
        options=ScoreOptions(scale=inputs["scale"], window=case.window, soft_cap=case.soft_cap),
        schedule=schedule,
        want_lse=True,
        interpret=interpret,
    )


def assert_is_oracle(result, inputs, dtype):
    wanted_out, wanted_lse = oracle.paged_attention(**inputs)
    assert_output(result[0], wanted_out, dtype)
    assert_lse(result[1], wanted_lse)


INTERPRETED = {
    "small pages, an empty row": (small(150, 0), Schedule(1, 1, 2)),
    "parts, more of them than tiles": (
        small(70, 1, page_size=32, table_width=4),
        Schedule(1, 3, 1),
    ),
    "a window that starts inside a page, sinks": (
        small(131, 64, page_size=64, window=70, sinks=True),
        Schedule(1, 2, 2),
    ),
    "a tile inside a page, a stage that is filled again, groups across 8 rows, a cap": (
        small(140, heads=14, page_size=128, soft_cap=5.0),
        Schedule(1, 1, 2),
    ),
    "fp8, an empty row, small pages": (
        small(150, 0, quantised="float8_e4m3fn"),
        Schedule(1, 1, 2),
    ),
    "int8, a window, sinks, parts": (
        small(131, 64, page_size=64, window=70, sinks=True, quantised="int8"),
        Schedule(1, 2, 2),
    ),
    "fp8, a cap, a static page": (
        small(140, heads=14, head_dim=128, page_size=192, soft_cap=5.0, quantised="float8_e4m3fn"),
        Schedule(1, 1, 3),
    ),
    "wide heads, one key head": (
        small(66, heads=3, kv_heads=1, head_dim=192, page_size=8),
        Schedule(1, 1, 1),
    ),
}


# What each of these combines is in the others.
COMBINED = (
    *("int8, a window, sinks, parts", "fp8, a cap, a static page"),
    *("small pages, an empty row", "wide heads, one key head"),
)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name in COMBINED))
        for name, given in INTERPRETED.items()
    ],
)
def test_interpreted_it_equals_the_oracle_without_a_race(case, schedule, races):
    """Places that must not be read hold NaN, and a read out of bounds raises."""
    inputs = case.inputs(1)
    assert_is_oracle(attend(case, schedule, inputs, interpret=True), inputs, "bfloat16")
    assert not races()


def test_page_ids_that_hold_no_visible_key_are_not_used(races):
    """They may be any number: pages before a window are given away, those behind the end never were the row's."""
    case = small(131, 30, page_size=16, window=40, table_width=12)
    inputs = case.inputs(2, "float16")
    for row, seq_len in enumerate(case.seq_lens):
        inputs["page_table"][row, : max(0, seq_len - case.window) // case.page_size] = 2**30
        inputs["page_table"][row, -(-seq_len // case.page_size) :] = 2**30
    out, lse = attend(case, Schedule(1, 2, 1), inputs, interpret=True)
    assert_is_oracle((out, lse), inputs, "float16")
    assert not races()


@pytest.mark.parametrize(
    "case",
    # A group that is filled and 8 bits are in the last one.
    [
        pytest.param(small(100, page_size=64), id="plain", marks=pytest.mark.slow),
        pytest.param(
            small(37, 0, heads=30, head_dim=256, sinks=True),
            id="groups of 15, which are filled",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            small(70, heads=22, head_dim=192, quantised="int8"), id="groups of 11 over 8 bits"
        ),
    ],
)
def test_the_door_of_the_kernel_interprets_its_own_schedule(case, races):
    inputs = case.inputs(3)
    arrays = AttentionArrays(*(inputs.get(name) for name in ARRAYS))
    out, lse = mosaic_gpu.paged_attention(
        jax.tree.map(jnp.asarray, arrays),
        ScoreOptions(inputs["scale"]),
        return_lse=True,
        interpret=True,
    )
    assert_is_oracle((out, lse), inputs, "bfloat16")
    assert not races()


def test_one_process_runs_it_over_several_grids(races):
    """The trace for one number of rows is not used for another."""
    for seq_lens in ((30,), (30, 70, 5), (30,)):
        case = small(*seq_lens, table_width=5)
        inputs = case.inputs(1)
        assert_is_oracle(
            attend(case, Schedule(1, 2, 1), inputs, interpret=True), inputs, "bfloat16"
        )
    assert not races()


def test_it_takes_every_group_up_to_sixteen():
    """And no group leaves it more columns than registers hold."""
    for head_dim in (64, 128, 192, 256):
        for group in range(1, 17):
            for kv_heads in (1, 2, 3, 8):
                geometry = Geometry(group * kv_heads, kv_heads, head_dim, 16, jnp.bfloat16)
                assert geometry.refusal() is None
                filled = dataclasses.replace(geometry, heads=kv_heads * geometry.filled_group)
                assert filled.columns * head_dim <= MAX_ACCUMULATOR
    assert "at most 16 query heads of 256" in Geometry(17, 1, 256, 16, jnp.bfloat16).refusal()


LOWERED = {
    "llama, batch 1": Case("", (1100,), page_size=64),
    "llama, batch 8": Case("", (1100,) * 8),
    "llama, batch 64": Case("", (4096,) * 64, page_size=64),
    "one long row": Case("", (131072,), page_size=64),
    "long rows, few key heads": Case("", (32768,), heads=14, kv_heads=2, head_dim=64, page_size=64),
    "static": Case("", (1152,) * 4, page_size=1152),
    "gemma": Case("", (600,), heads=8, kv_heads=4, head_dim=256, window=512, soft_cap=50.0),
    "gpt-oss": Case("", (600,), heads=64, kv_heads=8, head_dim=64, window=128, sinks=True),
    "the widest group": Case("", (600,) * 4, heads=64, kv_heads=2, page_size=32, sinks=True),
    "fp8": Case("", (4096,) * 64, quantised="float8_e4m3fn"),
    "int8, head_dim 192": Case(
        "", (600,) * 2, heads=40, head_dim=192, page_size=64, quantised="int8"
    ),
    "head_dim 192": Case("", (600,) * 2, heads=40, head_dim=192, page_size=8),
}
# Parts that are joined, a window with sinks, and odd sizes over 8 bits. Others show another size of one of these, or
# are compiled for an H200 by h200/test_kernels.py.
FAST = ("one long row", "gpt-oss", "int8, head_dim 192")


@pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX,
    reason="the kernels refuse this JAX; why_not says so",
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name not in FAST))
        for name, case in LOWERED.items()
    ],
)
def test_it_lowers_for_cuda_without_a_gpu(case):
    """Layouts are inferred and shared memory is counted here, so neither can fail on a GPU first."""
    rows, width = len(case.seq_lens), max(case.seq_lens) // case.page_size + 1
    pool = (rows * width, case.page_size, case.kv_heads, case.head_dim)
    stored = case.quantised or "bfloat16"
    shapes = {
        "q": ((rows, case.heads, case.head_dim), "bfloat16"),
        "k_pages": (pool, stored),
        "v_pages": (pool, stored),
        "page_table": ((rows, width), "int32"),
        "seq_lens": ((rows,), "int32"),
    }
    if case.sinks:
        shapes["sinks"] = ((case.heads,), "float32")
    if case.quantised:
        shapes |= dict.fromkeys(("k_scales", "v_scales"), (pool[:3], "float32"))
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    options = {"window": case.window, "soft_cap": case.soft_cap}
    run = partial(
        by_name(mosaic_gpu.paged_attention, AttentionArrays, ScoreOptions), scale=1.0, **options
    )
    lowered = jax.jit(run).trace(**arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_it_cannot_take_is_refused_with_the_number_that_it_got():
    fine = Geometry(8, 1, 64, 16, jnp.bfloat16)
    assert fine.refusal() is None
    for changes, named in (
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 80}, "got 80"),
        ({"page_size": 48}, "got 48"),
        ({"heads": 65}, "got 65"),
        ({"heads": 32, "head_dim": 256}, "got 32"),
    ):
        assert named in dataclasses.replace(fine, **changes).refusal()
    with pytest.raises(ValueError, match="page_size must be 8, 16, 32 or a multiple of 64, got 48"):
        attend_as_called(small(5, page_size=48).inputs())


def attend_as_called(inputs):
    arrays = {name: jnp.asarray(inputs[name]) for name in ARRAYS[:5]}
    return by_name(mosaic_gpu.paged_attention, AttentionArrays, ScoreOptions)(**arrays, scale=1.0)


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one it needs")
def test_it_refuses_devices_that_are_not_hopper():
    arrays = [jnp.asarray(small(5).inputs()[name]) for name in ARRAYS[:2]]
    assert "needs an sm90 GPU, found" in mosaic_gpu.why_not(*arrays)


SCHEDULES = [(1, 1, 1), (1, 1, 2), (2, 1, 4), (4, 1, 2), (8, 1, 3), (1, 3, 2), (8, 2, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("", (1, 63, 64, 65, 0, 1000, 1152, 700), table_width=72),
        Case("", (1, 63, 64, 65, 0, 1000, 1152, 700), page_size=1152),
        Case("", (0, 1, 200, 1000), page_size=64, window=130, soft_cap=30.0, sinks=True),
        Case("", (0, 1, 200, 1000), head_dim=64, sinks=True, quantised="float8_e4m3fn"),
        Case("", (0, 1, 200, 1000), page_size=64, window=130, quantised="int8"),
        Case("", (0, 1, 200, 1000), heads=28, kv_heads=4, head_dim=64, page_size=32, sinks=True),
    ],
    ids=["page 16", "static", "window", "fp8", "int8", "groups of 7"],
)
def test_any_schedule_gives_the_answer_always_and_whoever_is_in_the_batch(case, schedule):
    """Splits are combined in one order, so that repeats and permuted rows give equal bits."""
    inputs = case.inputs(4)
    run = partial(attend, case, Schedule(*schedule))
    out, lse = run(inputs)
    assert_is_oracle((out, lse), inputs, "bfloat16")
    for _ in range(20):
        assert bits(run(inputs)[0]) == bits(out)
    order = np.random.default_rng(0).permutation(len(case.seq_lens))
    moved = {name: inputs[name][order] for name in ("q", "page_table", "seq_lens")}
    assert bits(run({**inputs, **moved})[0]) == [bits(out)[row] for row in order]


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_pages_past_two_to_the_31_elements_are_read_where_they_lie(stored):
    """The pool has 4.3 billion elements, and its last page holds the only key."""
    pool = jnp.zeros((2**16 + 1, 64, 8, 128), stored)
    pool = jax.jit(lambda pool: pool.at[-1].set(1), donate_argnums=0)(pool)
    scales = None if stored == "bfloat16" else jnp.ones(pool.shape[:3], jnp.float32)
    q = jnp.zeros((1, 32, 128), jnp.bfloat16)
    table, lens = jnp.full((1, 1), 2**16, jnp.int32), jnp.ones(1, jnp.int32)
    arrays = AttentionArrays(q, pool, pool, table, lens, k_scales=scales, v_scales=scales)
    out = mosaic_gpu.paged_attention(arrays, ScoreOptions(1.0))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


def test_a_jax_it_was_not_made_for_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(device, "why_not_hopper", lambda: None)
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    q, pages = jnp.zeros((1, 8, 64), jnp.bfloat16), jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    assert "was tested with jax up to 0.12" in mosaic_gpu.why_not(q, pages)
    for tested in ((0, 11, 2), (0, 12, 0, 1)):
        monkeypatch.setattr(jax, "__version_info__", tested)
        assert mosaic_gpu.why_not(q, pages) is None
