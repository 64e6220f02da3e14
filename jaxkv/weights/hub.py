"""Finds a model by name: a local folder, or a model on the Hugging Face Hub, whose needed files are downloaded.

`huggingface_hub` downloads and keeps the cache, with its environment variables (HF_HOME, HF_HUB_CACHE, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). It is imported when a name is looked up there, and not for a local folder.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxkv import default_model
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.conversions import instead_of_config, instead_of_weights
from jaxkv.weights.directory import CONFIG, existing_directory
from jaxkv.weights.quantised.config import BESIDE
from jaxkv.weights.safetensors import INDEX, SINGLE, check_shards, read_index
from jaxkv.wording import clip

if TYPE_CHECKING:
    from collections.abc import Collection

_LOG = logging.getLogger(__name__)

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = (
    CONFIG,
    "generation_config.json",
    *BESIDE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_OTHER_TOKENIZERS = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Other forms of a tokenizer; fetched if there is no tokenizer.json."""
_USUAL = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Small files of nearly every model; a snapshot with all of them was not made of a single file by another program."""

_TEMPLATE = re.compile(r"chat_templates/[^/]+\.jinja")
_SECONDS = 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = os.strerror(errno.ENOSPC)


class _Unreachable(Exception):
    """The hub gave no answer; the message is the reason."""


class _Offline(_Unreachable):
    """HF_HUB_OFFLINE forbids asking it."""


def resolve_model(
    model: str | Path | None,
    revision: str | None = None,
    *,
    progress: bool = True,
) -> Path:
    """Returns the folder of a model; of one on the Hugging Face Hub, downloads all files that are read but the weights.

    The weights come by `fetch_weights`, once the configuration is known to be supported. A folder takes precedence over
    a model on the hub. Only a text of the form "org/name" is looked up there. Without an answer from the hub, the
    revision in its cache is returned, with a warning unless HF_HUB_OFFLINE is set: of a branch, the newest commit whose
    weights are there, or if none has them, the newest one.

    Args:
        model: a folder, a name on the hub, or `None` for the small model inside the package.
        revision: branch, tag or commit on the hub; `None` for its main branch.
        progress: show bars while files are downloaded, where stderr is a terminal.

    Raises:
        ValueError: a revision of a local folder.
        BadCheckpoint: there is no such model or revision, it needs permission, or it has no config.json. The message
            says what to do.
        OSError: the hub cannot be reached and its cache has not this model, or the disk is full.
    """
    if model is None or isinstance(model, Path) or not _is_asked_of_hub(model):
        if revision is not None:
            shown = "the small model inside the package" if model is None else f"{model}"
            raise ValueError(
                f"revision {revision!r} is one of a name on the Hugging Face Hub, but the model is {shown}"
            )
        if model is None:
            return default_model.path()
        return existing_directory(os.path.expanduser(model))
    return _Repository(model, revision, progress=progress).folder()


def fetch_weights(
    model: str | Path | None,
    directory: Path,
    revision: str | None = None,
    *,
    progress: bool = True,
) -> None:
    """Downloads the weights of a model on the Hugging Face Hub that are not in its cache; of other models, nothing.

    Args:
        model: what `resolve_model` was given.
        directory: what it returned, whose commit the weights are taken from.
        revision: what it was given; the cache's branch of this name then has this commit.
        progress: show bars while files are downloaded, where stderr is a terminal.

    Raises:
        BadCheckpoint: the model has no safetensors files, or not all; the message says what to do.
        OSError: the hub cannot be reached, or the disk is full.
    """
    if isinstance(model, str) and _is_asked_of_hub(model):
        if not _has_weights(directory):
            _Repository(model, directory.name, weights=True, progress=progress).folder()
        _move_branch(directory, revision)


def _is_asked_of_hub(model: str) -> bool:
    """Whether a text is a name of the hub's form, and no file or folder here."""
    return (
        _NAME.fullmatch(model) is not None
        and ".." not in model
        and "--" not in model
        and not model.endswith(_FILE_ENDINGS)
        and not os.path.lexists(model)
    )


class _NoBar(tqdm):
    """A progress bar that is not shown."""

    def __init__(self, *values: Any, **options: Any) -> None:  # noqa: ANN401 - as tqdm's
        # Some versions of huggingface_hub give their bars a name, which tqdm does not know.
        options.pop("name", None)
        super().__init__(*values, **options | {"disable": True})


