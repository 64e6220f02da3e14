"""The files of our kernels on which a stored program depends: those that an op can import, and no others."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels import sources
from pallas_kernels.sources import kernel_files
from tests.test_import_circles import graph_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "pallas_kernels"


def module_of(path):
    """Returns the name of a Python file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def left_out():
    """Returns the modules of `pallas_kernels` on which no stored program depends."""
    counted = set(kernel_files())
    return {module_of(path) for path in KERNELS.rglob("*.py") if path not in counted}


def reached(graph, roots):
    """Returns the modules that these import, directly or through others, and these themselves."""
    found, pending = set(), list(roots)
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += graph[module]
    return found


def test_no_file_that_is_left_out_is_imported_by_an_op_or_by_a_package_that_uses_ops():
    graph = graph_of(ROOT, ["pallas_kernels", "jaxkv", "torch_bridge"])
    doors = {module for module in graph if module.endswith(".api")}
    users = {module for module in graph if module.partition(".")[0] in ("jaxkv", "torch_bridge")}
    found = reached(graph, doors | users)
    assert "pallas_kernels.mosaic.dialects" in found
    assert found & left_out() == set()


def test_every_file_of_a_kernel_and_the_tuned_schedules_count():
    counted = {str(path.relative_to(KERNELS)) for path in kernel_files()}
    names = {path.partition("/")[2] or path for path in counted}
    assert {"mosaic_gpu.py", "mosaic_schedule.py", "xla.py", "api.py", "device.py"} <= names
    assert {"mosaic/dialects.py", "latent_kernel/consumer.py", "tuned/nvidia-h200.json"} <= counted
    kinds = {module.rpartition(".")[2] for module in left_out()}
    assert {"cases", "reference", "op_benchmark", "nan_filled_pages"} <= kinds


def test_ops_that_are_loaded_and_lowered_load_no_file_that_is_left_out():
    """Imports that are computed while a program runs are in no graph."""
    program = f"""
import sys, jax, pallas_kernels
for op in {sorted(pallas_kernels.__all__)}:
    getattr(pallas_kernels, op)
array = jax.ShapeDtypeStruct
pool, values = array((8, 16, 2, 128), "bfloat16"), array((4, 2, 128), "bfloat16")
from pallas_kernels.page_write import mosaic_gpu
traced = jax.jit(mosaic_gpu.page_write).trace((pool,), (values,), array((4,), "int32"))
assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
print(*sys.modules.keys() & {set(left_out())!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == []


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Returns a copy of the kernels' folder, of which names are made."""
    folder = tmp_path / "pallas_kernels"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "FOLDER", folder)
    return folder


def hash_now():
    sources.kernel_sources.cache_clear()
    return sources.kernel_sources()


@pytest.fixture(autouse=True)
def forget():
    yield
    sources.kernel_sources.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        "paged_attention/cases.py",
        "paged_attention/reference.py",
        "paged_attention/NOTES.md",
        "inputs/nan_filled_pages.py",
        "workbench/tune.py",
        "workbench/new.py",
    ],
)
def test_editing_what_only_tests_and_benchmarks_read_keeps_every_name(name, copied):
    before = hash_now()
    with (copied / name).open("a") as file:
        file.write("\n# edited\n")
    assert hash_now() == before


@pytest.mark.parametrize(
    "name",
    [
        "paged_attention/mosaic_block.py",
        "paged_attention/mosaic_schedule.py",
        "mosaic/dialects.py",
        "latent_kernel/pieces.py",
        "tuned/nvidia-h200.json",
        "paged_attention/new.py",
    ],
)
def test_editing_what_a_kernel_is_lowered_with_changes_every_name(name, copied):
    before = hash_now()
    with (copied / name).open("a") as file:
        file.write("\n")
    assert hash_now() != before
