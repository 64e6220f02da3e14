"""The manifest: programs are compiled once, from types alone, audited, and never while serving in strict mode."""

import gc
import hashlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxkv.errors import ProgramRefused
from jaxkv.programs import compile as compilation
from jaxkv.programs.lowering import trace
from jaxkv.programs.manifest import Lowering, Programs, compile_count
from jaxkv.runner.program_specs import StepSpec
from jaxkv.sampling.features import Features

PAGES, WIDTH = 64, 32
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_kept_on_disk():
    """Another test of the same process may have turned JAX's persistent cache on."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def run(params, cache, ints, floats):
    """Writes one value per slot into every pool and reads the slots back."""
    values = jnp.broadcast_to(params["scale"] * floats.sum(), (ints.shape[0], WIDTH))
    cache = tuple(pool.at[ints].set(values, mode="drop", unique_indices=True) for pool in cache)
    return cache, cache[0][ints] + cache[1][ints]


def arguments(rows=4):
    params = {"scale": jnp.ones(WIDTH)}
    cache = tuple(jnp.full((PAGES, WIDTH), fill, jnp.float32) for fill in (1.0, 2.0))
    return params, cache, np.arange(rows, dtype=np.int32), np.ones(3, np.float32)


def key(rows=4, kind="decode", **options):
    return StepSpec(rows, rows, (1,), decode=kind == "decode", **options)


def test_a_program_is_compiled_once_and_called_often():
    programs = Programs(strict=True)
    params, cache, ints, floats = arguments()
    program = programs.get(key(), lambda: Lowering(run, (params, cache, ints, floats)))
    programs.seal()
    before = compile_count()
    for step in range(5):
        again = programs.get(key(), lambda: pytest.fail("built twice"))
        cache, out = again(params, cache, (ints * 7 + step) % PAGES, floats + step)
        assert again is program
    assert compile_count() == before, "nothing compiles while serving"
    np.testing.assert_array_equal(out, np.full((4, WIDTH), 2 * 15.0))


def test_the_counter_sees_a_compile():
    before = compile_count()
    jax.jit(lambda x: x * 3 + 1)(np.ones(7, np.float32))
    assert compile_count() == before + 1


def test_compiling_leaves_the_cache_as_it_was():
    given = arguments()
    before = [np.asarray(pool).tobytes() for pool in given[1]]
    Programs().get(key(), lambda: Lowering(run, given))
    assert not any(pool.is_deleted() for pool in given[1])
    assert [np.asarray(pool).tobytes() for pool in given[1]] == before


def test_a_call_donates_the_cache_and_updates_it_in_place():
    params, cache, ints, floats = arguments()
    program = Programs().get(key(), lambda: Lowering(run, (params, cache, ints, floats)))
    places = [pool.unsafe_buffer_pointer() for pool in cache]
    after, _ = program(params, cache, ints, floats)
    assert all(pool.is_deleted() for pool in cache)
    assert [pool.unsafe_buffer_pointer() for pool in after] == places
    assert program.report.alias_bytes == 2 * PAGES * WIDTH * 4


def test_shapes_are_enough_to_compile():
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, arguments()))
    program = Programs().get(key(), lambda: Lowering(run, shapes))
    cache, _ = program(*arguments())
    assert cache[0][0, 0] == 3.0


def test_the_lowered_program_is_the_same_in_every_process():
    # The order of dicts and of hashes must not change the program.
    here = str(Path(__file__).parent)
    script = f"import sys; sys.path.append({here!r}); import test_manifest as t; print(t.digest())"
    # The hashes of this process are others.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    settings = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == digest()


def digest():
    text = trace("decode", Lowering(run, arguments())).lower().as_text()
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (2, np.arange(4), r"argument 2 of decode\(.*\) must be int32, got int64"),
        (3, np.ones(3), r"argument 3 of decode\(.*\) must be float32, got float64"),
        (3, jnp.ones(3, jnp.bfloat16), "must be float32, got bfloat16"),
        (2, [0, 1, 2, 3], "must be int32, got list"),
        (3, 1.0, "must be float32, got float"),
    ],
)
def test_a_call_refuses_dtypes_that_jax_would_cast(position, wrong, message):
    given = list(arguments())
    program = Programs().get(key(), lambda: Lowering(run, tuple(given)))
    given[position] = wrong
    with pytest.raises(ValueError, match=message):
        program(*given)
    assert not given[1][0].is_deleted()


def test_a_call_with_another_shape_fails_before_the_cache_is_given_away():
    given = list(arguments())
    program = Programs().get(key(), lambda: Lowering(run, tuple(given)))
    given[2] = np.arange(5, dtype=np.int32)
    with pytest.raises(TypeError, match="compiled with"):
        program(*given)
    assert not given[1][0].is_deleted()


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (3, 1.0, r"argument\[3\] must be an array, got float"),
        (2, np.arange(4), r"argument\[2\] is int64, which JAX would narrow"),
        (3, np.ones(3), r"argument\[3\] is float64, which JAX would narrow"),
        (3, jnp.asarray(1.0), r"argument\[3\] is weakly typed"),
        (0, {"scale": 1.0}, r"argument\[0\]\['scale'\] must be an array"),
    ],
)
def test_a_program_takes_typed_arrays_alone(position, wrong, message):
    given = list(arguments())
    given[position] = wrong
    programs = Programs()
    with pytest.raises(ValueError, match=message):
        programs.get(key(), lambda: Lowering(run, tuple(given)))
    assert programs.manifest() == ()


def test_a_program_that_fails_its_audit_is_not_kept():
    def swapped(*given):
        (keys, values), out = run(*given)
        return (values, keys), out

    programs = Programs()
    with pytest.raises(
        ProgramRefused, match=r"decode\(tokens=4, rows=4, table_widths=1\) does not update"
    ):
        programs.get(key(), lambda: Lowering(swapped, arguments()))
    assert programs.manifest() == ()
    programs.get(key(), lambda: Lowering(run, arguments()))
    assert [program.spec for program in programs.manifest()] == [key()]
    unaudited = Programs(audit=False).get(key(), lambda: Lowering(swapped, arguments()))
    assert unaudited.report.problems


def test_a_failure_while_tracing_leaves_the_manifest_as_it_was():
    def broken(*given):
        raise RuntimeError("no such layer")

    programs = Programs()
    with pytest.raises(RuntimeError, match="no such layer"):
        programs.get(key(), lambda: Lowering(broken, arguments()))
    assert programs.manifest() == ()


def test_a_cache_array_that_changes_its_type_is_named_with_both_types():
    def narrowed(*given):
        (keys, values), out = run(*given)
        return (keys, values.astype(jnp.bfloat16)), out

    message = r"takes cache\[1\] as float32\[64, 32\] and returns it as bfloat16\[64, 32\]"
    with pytest.raises(ProgramRefused, match=message):
        Programs().get(key(), lambda: Lowering(narrowed, arguments()))


def test_a_program_that_returns_its_cache_last_is_refused():
    with pytest.raises(
        ProgramRefused, match="must return its cache, or a tuple that starts with it"
    ):
        Programs().get(key(), lambda: Lowering(lambda *given: run(*given)[::-1], arguments()))


def test_a_program_may_return_its_cache_alone_or_take_none():
    programs = Programs()
    params, cache, ints, floats = arguments()
    alone = programs.get(
        key(kind="prefill"),
        lambda: Lowering(
            lambda cache, ints, floats: run(params, cache, ints, floats)[0],
            (cache, ints, floats),
            0,
        ),
    )
    assert alone(cache, ints, floats)[0].shape == (PAGES, WIDTH)
    without = programs.get(key(8, kind="prefill"), lambda: Lowering(jnp.sum, (floats,), None))
    assert without(floats) == 3.0


def test_a_program_that_is_dropped_leaves_no_trace_behind(monkeypatch):
    """JAX's caches are keyed by the trace; an entry that holds its own key stays for the life of the process."""
    traces = []

    def spied(name, lowering):
        traced = trace(name, lowering)
        traces.append(weakref.ref(traced.jaxpr))
        return traced

    monkeypatch.setattr(compilation, "trace", spied)
    programs = Programs()
    programs.get(key(), lambda: Lowering(run, arguments()))
    programs.get_all({key(8): lambda: Lowering(run, arguments(8))})
    del programs
    gc.collect()
    assert [alive() for alive in traces] == [None, None]


