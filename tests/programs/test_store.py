"""Programs on disk by their traces: a warm start lowers nothing, and never runs a program of another trace."""

import logging
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.topologies import TopologyDescription
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv.atomic_write import atomic_write
from jaxkv.errors import ProgramRefused
from jaxkv.programs import compile as compilation
from jaxkv.programs import fingerprint as trace_name
from jaxkv.programs import lowering
from jaxkv.programs import store as program_store
from jaxkv.programs.fingerprint import devices_of, name_traced
from jaxkv.programs.jax_cache import VARIABLE, enable_compile_cache, why_not_folder
from jaxkv.programs.manifest import Lowering, Programs, compile_count
from jaxkv.programs.store import ProgramStore, open_store
from jaxkv.runner.program_specs import StepSpec
from pallas_kernels import deferred
from pallas_kernels.lowering_helpers import LoweringHelpers
from tests.devices import needs_devices
from tests.jax_settings import cache_settings
from tests.pallas_kernels.test_deferred import OPTIONS, TRACES, scale

ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 64, 8
KEY = StepSpec(4, 4, (1,), decode=True)
FACTOR = 2.0


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """JAX's cache is on in a fresh private folder, and keeps nothing itself."""
    made = tmp_path / "programs"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(compilation, "MIN_COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(compilation, "_STORED_PLATFORMS", ("cpu",))
    with cache_settings(
        jax_compilation_cache_dir=str(made), jax_persistent_cache_min_compile_time_secs=1e9
    ):
        yield made


def add(params, cache, ids):
    """Adds to the named rows of the cache and reads them."""
    cache = cache.at[ids].add(params["scale"] * FACTOR, mode="drop", unique_indices=True)
    return cache, cache[ids]


def arguments(rows=ROWS):
    cache = jnp.ones((rows, WIDTH))
    return {"scale": jnp.full(WIDTH, 3.0, jnp.float32)}, cache, np.arange(4, dtype=np.int32)


def fresh(function):
    """Returns a copy of a function, of which JAX keeps no trace, as in a process of its own."""
    code, name = function.__code__, function.__name__
    return FunctionType(code, globals(), name, function.__defaults__, function.__closure__)


def build(function=add, **options):
    """Compiles as a process of its own would, which has traced nothing yet."""
    types = jax.eval_shape(fresh(arguments))
    return Programs().get(KEY, lambda: Lowering(fresh(function), types, **options))


def stored(folder):
    return sorted((folder / "traced").glob("*"))


def refuse_to_lower(monkeypatch):
    def lower(*_, **__):
        raise AssertionError("a stored program was lowered")

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)


