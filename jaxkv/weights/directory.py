"""Opens files and parses JSON of an untrusted model directory."""

import json
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.conversions import gguf_advice, instead_of_config
from jaxkv.wording import clip

CONFIG = "config.json"
MAX_JSON_BYTES = 16 * 2**20
_ADDRESS = re.compile(r"(?:hf:/+|https?:/+[\w.]+/+)([\w.-]+/[\w.-]+)", re.ASCII)
_NAME_ALONE = re.compile(r"\w[\w.-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"(chat_templates/)?\w[\w.+-]{0,254}", re.ASCII)
_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")
_HEAD_BYTES = 512
_FOREIGN = (
    (
        re.compile(rb"version https://git-lfs"),
        "is a pointer of Git LFS in the place of the file; run `git lfs pull` in its folder, or download the file",
    ),
    (
        re.compile(rb"\s*<(!doctype html|html|head|\?xml)", re.IGNORECASE),
        "is an HTML page, as downloads save it when a login or an error comes instead; download the file again",
    ),
    (
        re.compile(rb"GGUF"),
        "is in GGUF, which jaxkv does not read; download the safetensors files of the model it was made from",
    ),
    (
        re.compile(rb"PK\x03\x04"),
        "is a zip archive, as PyTorch writes it; that is never read, as it can run code: convert it to safetensors",
    ),
)
"""(Beginning of a file, message with what to do) of formats often found instead of JSON or safetensors."""


def existing_directory(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a model directory; raises `BadCheckpoint` if there is none, and says what to give instead."""
    path = Path(directory)
    if path.is_dir():
        return path
    wanted = f"{directory} is not a directory; wanted one with config.json and weights"
    if path.suffix == ".gguf":
        folder = str(path.parent)
        raise BadCheckpoint(f"{wanted} in safetensors; {gguf_advice(folder, path.name)}")
    if path.is_file():
        raise BadCheckpoint(f"{wanted}; give the folder of this file, {path.parent}")
    address = _ADDRESS.match(str(directory))
    if address:
        raise BadCheckpoint(f"{wanted}; give the name of the model, {address[1]}")
    if _NAME_ALONE.fullmatch(str(directory)):
        raise BadCheckpoint(
            f"{wanted}; a model on the Hugging Face Hub is given with its owner, such as Qwen/Qwen3-0.6B"
        )
    raise BadCheckpoint(wanted)


def read_config_json(directory: Path) -> dict[str, object]:
    """Returns the JSON object of config.json; raises `BadCheckpoint`, which says what the directory holds instead."""
    if not has_file(directory, CONFIG):
        names = os.listdir(directory)
        instead = instead_of_config(names, str(directory))
        raise BadCheckpoint(f"{directory} holds no {CONFIG}{instead}")
    return read_json(directory, CONFIG)


def check_format(head: bytes, where: str) -> None:
    """Raises `BadCheckpoint` if the first bytes of a file are those of a format in `_FOREIGN`."""
    for beginning, message in _FOREIGN:
        if beginning.match(head[:_HEAD_BYTES]):
            raise BadCheckpoint(f"{where} {message}")


def has_file(directory: Path, name: str) -> bool:
    """Whether the directory has an entry `name` of any kind, broken links included."""
    return os.path.lexists(directory / name)


def check_plain_name(directory: Path, name: str) -> None:
    """Raises `BadCheckpoint` if `name`, possibly from an untrusted file, is not a plain file name."""
    if not _PLAIN_NAME.fullmatch(name):
        raise BadCheckpoint(f"{directory}: {clip(repr(name))} is not a plain file name")


def files_below(directory: Path, folder: str) -> list[str]:
    """Returns the sorted names `folder/file` in a folder of the directory; none if there is no such folder."""
    path = directory / folder
    if not path.is_dir():
        return []
    return sorted(f"{folder}/{entry.name}" for entry in os.scandir(path))


def path_inside(directory: Path, name: str) -> Path:
    """Returns the path of a file after following links, checked to be inside the directory.

    A snapshot of the Hugging Face cache (`<cache>/<model>/snapshots/<revision>`) consists of links into
    `<cache>/<model>/blobs`, where files may again be links into `<cache>/blobs`, which models share; these two folders
    count as inside for such a directory.

    Args:
        directory: the model directory.
        name: a plain file name, possibly from an untrusted file; or one in the folder `chat_templates`.

    Raises:
        BadCheckpoint: the name is no plain file name, leads outside, or is not that of a readable regular file.
    """
    check_plain_name(directory, name)
    root = Path(os.path.realpath(directory))
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(root) and not _is_blob(path, root):
        raise BadCheckpoint(f"{directory / name} is a link out of the model directory")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadCheckpoint(f"{directory / name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise BadCheckpoint(f"{directory / name} is not a regular file")
    return path


def _is_blob(path: Path, snapshot: Path) -> bool:
    """Whether a file lies where the Hugging Face cache keeps the contents of a snapshot's files."""
    if snapshot.parent.name != "snapshots":
        return False
    model = snapshot.parent.parent
    if path.is_relative_to(model / "blobs"):
        return True
    shared = model.parent / "blobs"
    return (
        model.name.startswith("models--")
        and path.is_relative_to(shared)
        and _SHARED_BLOB.fullmatch(path.relative_to(shared).as_posix()) is not None
    )


def open_inside(directory: Path, name: str) -> BinaryIO:
    """Opens a regular file of the directory for unbuffered reading, without ever blocking.

    Raises:
        BadCheckpoint: as `path_inside`.
    """
    path = path_inside(directory, name)
    try:
        # Without O_NONBLOCK, opening a FIFO that replaced the file after the check would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BadCheckpoint(f"{directory / name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadCheckpoint(f"{directory / name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_bytes(directory: Path, name: str, *, max_bytes: int) -> bytes:
    """Returns the content of a file; raises `BadCheckpoint` if it is unreadable or longer than `max_bytes`."""
    with open_inside(directory, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise BadCheckpoint(f"{directory / name} has {size} bytes; the limit is {max_bytes}")
        return file.read()


def read_text(directory: Path, name: str, *, max_bytes: int) -> str:
    """Returns the UTF-8 text of a file; raises `BadCheckpoint` if it is unreadable or longer than `max_bytes`."""
    content = read_bytes(directory, name, max_bytes=max_bytes)
    return decode_utf8(content, f"{directory / name}")


def decode_utf8(content: bytes, where: str) -> str:
    """Returns the text of UTF-8 bytes; raises `BadCheckpoint`, whose message begins with `where`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{where} is not UTF-8 (byte {error.start})") from None


def parse_json_object(text: str, where: str) -> dict[str, object]:
    """Returns the JSON object in `text`. Duplicate keys are rejected, because JSON readers treat them differently.

    Args:
        text: the JSON.
        where: its name in messages.

    Raises:
        BadCheckpoint: `text` is no JSON, no object, nested too deeply, or has a key twice.
    """
    check_format(text[:_HEAD_BYTES].encode(), where)

    def refuse(reason: str) -> NoReturn:
        raise BadCheckpoint(f"{where} {reason}")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            seen: set[str] = set()
            double = next(key for key, _ in pairs if key in seen or seen.add(key))
            refuse(f"holds the key {clip(repr(double))} twice")
        return members

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except BadCheckpoint:
        raise
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not JSON: {clip(error)}; mend it, or copy or download the file again")
    if not isinstance(value, dict):
        refuse(f"holds a JSON {type(value).__name__}, wanted an object")
    return value


def read_json(directory: Path, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Returns the JSON object in a file of the directory; raises `BadCheckpoint` if there is none."""
    text = read_text(directory, name, max_bytes=max_bytes)
    return parse_json_object(text, f"{directory / name}")


def read_json_if_there(directory: Path, name: str) -> dict[str, object]:
    """Returns the JSON object in a file of the directory, or an empty one if there is no such file."""
    return read_json(directory, name) if has_file(directory, name) else {}