def test_an_argument_that_is_not_read_stays_an_argument():
    def unread(params, cache, ints, floats):
        return tuple(pool.at[ints].set(0.0, mode="drop") for pool in cache), ints

    program = Programs().get(key(), lambda: Lowering(unread, arguments()))
    assert program(*arguments())[0][0][0, 0] == 0.0


def test_weights_in_the_code_of_a_program_are_refused():
    # A closure over the parameters would keep a second copy of them in the executable.
    weights = jnp.ones((600, 600))

    def closed(params, cache, ints, floats):
        return run({"scale": params["scale"] + weights[:WIDTH, :WIDTH].sum(0)}, cache, ints, floats)

    with pytest.raises(ProgramRefused, match="has 1,440,000 bytes of arrays in its code"):
        Programs().get(key(), lambda: Lowering(closed, arguments()))


def test_strict_mode_shows_the_difference_to_the_nearest_program():
    programs = Programs(strict=True)
    programs.get(key(4), lambda: Lowering(run, arguments(4)))
    programs.get(key(8, features=Features(draws=True)), lambda: Lowering(run, arguments(8)))
    programs.seal()
    wanted = key(8, features=Features(draws=True, logprobs=0), pending_checkpoints=2)
    with pytest.raises(ProgramRefused) as refused:
        programs.get(wanted, lambda: pytest.fail("strict mode must not build"))
    message = str(refused.value)
    assert message.startswith(
        "decode(tokens=8, rows=8, table_widths=1, draws=True, logprobs=0, pending_checkpoints=2) was not"
    )
    assert "in the nearest one, decode(tokens=8, rows=8, table_widths=1, draws=True), " in message
    assert "logprobs is None, not 0, pending_checkpoints is None, not 2;" in message


