"""Bundles: folders of compiled programs that can be shipped, and that a process loads without tracing any.

The store (`store.py`) finds a program by its trace, so even a warm start traces every program. A bundle finds it by its
spec, which says nothing about the model, the versions or the device. So a bundle also has facts about everything that
its programs were compiled for, and a process that differs in one of them is refused with the difference.

A bundle holds `manifest.json` (facts, the names of the programs for people, and hashes of itself and of the specs),
`specs.json` (spec, file with its hash, and structure of the results of each program) and a file of the store's format
for each program.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
from jaxlib._jax import Device

from jaxkv.errors import BadBundle
from jaxkv.links.values import Values
from jaxkv.programs.compile import Built, load_build
from jaxkv.programs.manifest import Program
from jaxkv.programs.spec import ProgramSpec
from jaxkv.programs.store import (
    UNREADABLE,
    UNSERIALISABLE,
    ProgramFile,
    StoredProgram,
    Structure,
)
from jaxkv.wording import shown

_MANIFEST, _SPECS = "manifest.json", "specs.json"
_FORMAT = 2
_SHOWN_DIFFERENCES, _SHOWN_CHARACTERS = 8, 120
_ABSENT = "nothing"

type Facts = Mapping[str, Any]
"""What programs were compiled for: names, and values that JSON can hold, or further facts."""


def facts_of(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    """Returns a value as `Facts` has it: fields of dataclasses by name, entries of sequences by index."""
    if isinstance(value, str | bool | int | float | None):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: facts_of(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): facts_of(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): facts_of(one) for index, one in enumerate(value)}
    return str(value)


def write_bundle(
    folder: Path,
    facts: Facts,
    programs: Iterable[Program],
    devices: Sequence[Device],
    values: Values,
) -> None:
    """Writes a bundle into a new folder, and loads each program of it once to see that it can be loaded.

    Args:
        folder: the new folder.
        facts: what the programs were compiled for.
        programs: the programs, all of these devices.
        devices: their devices, in the order of their mesh.
        values: writes specs, and the pytrees of results.

    Raises:
        BadBundle: a program cannot be serialised or loaded on this backend, or was itself loaded, for a CPU.
        OSError: the folder exists already, or cannot be written.
    """
    folder.mkdir(mode=0o700)
    try:
        _fill(folder, facts, programs, devices, values)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fill(
    folder: Path,
    facts: Facts,
    programs: Iterable[Program],
    devices: Sequence[Device],
    values: Values,
) -> None:
    entries = []
    for index, program in enumerate(programs):
        compiled, name = program.compiled, f"{index:03}-{program.spec.name}.program"
        results = compiled.out_tree.unflatten(range(compiled.out_tree.num_leaves))
        file = ProgramFile(folder / name, devices)
        try:
            if program.loaded and devices[0].platform == "cpu":
                # XLA serialises it without some of its functions. That shows only when it runs.
                raise ValueError("it was loaded, not compiled")
            file.write(StoredProgram(compiled, program.report))
            file.read(jax.tree.structure(compiled.args_info), compiled.out_tree)
        except OSError:
            raise
        except (*UNREADABLE, *UNSERIALISABLE) as error:
            raise BadBundle(
                f"{program.spec} cannot be put into a bundle on {devices[0].platform}: {error}. If it came from a "
                f"store of compiled programs, set JAX_ENABLE_COMPILATION_CACHE=false and compile it anew"
            ) from error
        entries.append((program.spec, name, _digest(folder / name), results))
    [listed] = values.write(entries)
    (folder / _SPECS).write_bytes(listed)
    manifest = {
        "format": _FORMAT,
        "programs": [str(spec) for spec, *_ in entries],
        "specs_sha256": hashlib.sha256(listed).hexdigest(),
        "facts": facts,
    }
    manifest["sha256"] = _manifest_digest(manifest)
    # Last, so that the folder of a process that was killed is no bundle.
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


class Bundle:
    """A bundle on disk, of which only the manifest is read until `load`.

    Args:
        folder: its folder.

    Attributes:
        folder: its folder.
        facts: what its programs were compiled for.

    Raises:
        BadBundle: the folder holds no bundle of this format, or others can write to it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        reason = _why_not_trusted(self.folder)
        if reason is not None:
            raise BadBundle(f"the programs in {self.folder} are not loaded, because {reason}")
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text())
            form = manifest["format"]
        except FileNotFoundError as error:
            raise BadBundle(
                f"{self.folder} holds no bundle of programs: it has no {_MANIFEST}; make one with jaxkv compile"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadBundle(f"{self._damaged(_MANIFEST)}: {shown(error)}") from error
        if form != _FORMAT:
            raise BadBundle(
                f"the bundle {self.folder} has format {form}, and this jaxkv reads {_FORMAT}; make it again with "
                f"jaxkv compile"
            )
        # A process takes facts such as the size of its cache from here.
        if manifest.get("sha256") != _manifest_digest(manifest):
            raise BadBundle(
                f"{self._damaged(_MANIFEST)}: it was edited, since its entries have another sha256 than it names"
            )
        try:
            self.facts: Facts = manifest["facts"]
            self._specs_sha256: str = manifest["specs_sha256"]
        except KeyError as error:
            raise BadBundle(f"{self._damaged(_MANIFEST)}: it lacks {error}") from error

    def refuse_unless(self, facts: Facts) -> None:
        """Raises `BadBundle` with every difference if the bundle was made for other facts.

        Args:
            facts: all facts, or some of them.
        """
        found = list(_differences(facts, {name: self.facts.get(name) for name in facts}))
        if not found:
            return
        more = len(found) - _SHOWN_DIFFERENCES
        lines = [
            *found[:_SHOWN_DIFFERENCES],
            *([f"and {more} more differences"] if more > 0 else []),
        ]
        listed = "\n  ".join(lines)
        raise BadBundle(
            f"the programs in {self.folder} were compiled for something else:\n  {listed}\n"
            f"Give the options that they were compiled with, make another bundle with jaxkv compile here, or give none"
        )

    def load(
        self,
        devices: Sequence[Device],
        values: Values,
        arguments: Callable[[ProgramSpec], Structure],
    ) -> dict[ProgramSpec, Built]:
        """Returns all programs, loaded in parallel; call `refuse_unless` before.

        Args:
            devices: devices to run them on, in the order of their mesh.
            values: reads what that of `write_bundle` has written.
            arguments: returns the structure of a program's positional arguments.

        Raises:
            BadBundle: a file is missing or damaged, or these devices cannot load it.
        """
        listed = self._read(_SPECS)
        if hashlib.sha256(listed).hexdigest() != self._specs_sha256:
            raise BadBundle(self._damaged(_SPECS))
        started: dict[ProgramSpec, Future[Built]] = {}
        with ThreadPoolExecutor() as pool:
            for spec, name, digest, results in values.read([listed]):
                file = ProgramFile(self.folder / name, devices)
                started[spec] = pool.submit(
                    self._load, file, digest, arguments(spec), jax.tree.structure(results)
                )
        return {spec: future.result() for spec, future in started.items()}

    def _load(
        self, file: ProgramFile, digest: str, arguments: Structure, results: Structure
    ) -> Built:
        try:
            if _digest(file.path) != digest:
                raise BadBundle(self._damaged(file.path.name))
            return load_build(file, arguments, results)
        except UNREADABLE as error:
            raise BadBundle(f"{self._damaged(file.path.name)}: {error}") from error

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise BadBundle(f"{self._damaged(name)}: {error}") from error

    def _damaged(self, name: str) -> str:
        return f"the bundle {self.folder} is damaged, make it again with jaxkv compile ({name})"


def _why_not_trusted(folder: Path) -> str | None:
    """Returns why a folder must not be loaded from, or `None` if it may: loading a program runs what its file holds."""
    if not folder.is_dir():
        return "there is no such folder; make one with jaxkv compile"
    try:
        all_found = [(path, path.stat()) for path in (folder, *folder.iterdir())]
    except OSError as error:
        return f"this user cannot read all of the folder ({error}); copy it, or change its owner"
    for path, found in all_found:
        if found.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user, who could run code here; copy the folder"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {path}, and so run code here (chmod -R go-w {folder})"
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Returns the hash of all entries of a manifest but "sha256", which is the same once JSON has held them."""
    entries = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _differences(here: Any, bundled: Any, name: str = "") -> Iterator[str]:  # noqa: ANN401 - facts
    """Yields a line for each fact that differs."""
    if isinstance(here, Mapping) and isinstance(bundled, Mapping):
        for key in dict.fromkeys([*here, *bundled]):
            inner = f"{name}.{key}" if name else str(key)
            yield from _differences(here.get(key, _ABSENT), bundled.get(key, _ABSENT), inner)
    elif here != bundled:
        ours, theirs = str(here), str(bundled)
        if max(len(ours), len(theirs)) > _SHOWN_CHARACTERS:
            ours, theirs = _words_beside(ours, theirs), _words_beside(theirs, ours)
        yield f"{name}: {ours} here, {theirs} in the bundle"


def _words_beside(text: str, other: str) -> str:
    """Returns the words of a long text that another one lacks, as many as an error shows."""
    known = set(other.split())
    words = " ".join(word for word in text.split() if word not in known)
    return words if len(words) <= _SHOWN_CHARACTERS else words[:_SHOWN_CHARACTERS] + "..."
