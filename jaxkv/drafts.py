"""Files that appear whole or not at all: written as drafts in a folder beside their place, then moved there."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ENDING = ".jaxkv-draft"
_LOCK = "lock"
_GRACE_SECONDS = 60.0
"""A younger draft may be one that its process has made and not locked yet."""


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yields a path to write to; at the end of the block that file replaces `path`, unless the block failed.

    The draft has a folder of its own, for the temporary files of those who write it, and is locked until then. A
    process that is killed leaves the folder behind without a lock; see `remove_abandoned`.

    Raises:
        OSError: names the folder of `path` if no draft can be made there.
    """
    try:
        made = tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=_ENDING, dir=path.parent)
    except OSError as error:
        # The name of the draft would mean nothing to the user.
        error.filename = str(path.parent)
        raise
    folder = Path(made)
    try:
        with (folder / _LOCK).open("wb") as lock:
            # Some network file systems have no locks; drafts there are never taken for abandoned.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder / "content"
            os.replace(folder / "content", path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files_of_drafts(folder: Path) -> list[Path]:
    """Returns the files of all drafts in a folder, abandoned or not."""
    return sorted(folder.glob(f".*{_ENDING}/*"))


def remove_abandoned(folder: Path) -> None:
    """Deletes the user's drafts in a folder whose process has ended: the kernel has then released their locks."""
    for draft in folder.glob(f".*{_ENDING}"):
        # It may be gone meanwhile, or locked.
        with suppress(OSError):
            found = draft.lstat()
            # In a folder that several users write to, the lock of another user may be a link or a pipe.
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue
            if time.time() - found.st_mtime < _GRACE_SECONDS:
                continue
            with (draft / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft)
