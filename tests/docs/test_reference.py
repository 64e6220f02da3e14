"""The reference has every public name, and each has a docstring."""

import re

import pytest

import jaxkv
import pallas_kernels
from tests.docs.blocks import ROOT

griffe = pytest.importorskip("griffe")

REFERENCE = ROOT / "docs" / "reference"
MODULES = ("kernels", "inside", "weights", "memory")


@pytest.fixture(scope="module")
def sources():
    """The packages as their source shows them; nothing is imported."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in ("jaxkv", "torch_bridge", "pallas_kernels"):
        loader.load(package)
    return loader.modules_collection


def names_on(page):
    return re.findall(r"^::: (\S+)$", (REFERENCE / page).read_text(), re.MULTILINE)


def public_names(sources):
    bridge = sources["torch_bridge"].exports
    yield from (("jaxkv.md", f"jaxkv.{name}") for name in jaxkv.__all__)
    yield from (("torch_bridge.md", f"torch_bridge.{name}") for name in (*bridge, *MODULES))
    for op in pallas_kernels.__all__:
        yield "pallas_kernels.md", f"pallas_kernels.{op}.api.{op}"


def test_the_reference_has_every_public_name(sources):
    missing = [name for page, name in public_names(sources) if name not in names_on(page)]
    assert missing == []


@pytest.mark.parametrize("page", [path.name for path in sorted(REFERENCE.glob("*.md"))])
def test_every_name_of_the_reference_has_a_docstring(page, sources):
    assert len(names_on(page)) == len(set(names_on(page))) > 0
    bare = [name for name in names_on(page) if not sources[name].docstring]
    assert bare == []
