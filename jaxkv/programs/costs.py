"""Records of the compile times and memory of a model's programs on this machine, for `jaxkv plan`."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxkv.drafts import draft_of
from jaxkv.programs.manifest import Program
from jaxkv.programs.spec import ProgramSpec
from jaxkv.programs.store import store_folder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """The cost of one program.

    Attributes:
        seconds: to trace, lower and compile it.
        temp_bytes: memory on the device that it uses besides its arguments.
    """

    seconds: float
    temp_bytes: int


def read_costs(identity: str) -> dict[str, Cost]:
    """Returns `cost_name` -> recorded cost of a model's programs; empty if nothing was recorded."""
    path = _path(identity)
    if path is None or not path.exists():
        return {}
    try:
        return {name: Cost(**cost) for name, cost in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _LOG.warning("what programs cost cannot be read from %s: %s", path, error)
        return {}


def note_costs(identity: str, programs: Iterable[Program]) -> None:
    """Notes what compiling programs took; those that were loaded from disk cost nothing worth a note."""
    compiled = {
        cost_name(program.spec): Cost(program.seconds, program.report.temp_bytes)
        for program in programs
        if not program.loaded
    }
    path = _path(identity)
    if path is None or not compiled:
        return
    _write(path, read_costs(identity) | compiled)


def cost_name(spec: ProgramSpec) -> str:
    """Returns what a program's cost is noted under; the size of the cache makes no difference to it."""
    return str(spec)


def _write(path: Path, costs: Mapping[str, Cost]) -> None:
    text = json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Two processes may note at once; each file is whole, and what one of them adds may be lost.
        with draft_of(path) as draft:
            draft.write_text(text + "\n")
    except OSError as error:
        _LOG.warning("what programs cost cannot be kept in %s: %s", path, error)


def _path(identity: str) -> Path | None:
    folder = store_folder()
    if folder is None:
        return None
    return folder / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
