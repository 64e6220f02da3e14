"""The reference has every public name, and each has a docstring."""

import re
from functools import cache

import pytest

import jaxkv
import pallas_kernels
from tests.docs.blocks import ROOT

griffe = pytest.importorskip("griffe")

REFERENCE = ROOT / "docs" / "reference"
MODULES = ("kernels", "inside", "weights", "memory")


@cache
def parsed(module):
    """Returns a module as its source shows it, or `None` if there is no such file; nothing is imported."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return griffe.visit(module, filepath=path, code=path.read_text()) if path.is_file() else None


def find(name):
    """Returns what has a name in the sources, where it is defined."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module, inside = parsed(".".join(parts[:count])), parts[count:]
        if module is not None:
            found = module[".".join(inside)] if inside else module
            return find(found.target_path) if found.is_alias else found
    raise KeyError(name)


def names_on(page):
    return re.findall(r"^::: (\S+)$", (REFERENCE / page).read_text(), re.MULTILINE)


def public_names():
    bridge = parsed("torch_bridge").exports
    yield from (("jaxkv.md", f"jaxkv.{name}") for name in jaxkv.__all__)
    yield from (("torch_bridge.md", f"torch_bridge.{name}") for name in (*bridge, *MODULES))
    for op in pallas_kernels.__all__:
        yield "pallas_kernels.md", f"pallas_kernels.{op}.api.{op}"


def test_the_reference_has_every_public_name():
    missing = [name for page, name in public_names() if name not in names_on(page)]
    assert missing == []


@pytest.mark.parametrize("page", [path.name for path in sorted(REFERENCE.glob("*.md"))])
def test_every_name_of_the_reference_has_a_docstring(page):
    assert len(names_on(page)) == len(set(names_on(page))) > 0
    bare = [name for name in names_on(page) if not find(name).docstring]
    assert bare == []
