"""NCCL that is too old for JAX's sums over several GPUs is refused before anything is loaded."""

import importlib.metadata
import importlib.util
from pathlib import Path

import jax
import pytest

from jaxkv.models import nccl, tensor_parallel


class Device:
    """A device of which only the platform is known."""

    def __init__(self, platform):
        self.platform, self.process_index = platform, 0


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu"), Device("gpu")])


def use(monkeypatch, jax_version, nccl_version):
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    monkeypatch.setattr(nccl, "library_version", lambda: nccl_version)


def test_an_old_nccl_is_refused_with_what_to_install(monkeypatch, gpus):
    use(monkeypatch, (0, 12, 0, 1), (2, 28, 9))
    with pytest.raises(
        RuntimeError, match=r"needs NCCL 2\.29 .* found NCCL 2\.28\.9; run pip install"
    ):
        tensor_parallel.tensor_mesh(2)


@pytest.mark.parametrize(
    ("jax_version", "nccl_version"),
    [
        ((0, 11, 2), (2, 28, 9)),
        ((0, 12, 0, 1), (2, 29, 2)),
        ((0, 12, 0, 1), (3, 0, 0)),
        ((0, 12), None),
    ],
)
def test_what_works_or_cannot_be_asked_is_not_refused(monkeypatch, jax_version, nccl_version):
    use(monkeypatch, jax_version, nccl_version)
    assert nccl.why_not_nccl() is None


def test_one_gpu_and_cpus_need_no_nccl(monkeypatch, gpus):
    use(monkeypatch, (0, 12, 0, 1), (2, 28, 9))
    assert tensor_parallel.tensor_mesh(1).size == 1
    monkeypatch.setattr(jax, "devices", lambda: [Device("cpu"), Device("cpu")])
    assert tensor_parallel.tensor_mesh(2).size == 2


def test_the_version_is_read_from_the_library():
    spec = importlib.util.find_spec("nvidia.nccl")
    found = (
        [] if spec is None else [Path(place) / "lib" for place in spec.submodule_search_locations]
    )
    library = next((str(folder / "libnccl.so.2") for folder in found if folder.is_dir()), None)
    if library is None:
        pytest.skip("NCCL is not installed")
    names = [name for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if _installed(name)]
    version = nccl.library_version(library)
    assert ".".join(map(str, version)) in {importlib.metadata.version(name) for name in names}


def _installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_a_library_that_is_not_there_has_no_version():
    assert nccl.library_version("libnccl-that-nobody-has.so") is None
