"""The fenced code blocks of a Markdown page, and functions that run them.

The blocks of a page run in order, in one namespace. A `text` block right behind a block is what that block prints, and
a `console` block may hold the output behind its commands; `...` stands for any text. A block that cannot run in the
tests has the comment `<!-- not run: REASON -->` on the line above it.
"""

import doctest
import importlib
import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from jaxkv.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
LANGUAGES = ("python", "console", "text")
ON_THE_HUB = "Qwen/Qwen3-0.6B"
"""What pages name as a model that is downloaded; a folder takes its place, since tests have no network."""

_FENCED = re.compile(
    r"^(?:<!-- not run: (.*) -->\n)?```(.*)\n((?:(?!```).*\n)*?)```$", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: path in the repository.
        line: of its fence.
        language: behind the fence.
        text: between the fences.
        reason: why it is not run; `None` if it is.
        start, end: its place in the page, in characters, a comment above it included.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    start: int
    end: int


def blocks_of(page):
    """Returns the blocks of a page in order."""
    text = page.read_text()
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(
            page=name,
            line=text.count("\n", 0, found.start(2)) + 1,
            language=found[2],
            text=found[3],
            reason=found[1],
            start=found.start(),
            end=found.end(),
        )
        for found in _FENCED.finditer(text)
    ]


def steps_of(page):
    """Returns pairs of a block to run and the output that stands in a `text` block right behind it, or `None`."""
    text, blocks = page.read_text(), blocks_of(page)
    steps = []
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        follows = after is not None and not text[block.end : after.start].strip()
        shown = after.text if follows and after.language == "text" else None
        if block.language != "text" and block.reason is None:
            steps.append((block, shown))
    return steps


def commands_of(block):
    """Returns pairs of a command's words and the output that stands behind it, of a `console` block."""
    commands = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((shlex.split(line[2:], comments=True), []))
        else:
            commands[-1][1].append(line)
    return [(words, "".join(f"{line}\n" for line in output)) for words, output in commands]


def assert_shown(block, shown, printed):
    """Raises if a block printed something else than the page shows, but for spaces at the ends of lines."""
    wanted, got = (
        "\n".join(line.rstrip() for line in text.rstrip().splitlines()) for text in (shown, printed)
    )
    if not doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS):
        raise AssertionError(
            f"{block.page}:{block.line} shows\n{shown}\nbut the block printed\n{printed}"
        )


def run_python(block, names, replaced):
    """Runs a block; `replaced` maps what a page shows to what the test runs instead."""
    text = block.text
    for shown, small in replaced.items():
        text = text.replace(shown, small)
    # Lines of a traceback are those of the page.
    exec(compile("\n" * block.line + text, block.page, "exec"), names)


def run_command(words, directory, more=()):
    """Runs a command of a page, or checks that it exists where running it would run the tests again.

    `directory` is the model of commands that name one, and OUT and PROGRAMS new directories beside it.
    """
    new = {name: Path(f"{directory}-{name.lower()}") for name in ("OUT", "PROGRAMS")}
    places = {"DIR": directory, ON_THE_HUB: directory, **new}
    words = [str(places.get(word, word)) for word in words]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), words
    elif words[0] == "jaxkv":
        assert main([*words[1:], *more]) == 0, words
    else:
        assert words[:2] == ["python", "-m"], words
        importlib.import_module(words[2]).main(*words[3:])
