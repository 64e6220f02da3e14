"""The files of the prefix caches of several replicas, one for each, and the texts in them."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

_ROOT = -1


def new_files(path: str | Path, count: int) -> list[Path]:
    """Returns the file of each replica that is saved under a path, such as cache.1-of-2.safetensors."""
    path = Path(path)
    return [
        path.with_name(f"{path.stem}.{number}-of-{count}{path.suffix}") for number in range(count)
    ]


def found_files(path: str | Path) -> list[Path]:
    """Returns the files that were last saved under a path: one for each replica, or that of a single `LLM`.

    There may be older ones of another number of replicas, such as from before one was lost.

    Raises:
        FileNotFoundError: there are none, or some are missing.
    """
    path = Path(path)
    name = re.compile(rf"{re.escape(path.stem)}\.\d+-of-(\d+){re.escape(path.suffix)}")
    folder = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    counts = {int(match[1]) for each in folder if (match := name.fullmatch(each.name))}
    saved = [new_files(path, count) for count in sorted(counts)]
    if path.is_file():
        saved.append([path])
    if not saved:
        raise FileNotFoundError(f"there is neither {path} nor {new_files(path, 2)[0]} and so on")
    files = max(saved, key=_last_written)
    if missing := [each for each in files if not each.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing, of {len(files)} files of replicas")
    return files


def _last_written(files: Sequence[Path]) -> int:
    return max(each.stat().st_mtime_ns for each in files if each.is_file())


def texts_of(file: Path) -> list[list[int]]:
    """Returns the token ids of the longest texts in a file of `LLM.save_prefixes`."""
    with safe_open(file, framework="numpy") as opened:
        parents = opened.get_tensor("parents").tolist()
        tokens: list[list[int]] = opened.get_tensor("tokens").astype(np.int64).tolist()
    texts: list[list[int]] = []
    for parent, page in zip(parents, tokens, strict=True):
        texts.append([*(texts[parent] if parent != _ROOT else []), *page])
    followed = set(parents)
    return [text for row, text in enumerate(texts) if row not in followed]
