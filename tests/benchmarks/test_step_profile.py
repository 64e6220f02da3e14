"""Profiles of steps: the busy time of GPU streams, and the time per kernel."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.step_profile import by_kernel, covered, record_events


def named(kind, process, thread, name):
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def span(process, thread, start, length, name="k", **arguments):
    times = {"ts": start, "dur": length}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "args": arguments, **times}


STREAMS = [
    named("process_name", 1, None, "/device:GPU:0"),
    named("process_name", 2, None, "/host:CPU"),
    named("thread_name", 1, 7, "Stream #13(Compute)"),
    named("thread_name", 1, 8, "Stream #14(MemcpyH2D)"),
    named("thread_name", 1, 9, "XLA Modules"),
    named("thread_name", 2, 7, "Stream of thoughts"),
]


def test_what_overlaps_on_streams_counts_once_and_other_rows_not_at_all():
    events = [
        *STREAMS,
        span(1, 7, 100, 50),
        span(1, 8, 120, 40),
        span(1, 7, 125, 5),
        span(1, 7, 200, 10),
        span(1, 9, 0, 1000),
        span(2, 7, 0, 1000),
    ]
    assert covered(events) == pytest.approx(70e-6)
    assert covered([]) == 0


def test_kernels_of_one_kind_are_one_row_and_what_is_shorter_than_most_is_the_rest():
    events = [
        *STREAMS,
        span(1, 7, 0, 30, "loop_add_fusion.1"),
        span(1, 7, 40, 20, "loop_add_fusion_12"),
        span(1, 7, 70, 100, "skinny_matmul"),
        span(1, 8, 200, 6, "memcpy"),
        span(1, 8, 210, 4, "memset"),
        span(2, 7, 0, 1000, "python"),
    ]
    rows = by_kernel(events, steps=2, most=2)
    told = [(row["kernel"], row["launches_per_step"], row["us_per_step"]) for row in rows]
    assert told == [("skinny_matmul", 0.5, 50), ("loop_add_fusion", 1, 25), ("the rest", 1, 5)]
    assert sum(row["share_percent"] for row in rows) == pytest.approx(100)
    assert by_kernel([], steps=1) == []


def test_a_program_tells_what_each_of_its_kernels_is_given():
    """Two products of one kernel are two rows if one has a larger weight; HLO is that of a program of XLA."""
    run = jax.jit(lambda x, first, second: (x @ first) @ second)
    shapes = [jnp.zeros(shape) for shape in ((2, 16), (16, 64), (64, 256))]
    hlo = run.lower(*shapes).compile().as_text() or ""
    entry = hlo[hlo.index("ENTRY") :].splitlines()
    names = [line.split("%")[1].split(" ")[0] for line in entry if "(" in line and " = " in line]
    products = [name for name in names if not name.startswith(("x", "first", "second"))]
    events = [
        *STREAMS,
        *(span(1, 7, at, 10, "gemm", hlo_op=name) for at, name in enumerate(products)),
    ]
    operands = {row["largest_operand"] for row in by_kernel(events, 1, hlo)}
    assert {"f32[16,64]", "f32[64,256]"} <= operands
    assert [row["largest_operand"] for row in by_kernel(events, 1)] == [None]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what is seen without a GPU")
def test_without_a_gpu_a_profile_sees_no_stream():
    assert covered(record_events(lambda: jnp.ones(8).block_until_ready())) == 0
