"""Helpers lower the kernels of a trace in other processes, and what they cannot lower is left to this one.

Kernels are plain functions of JAX here; `tests/engine/test_h200_helpers.py` has those of an H200.
"""

import logging
import os
import sys
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import deferred as module
from pallas_kernels import lowering_helpers
from pallas_kernels.deferred import deferred, instances
from pallas_kernels.lowering_helpers import LoweringHelpers
from tests.pallas_kernels.test_deferred import OPTIONS, TRACES, Sizes, scale

X = jnp.arange(8, dtype=jnp.float32)
CPU = ("cpu",)
FACTORS = (2.0, 3.0, 4.0, 5.0)
PRODUCT = np.arange(8) * 120


@pytest.fixture(autouse=True)
def lowered(monkeypatch):
    kept = {}
    TRACES.clear()
    monkeypatch.setattr(module, "_lowered", kept)
    return kept


def program(*kernels):
    def run(x):
        for kernel in kernels:
            x = kernel(x)
        return x

    return jax.jit(run).trace(X)


def scaled(factors=FACTORS, options=OPTIONS):
    return program(*(scale(factor, options) for factor in factors))


def launch_here(body, options):
    """Fails in every other process."""
    assert os.environ.get("JAXKV_TEST_OF_HELPERS") != "1"
    return lambda x: x * 2


def launch_at_once(body, options):
    """Ends any other process."""
    if os.environ.get("JAXKV_TEST_OF_HELPERS") == "1":
        os._exit(1)
    return lambda x: x * 2


@pytest.fixture
def in_helpers(monkeypatch):
    """Lets kernels know that they are in another process, which is given a variable that this one has not."""
    monkeypatch.setitem(lowering_helpers._ENVIRONMENT, "JAXKV_TEST_OF_HELPERS", "1")


def waited(helpers, traced):
    """Collects what helpers have lowered, once they have lowered all."""
    assert not wait(helpers._lowered.values(), 60).not_done
    assert helpers.is_done(traced)
    helpers.collect(traced)


def test_a_kernel_is_lowered_by_another_process_and_is_the_same(lowered):
    traced = scaled()
    with LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        waited(helpers, traced)
    assert len(lowered) == len(FACTORS)
    compiled = traced.lower().compile()
    assert TRACES == []
    np.testing.assert_array_equal(compiled(X), PRODUCT)
    texts = [str(parsed(module)) for module in lowered.values()]
    lowered.clear()
    scaled().lower()
    assert len(TRACES) == len(FACTORS)
    assert [str(parsed(module)) for module in lowered.values()] == texts


def parsed(module):
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        return str(ir.Module.parse(module))


def test_few_kernels_start_no_process(lowered):
    traced = scaled(FACTORS[:-1])
    with LoweringHelpers(8) as helpers:
        helpers.request(traced, CPU)
        assert helpers._threads == []
        helpers.collect(traced)
    assert lowered == {}
    np.testing.assert_array_equal(traced.lower().compile()(X), np.arange(8) * 24)


def test_processes_are_as_many_as_their_kernels_need_and_at_most_as_given():
    with LoweringHelpers(2) as helpers:
        helpers.request(scaled(range(2, 9)), CPU)
        assert len(helpers._threads) == 1
        helpers.request(scaled(range(2, 30)), CPU)
        assert len(helpers._threads) == 2
    assert all(not thread.is_alive() for thread in helpers._threads)
    assert all(process.returncode is not None for process in helpers._processes)
    assert len(helpers._threads) == 2


def test_kernels_that_are_lowered_already_or_requested_are_not_asked_for_again():
    jax.jit(scale(2.0)).lower(X)
    with LoweringHelpers(0) as helpers:
        assert not helpers.request(scaled(), CPU)
        assert helpers._lowered == {}
    with LoweringHelpers(1) as helpers:
        assert not helpers.request(scaled(), CPU)
        assert not helpers.request(scaled(), CPU)
        assert len(helpers._lowered) == len(FACTORS) - 1
        assert helpers._threads == []


# That a process ends is in the tests of processes below.
@pytest.mark.parametrize(
    "launch", [launch_here, pytest.param(launch_at_once, marks=pytest.mark.slow)]
)
def test_what_another_process_cannot_lower_is_lowered_here_and_said(
    launch, lowered, in_helpers, caplog
):
    kernels = [deferred(launch, Sizes(factor).body, OPTIONS) for factor in FACTORS]
    traced = program(*kernels)
    with caplog.at_level(logging.WARNING), LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        first = next(iter(helpers._lowered.values()))
        with pytest.raises(RuntimeError):
            first.result(60)
        helpers.collect(traced)
        assert lowered == {}
        np.testing.assert_array_equal(traced.lower().compile()(X), np.arange(8) * 16)
    (record,) = caplog.records
    assert "scale: " in record.getMessage()