def test_a_stored_program_is_neither_lowered_nor_compiled_and_does_the_same(folder, monkeypatch):
    first = build()
    cold = [np.asarray(out) for out in first(*arguments())]
    assert not first.loaded
    assert len(stored(folder)) == 1
    refuse_to_lower(monkeypatch)
    before = compile_count()
    again = build()
    assert again.loaded
    assert again.report == first.report
    assert compile_count() == before + 1
    for one, other in zip(cold, again(*arguments()), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


def test_a_stored_program_is_not_in_jaxs_cache_as_well(folder, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    build()
    assert len(stored(folder)) == 1
    assert not list(folder.glob(f"jit_{KEY.name}-*-cache"))
    monkeypatch.setattr(compilation, "_STORED_PLATFORMS", ())
    build()
    assert list(folder.glob(f"jit_{KEY.name}-*-cache"))


def test_a_kernel_whose_text_has_changed_is_another_program(folder, monkeypatch):
    """What `inline_mgpu` puts into a kernel shows in no trace."""
    build()
    monkeypatch.setattr(trace_name, "kernel_sources", lambda: "edited")
    assert not build().loaded
    assert len(stored(folder)) == 2


def test_a_loaded_program_donates_its_cache_and_checks_its_dtypes():
    build()
    again = build()
    assert again.loaded
    params, cache, ids = arguments()
    with pytest.raises(ValueError, match=r"argument 2 .* must be int32"):
        again(params, cache, ids.astype(np.int64))
    again(params, cache, ids)
    assert cache.is_deleted()


def test_whoever_changes_a_function_gets_another_program(monkeypatch):
    """What was traced counts, not where it was written: a patched constant is a different program."""
    build()
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    changed = build()
    assert not changed.loaded
    assert np.asarray(changed(*arguments())[1])[0, 0] == 1 + 3 * 5


@pytest.mark.parametrize("nested", [False, True])
def test_arrays_in_the_code_count_by_their_values(nested):
    def scaled(by):
        table = np.arange(WIDTH, dtype=np.float32) * by

        def inner(x):
            return x * jnp.asarray(table)

        def run(params, cache, ids):
            values = (jax.jit(inner) if nested else inner)(params["scale"])
            cache = cache.at[ids].add(values, mode="drop", unique_indices=True)
            return cache, cache[ids]

        return run

    assert not build(scaled(1.0)).loaded
    other = build(scaled(2.0))
    assert not other.loaded
    assert np.asarray(other(*arguments())[1])[0, 1] == 1 + 3 * 2
    assert build(scaled(2.0)).loaded


def test_types_options_and_settings_make_the_name():
    def name(rows=ROWS, options=(), **settings):
        work = Lowering(fresh(add), jax.eval_shape(lambda: arguments(rows)))
        specs = lowering.argument_types(work)
        devices = devices_of(specs)
        return name_traced("decode", lowering.trace("decode", work), specs, devices, dict(options))

    names = [name(), name(rows=ROWS + 1), name(options=(("xla_cpu_enable_fast_math", True),))]
    with jax.default_matmul_precision("highest"):
        names.append(name())
    assert len(set(names)) == 4
    assert name() == names[0]
    assert all(one.startswith("decode-") for one in names)


def test_the_environment_of_xla_makes_the_name(monkeypatch):
    assert not build().loaded
    with monkeypatch.context() as other:
        other.setenv("XLA_FLAGS", "--xla_nothing_that_this_process_has_read")
        assert not build().loaded
    assert build().loaded


@pytest.mark.parametrize("size", [0, 20, 1000])
def test_a_damaged_file_is_replaced_and_told_of(folder, caplog, size):
    build()
    (path,) = stored(folder)
    whole = path.stat().st_size
    os.truncate(path, size)
    with caplog.at_level(logging.WARNING):
        assert not build().loaded
    assert "damaged" in caplog.text
    assert path.stat().st_size >= whole - 64
    assert build().loaded


def test_a_program_that_was_refused_is_not_kept(folder):
    def swapped(params, cache, ids):
        return (cache[1], cache[0]), cache[0][ids]

    params, pool, ids = jax.eval_shape(lambda: arguments(1024))
    with pytest.raises(ProgramRefused, match="in the place of"):
        Programs().get(KEY, lambda: Lowering(swapped, (params, (pool, pool), ids)))
    assert stored(folder) == []


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    assert why_not_folder(folder) is None
    os.chmod(folder, stat.S_IRWXU | stat.S_IRWXG)
    program_store._is_ours.cache_clear()
    assert open_store() is None
    assert not build().loaded
    os.chmod(folder, stat.S_IRWXU)
    program_store._is_ours.cache_clear()
    assert open_store() is not None


def test_no_store_without_jax_s_cache(monkeypatch):
    jax.config.update("jax_compilation_cache_dir", None)
    assert open_store() is None


def put(path, size, age):
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1e9 - age, 1e9 - age))


def names_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_programs_used_last_are_kept(folder):
    for age, name in enumerate(("new", "middle", "old")):
        put(folder / f"{name}.program", 100, age)
    (folder / "other").write_bytes(bytes(1000))
    ProgramStore(folder).trim(200)
    assert names_in(folder) == {"new.program", "middle.program", "other"}


def test_jax_s_entries_count_where_jaxkv_has_turned_its_cache_on(folder):
    """JAX bounds its cache only with a package that jaxkv does not need, and without the programs beside it."""

    def fill():
        put(folder / "traced" / "new.program", 100, 0)
        put(folder / "jit_step-1-cache", 100, 1)
        put(folder / "traced" / "old.program", 100, 2)
        put(folder / "jit_step-2-cache", 100, 3)
        put(folder / "notes", 1000, 4)

    store = open_store()
    fill()
    store.trim(100)
    theirs = {"jit_step-1-cache", "jit_step-2-cache", "notes"}
    assert names_in(folder) == {"traced/new.program"} | theirs, "the user has turned the cache on"
    jax.config.update("jax_compilation_cache_dir", None)
    assert enable_compile_cache({VARIABLE: str(folder)}) == folder
    fill()
    store.trim(200)
    assert names_in(folder) == {"traced/new.program", "jit_step-1-cache", "notes"}


