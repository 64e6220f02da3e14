"""The fastest measured schedules of each kind of device, read from `tuned/<device>.json`.

A file maps op -> shape class -> the fields of the op's schedule, and "us", the measured time in microseconds.
`pallas_kernels.workbench.tune` writes the file. For a shape class without an entry, the op's own rules choose the
schedule.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.extend.backend import get_default_device

FOLDER = Path(__file__).parent / "tuned"
# Key of the measured time in microseconds. Every other key is a field of the schedule.
TIME = "us"

_TRIAL: ContextVar[tuple[str, Mapping[str, int] | None] | None] = ContextVar("trial", default=None)


def tuned(op: str, shape_class: str) -> Mapping[str, int] | None:
    """Returns the fields of the fastest schedule measured on the default device's kind, or `None` without an entry.

    A device of a topology description gets the schedules of its device kind, like a real one.

    Raises:
        ValueError: the device's file is malformed.
    """
    trial = _TRIAL.get()
    if trial is not None and trial[0] == op:
        return trial[1]
    path = tuned_path(get_default_device())
    return None if path is None else load_tuned(path).get(op, {}).get(shape_class)


def choose[Schedule](
    op: str,
    shape_class: str,
    schedules: type[Schedule],
    *,
    is_possible: Callable[[Schedule], bool],
    by_rule: Callable[[], Schedule],
) -> Schedule:
    """Returns the tuned schedule of a shape class, or the schedule of the op's rules if no tuned one can run.

    Args:
        op: the op's name.
        shape_class: the class of the call's shapes.
        schedules: the op's dataclass of schedules. An entry of the file that lacks a field without default, or has an
            unknown field, was written for an older version of the dataclass and is ignored.
        is_possible: whether the kernel can run under a schedule.
        by_rule: chooses a schedule without measurements.

    Raises:
        ValueError: the device's file is malformed.
    """
    found = tuned(op, shape_class)
    declared: Any = schedules
    names = {field.name for field in fields(declared)}
    needed = {field.name for field in fields(declared) if field.default is MISSING}
    if found is not None and needed <= found.keys() <= names:
        schedule = schedules(**found)
        if is_possible(schedule):
            return schedule
    return by_rule()


def round_up_to_power(number: int) -> int:
    """Returns the least power of two that is at least `number` and 1; shape classes round sizes up to it."""
    return 1 << (max(number, 1) - 1).bit_length()


@contextmanager
def trying(op: str, fields: Mapping[str, int] | None) -> Iterator[None]:
    """Makes `op`, when traced inside, use a schedule of these fields, or its own rules if `fields` is `None`."""
    token = _TRIAL.set((op, fields))
    try:
        yield
    finally:
        _TRIAL.reset(token)


def tuned_path(device: Any, folder: Path | None = None) -> Path | None:  # noqa: ANN401 - JAX's type is private
    """Returns the path of the schedules for a device's kind, or `None` for a CPU, where kernels are interpreted."""
    if device.platform == "cpu":
        return None
    name = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return (FOLDER if folder is None else folder) / f"{name}.json"


@cache
def load_tuned(path: Path) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    """Returns op -> shape class -> fields, empty without a file. Each file is read once per process.

    Raises:
        ValueError: the file does not have the format of `pallas_kernels.workbench.tune`; the message names the entry.
    """
    if not path.is_file():
        return MappingProxyType({})
    try:
        ops = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(_damaged(path, str(error))) from error
    return {
        op: {
            name: _fields(path, f"{op} / {name}", fields)
            for name, fields in _object(path, op, classes).items()
        }
        for op, classes in _object(path, "the file", ops).items()
    }


def _fields(path: Path, place: str, fields: object) -> Mapping[str, int]:
    known = {name: value for name, value in _object(path, place, fields).items() if name != TIME}
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(_damaged(path, f"{place} / {name} must be an integer, got {value!r}"))
    return MappingProxyType(known)


def _object(path: Path, place: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(_damaged(path, f"{place} must be an object, got {value!r:.80}"))
    return value


def _damaged(path: Path, problem: str) -> str:
    return (
        f"{path} is damaged: {problem}; make it again with `python -m pallas_kernels.workbench.tune`, or "
        f"delete it to run on heuristics"
    )
