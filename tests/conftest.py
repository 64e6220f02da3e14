"""Strict JAX settings, shape checks on our own packages, and skips for what this machine lacks."""

import gc
import importlib.util
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

# The Mosaic GPU interpreter runs one host thread per warpgroup; XLA's CPU pool must be larger than the cores of
# a small machine or it deadlocks, and the pool is sized when JAX is imported.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Models over several devices run on parts of one CPU. Others use the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# The tests' tensors are tiny. With a thread per core in each of pytest's processes, PyTorch's threads spin while
# they wait for one another, a third of the processor time of tests against it. It is read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest
from hypothesis import settings

from tests.jax_settings import cache_settings, set_cache
from tests.shape_checks import check_shapes

# Most tests compile small programs for the CPU and run each a few times. Without LLVM's optimisations and in one part,
# and with XLA's older emitters where JAX still has them, which is before 0.12, compiling takes less than half the
# processor time. `make test-all` sets the variable to 0 and runs the tests on programs as users compile them. XLA reads
# its flags when it first sees a device. Processes that tests start inherit both variables.
QUICK_TO_COMPILE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def keep_one_core():
    """Keeps this process on one core if pytest has a process for each, and lets XLA's threads go first there.

    From JAX 0.12 on XLA compiles each kernel in an MLIR context, which takes longer to make than the kernel to compile.
    It makes none if a thread has given one back, and so saves a third of the time of compiling if its threads compile
    at once what the main thread hands them. Threads inherit the core and the priority of the one that starts them:
    XLA's last ones are started by the first program, and the main thread gives way from then on.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not hasattr(os, "sched_setaffinity") or workers < len(os.sched_getaffinity(0)):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    jax.block_until_ready(jax.numpy.ones(1))
    os.nice(10)


def keep_programs():
    """Lets JAX keep the programs that tests compile, for pytest's other processes and for later runs.

    The names of programs follow from their code and from all settings of XLA, so a changed program is compiled anew.
    Behind many changes, when they have 1 GiB, all are deleted.
    """
    folder = Path(__file__).parents[1] / "build" / "tested-programs"
    if "PYTEST_XDIST_WORKER" not in os.environ and folder.is_dir():
        size = sum(one.stat().st_size for one in folder.iterdir())
        if size > 2**30:
            shutil.rmtree(folder)
    kept = {
        "jax_compilation_cache_dir": str(folder),
        # Writing those that compile faster takes a first run longer than it saves.
        "jax_persistent_cache_min_compile_time_secs": 0.03,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    set_cache(**kept)
    # Processes that tests start inherit them.
    os.environ.update({name.upper(): str(value) for name, value in kept.items()})


if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "0":
    flags = os.environ.get("XLA_FLAGS", "")
    if QUICK_TO_COMPILE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_TO_COMPILE}"
    keep_one_core()
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        keep_programs()

check_shapes()
# A deadline measures time, so a busy machine would fail the test.
settings.register_profile("jaxkv", deadline=None)
settings.load_profile("jaxkv")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_COMPILE_CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    """Keeps what `LLM` and started servers compile in a folder of this process, which goes with it, not in ~/.cache."""
    config.stash[_COMPILE_CACHE] = tempfile.TemporaryDirectory(prefix="jaxkv-tests-")
    os.environ["JAXKV_COMPILE_CACHE"] = config.stash[_COMPILE_CACHE].name


def pytest_unconfigure(config):
    config.stash[_COMPILE_CACHE].cleanup()


@pytest.fixture
def compiled_anew():
    """Turns JAX's cache off: on CPUs a program that was loaded from it cannot be stored again."""
    with cache_settings(jax_enable_compilation_cache=False):
        yield


_LONG = (
    "test_tensor_parallel.py",
    "test_llm.py",
    "replicas/test_front.py",
    "pallas_kernels/skinny_matmul/test_mosaic_skinny_matmul.py",
    "test_generation.py",
    "models/families/test_parity.py",
    "engine/test_h200.py",
    "pallas_kernels/h200/test_kernels.py",
    "models/families/test_tensor_parallel.py",
    "pallas_kernels/test_mosaic_states.py",
    "engine/test_engine.py",
    "engine/test_saved_prefixes.py",
    "benchmarks/test_ops.py",
    "models/families/test_hybrid_parity.py",
    "engine/test_hybrid_reuse.py",
    "models/test_flax_model.py",
    "structured/test_generated_text.py",
    "engine/test_simulated.py",
    "pallas_kernels/grouped_matmul/test_mosaic_grouped_matmul.py",
    "test_bundled_programs.py",
    "serve/test_engine_program.py",
    "pallas_kernels/delta_scan/test_delta_scan.py",
    "engine/speculation/test_draft_heads.py",
    "pallas_kernels/latent_attention/test_mosaic_latent_attention.py",
    "pallas_kernels/ragged_attention/test_ragged_attention.py",
    "sampling/test_sample.py",
    "torch_bridge/graphs/test_step_graphs.py",
    "models/test_unsettled_states.py",
    "pallas_kernels/gathered_matmul/test_gathered_matmul.py",
    "engine/steps/test_multi_step.py",
    "models/test_decoder_joined_norms.py",
)
"""Files of 10 CPU seconds and more, the longest first, so that no process waits at the end for another's long file."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    long = {here / name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: long.get(item.path, len(long)))
    has_gpu = jax.default_backend() == "gpu"
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    for item in items:
        # A test's keywords hold the names of its folders too, and a checkout may be named as a mark.
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("torch") and not has_torch:
            item.add_marker(pytest.mark.skip(reason="needs torch and transformers"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leaves JAX, torch and thousands of tests, which last to the end, out of garbage collections from here on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # A test's program makes thousands of objects as it is traced, and few cycles.
        gc.set_threshold(20_000)
        gc.enable()


# Linux lets a process have 65530, and compiled programs take some each; one more, and XLA crashes.
_MANY_MAPS = 45_000
_MAPS = Path("/proc/self/maps")
_ENDED = itertools.count(1)


def _clear_many_programs():
    """Clears JAX's caches if compiled programs use many memory mappings of the process; returns whether it did."""
    many = _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MANY_MAPS
    if many:
        gc.unfreeze()
        jax.clear_caches()
    return many


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Leaves what lasts beyond a module, such as JAX's caches, out of later collections, which otherwise take seconds.

    A module of less than a second leaves its garbage to the next one.
    """
    begun = time.monotonic()
    yield
    if _clear_many_programs() or time.monotonic() - begun >= 1:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def few_mappings():
    """Clears many programs within a module too: those of all families on several devices are nearly too many."""
    yield
    # Counting takes milliseconds, and 16 tests compile far fewer than are left.
    if next(_ENDED) % 16 == 0 and _clear_many_programs():
        gc.collect()
        gc.freeze()