def test_the_difference_to_a_program_of_another_kind_and_the_same_sizes_is_its_kind():
    programs = Programs(strict=True)
    programs.get(key(4, kind="prefill"), lambda: Lowering(run, arguments(4)))
    programs.seal()
    with pytest.raises(ProgramRefused) as refused:
        programs.get(key(4), lambda: pytest.fail("strict mode must not build"))
    assert "table_widths=1), kind is prefill, not decode;" in str(refused.value)


def test_strict_mode_with_no_program_at_all_says_so():
    programs = Programs(strict=True)
    programs.seal()
    with pytest.raises(ProgramRefused, match="no program is known"):
        programs.get(key(), lambda: pytest.fail("strict mode must not build"))


def test_a_late_compile_is_counted_and_logged_when_not_strict(caplog):
    programs = Programs()
    programs.get(key(4), lambda: Lowering(run, arguments(4)))
    assert programs.compiled_late == 0
    programs.seal()
    with caplog.at_level(logging.WARNING):
        programs.get(key(8), lambda: Lowering(run, arguments(8)))
        programs.get(key(8), lambda: pytest.fail("built twice"))
    assert programs.compiled_late == 1
    (record,) = caplog.records
    assert "compiling decode(tokens=8, rows=8, table_widths=1) while serving" in record.getMessage()
    assert "tokens is 4, not 8, rows is 4, not 8" in record.getMessage()


def test_the_manifest_is_sorted_and_has_times():
    programs = Programs()
    for features in (Features(logprobs=2), Features()):
        for rows in (8, 4):
            programs.get(
                key(rows, features=features), lambda rows=rows: Lowering(run, arguments(rows))
            )
    order = [(program.spec.rows, program.spec.features.logprobs) for program in programs.manifest()]
    assert order == [(4, None), (4, 2), (8, None), (8, 2)]
    assert all(program.seconds > 0 and not program.loaded for program in programs.manifest())


