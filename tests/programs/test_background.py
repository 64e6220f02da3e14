"""Programs that are compiled in the background: each once, in order, beside others that compile, and until the end."""

import gc
import logging
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv.errors import ProgramRefused
from jaxkv.programs import background
from jaxkv.programs import compile as compilation
from jaxkv.programs.compile import TRACING_LOCK
from jaxkv.programs.jax_cache import repaired_entries
from jaxkv.programs.manifest import Lowering, Programs
from tests.programs.test_manifest import arguments, key, run

ROOT = Path(__file__).parents[2]


class Traces:
    """Lowerings whose traces are counted with their threads, and wait for a gate if they have one."""

    def __init__(self):
        self.seen = []

    def lowering(self, rows, gate=None, function=run):
        def traced(*given):
            self.seen.append((rows, threading.current_thread() is threading.main_thread()))
            assert gate is None or gate.wait(60)
            return function(*given)

        return Lowering(traced, arguments(rows)).without_arrays()

    def some(self, *sizes, **options):
        return {key(rows): self.lowering(rows, **options) for rows in sizes}


def swapped(*given):
    """Does not update its cache in place."""
    (keys, values), out = run(*given)
    return (values, keys), out


def test_programs_are_compiled_in_order_in_a_thread_and_each_is_announced():
    programs, traces, compiled = Programs(), Traces(), []
    programs.get(key(4), lambda: traces.lowering(4))
    programs.compile_in_background(traces.some(8, 4, 2), compiled.append)
    programs.compile_in_background(traces.some(2, 6), compiled.append)
    programs.wait()
    assert traces.seen == [(4, True), (8, False), (2, False), (6, False)]
    assert sorted(program.spec.rows for program in compiled) == [2, 6, 8]
    assert [program.spec.rows for program in programs.manifest()] == [2, 4, 6, 8]
    assert programs.pending == 0
    program = programs.get(key(8), lambda: pytest.fail("built twice"))
    cache, out = program(*arguments(8))
    np.testing.assert_array_equal(out, np.full((8, 32), 6.0))
    assert not any(pool.is_deleted() for pool in cache)
    assert programs.compile_seconds >= program.seconds > 0


