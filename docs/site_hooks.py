"""Hooks of mkdocs: pages that stand outside docs/, their links, and a check that no page needs the network."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> its page on the site."""

_LINK = re.compile(r"(?<!!)\]\((?!#|[a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_FROM_THE_NETWORK = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*", re.IGNORECASE
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand outside docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site.

    Raises:
        PluginError: a link leads to a file that is no page.
    """
    place = page.file.src_uri
    source = next((name for name, target in OUTSIDE.items() if target == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        wanted = OUTSIDE.get(target) or target.removeprefix("docs/")
        if target not in OUTSIDE and not target.startswith("docs/"):
            raise PluginError(
                f"{source} links to {path}, which is no page of the site; name the path as code instead"
            )
        return f"]({posixpath.relpath(wanted, posixpath.dirname(place) or '.')}{anchor})"

    parts = _CODE.split(markdown)
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(moved, part) for part in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses a page that would load a file from the network.

    Raises:
        PluginError: it has a script, a style or a picture with an address.
    """
    found = _FROM_THE_NETWORK.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads a file from the network: {found[0]}")
    return output