def test_programs_can_be_given_xla_options():
    options = {"xla_cpu_enable_fast_math": False}
    program = Programs().get(key(), lambda: Lowering(run, arguments(), compiler_options=options))
    assert program(*arguments())[0][0][0, 0] == 3.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        Programs().get(
            key(), lambda: Lowering(run, arguments(), compiler_options={"xla_no_such_option": 1})
        )


def builds(*sizes, function=run):
    return {key(rows): lambda rows=rows: Lowering(function, arguments(rows)) for rows in sizes}


def test_many_programs_are_those_that_each_alone_would_be():
    programs = Programs()
    one = programs.get(key(4), builds(4)[key(4)])
    made = programs.get_all(builds(16, 4, 8))
    assert [program.spec.rows for program in made] == [16, 4, 8]
    assert made[1] is one
    assert [program.spec.rows for program in programs.manifest()] == [4, 8, 16]
    for program in made:
        params, cache, ints, floats = arguments(program.spec.rows)
        _, out = program(params, cache, ints, floats)
        assert out.shape == (program.spec.rows, WIDTH)
        assert 0 < program.host_seconds <= program.seconds


def test_xla_compiles_some_while_others_are_traced(monkeypatch):
    """The one that is traced last is traced while the first is still being compiled."""
    second_traced = threading.Event()
    compile_alone = jax.stages.Lowered.compile

    def compile_late(lowered, **options):
        assert second_traced.wait(60), "nothing was traced meanwhile"
        return compile_alone(lowered, **options)

    def traced_second(*given):
        second_traced.set()
        return run(*given)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_late)
    both = builds(4) | builds(8, function=traced_second)
    assert len(Programs().get_all(both)) == 2


def test_a_bad_one_among_many_is_told_and_the_others_are_kept():
    def swapped(params, cache, ints, floats):
        cache, out = run(params, cache, ints, floats)
        return (cache[1], cache[0]), out

    programs = Programs()
    with pytest.raises(ProgramRefused, match="in the place of"):
        programs.get_all(builds(4) | builds(8, function=swapped) | builds(16))
    assert [program.spec.rows for program in programs.manifest()] == [4, 16]


def test_a_failure_while_tracing_one_of_many_leaves_the_rest_undone():
    def broken(*_):
        raise ValueError("no such layer")

    programs = Programs()
    with pytest.raises(ValueError, match="no such layer"):
        programs.get_all(builds(4) | builds(8, function=broken) | builds(16))
    assert programs.manifest() == ()
    assert len(programs.get_all(builds(4, 16))) == 2


def test_many_are_refused_like_one_after_the_warm_up():
    programs = Programs(strict=True)
    programs.get_all(builds(4))
    programs.seal()
    assert len(programs.get_all(builds(4))) == 1
    with pytest.raises(ProgramRefused, match="rows is 4, not 8"):
        programs.get_all(builds(4, 8))


def test_a_bar_shows_how_far_it_is(capsys):
    Programs().get_all(builds(4, 8))
    assert capsys.readouterr().err == ""
    Programs().get_all(builds(4, 8), progress=True)
    assert "2/2" in capsys.readouterr().err


def test_compile_seconds_are_wall_time_however_many_are_compiled_side_by_side(monkeypatch):
    now = iter([10.0, 13.0, 20.0, 21.0])
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr("jaxkv.programs.manifest.time", clock)
    programs = Programs()
    programs.get_all(builds(4, 8))
    assert programs.compile_seconds == 3.0
    programs.get(key(16), builds(16)[key(16)])
    assert programs.compile_seconds == 4.0
    programs.get(key(16), builds(16)[key(16)])
    assert programs.compile_seconds == 4.0


def test_a_watcher_hears_of_each_compile_and_of_its_end():
    def broken(*_):
        raise ValueError("no such layer")

    programs, heard = Programs(), []
    with programs.watched(heard.append):
        programs.get(key(4), builds(4)[key(4)])
        programs.get(key(4), builds(4)[key(4)])
        with pytest.raises(ValueError, match="no such layer"):
            programs.get(key(8), builds(8, function=broken)[key(8)])
        programs.get_all(builds(16, 32))
    programs.get(key(64), builds(64)[key(64)])
    assert heard == [key(4).name, "", key(8).name, "", "2 programs", ""]
