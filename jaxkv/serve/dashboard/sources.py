"""Reads the view that the dashboard shows, from a server's address or a file of saved prefixes."""

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxkv.offload.prefix_listing import list_prefixes
from jaxkv.serve.dashboard.file_view import file_view
from jaxkv.serve.dashboard.text_view import text_of
from jaxkv.wording import clip, shown

_SECONDS = 15.0
_MOST_BYTES = 64 * 2**20


def look_at(source: str, key: str | None = None) -> dict[str, Any]:
    """Returns the view of a server or a file.

    Args:
        source: an address that begins with http:// or https://, or a path.
        key: API key of the server.

    Raises:
        ValueError: the source is no address and no file, or the server refuses or is no jaxkv server.
        BadCheckpoint: the file is damaged or no file of prefixes.
        OSError: the server or the file cannot be reached.
    """
    if "://" in source:
        view, now = _fetch(source, key), datetime.now(UTC)
        # A file with the view is read later.
        return view | {"state": f"{view.get('state')} at {now:%Y-%m-%d %H:%M:%S} UTC"}
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"{shown(source)} is no file; give a file of saved prefixes, or the address of a server such as "
            "http://127.0.0.1:8000"
        )
    return file_view(list_prefixes(path), path)


def text_from(source: str, view: dict[str, Any]) -> str:
    """Returns a view as text.

    Args:
        source: where it is from, for messages.
        view: what `look_at` returned.

    Raises:
        ValueError: it is no view that this release can show.
    """
    try:
        return text_of(view)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{source} answers with figures of another form ({clip(repr(error), 80)}); use the jaxkv of the server's "
            "release"
        ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because the key would be sent to another address."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Returns nothing, so that the redirect is an error."""
        del req, fp, code, msg, headers, newurl


def _fetch(address: str, key: str | None) -> dict[str, Any]:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(
            f"the address must be like http://127.0.0.1:8000, without name and password, got {shown(address)}; "
            f"the key belongs in --api-key or JAXKV_API_KEY"
        )
    base = address.split("?")[0].rstrip("/").removesuffix("/dashboard").removesuffix("/v1")
    request = urllib.request.Request(f"{base}/dashboard/data")
    if key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_SECONDS) as answer:
            body = answer.read(_MOST_BYTES)
        view = json.loads(body)
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"{base} answers {error.code}: {_why(error.code, key)}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise OSError(f"{base} cannot be reached: {clip(reason)}; is the server running?") from None
    except ValueError:
        raise ValueError(f"{base} answers no JSON; it is no jaxkv server") from None
    if not isinstance(view, dict):
        raise ValueError(f"{base} answers no figures; it is no jaxkv server")
    return view


def _why(code: int, key: str | None) -> str:
    """Returns what a status means here, and what to do."""
    if code == 401:
        given = "the key is wrong" if key else "it needs a key"
        return f"{given}; give --api-key or JAXKV_API_KEY"
    if code == 404:
        return "it has no dashboard; it is no jaxkv server, or an older one"
    if code == 503:
        return "the engine loads, compiles or has ended; try again"
    return "it is no jaxkv server, or a proxy in front of it refuses"
