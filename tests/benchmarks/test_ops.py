"""The op benchmark: it runs on any device, times correct results only, and each call reads separate memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import ops
from benchmarks.record import load_record
from pallas_kernels.workbench.op_benchmark import (
    KINDS,
    OPS,
    WrongResult,
    compare,
    implementations,
    load_cases,
    prepare,
)
from tests.fast_cases import fast_cases

SMALL = {"paged_attention": "page-edges", "ragged_attention": "mixed", "page_write": "latent"}
EQUAL = {"paged_attention": "one-row", "ragged_attention": "one-prompt", "page_write": "latent"}
SMALL["latent_attention"], EQUAL["latent_attention"] = "mixed", "equal-rows"
SMALL["index_topk"], EQUAL["index_topk"] = "ragged", "one-prompt"
SMALL["sparse_attention"], EQUAL["sparse_attention"] = "sequences", "alike"
SMALL["filter_bounds"], EQUAL["filter_bounds"] = "odd", "odd"
SMALL["skinny_matmul"], EQUAL["skinny_matmul"] = "all-at-the-end", "all-at-the-end"
WITH_PEER = tuple(SMALL)
for op in set(OPS) - set(WITH_PEER):
    SMALL[op] = EQUAL[op] = next(case.name for case in load_cases(op).values() if case.ci)
on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="says what happens without a GPU"
)


def measure(op, case, dtype="float32", chosen=("xla",)):
    rows = ops.measure(op, load_cases(op)[case], dtype=dtype, chosen=chosen, seconds=0.001)
    return {row["implementation"]: row for row in rows}


# Of attention, of a product and of a scan; the others are prepared and compared alike.
NARROW = ("paged_attention", "skinny_matmul", "ssd_scan")
# A small update is prepared as a scan is, and ops of the other family as these. Ops with a peer are timed beside it.
ALIKE = ("delta_scan", "delta_update", "ssd_scan", *WITH_PEER)
TIMED = [
    pytest.param(
        op,
        dtype,
        marks=[pytest.mark.slow]
        * (op in ALIKE or dtype == "bfloat16")
        * ((op, dtype) != ("paged_attention", "bfloat16")),
    )
    for op in OPS
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("op", "dtype"), TIMED)
def test_every_op_is_timed_on_a_small_case(op, dtype):
    row = measure(op, SMALL[op], dtype)["xla"]
    assert row["us"] > 0
    assert row["gb_per_s"] > 0
    assert row["memory_mib"] > 0
    assert row["refused"] is None
    assert not row["is_peer"]
    if row["floor_us"] is None:
        assert row["share_of_ceiling"] is None


# Of attention, a product, a write and a choice; the others have peers of these kinds.
@pytest.mark.torch
@pytest.mark.parametrize(
    "op",
    fast_cases(WITH_PEER, "paged_attention", "skinny_matmul", "page_write", "index_topk"),
)
def test_a_peer_is_timed_beside_it(op):
    rows = measure(op, EQUAL[op])
    assert rows["torch"]["is_peer"]
    assert rows["torch"]["ratio_to_peer"] == 1
    assert rows["xla"]["peer"] == "torch"
    assert rows["xla"]["ratio_to_peer"] == pytest.approx(rows["xla"]["us"] / rows["torch"]["us"])


@pytest.mark.torch
def test_a_peer_after_a_cached_prefix_is_right_too():
    """The peers' answers are compared as well: this mask is aligned to the last key, not to the first."""
    case = load_cases("ragged_attention")["one-prompt"]
    chunk = type(case)(name="chunk", rows=((5, 37),) * 2, heads=4, kv_heads=2, head_dim=16)
    rows = ops.measure("ragged_attention", chunk, dtype="float32", chosen=["xla"], seconds=0.001)
    assert [row["refused"] for row in rows if row["implementation"] == "torch"] == [None]


@pytest.mark.parametrize("op", ["paged_attention", "ragged_attention"])
def test_a_peer_that_cannot_do_a_case_says_why(op):
    rows = measure(op, "sinks")
    assert "sinks" in rows["torch"]["refused"] or "torch" in rows["torch"]["refused"]
    assert rows["cudnn-contiguous"]["us"] is None
    assert rows["xla"]["peer"] is None


def broken(op):
    right = getattr(pallas_kernels, op)

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        if op == "page_write":
            return tuple(pool.at[0, 0].set(7) for pool in result)
        if op == "rotary_write":
            return result[0], tuple(pool.at[0, 0].set(7) for pool in result[1])
        if KINDS[op].pool == "states":
            return result[0], result[1].at[0].set(7)
        if op in ("index_topk", "row_topk"):
            return result[0].at[0, 0].add(1), result[1]
        if op == "group_rows":
            return *result[:3], result[3].at[0].add(1)
        return result.at[-1].multiply(jnp.asarray(1.1, result.dtype))

    return wrong


@pytest.mark.torch
def test_rows_of_a_few_lengths_have_a_peer_that_is_called_for_each():
    case = load_cases("ragged_attention")["one-prompt"]
    mixed = type(case)(
        name="mixed", rows=((1, 40), (9, 20), (1, 40), (7, 7)), heads=4, kv_heads=2, head_dim=16
    )
    rows = ops.measure("ragged_attention", mixed, dtype="float32", chosen=["xla"], seconds=0.001)
    assert {row["implementation"]: row["refused"] for row in rows}["torch"] is None


def test_a_kernel_of_somebody_else_behind_our_door_is_a_peer():
    row = measure("paged_attention", "one-row", chosen=["cudnn"])["cudnn"]
    assert row["is_peer"]