def test_other_sources_are_refused(lowered, monkeypatch, caplog):
    monkeypatch.setattr(lowering_helpers, "kernel_sources", lambda: "as they were")
    traced = scaled()
    with caplog.at_level(logging.WARNING), LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        helpers._threads[0].join(60)
        helpers.collect(traced)
    assert lowered == {}
    assert "have changed since they were imported" in caplog.text
    np.testing.assert_array_equal(traced.lower().compile()(X), PRODUCT)


def test_a_process_that_does_not_start_is_said(monkeypatch, caplog):
    monkeypatch.setattr(lowering_helpers, "_PROGRAM", "raise SystemExit(3)")
    with caplog.at_level(logging.WARNING), LoweringHelpers(1) as helpers:
        helpers.request(scaled(), CPU)
        helpers._threads[0].join(60)
    assert "no process could be started: a process ended: 3" in caplog.text


def test_the_last_line_of_its_errors_says_why_a_process_ended(monkeypatch, caplog):
    monkeypatch.setattr(lowering_helpers, "_PROGRAM", "raise OSError('no memory')")
    with caplog.at_level(logging.WARNING), LoweringHelpers(1) as helpers:
        helpers.request(scaled(), CPU)
        helpers._threads[0].join(60)
    assert "a process ended: OSError: no memory" in caplog.text