def test_the_unfinished_file_of_a_killed_process_is_removed_and_one_under_way_counts(folder):
    store = folder / "traced"
    store.mkdir(mode=0o700)
    script = f"""
import os
from pathlib import Path
from jaxkv.atomic_write import atomic_write
with atomic_write(Path({str(store)!r}) / "killed.program") as unfinished:
    unfinished.write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    assert [path.stat().st_size for path in store.glob(".killed*/content")] == [1000]
    put(store / "kept.program", 100, 0)
    put(store / "old.program", 100, 1)
    with atomic_write(store / "new.program") as unfinished:
        unfinished.write_bytes(bytes(100))
        for path in store.glob(".*"):
            os.utime(path, (0, 0))
        ProgramStore(store).trim(200)
        assert list(store.glob(".killed*")) == []
    assert names_in(store) == {"kept.program", "new.program"}


def on_mesh(*numbers):
    """Returns a function and arguments over the devices with these numbers, in this order, whose sums cross devices."""
    mesh = Mesh(np.asarray([jax.devices()[number] for number in numbers]), ("tensor",))
    everywhere, rows, columns = (
        PartitionSpec(),
        PartitionSpec("tensor"),
        PartitionSpec(None, "tensor"),
    )

    def part(scale, cache, ids):
        total = jax.lax.psum(jnp.sum(cache[0]), "tensor")
        place = jax.lax.axis_index("tensor").astype(cache.dtype)
        added = cache.at[ids].add(scale * total + place, mode="drop", unique_indices=True)
        return added, added[ids]

    def run(params, cache, ids):
        divided = jax.shard_map(
            part, mesh=mesh, in_specs=(rows, columns, everywhere), out_specs=(columns, columns)
        )
        return divided(params["scale"], cache, ids)

    places = {"scale": rows}, columns, everywhere
    return run, jax.device_put(
        arguments(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), places)
    )


def check_parts(cache, *numbers):
    """Checks that each device has added its own place in the mesh, and the sum over all of them."""
    parts = {shard.device.id: np.asarray(shard.data) for shard in cache.addressable_shards}
    assert parts.keys() == set(numbers)
    for place, number in enumerate(numbers):
        np.testing.assert_array_equal(parts[number][0], 1 + 3 * WIDTH + place)


def build_on(*numbers):
    """Compiles for these devices as a process of its own would: each call makes a function."""
    return Programs().get(KEY, lambda: Lowering(*on_mesh(*numbers)))


@needs_devices(4)
def test_a_program_of_several_devices_comes_back_and_does_the_same(folder, monkeypatch):
    first = build_on(3, 1)
    cold = first(*on_mesh(3, 1)[1])
    assert len(stored(folder)) == 1
    refuse_to_lower(monkeypatch)
    again = build_on(3, 1)
    assert again.loaded
    assert again.report == first.report
    given = on_mesh(3, 1)[1]
    warm = again(*given)
    assert given[1].is_deleted()
    check_parts(warm[0], 3, 1)
    for one, other in zip(cold, warm, strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@needs_devices(4)
@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (1, 0), (0, 2)])
def test_a_mesh_of_other_devices_or_another_order_is_another_program(folder, numbers):
    build_on(0, 1)
    other = build_on(*numbers)
    assert not other.loaded
    assert len(stored(folder)) == 2
    check_parts(other(*on_mesh(*numbers)[1])[0], *numbers)


@needs_devices(2)
def test_a_sharding_has_one_name_however_it_is_written(folder):
    """A program compiled for the first cache is found by a process that compiles it after a step, and vice versa."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tensor",))
    lead = jax.ShapeDtypeStruct((), jnp.float32)

    def built(*axes):
        place = NamedSharding(mesh, PartitionSpec(*axes))
        cache = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place)
        work = Lowering(lambda lead, cache: (cache + lead, lead), (lead, cache), cache_argument=1)
        return Programs().get(KEY, lambda: work)

    assert not built("tensor", None).loaded
    assert built("tensor").loaded
    assert not built(None, "tensor").loaded
    assert not built(None, None).loaded
    assert built().loaded


@needs_devices(2)
def test_other_links_between_the_devices_make_another_program(folder, monkeypatch):
    build_on(0, 1)
    build()
    described = TopologyDescription.serialize
    monkeypatch.setattr(TopologyDescription, "serialize", lambda self: described(self) + b"x")
    assert not build_on(0, 1).loaded
    assert build().loaded, "one device has no links"
    assert len(stored(folder)) == 3


@needs_devices(2)
def test_a_program_whose_links_nobody_can_describe_is_compiled_and_not_kept(
    folder, monkeypatch, caplog
):
    def undescribed(self):
        raise NotImplementedError("no serialized topology")

    monkeypatch.setattr(TopologyDescription, "serialize", undescribed)
    check_parts(build_on(0, 1)(*on_mesh(0, 1)[1])[0], 0, 1)
    assert stored(folder) == []
    assert "over 2 devices is not stored" in caplog.text


