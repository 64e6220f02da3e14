"""A store of compiled programs on disk, keyed by their traces, so that a warm start lowers nothing.

The key of JAX's own compilation cache is the lowered module, and lowering is slow, because it generates our kernels in
Python. The key here is a hash of the trace (see `fingerprint`). The store's folder lies inside the folder of JAX's
cache, and the store is on or off together with that cache (see `jax_cache`).
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib._jax import Device

from jaxkv.atomic_write import atomic_write, remove_abandoned, unfinished_files
from jaxkv.programs.alias_flow import PoolCopy
from jaxkv.programs.audit import AuditReport
from jaxkv.programs.jax_cache import own_entries, why_not_folder

MOST_BYTES = 8 * 2**30
"""Most bytes of all programs, JAX's entries and unfinished files after the store is opened."""

_LOG = logging.getLogger(__name__)
_ENDING = ".program"
_DIGEST_BYTES = hashlib.sha256().digest_size
_SIZE_BYTES = 8

Structure = Any
"""Structure of a pytree, `jax.tree_util.PyTreeDef`, which static checkers do not know as a type."""

UNREADABLE = (jax.errors.JaxRuntimeError, ValueError, TypeError, KeyError, OSError)
"""Errors of loading a program whose file is damaged, or which these devices cannot load."""

UNSERIALISABLE = (NotImplementedError, ValueError, jax.errors.JaxRuntimeError)
"""Errors of serialising a program that its backend cannot serialise."""


@dataclass(frozen=True)
class StoredProgram:
    """A compiled program and its audit.

    Attributes:
        compiled: the executable.
        report: the audit's report from when the program was compiled.
    """

    compiled: jax.stages.Compiled
    report: AuditReport


@dataclass(frozen=True)
class ProgramFile:
    """The file of one program in the store, which may not exist.

    It holds the SHA-256 of the rest, the length of the audit's report, the report as JSON, and the serialised
    executable.

    Attributes:
        path: path of the file.
        devices: devices that the program runs on, in the order of their mesh.
    """

    path: Path
    devices: Sequence[Device]

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self.path.exists()

    def load(self, traced: jax.stages.Traced) -> StoredProgram | None:
        """Returns the program, or `None` if there is no file or it cannot be loaded; such a file is deleted.

        Args:
            traced: the program's trace, which has the pytrees of its arguments and results.
        """
        try:
            os.utime(self.path)
            return self.read(jax.tree.structure(traced.args_info), traced.out_tree)
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            self._delete_broken(str(error))
            return None

    def read(self, arguments: Structure, results: Structure) -> StoredProgram:
        """Returns the program.

        Args:
            arguments: structure of its positional arguments and keywords.
            results: structure of what it returns.

        Raises:
            OSError: there is no such file, or it cannot be read.
            UNREADABLE: it is damaged, or these devices cannot load it.
        """
        content = self.path.read_bytes()
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged")
        size = int.from_bytes(body[:_SIZE_BYTES], "little")
        head, payload = body[_SIZE_BYTES:][:size], body[_SIZE_BYTES + size :]
        report = _report_of(json.loads(head))
        compiled = serialize_executable.deserialize_and_load(
            payload,
            arguments,
            results,
            backend=self.devices[0].client,
            execution_devices=self.devices,
        )
        return StoredProgram(compiled, report)

    def save(self, stored: StoredProgram) -> None:
        """Writes the program, unless its audit found problems. Failures to serialise or write it are logged."""
        if stored.report.problems:
            return
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            self.write(stored)
        except UNSERIALISABLE as error:
            _LOG.debug("a compiled program cannot be serialised: %s", error)
        except OSError as error:
            _LOG.warning("the compiled program %s cannot be written: %s", self.path, error)

    def write(self, stored: StoredProgram) -> None:
        """Writes the program into its folder, which there must be.

        Raises:
            UNSERIALISABLE: the backend cannot serialise it.
            OSError: the file cannot be written.
        """
        payload, *_ = serialize_executable.serialize(stored.compiled)
        head = json.dumps(asdict(stored.report)).encode()
        body = len(head).to_bytes(_SIZE_BYTES, "little") + head + payload
        with atomic_write(self.path) as unfinished:
            unfinished.write_bytes(hashlib.sha256(body).digest() + body)

    def _delete_broken(self, reason: str) -> None:
        _LOG.warning(
            "the stored program %s cannot be loaded and is compiled again: %s", self.path, reason
        )
        self.path.unlink(missing_ok=True)


def _report_of(fields: dict[str, Any]) -> AuditReport:
    copies = tuple(PoolCopy(**copy) for copy in fields["copies"])
    return AuditReport(**{**fields, "copies": copies, "problems": tuple(fields["problems"])})


class ProgramStore:
    """The stored programs in one folder; `store_folder` checks that only this user can write to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file_of(self, name: str, devices: Sequence[Device]) -> ProgramFile:
        """Returns the file of the program with this name, see `fingerprint.name_traced`."""
        return ProgramFile(self._folder / (name + _ENDING), devices)

    def trim(self, most_bytes: int = MOST_BYTES) -> None:
        """Deletes the least recently used programs beyond `most_bytes`, and unfinished files of ended processes.

        JAX's entries in the parent folder count as programs too, unless the user has configured or bounded JAX's cache.
        """
        try:
            remove_abandoned(self._folder)
            unfinished = sum(size for size, _, _ in _sizes(unfinished_files(self._folder)))
            kept = [*self._folder.glob(f"*{_ENDING}"), *own_entries(self._folder.parent)]
            found = _sizes(kept)
            total = unfinished + sum(size for size, _, _ in found)
            for size, _, path in sorted(found, key=lambda entry: entry[1]):
                if total <= most_bytes:
                    return
                path.unlink(missing_ok=True)
                total -= size
        except OSError as error:
            _LOG.warning("old programs in %s cannot be deleted: %s", self._folder, error)


def _sizes(paths: Iterable[Path]) -> list[tuple[int, float, Path]]:
    """Returns (bytes, time of the last use, path) of each file that still exists."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            stat = path.stat()
            # JAX does not update an entry that it reads, but most file systems record the access time.
            found.append((stat.st_size, max(stat.st_atime, stat.st_mtime), path))
    return found


def store_folder() -> Path | None:
    """Returns the store's folder, or `None` if JAX's cache is off, remote, or others can write to its folder."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or not _is_ours(folder):
        return None
    return Path(folder) / "traced"


def open_store() -> ProgramStore | None:
    """Returns the store in `store_folder`, trimmed once per process; `None` if that is `None`."""
    folder = store_folder()
    return None if folder is None else _open(folder)


@cache
def _is_ours(folder: str) -> bool:
    # Loading a program runs its code, so a remote folder, or one that others can write to, is not used.
    return "://" not in folder and why_not_folder(Path(folder)) is None


@cache
def _open(folder: Path) -> ProgramStore:
    store = ProgramStore(folder)
    store.trim()
    return store