# One op of each kind of result: `broken` changes pools that are written, states, positions, and numbers.
@pytest.mark.parametrize(
    "op",
    fast_cases(OPS, "page_write", "rotary_write", "ssd_update", "index_topk", "paged_attention"),
)
def test_a_wrong_implementation_is_not_timed(op, monkeypatch):
    monkeypatch.setattr(pallas_kernels, op, broken(op))
    row = measure(op, EQUAL[op])["xla"]
    assert row["us"] is None
    assert row["refused"].startswith("WRONG")


@pytest.mark.parametrize("op", fast_cases(NARROW, "paged_attention"))
def test_the_command_fails_where_a_result_is_wrong(op, monkeypatch, capsys):
    monkeypatch.setattr(pallas_kernels, op, broken(op))
    assert ops.main([op, "--case", EQUAL[op], "--implementation", "xla", "--seconds", "0.001"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_nan_is_wrong_and_so_is_an_error_in_one_place():
    right = np.ones((3, 4), np.float32)
    compare([right], [right], tolerance=1e-5)
    for value in (np.nan, np.inf, 1.001):
        wrong = right.copy()
        wrong[2, 3] = value
        with pytest.raises(WrongResult):
            compare([wrong], [right], tolerance=1e-5)


@on_cpu
def test_an_implementation_that_cannot_run_here_says_why():
    names = [name for name in implementations("paged_attention") if name != "xla"]
    for name in names:
        row = measure("paged_attention", "one-row", chosen=[name])[name]
        assert row["us"] is None
        assert name in row["refused"]


@pytest.mark.parametrize("op", OPS)
def test_calls_of_a_launch_use_memory_of_their_own(op):
    """Inputs larger than the L2 cache: the next call reads or writes other pages than the one before."""
    case = load_cases(op)[SMALL[op]]
    bench = prepare(op, case, "float32", rotation_bytes=4 * case.bytes_moved("float32"))
    assert len(bench.own) == 4
    if KINDS[op].pool == "states":
        num_states = len(bench.inputs["states"])
        assert len(bench.shared["states"]) == 4 * num_states
        for copy, own in enumerate(bench.own):
            real = bench.inputs["write_states"] < num_states
            moved = bench.inputs["write_states"][real] + copy * num_states
            np.testing.assert_array_equal(np.asarray(own["write_states"])[real], moved)
        return
    if KINDS[op].writes:
        num_slots = int(np.prod(bench.inputs["pages"][0].shape[:2]))
        per_call = [np.asarray(own["slots"]) for own in bench.own]
        real = [slots[slots < num_slots] for slots in per_call]
        assert len({tuple(slots) for slots in real}) == 4
        assert all(len(set(slots)) == case.tokens for slots in real)
        return
    if op == "sparse_attention":
        num_slots = int(np.prod(bench.inputs["records"].shape[:2]))
        assert np.prod(bench.shared["records"].shape[:2]) == 4 * num_slots
        real = bench.inputs["slots"] < num_slots
        for copy, own in enumerate(bench.own):
            moved = np.where(real, bench.inputs["slots"] + copy * num_slots, 4 * num_slots)
            np.testing.assert_array_equal(own["slots"], moved)
        return
    whole = {"skinny_matmul": "weight", "filter_bounds": "logits"}
    whole |= {"row_topk": "scores", "group_rows": "x"}
    if op in whole:
        name = whole[op]
        places = {own[name].unsafe_buffer_pointer() for own in bench.own}
        assert len(places) == 4
        return
    if op == "gathered_matmul":
        # Of one weight, since no call reads all of it.
        assert len({np.asarray(own["chosen"]).tobytes() for own in bench.own}) == 4
        return
    pools = ("latent_pages", "index_pages", "k_pages")
    pool = next(name for name in pools if name in bench.inputs)
    num_pages = bench.inputs[pool].shape[0]
    assert bench.shared[pool].shape[0] == 4 * num_pages
    for copy, own in enumerate(bench.own):
        np.testing.assert_array_equal(
            own["page_table"], bench.inputs["page_table"] + copy * num_pages
        )


@on_cpu
def test_without_a_gpu_it_says_so_and_records_only_what_it_is_told_to(tmp_path, capsys):
    arguments = [
        "paged_attention",
        "--case",
        "one-row",
        "--implementation",
        "xla",
        "--seconds",
        "0.001",
    ]
    assert ops.main(arguments) == 0
    out = capsys.readouterr().out
    assert "no GPU" in out
    assert "no ceilings are known" in out
    assert "recorded" not in out
    assert ops.main([*arguments, "--record", "mine", "--folder", str(tmp_path)]) == 0
    assert f"recorded in {tmp_path / 'mine.json'}" in capsys.readouterr().out
    assert {row["case"] for row in load_record(tmp_path / "mine.json").rows} == {"one-row"}


def test_options_of_one_op_are_refused_for_several(capsys):
    with pytest.raises(SystemExit):
        ops.main(["paged_attention", "page_write", "--case", "one-row"])
    assert "those of one op" in capsys.readouterr().err


def test_an_unknown_case_is_named_beside_the_known_ones():
    with pytest.raises(SystemExit, match=r"no case 'nowhere'; choose from .*one-row"):
        ops.main(["paged_attention", "--case", "nowhere"])


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_found_is_one_that_the_op_knows(op):
    """A file beside them, such as a kernel's parts, is not taken for an implementation."""
    names = implementations(op)
    assert "xla" in names
    with pytest.raises(ValueError, match="no implementation 'nobody'") as refusal:
        measure(op, EQUAL[op], chosen=["nobody"])
    told = str(refusal.value).split("choose one of ")[1].split(", ")
    assert sorted(told) == names
