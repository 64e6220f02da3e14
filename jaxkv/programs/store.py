"""Compiled programs on disk, found by what JAX traced, so that a warm start need not lower anything.

JAX's own compilation cache is asked with the lowered module, and lowering is what takes long: our kernels are
generated then, in Python. Here a program is found by what was traced (see `trace_name`). The folder lies in the one of
JAX's cache (see `compile_cache`), with which it is turned on and off.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib._jax import Device

from jaxkv.drafts import draft_of, files_of_drafts, remove_abandoned
from jaxkv.programs.alias_flow import PoolCopy
from jaxkv.programs.audit import AuditReport
from jaxkv.programs.jax_cache import own_entries, why_not_folder

MOST_BYTES = 8 * 2**30
"""Most bytes of all programs, JAX's entries and drafts, when the store is opened."""

_LOG = logging.getLogger(__name__)
_ENDING = ".program"
_DIGEST_BYTES = hashlib.sha256().digest_size
_SIZE_BYTES = 8


@dataclass(frozen=True)
class Stored:
    """A program that was compiled before.

    Attributes:
        compiled: ready to be called.
        report: what the audit found when it was compiled.
    """

    compiled: jax.stages.Compiled
    report: AuditReport


@dataclass(frozen=True)
class Place:
    """The file of one program, which may not exist.

    Attributes:
        path: its file.
        device: where it runs.
    """

    path: Path
    device: Device

    @property
    def is_filled(self) -> bool:
        """Whether there is a file."""
        return self.path.exists()

    def load(self, traced: jax.stages.Traced) -> Stored | None:
        """Returns the program, or `None` if it is not there; one that cannot be loaded is deleted.

        Args:
            traced: what it was found by, which knows the trees of its arguments and results.
        """
        try:
            content = self.path.read_bytes()
            os.utime(self.path)
            digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != digest:
                return self._give_up("it is damaged")
            size = int.from_bytes(body[:_SIZE_BYTES], "little")
            head, payload = body[_SIZE_BYTES:][:size], body[_SIZE_BYTES + size :]
            report = _report_of(json.loads(head))
            compiled = serialize_executable.deserialize_and_load(
                payload,
                jax.tree.structure(traced.args_info),
                traced.out_tree,
                backend=self.device.client,
                execution_devices=[self.device],
            )
        except FileNotFoundError:
            return None
        except (jax.errors.JaxRuntimeError, ValueError, TypeError, KeyError, OSError) as error:
            return self._give_up(str(error))
        return Stored(compiled, report)

    def save(self, stored: Stored) -> None:
        """Keeps a program, unless it has a problem, or it or the folder does not allow it."""
        if stored.report.problems:
            return
        try:
            payload, *_ = serialize_executable.serialize(stored.compiled)
        except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
            _LOG.debug("a program cannot be kept: %s", error)
            return
        head = json.dumps(asdict(stored.report)).encode()
        body = len(head).to_bytes(_SIZE_BYTES, "little") + head + payload
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with draft_of(self.path) as draft:
                draft.write_bytes(hashlib.sha256(body).digest() + body)
        except OSError as error:
            _LOG.warning("the compiled program %s cannot be kept: %s", self.path, error)

    def _give_up(self, reason: str) -> None:
        _LOG.warning("the stored program %s is compiled anew: %s", self.path, reason)
        self.path.unlink(missing_ok=True)


def _report_of(fields: dict[str, Any]) -> AuditReport:
    copies = tuple(PoolCopy(**copy) for copy in fields["copies"])
    return AuditReport(**{**fields, "copies": copies, "problems": tuple(fields["problems"])})


class ProgramStore:
    """The programs in one private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, name: str, device: Device) -> Place:
        """Returns where a program of this name is kept."""
        return Place(self._folder / (name + _ENDING), device)

    def trim(self, most_bytes: int = MOST_BYTES) -> None:
        """Deletes drafts of processes that have ended, and beyond so many bytes what was not used for longest.

        JAX's entries beside the folder count too, unless the user has configured or bounded JAX's cache.
        """
        try:
            remove_abandoned(self._folder)
            drafts = sum(size for size, _, _ in _sizes(files_of_drafts(self._folder)))
            kept = [*self._folder.glob(f"*{_ENDING}"), *own_entries(self._folder.parent)]
            found = _sizes(kept)
            total = drafts + sum(size for size, _, _ in found)
            for size, _, path in sorted(found, key=lambda entry: entry[1]):
                if total <= most_bytes:
                    return
                path.unlink(missing_ok=True)
                total -= size
        except OSError as error:
            _LOG.warning("old programs in %s cannot be deleted: %s", self._folder, error)


def _sizes(paths: Iterable[Path]) -> list[tuple[int, float, Path]]:
    """Returns the bytes and the time of the last use of each file that is still there."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            stat = path.stat()
            # JAX does not touch an entry that it reads, but most file systems note that it was read.
            found.append((stat.st_size, max(stat.st_atime, stat.st_mtime), path))
    return found


def store_folder() -> Path | None:
    """Returns the folder beside JAX's compilation cache, or `None` if that is off or not ours alone."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache or not _is_ours(folder):
        return None
    return Path(folder) / "traced"


def open_store() -> ProgramStore | None:
    """Returns the store in `store_folder`, if there is one."""
    folder = store_folder()
    return None if folder is None else _open(folder)


@cache
def _is_ours(folder: str) -> bool:
    # Loading a program runs its code, so a folder that others write to, or that lies elsewhere, is not used.
    return "://" not in folder and why_not_folder(Path(folder)) is None


@cache
def _open(folder: Path) -> ProgramStore:
    store = ProgramStore(folder)
    store.trim()
    return store