def test_types_stand_for_the_arguments_while_a_program_waits():
    lowering = Lowering(run, arguments()).without_arrays()
    leaves = jax.tree.leaves(lowering.arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert lowering.without_arrays() == lowering


def test_one_that_is_needed_is_compiled_at_once_or_waited_for_but_never_twice():
    programs, traces, gate, compiled = Programs(strict=True), Traces(), threading.Event(), []
    lowerings = traces.some(2, gate=gate) | traces.some(4, 6)
    with TRACING_LOCK:
        # The thread cannot trace now.
        programs.compile_in_background(lowerings, compiled.append)
        programs.seal()
        assert programs.pending == 3
        assert programs.is_pending(key(6))
        taken = programs.get(key(6), lambda: traces.lowering(6))
        assert programs.pending == 2
    while len(traces.seen) < 2:
        pass
    threading.Timer(0.2, gate.set).start()
    waited = programs.get(key(2), lambda: pytest.fail("built twice"))
    assert gate.is_set()
    programs.wait()
    assert traces.seen == [(6, True), (2, False), (4, False)]
    assert [program.spec.rows for program in compiled] in ([2, 4], [4, 2])
    assert programs.manifest() == (waited, programs.get(key(4), pytest.fail), taken)
    assert programs.compiled_late == 0
    with pytest.raises(ProgramRefused, match="was not compiled before serving"):
        programs.get(key(8), lambda: traces.lowering(8))


def test_several_that_are_needed_are_compiled_with_those_that_wait():
    programs, traces = Programs(), Traces()
    with TRACING_LOCK:
        programs.compile_in_background(traces.some(8, 2, 4), lambda program: None)
        builds = {key(rows): lambda rows=rows: traces.lowering(rows) for rows in (4, 6)}
        assert [program.spec.rows for program in programs.get_all(builds)] == [4, 6]
        assert programs.pending == 2
    programs.wait()
    assert traces.seen == [(4, True), (6, True), (8, False), (2, False)]


def test_two_threads_never_trace_at_once():
    programs, traces, gate = Programs(), Traces(), threading.Event()
    programs.compile_in_background(traces.some(2, gate=gate), lambda program: None)
    while not traces.seen:
        pass
    assert not TRACING_LOCK.acquire(blocking=False)
    gate.set()
    programs.get(key(4), lambda: traces.lowering(4))
    assert traces.seen == [(2, False), (4, True)]
    programs.wait()


@pytest.mark.parametrize("fails", ["traced", "audited"])
def test_a_failure_is_logged_and_raised_once_and_the_others_are_compiled(fails, caplog):
    programs, traces, compiled = Programs(strict=True), Traces(), []
    bad = traces.lowering(4, function=swapped)
    if fails == "traced":
        bad = Lowering(lambda *given: 1 / 0, arguments(4))
    with caplog.at_level(logging.ERROR), TRACING_LOCK:
        programs.compile_in_background({key(4): bad} | traces.some(8, 2), compiled.append)
        programs.seal()
    with pytest.raises((ProgramRefused, ZeroDivisionError)):
        programs.wait()
    assert sum("could not be compiled in the background" in one for one in caplog.messages) == 1
    programs.wait()
    assert [program.spec.rows for program in programs.manifest()] == [2, 8]
    assert len(compiled) == 2
    assert not programs.is_pending(key(4))
    # Like one that was never declared.
    with pytest.raises(ProgramRefused, match="was not compiled before serving"):
        programs.get(key(4), lambda: traces.lowering(4))


def test_one_without_which_all_goes_on_fails_in_the_log_alone(caplog):
    """It is not compiled in the thread that asks, either."""
    programs, traces, compiled = Programs(), Traces(), []
    bad = traces.lowering(4, function=swapped)
    with caplog.at_level(logging.ERROR):
        programs.compile_in_background({key(4): bad}, compiled.append, optional=True)
        programs.compile_in_background(traces.some(2), compiled.append)
        programs.wait()
    assert sum("could not be compiled in the background" in one for one in caplog.messages) == 1
    assert [program.spec.rows for program in programs.manifest()] == [2]
    with jax.default_matmul_precision("highest"):
        programs.compile_in_background(traces.some(8), compiled.append, optional=True)
    assert not programs.is_pending(key(8))
    assert [program.spec.rows for program in compiled] == [2]


def test_one_that_fails_while_it_is_waited_for_fails_there_too():
    programs, traces, gate = Programs(), Traces(), threading.Event()
    bad = traces.lowering(4, gate, swapped)
    programs.compile_in_background({key(4): bad}, lambda program: None)
    while not traces.seen:
        pass
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(ProgramRefused, match="does not update"):
        programs.get(key(4), lambda: traces.lowering(4, function=swapped))
    with pytest.raises(ProgramRefused, match="does not update"):
        programs.wait()


def test_a_failure_costs_none_of_those_whose_kernels_other_processes_lower(monkeypatch):
    """They wait until all are traced; a small one that is ready comes before that."""
    monkeypatch.setattr(compilation.Build, "request", lambda build, helpers: True)
    monkeypatch.setattr(
        compilation.Build, "is_ready", lambda build, helpers: "_10x" in build.traced.fun_name
    )
    programs, traces, order = Programs(), Traces(), []
    bad = Lowering(lambda *given: 1 / 0, arguments(4)).without_arrays()
    lowerings = traces.some(10, 9) | {key(4): bad} | traces.some(2, 3)
    lower = compilation.Build.lower

    def lowered(build):
        order.append((build.traced.fun_name, len(traces.seen)))
        lower(build)

    monkeypatch.setattr(compilation.Build, "lower", lowered)
    programs.compile_in_background(lowerings, lambda program: None)
    with pytest.raises(ZeroDivisionError):
        programs.wait()
    assert [program.spec.rows for program in programs.manifest()] == [2, 3, 9, 10]
    assert order[0] == ("decode_10x10x1", 1)


def test_a_program_that_is_added_again_is_compiled_once():
    programs, traces, compiled = Programs(), Traces(), []
    for _ in range(5):
        programs.compile_in_background(traces.some(2, 3, 4), compiled.append)
    programs.wait()
    programs.compile_in_background(traces.some(2, 3, 4), compiled.append)
    programs.wait()
    assert sorted(rows for rows, _ in traces.seen) == [2, 3, 4]
    assert len(compiled) == 3


def test_programs_that_are_dropped_end_the_thread_and_free_their_owner():
    traces, gate = Traces(), threading.Event()
    owner = SimpleNamespace(programs=Programs())
    gone = weakref.ref(owner.programs)
    lowerings = traces.some(2, gate=gate) | traces.some(*range(3, 30))
    owner.programs.compile_in_background(lowerings, lambda program: None)
    [thread] = [one for one in threading.enumerate() if one.name == "jaxkv-compiler"]
    while not traces.seen:
        pass
    del owner
    gc.collect()
    assert gone() is None
    gate.set()
    thread.join(60)
    assert not thread.is_alive()
    assert traces.seen == [(2, False)]


def test_the_end_drops_those_that_wait_and_leaves_no_thread():
    programs, traces, gate = Programs(), Traces(), threading.Event()
    lowerings = traces.some(2, gate=gate) | traces.some(4, 6)
    programs.compile_in_background(lowerings, lambda program: None)
    while not traces.seen:
        pass
    threading.Timer(0.2, gate.set).start()
    programs.clear()
    assert programs.manifest() == ()
    assert programs.pending == 0
    assert traces.seen == [(2, False)]
    assert "jaxkv-compiler" not in [thread.name for thread in threading.enumerate()]
    programs.wait()


def test_settings_of_this_thread_alone_hold_for_all_programs():
    programs, traces, compiled = Programs(), Traces(), []
    with jax.default_matmul_precision("highest"):
        programs.compile_in_background(traces.some(2, 4), compiled.append)
        assert programs.pending == 0
    assert traces.seen == [(2, True), (4, True)]
    assert len(compiled) == 2


def test_threads_take_turns_often_until_the_last_one_has_compiled():
    programs, traces, gate = Programs(), Traces(), threading.Event()
    usual = sys.getswitchinterval()
    programs.compile_in_background(traces.some(2, gate=gate), lambda program: None)
    while not traces.seen:
        pass
    assert sys.getswitchinterval() <= 0.001 < usual
    gate.set()
    programs.wait()
    assert sys.getswitchinterval() == usual
    first, second = background._quick_switches(), background._quick_switches()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


def test_threads_that_compile_at_once_leave_the_warnings_of_the_process_as_they_were():
    filters, show = list(warnings.filters), warnings.showwarning
    first, second = repaired_entries(), repaired_entries()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert warnings.showwarning is not show, "the second one still repairs"
    second.__exit__(None, None, None)
    assert list(warnings.filters) == filters
    assert warnings.showwarning is show
    # A user's block that was open when a compilation began, and ends first.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = repaired_entries()
        first.__enter__()
    first.__exit__(None, None, None)
    assert list(warnings.filters) == filters
    assert warnings.showwarning is show


def test_a_process_that_ends_leaves_what_waits():
    script = """
from tests.programs.test_background import *
programs, traces, first = Programs(), Traces(), threading.Event()
def slow(*given):
    first.set()
    threading.Event().wait(0.2)
    print("traced", flush=True)
    return run(*given)
programs.compile_in_background(traces.some(*range(1, 51), function=slow), lambda program: None)
first.wait()
"""
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 1 <= done.stdout.count("traced") < 50
    assert "Error" not in done.stderr