def test_files_of_the_working_directory_are_no_modules_of_a_process(lowered, tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise AssertionError('no part of this program')")
    monkeypatch.setattr(sys, "path", [str(Path(path or ".").resolve()) for path in sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORM_NAME", "gpu")
    traced = scaled()
    with LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        waited(helpers, traced)
    assert len(lowered) == len(FACTORS)


def test_a_kernel_that_takes_too_long_is_lowered_here(lowered, monkeypatch, caplog):
    monkeypatch.setattr(lowering_helpers, "_LONGEST", 0.05)
    traced = scaled()
    with caplog.at_level(logging.WARNING), LoweringHelpers(0) as helpers:
        kernels = helpers._kernels[traced] = tuple(instances(traced.jaxpr.jaxpr, CPU))
        for instance in kernels:
            future = helpers._lowered[instance] = Future()
            future.set_running_or_notify_cancel()
            helpers._begun[future] = time.monotonic()
        assert not helpers.is_done(traced)
        start = time.monotonic()
        helpers.collect(traced)
        # All have begun at the same time, so one limit is that of all.
        assert time.monotonic() - start < 0.15
    assert lowered == {}
    assert "scale: it took too long" in caplog.text


def test_processes_end_after_what_waits(lowered):
    traced = scaled()
    with LoweringHelpers(1) as helpers:
        assert helpers.request(traced, CPU)
        helpers.end()
        helpers._threads[0].join(60)
        assert helpers._processes[0].returncode is not None
        helpers.collect(traced)
    assert len(lowered) == len(FACTORS)


@pytest.mark.parametrize(
    ("limits", "cores", "memory"),
    [
        ({}, 64, 2**40),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, 2**40),
        ({"cpu.max": "400000 100000\n", "memory.max": f"{2**33}\n"}, 4, 2**33),
        ({"cpu.max": "50000 100000\n"}, 0, 2**40),
    ],
)
def test_containers_limit_the_processes(limits, cores, memory, tmp_path, monkeypatch):
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(lowering_helpers, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**28, "SC_PAGE_SIZE": 2**12}.get)
    found = lowering_helpers._cores(), lowering_helpers._memory()
    assert found == (min(cores, lowering_helpers._MOST + 2), memory)
    expected = min(12, cores - 2, memory // 2**30)
    assert LoweringHelpers()._most == expected


def test_settings_of_this_process_hold_in_the_others():
    found = []
    for precision in (None, "highest"):
        with jax.default_matmul_precision(precision):
            helpers = LoweringHelpers(1)
            with helpers, helpers._process(settings_with(precision)) as ask:
                found.append(ask(pack_square()))
    assert [answer.error for answer in found] == ["", ""]
    plain, highest = (parsed(answer.module) for answer in found)
    assert "HIGHEST" in highest
    assert "HIGHEST" not in plain


def settings_with(precision):
    found = lowering_helpers._settings()
    assert found["jax_default_matmul_precision"] == precision
    assert "jax_platforms" not in found
    return found


def launch_square(body, options):
    return lambda x: x @ x


def pack_square():
    options = OPTIONS | {"out_type": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    traced = jax.jit(deferred(launch_square, Sizes(1.0).body, options)).trace(jnp.ones((8, 8)))
    (instance,) = instances(traced.jaxpr.jaxpr, CPU)
    return lowering_helpers._packed(instance)


def test_a_copy_that_is_another_kernel_is_refused():
    (instance,) = instances(scaled([2.0]).jaxpr.jaxpr, CPU)
    answer = lowering_helpers._answer(lowering_helpers._packed(instance))
    assert answer.module is not None
    object.__setattr__(instance.kernel, "options", OPTIONS | {"kernel_name": "other"})
    answer = lowering_helpers._answer(lowering_helpers._packed(instance))
    assert answer.module is None
    assert "another kernel" in answer.error


def test_kernels_of_the_main_module_and_of_no_module_stay_here(monkeypatch):
    (instance,) = instances(scaled([2.0]).jaxpr.jaxpr, CPU)
    monkeypatch.setattr(Sizes, "__module__", "__main__")
    assert lowering_helpers._packed(instance) is None
    local = partial(instance.kernel.body, lambda: 0)
    object.__setattr__(instance.kernel, "body", local)
    assert lowering_helpers._packed(instance) is None


def test_kernels_inside_calls_loops_and_branches_are_found():
    kernels = [scale(factor) for factor in FACTORS]

    def run(x):
        x = jax.jit(kernels[0])(x)
        x = jax.lax.fori_loop(0, 2, lambda _, y: kernels[1](y), x)
        x = jax.lax.cond(x[0] > 0, kernels[2], kernels[3], x)
        return jax.vmap(kernels[0])(x[None])[0]

    found = instances(jax.jit(run).trace(X).jaxpr.jaxpr, CPU)
    assert len(found) == len(FACTORS)
    assert {one.name for one in found} == {"scale"}
    assert {one.operands for one in found} == {(jax.ShapeDtypeStruct((8,), jnp.float32),)}


@pytest.fixture
def packed(monkeypatch, compiled_anew):
    """Returns a kernel for another process, which takes this machine's CPU for a GPU."""
    monkeypatch.setattr(lowering_helpers, "_described", lambda: jax.devices()[0])
    (instance,) = instances(scaled([2.0]).jaxpr.jaxpr, ("cuda",))
    return lowering_helpers._packed(instance)


def test_a_compiled_kernel_comes_as_a_program(packed):
    answer = lowering_helpers._answer(packed)
    assert answer.module is not None
    assert answer.error == ""
    assert (answer.compiled.operands, answer.compiled.results) == (1, 1)
    (found,) = answer.compiled.load(jax.devices()[0])(X)
    np.testing.assert_array_equal(found, np.arange(8) * 2)


def test_a_kernel_that_does_not_compile_is_lowered_all_the_same(packed, monkeypatch):
    def refuse(_):
        raise ValueError("no assembler")

    expected = lowering_helpers._answer(packed).module
    monkeypatch.setattr(lowering_helpers.serialize_executable, "serialize", refuse)
    answer = lowering_helpers._answer(packed)
    assert parsed(answer.module) == parsed(expected)
    assert answer.compiled is None
    assert "no assembler" in answer.error


def test_without_the_plugin_of_cuda_kernels_are_lowered_alone(monkeypatch):
    def missing():
        raise RuntimeError("no plugin")

    monkeypatch.setattr(lowering_helpers, "described_gpu", missing)
    lowering_helpers._described.cache_clear()
    (instance,) = instances(scaled([2.0]).jaxpr.jaxpr, ("cuda",))
    answer = lowering_helpers._answer(lowering_helpers._packed(instance))
    lowering_helpers._described.cache_clear()
    assert answer.module is not None
    assert (answer.compiled, answer.error) == (None, "")


@pytest.fixture
def answers(monkeypatch):
    """Returns a list; the one other process answers with a kernel's module and the next entry of it."""
    given = []

    @contextmanager
    def process(helpers, settings):
        def ask(packed):
            module = lowering_helpers._answer(packed).module
            return lowering_helpers._Answer(module, *given.pop(0))

        yield ask

    monkeypatch.setattr(LoweringHelpers, "_process", process)
    return given


def collected(traced):
    with LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        waited(helpers, traced)
        return list(helpers._loaded)


def test_after_an_answer_that_cannot_be_read_the_process_is_asked_no_more(answers, lowered, caplog):
    answers += [(None, ""), (None,) * 5, (None, ""), (None, "")]
    traced = scaled()
    with caplog.at_level(logging.WARNING), LoweringHelpers(1) as helpers:
        helpers.request(traced, CPU)
        helpers._threads[0].join(60)
        helpers.collect(traced)
    assert len(lowered) == 1
    assert len(answers) == 2
    assert "scale: " in caplog.text


def test_what_failed_to_compile_is_said_and_kept(answers, lowered, caplog):
    answers += [(None, "no assembler"), (None, ""), (None, ""), (None, "")]
    with caplog.at_level(logging.WARNING):
        collected(scaled())
    assert len(lowered) == len(FACTORS)
    assert "lowered alone: no assembler" in caplog.text


def test_compiled_kernels_are_loaded_where_a_gpu_is_and_a_failure_is_said(
    answers, lowered, monkeypatch, caplog
):
    class Loads(lowering_helpers._Compiled):
        def load(self, device):
            return device

    class Fails(lowering_helpers._Compiled):
        def load(self, device):
            raise TypeError("another driver")

    answers += [(one(b"", 1, 1), "") for one in (Loads, Fails)] + [(None, "")] * 2
    gpu = object()
    monkeypatch.setattr(lowering_helpers, "_gpu", lambda: gpu)
    with caplog.at_level(logging.WARNING):
        assert collected(scaled()) == [gpu]
    assert len(lowered) == len(FACTORS)
    assert "cannot be loaded: another driver" in caplog.text
