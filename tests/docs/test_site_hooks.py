"""The hooks of the documentation's site: links between files become links between pages, without network access."""

import importlib.util
from types import SimpleNamespace

import pytest

from tests.docs.blocks import ROOT

PluginError = pytest.importorskip("mkdocs.exceptions").PluginError

_SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)


def on_page(place, text):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
    return hooks.on_page_markdown(text, page, None, None)


@pytest.mark.parametrize(
    ("place", "link", "moved"),
    [
        ("index.md", "docs/tutorial.md", "tutorial.md"),
        ("index.md", "benchmarks/README.md", "benchmarks.md"),
        ("benchmarks.md", "../docs/measured.md#the-bridge", "measured.md#the-bridge"),
        ("how-to/serve.md", "cache.md", "cache.md"),
        ("how-to/serve.md", "../../README.md#measured", "../index.md#measured"),
        ("tutorial.md", "../ARCHITECTURE.md", "architecture.md"),
        ("tutorial.md", "#install", "#install"),
        ("tutorial.md", "mailto:nobody", "mailto:nobody"),
    ],
)
def test_a_link_between_files_becomes_a_link_between_pages(place, link, moved):
    assert on_page(place, f"a [link]({link}).") == f"a [link]({moved})."


def test_a_picture_is_found_from_pages_that_stand_outside_docs_too():
    for place, link in (("index.md", "docs/images/a.svg"), ("how-to/x.md", "../images/a.svg")):
        moved = on_page(place, f"![what it shows]({link})")
        assert moved == f"![what it shows]({link.removeprefix('docs/')})"


def test_code_is_left_as_it_is():
    text = "`[a](../jaxkv/llm.py)`\n\n```text\n[a](../jaxkv/llm.py)\n```\n"
    assert on_page("tutorial.md", text) == text


def test_a_link_to_a_file_that_is_no_page_is_refused():
    with pytest.raises(PluginError, match=r"docs/tutorial\.md links to \.\./jaxkv/llm\.py"):
        on_page("tutorial.md", "a [link](../jaxkv/llm.py)")


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://a.b/c.js">',
        '<link rel="stylesheet" href="//a.b/c.css">',
        '<img src="http://a.b/c.png">',
    ],
)
def test_a_page_that_loads_from_the_network_is_refused(tag):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorial.md"))
    assert hooks.on_post_page('<a href="https://a.b/">', page, None) == '<a href="https://a.b/">'
    with pytest.raises(PluginError, match="from the network"):
        hooks.on_post_page(f"<p>{tag}</p>", page, None)
