"""The files on which lowered kernels depend, and a hash of them."""

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
"""The package's folder."""

# Cases, references, inputs and benchmarks of the kernels.
_NEVER_LOWERED = {"cases.py", "reference.py", "inputs", "workbench"}


def kernel_files(folder: Path = FOLDER) -> list[Path]:
    """Returns the files of `pallas_kernels` on which a lowered program may depend, in a fixed order.

    These are the Python files and the tuned schedules, without the files and folders named in `_NEVER_LOWERED`. Leaving
    those out is safe because no op imports them, directly or through other files, so nothing in them can run while a
    program is lowered. `tests/programs/test_fingerprint.py` checks this on the graph of imports. A new file counts
    unless it has one of these names.

    Args:
        folder: the package's folder.
    """
    files = [*folder.rglob("*.py"), *folder.glob("tuned/*.json")]
    return sorted(path for path in files if not _NEVER_LOWERED & {*path.relative_to(folder).parts})


@cache
def kernel_sources() -> str:
    """Returns a hash of `kernel_files`, paths and contents, as they were when this module was imported."""
    digest = hashlib.sha256()
    for path in kernel_files(FOLDER):
        digest.update(str(path.relative_to(FOLDER)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# When this process imports the kernels, and not when it compiles them: a file may be edited in between.
kernel_sources()
