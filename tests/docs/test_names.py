"""The files, folders and classes that the documentation of the code names exist."""

import re

import pytest

from tests.docs.blocks import ROOT

PAGES = (
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "how-it-works").glob("*.md")),
)
PLACES = ("jaxkv", "pallas_kernels", "torch_bridge", "benchmarks", "tests", "docs")
FILES = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix != ".pyc"]
FOLDERS = {f"/{path.parent.relative_to(ROOT).as_posix()}/" for path in FILES} | {"/build/docs/"}
SOURCES = [
    path.read_text()
    for path in FILES
    if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"
]


def named_in(text):
    """Returns what a page names as code, outside of its blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.M))


def missing_in(text):
    for name in named_in(text):
        camel = re.fullmatch(r"([A-Z][a-z]+[A-Z]\w*)(?:\.(\w+))?(?:\(.*\))?", name)
        if re.fullmatch(r"[\w/]+\.py", name):
            found = any(path.as_posix().endswith(f"/{name}") for path in FILES)
        elif re.fullmatch(r"[\w/-]+/", name):
            found = any(folder.endswith(f"/{name}") for folder in FOLDERS)
        else:
            found = camel is None or any(defines(source, *camel.groups()) for source in SOURCES)
        if not found:
            yield name


def defines(source, name, member):
    """Returns whether a source file defines a class, with a member of that name if one is given."""
    found = re.search(rf"^class {name}\b", source, re.MULTILINE)
    return found is not None and (
        member is None or re.search(rf"\b{member}\b", source[found.end() :]) is not None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    assert list(missing_in(page.read_text())) == []


def test_a_name_that_does_not_exist_is_found():
    text = "`engine/nothing.py`, `nowhere/`, `NoSuchClass`, `PageAllocator.no_such_verb`, `cache/pool.py`, `CacheOwner`"
    assert list(missing_in(text)) == [
        "engine/nothing.py",
        "nowhere/",
        "NoSuchClass",
        "PageAllocator.no_such_verb",
    ]
