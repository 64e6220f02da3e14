"""`jaxkv inspect`: what is in a running server, or in a file of saved prefixes, as text or as an HTML file."""

import argparse
import os
from pathlib import Path
from typing import Any

from jaxkv.terminal import Screen

KEY_VARIABLE = "JAXKV_API_KEY"
ADDRESS_VARIABLE = "JAXKV_BASE_URL"

_ADDRESS = "http://127.0.0.1:8000"


def add_inspect(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    inspect = commands.add_parser(
        "inspect", help="what is in a server's cache, or in a file of saved prefixes"
    )
    inspect.add_argument(
        "source",
        metavar="URL|FILE",
        nargs="?",
        help="address of a server, or a file of LLM.save_prefixes "
        f"(default: the variable {ADDRESS_VARIABLE}, or {_ADDRESS})",
    )
    inspect.add_argument(
        "--html", metavar="OUT", type=Path, help="write one HTML file instead of text"
    )
    inspect.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"of the server; the variable {KEY_VARIABLE} keeps it out of the list of processes (default: none)",
    )
    inspect.set_defaults(run=_run)


def _run(options: argparse.Namespace, screen: Screen) -> int:
    # Slow to import, as in `jaxkv.cli`.
    from jaxkv.serve.dashboard.page import page_with
    from jaxkv.serve.dashboard.sources import look_at, text_from

    source = options.source or os.environ.get(ADDRESS_VARIABLE, _ADDRESS)
    view = look_at(source, options.api_key or os.environ.get(KEY_VARIABLE))
    text = text_from(source, view)
    if options.html is None:
        screen.write(text)
    else:
        options.html.write_text(page_with(view), encoding="utf-8")
        screen.write(f"wrote {options.html}\n")
    return 0
