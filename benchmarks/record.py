"""`Record`: one measurement as JSON, with its machine, versions and command.

Each benchmark chooses the columns of its rows.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

RECORDS = Path(__file__).parent / "records"
UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of a benchmark.

    Attributes:
        name: name of the record and of its file, without the suffix.
        device: name of the accelerator or the processor.
        platform: JAX's name of the platform: "gpu" or "cpu".
        driver: NVIDIA driver version; "none" without a GPU.
        jax, jaxlib: their versions.
        commit: full hash, "unknown" where there is no git history.
        dirty: whether tracked files, the records aside, differed from the commit; `None` where unknown.
        date: date of the record, UTC.
        command: command line that repeats the measurement.
        rows: the results; column names include their units.
        note: further remarks, such as why a record was written by hand.
    """

    name: str
    device: str
    platform: str
    driver: str
    jax: str
    jaxlib: str
    commit: str
    dirty: bool | None
    date: str
    command: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


def _output(*command: str, cwd: Path | None = None) -> str | None:
    """Returns what a command prints, or `None` if it does not exist or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read_commit(folder: Path) -> tuple[str, bool | None]:
    """Returns the commit that `folder` is checked out at and whether its tracked files differ from it.

    Where there are files without git history, the environment variable JAXKV_COMMIT gives the commit.
    """
    commit = _output("git", "rev-parse", "HEAD", cwd=folder)
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", cwd=folder)
    if commit is None or changed is None:
        return os.environ.get("JAXKV_COMMIT", UNKNOWN), None
    # Saving one record must not make the next one look as if the code had changed.
    return commit, any("benchmarks/records/" not in line for line in changed.splitlines())


def device_name() -> str:
    """Returns the accelerator's name, such as "NVIDIA H200", or the processor's."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _driver() -> str:
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told.splitlines()[0] if told else UNKNOWN


def _command() -> str:
    """The command line that started this process; of a path it has the last part, and of `--folder` nothing."""
    line = " ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    return re.sub(r"(?<=[ =])/\S*/", "", re.sub(r" --folder[ =]\S+", "", line))


def save_record(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    folder: Path = RECORDS,
    torch_device: str | None = None,
) -> Path:
    """Writes `folder/name.json`, replacing the record of that name, and returns its path.

    Args:
        name: name of the record.
        rows: what was measured.
        folder: where records are.
        torch_device: name of the GPU that was measured, if torch used it and JAX did not; JAX's device if `None`.
    """
    commit, dirty = read_commit(Path(__file__).parent)
    backend = jax.devices()[0].platform if torch_device is None else "gpu"
    record = Record(
        name=name,
        device=torch_device or device_name(),
        platform=backend,
        driver="none" if backend == "cpu" else _driver(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        commit=commit,
        dirty=dirty,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=_command(),
        rows=rows,
    )
    # NaN is not JSON; a missing measurement is `None`.
    text = json.dumps(asdict(record), indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(text + "\n")
    return path


def load_record(path: Path) -> Record:
    """Reads one record.

    Raises:
        ValueError: the file is no record; the message has its path and the reason.
    """
    try:
        return Record(**json.loads(path.read_text()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a benchmark record: {error}") from error