class _Repository:
    """One model at one revision, on the hub and in its cache.

    Args:
        name: such as "Qwen/Qwen3-0.6B".
        revision: branch, tag or commit; `None` for the main branch.
        weights: whether the weights are wanted, or the other files.
        progress: show bars.

    Raises:
        BadCheckpoint: huggingface_hub is not installed.
    """

    def __init__(
        self, name: str, revision: str | None, *, weights: bool = False, progress: bool
    ) -> None:
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors
        except ImportError:
            raise BadCheckpoint(
                f"{name} is no folder, and looking it up on the Hugging Face Hub needs huggingface_hub: "
                f"pip install huggingface_hub"
            ) from None
        self._name = name
        self._revision = revision
        self._weights = weights
        self._bars: dict[str, Any] = {} if progress else {"tqdm_class": _NoBar}
        self._library = huggingface_hub
        self._errors = errors
        self._endpoint = _without_password(constants.ENDPOINT)
        self._cache: str = constants.HF_HUB_CACHE

    def folder(self) -> Path:
        """Returns the folder of the model in the hub's cache, with the wanted files."""
        kept = self._kept()
        is_commit = _COMMIT.fullmatch(self._revision or "") is not None
        if kept is not None and is_commit and (self._weights or _has_all(kept, _USUAL)):
            return kept
        try:
            folder = self._fetched(kept)
        except _Unreachable as error:
            if kept is None:
                raise OSError(self._not_kept(error)) from error
            if not isinstance(error, _Offline):
                _LOG.warning(
                    "%s cannot be reached (%s); %s is read from the cache, at revision %s",
                    self._endpoint,
                    error,
                    self._name,
                    kept.name,
                )
            return kept
        _LOG.info("%s is read at revision %s", self._name, folder.name)
        return folder

    def _kept(self) -> Path | None:
        """Returns the folder of the revision in the cache; `None` if there is none or it lacks files."""
        try:
            folder = Path(
                self._library.snapshot_download(
                    self._name,
                    revision=self._revision,
                    local_files_only=True,
                    allow_patterns=[CONFIG] if self._weights else [*_SMALL],
                )
            )
        except self._errors.LocalEntryNotFoundError:
            return None
        complete = not self._weights or _has_weights(folder)
        return folder if (folder / CONFIG).is_file() and complete else None

    def _fetched(self, kept: Path | None) -> Path:
        """Returns the folder in the cache once all files are there.

        Raises:
            _Unreachable: the hub cannot be asked.
            BadCheckpoint, OSError: see `resolve_model`.
        """
        api = self._library.HfApi()
        info = self._ask(
            lambda: api.model_info(self._name, revision=self._revision, timeout=_SECONDS)
        )
        there = {file.rfilename for file in info.siblings or ()}
        wanted = self._wanted(there, info.sha)
        if kept is None or info.sha is None:
            return self._download(self._revision, wanted)
        if _has_all(kept.parent / info.sha, wanted):
            return kept.parent / info.sha
        # A download by the branch's name moves the cache's branch to the newer commit, whose weights are not there yet.
        # If those of the older one are, only `fetch_weights` moves it: after a plan, the older one still works offline.
        return self._download(info.sha if _has_weights(kept) else self._revision, wanted)

    def _download(self, revision: str | None, names: "Collection[str]") -> Path:
        """Fetches the files that are not in the cache yet, and returns their folder there."""
        return Path(
            self._ask(
                lambda: self._library.snapshot_download(
                    self._name, revision=revision, allow_patterns=sorted(names), **self._bars
                )
            )
        )

    def _wanted(self, there: "Collection[str]", commit: str | None) -> set[str]:
        """Returns the files to fetch, of those that the model has on the hub."""
        where = f"{self._name} on {self._endpoint}"
        if CONFIG not in there:
            instead = instead_of_config(there, self._name)
            raise BadCheckpoint(f"{where} holds no {CONFIG}{instead}")
        if not self._weights:
            other = () if "tokenizer.json" in there else _OTHER_TOKENIZERS
            templates = {name for name in there if _TEMPLATE.fullmatch(name)}
            return {*_SMALL, *other} & {*there} | templates
        # As the loader does: the single file if there is one, and otherwise the shards of the index.
        if SINGLE in there:
            return {SINGLE}
        if INDEX not in there:
            instead = instead_of_weights(there, self._name)
            raise BadCheckpoint(f"{where} holds neither {SINGLE} nor {INDEX}{instead}")
        shards = read_index(self._download(commit or self._revision, [INDEX]))
        check_shards(shards, there, where)
        return {INDEX, *shards}

    def _ask[T](self, call: Callable[[], T]) -> T:
        """Returns what a call of huggingface_hub returns; its errors become ours."""
        try:
            return call()
        # The HTTP client's own errors come too, and which client that is depends on the version of huggingface_hub.
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> Exception:
        """Returns the error to raise for one of huggingface_hub, with what to do."""
        errors, page = self._errors, f"{self._endpoint}/{self._name}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return _Offline("HF_HUB_OFFLINE is set")
        if isinstance(error, errors.GatedRepoError):
            if self._library.get_token() is None:
                return BadCheckpoint(
                    f"{self._name} is gated: accept its conditions at {page}, make a token at "
                    f"{self._endpoint}/settings/tokens, and run `hf auth login` or set HF_TOKEN"
                )
            return BadCheckpoint(
                f"{self._name} is gated, and the account of this token has no access yet: ask for it at {page}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return BadCheckpoint(self._not_found())
        if isinstance(error, errors.RevisionNotFoundError):
            return BadCheckpoint(
                f"{self._name} has no revision {self._revision!r}; {page}/tree/main lists its branches and tags"
            )
        if getattr(error, "errno", None) in _FULL or _FULL_TEXT in str(error):
            free = shutil.disk_usage(_existing(Path(self._cache))).free
            return OSError(
                f"the disk is full, with {free:,} bytes free in the hub's cache, {self._cache}: make room, or set "
                f"HF_HUB_CACHE to a folder on another disk; whole files are not downloaded again"
            )
        if isinstance(error, PermissionError):
            return OSError(
                f"the hub's cache, {self._cache}, cannot be written ({error.strerror}): set HF_HUB_CACHE to a folder "
                f"of your own"
            )
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status in (401, 403):
            return BadCheckpoint(
                f"{self._endpoint} refuses {self._name} (status {status}): check HF_TOKEN, or run `hf auth login`"
            )
        reason = (
            f"{type(error).__name__}: {clip(_without_password(str(error)))}"
            if status is None
            else f"status {status}"
        )
        return _Unreachable(reason)

    def _not_found(self) -> str:
        """Returns the message for a name that neither the hub nor this machine has."""
        owner, _, name = self._name.partition("/")
        folders = os.listdir(owner) if os.path.isdir(owner) else []
        close = get_close_matches(name, folders, n=1)
        meant = f"; did you mean the folder {owner}/{close[0]}?" if close else ""
        return (
            f"{self._name} is no folder here, and {self._endpoint} shows no model of this name{meant}; check the "
            f"spelling at {self._endpoint}/models?search={name}, and for a private model run `hf auth login` or set "
            f"HF_TOKEN"
        )

    def _not_kept(self, error: _Unreachable) -> str:
        """Returns the message for a model that is not in the cache while the hub cannot be asked."""
        revision = "" if self._revision is None else f" --revision {self._revision}"
        reason = (
            f"{error}"
            if isinstance(error, _Offline)
            else f"{self._endpoint} cannot be reached ({error})"
        )
        other = self._complete()
        named = (
            "" if other is None else f"it holds those of revision {other}, which may be named; or "
        )
        return (
            f"{self._name} is no folder here, {reason}, and the hub's cache, {self._cache}, does not hold all files of "
            f"it; {named}run `hf download {self._name}{revision}` where there is a network, or give a folder"
        )

    def _complete(self) -> str | None:
        """Returns the newest commit of the model whose weights are in the cache; `None` if there is none."""
        snapshots = Path(self._cache) / f"models--{self._name.replace('/', '--')}" / "snapshots"
        found = [
            folder
            for folder in snapshots.glob("*")
            if (folder / CONFIG).is_file() and _has_weights(folder)
        ]
        return max(found, key=lambda folder: folder.stat().st_mtime).name if found else None


def _move_branch(folder: Path, revision: str | None) -> None:
    """Makes the cache's branch point to a commit whose weights are there; a cache that cannot be written stays."""
    branch = folder.parents[1] / "refs" / (revision or "main")
    with suppress(OSError):
        if branch.is_file() and branch.read_text() != folder.name:
            draft = branch.with_name(f"{branch.name}.{os.getpid()}.tmp")
            draft.write_text(folder.name)
            os.replace(draft, branch)


def _without_password(text: str) -> str:
    """Returns a text without the user and password that its addresses may have (HF_ENDPOINT of a mirror)."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _has_weights(folder: Path) -> bool:
    """Whether a folder has its safetensors files; an index that cannot be read counts as none."""
    if (folder / SINGLE).is_file():
        return True
    if not (folder / INDEX).is_file():
        return False
    try:
        return _has_all(folder, read_index(folder))
    except BadCheckpoint:
        return False


def _has_all(folder: Path, names: "Collection[str]") -> bool:
    return all((folder / name).is_file() for name in names)


def _existing(path: Path) -> Path:
    """Returns a path or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
