"""Records of the compile times and memory of a model's programs on this machine, for `jaxkv plan`."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxkv.atomic_write import atomic_write
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
    """Returns `cost_name` -> recorded cost of a model's programs; empty if there is no record.

    Args:
        identity: text that identifies the model, see `warm_up.cost_identity`.
    """
    path = _path(identity)
    if path is None or not path.exists():
        return {}
    try:
        return {name: Cost(**cost) for name, cost in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _LOG.warning("recorded costs of programs cannot be read from %s: %s", path, error)
        return {}


def record_costs(identity: str, programs: Iterable[Program]) -> None:
    """Records the costs of programs that this process has compiled; those loaded from disk are left out."""
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
    """Returns the name under which a program's cost is recorded; it does not depend on the cache's size."""
    return str(spec)


def _write(path: Path, costs: Mapping[str, Cost]) -> None:
    text = json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # If two processes write at once, the file is one of the two, and the additions of the other are lost.
        with atomic_write(path) as unfinished:
            unfinished.write_text(text + "\n")
    except OSError as error:
        _LOG.warning("costs of programs cannot be written to %s: %s", path, error)


def _path(identity: str) -> Path | None:
    folder = store_folder()
    if folder is None:
        return None
    return folder / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
