"""Turns on JAX's persistent compilation cache, which keeps compiled programs on disk between processes.

JAX writes entries in place and never overwrites one, so an entry cut short by a killed process would fail in every
later process. Here an entry that fails to load is deleted, and JAX writes it again.
"""

import logging
import math
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import jax

VARIABLE = "JAXKV_COMPILE_CACHE"
"""Environment variable with the path of the folder, or "off"."""

MIN_COMPILE_SECONDS = 0.2
"""Programs that compile faster than this are not stored, because loading them would not be faster."""

_LOG = logging.getLogger(__name__)
_turned_on: set[Path] = set()
"""Folders in which this module has turned on JAX's cache, as opposed to the user."""
_LOCK = threading.Lock()
_open_blocks: list[None] = []
"""One for each thread inside of `repaired_entries`."""
_before: list[tuple[Any, Callable[..., None]]] = []
"""The filter of warnings that the first of these has added, and what showed warnings before."""
_BROKEN = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


def enable_compile_cache(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Turns the cache on, unless the user has configured JAX's cache or set `VARIABLE` to "off".

    Entries are code that this process will run, so the folder is made private. A folder that another user owns or can
    write to, or that cannot be written, is not used; a warning is logged, and programs are compiled anew.

    Returns:
        The folder in use, or `None`.
    """
    setting = environment.get(VARIABLE, "")
    configured = jax.config.jax_compilation_cache_dir
    if configured or setting == "off" or not jax.config.jax_enable_compilation_cache:
        return Path(configured) if configured else None
    folder = Path(os.path.expanduser(setting)) if setting else _default_folder(environment)
    reason = why_not_folder(folder)
    if reason is not None:
        _LOG.warning(
            "compiled programs are not kept between runs: %s; name another folder in %s, or set it to off",
            reason,
            VARIABLE,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    _turned_on.add(folder)
    return folder


def own_entries(folder: Path) -> list[Path]:
    """Returns the entries of JAX's cache in a folder, if jaxkv must limit their size; otherwise none.

    JAX limits the size itself only if the package `filelock` is installed, and does not count stored programs. So jaxkv
    does it where this module has turned the cache on and the user has not set `jax_compilation_cache_max_size`.
    """
    if folder not in _turned_on or jax.config.jax_compilation_cache_max_size != -1:
        return []
    return sorted(folder.glob("*-cache"))


def _default_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder of the XDG base directory specification, which ignores relative paths."""
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    caches = named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return caches / "jaxkv" / "programs"


def why_not_folder(folder: Path) -> str | None:
    """Creates the folder if it is missing, and returns why it must not hold code, or `None` if it may."""
    if not folder.is_absolute():
        return f"{folder} is not an absolute path"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        found = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by others (chmod 700 it)"
    return None


def without_entry() -> AbstractContextManager[None]:
    """Returns a context in which this thread adds no entry to JAX's cache, for a program that the store will have."""
    # JAX has no public API for one thread.
    from jax._src.config import persistent_cache_min_compile_time_secs

    return persistent_cache_min_compile_time_secs(math.inf)


@contextmanager
def repaired_entries() -> Iterator[None]:
    """Deletes cache entries that fail to load, so that JAX writes them again, while a thread is in such a block.

    JAX's warning names the program and not the entry, so all entries of programs with that name are deleted.
    """
    with _LOCK:
        if not _open_blocks:
            warnings.filterwarnings("always", message=_BROKEN.pattern)
            _before.append((warnings.filters[0], warnings.showwarning))
            warnings.showwarning = _repair
        _open_blocks.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _open_blocks.pop()
            if not _open_blocks:
                ours, show = _before.pop()
                # A block of `warnings.catch_warnings` may have put back what was there before.
                if ours in warnings.filters:
                    cast("list[Any]", warnings.filters).remove(ours)
                if warnings.showwarning is _repair:
                    warnings.showwarning = show


def _repair(message: Warning | str, *details: Any, **options: Any) -> None:  # noqa: ANN401 - passed through
    found = _BROKEN.match(str(message))
    if found is not None:
        _delete_entries(found.group(1), str(message))
        return
    _, show = _before[-1]
    show(message, *details, **options)


def _delete_entries(program: str, message: str) -> None:
    # JAX has just read from this folder, so it is set. For a remote folder the glob finds nothing.
    entries = list(Path(jax.config.jax_compilation_cache_dir).glob(f"{program}-*-cache"))
    try:
        for path in entries:
            path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s; it cannot be deleted (%s)", message, error.strerror)
    else:
        _LOG.warning("%s; deleted the %d entries of that name", message, len(entries))
