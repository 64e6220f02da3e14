"""Atomic file writes: the content is written in a folder beside the file, and then replaces the file in one step."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENDING = ".jaxkv-unfinished"
_LOCK = "lock"
_GRACE_SECONDS = 60.0
"""Younger folders are never removed, because their process may not have locked them yet."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end of the block the file there replaces `path`, unless the block raised.

    The file lies in a folder of its own, which also has room for temporary files and is locked until the end. A
    process that is killed leaves the folder behind without a lock; see `remove_abandoned`.

    Raises:
        OSError: names the folder of `path` if nothing can be made there.
    """
    try:
        made = tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=_ENDING, dir=path.parent)
    except OSError as error:
        # The user does not know the name of the temporary folder.
        error.filename = str(path.parent)
        raise
    folder = Path(made)
    try:
        with (folder / _LOCK).open("wb") as lock:
            # Some network file systems have no locks; `remove_abandoned` then removes nothing.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder / "content"
            os.replace(folder / "content", path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unfinished_files(folder: Path) -> list[Path]:
    """Returns the files of all writes in a folder that have not ended, abandoned or not."""
    return sorted(folder.glob(f".*{_ENDING}/*"))


def remove_abandoned(folder: Path) -> None:
    """Deletes this user's unfinished writes in a folder whose process has ended, which are those without a lock."""
    for unfinished in folder.glob(f".*{_ENDING}"):
        # Another process may have removed or locked it.
        with suppress(OSError):
            found = unfinished.lstat()
            # In a folder that several users write to, the lock of another user may be a link or a pipe.
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue
            if time.time() - found.st_mtime < _GRACE_SECONDS:
                continue
            with (unfinished / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(unfinished)