@needs_devices(2)
def test_programs_over_the_devices_of_other_processes_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not build_on(0, 1).loaded
    assert stored(folder) == []


@needs_devices(2)
def test_the_devices_of_a_program_are_those_of_the_one_mesh_of_its_arguments():
    def types(*places):
        return [jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place) for place in places]

    first, second = jax.devices()[:2]
    alone = SingleDeviceSharding(second)
    meshes = [Mesh(np.asarray(order), ("tensor",)) for order in ([second, first], [first, second])]
    swapped, straight = (NamedSharding(mesh, PartitionSpec("tensor")) for mesh in meshes)
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    assert devices_of(types(None)) == (first,)
    assert devices_of(types(None, alone)) == (second,)
    assert devices_of(types(None, swapped, everywhere)) == (second, first)
    assert devices_of(types(swapped, straight)) == ()
    assert devices_of(types(swapped, alone)) == ()


@pytest.fixture
def in_helpers(monkeypatch):
    """Returns what helpers were asked for; they lower for the CPU here, and have lowered all when one is collected."""
    asked = []
    TRACES.clear()
    monkeypatch.setattr(deferred, "_lowered", {})
    monkeypatch.setattr(compilation, "_PLATFORMS", ("cpu",))
    monkeypatch.setattr(LoweringHelpers, "__init__", with_one_process(LoweringHelpers.__init__))
    request, collect = LoweringHelpers.request, LoweringHelpers.collect

    def requested(helpers, *given):
        asked.append(request(helpers, *given))
        return asked[-1]

    def collected(helpers, *given):
        if helpers._threads:
            assert not wait(helpers._lowered.values(), 60).not_done
        collect(helpers, *given)

    monkeypatch.setattr(LoweringHelpers, "request", requested)
    monkeypatch.setattr(LoweringHelpers, "collect", collected)
    return asked


def with_one_process(init):
    return lambda helpers: init(helpers, 1)


def scaled_by(rows):
    """Returns what to compile: a cache of some rows, multiplied by two kernels."""

    def run(params, cache, ids):
        cache = scale(float(rows), options_of(rows))(cache)
        return scale(2.0, options_of(rows))(cache), ids

    return Lowering(run, jax.eval_shape(lambda: arguments(rows)))


def options_of(rows):
    return OPTIONS | {"out_type": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}


def get_all(*sizes):
    specs = {StepSpec(rows, rows, (1,), decode=True): rows for rows in sizes}
    builds = {spec: lambda rows=rows: scaled_by(rows) for spec, rows in specs.items()}
    return Programs().get_all(builds)


def test_other_processes_lower_the_kernels_of_programs_that_the_store_lacks(in_helpers):
    first, second = get_all(4, 8)
    # Four kernels are enough for a process; the first program has two.
    assert in_helpers == [False, True]
    assert TRACES == [(False, True)] * 2
    for program, rows in ((first, 4), (second, 8)):
        params, cache, ids = arguments(rows)
        found, _ = program(params, jnp.asarray(cache), ids)
        np.testing.assert_array_equal(found, np.full((rows, WIDTH), rows * 2))
    again = get_all(4, 8)
    assert in_helpers == [False, True]
    assert all(program.loaded for program in again)


def test_programs_are_lowered_as_their_kernels_are_ready(monkeypatch):
    """The first of those that wait if none is."""
    order, lower = [], compilation.Build.lower

    def lowered(program, *_):
        order.append(program._name)
        lower(program)

    monkeypatch.setattr(compilation.Build, "request", lambda *_: True)
    monkeypatch.setattr(compilation.Build, "is_ready", lambda program, _: "8x8" in program._name)
    monkeypatch.setattr(compilation.Build, "lower", lowered)
    get_all(4, 8, 16)
    assert order == [StepSpec(rows, rows, (1,), decode=True).name for rows in (8, 4, 16)]


def test_without_the_store_this_process_lowers_all(in_helpers, monkeypatch):
    monkeypatch.setattr(compilation, "_STORED_PLATFORMS", ())
    get_all(4, 8)
    assert in_helpers == []
    assert len(TRACES) == 4


def test_a_program_alone_counts_its_lowering_as_work_of_python(monkeypatch):
    lower = compilation.Build.lower

    def slowly(program, *given):
        time.sleep(0.2)
        lower(program, *given)
        program._host_seconds += 0.2

    monkeypatch.setattr(compilation.Build, "lower", slowly)
    program = build()
    assert 0.2 < program.host_seconds <= program.seconds
