"""The dashboard's page as bytes: with its Content-Security-Policy, or with the data inside, as a file of its own."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).with_name("dashboard.html")
_EMPTY = '<script type="application/json" id="embedded">null</script>'
_HEAD = '<meta charset="utf-8">'


@cache
def page() -> bytes:
    """Returns the page, which asks the server for its data."""
    return _PAGE.read_bytes()


@cache
def page_headers() -> Mapping[str, str]:
    """Returns the headers of the page: nothing but its own script and style runs, and no other site shows it."""
    return {
        "content-security-policy": f"{_policy(page().decode())}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }


def page_with(view: Mapping[str, object]) -> str:
    """Returns the page with its data inside, as one file that needs no server."""
    text = page().decode()
    # Markup inside the data would end the script element; JSON has another way to write these characters.
    data = json.dumps(view, allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    policy = f'{_HEAD}\n<meta http-equiv="Content-Security-Policy" content="{_policy(text)}">'
    return text.replace(_EMPTY, _EMPTY.replace("null", data)).replace(_HEAD, policy, 1)


def _policy(text: str) -> str:
    """Returns the policy that allows exactly the page's own script and style."""
    script, style = _hash(text, "script"), _hash(text, "style")
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str, tag: str) -> str:
    [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = hashlib.sha256(inside.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
