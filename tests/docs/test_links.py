"""Every relative link of the repository's pages leads to a file that exists, and every anchor to a heading in it."""

import re
import subprocess

import pytest

from tests.docs.blocks import PAGES, ROOT

LINKED = (*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(page):
    """Returns the anchors that a page of Markdown has, as hosts of repositories and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    made = {re.sub(r"\s", "-", heading) for heading in plain}
    documented = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    return made | set(documented) | set(re.findall(r'<a id="([^"]+)"', text))


def broken_links(page, text):
    for link in _LINK.findall(_CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or ROOT not in (target, *target.parents):
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors_of(target):
            yield f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page):
    assert list(broken_links(page, page.read_text())) == []


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("docs/nothing.md", "no such file"),
        ("docs/tutorial.md#nothing", "no such heading"),
        ("#nothing", "no such heading"),
        ("../outside.md", "no such file"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(link, message):
    [found] = broken_links(ROOT / "README.md", f"a [link]({link}), and `[code]({link})`")
    assert message in found


def test_every_page_is_checked():
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    outside = ("pallas_kernels/", "jaxkv/", "torch_bridge/")
    assert {name for name in listed if not name.startswith(outside)} <= {
        page.relative_to(ROOT).as_posix() for page in LINKED
    }
