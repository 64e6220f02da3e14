"""Keys of config.json that the user wants ignored: `ignore_config_keys` of `LLM`, `--ignore-config-key` of the command.

Only unknown keys can be ignored. Whether a key is unknown shows when the file is read without it, so that no family has
to list what it reads.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config.config_json import UnknownKeys
from jaxkv.models.hf_config.known_keys import CHANGES, SAME_FACT, why_harmless
from jaxkv.wording import clip, listed, shown

_LOG = logging.getLogger(__name__)
_OPTION = "ignore_config_keys"
_ABSENT = object()
_TEXT = "text_config"
_REPEATS = frozenset().union(*SAME_FACT)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of keys to ignore; raises `ValueError` if they are not a sequence of strings."""
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f'{_OPTION} must be a sequence of names such as ("name",), got {shown(names)}'
        )
    return tuple(dict.fromkeys(names))


def read_ignoring(
    raw: Mapping[str, object],
    names: Sequence[str],
    read: Callable[[Mapping[str, object]], ModelConfig],
) -> ModelConfig:
    """Returns the config of a parsed config.json, read without the keys that the user wants ignored.

    Args:
        raw: the parsed file.
        names: keys to ignore; a key of a nested object after its own key and a dot, as "rope_scaling.name".
        read: returns the config of a parsed file, or raises `UnknownKeys`.

    Raises:
        UnknownConfig: the file lacks a named key, or the key is known; and what `read` raises.
    """
    wanted = check_names(names)
    for name in wanted:
        _check_unknown(raw, name)
    rest, ignored = raw, set()
    while True:
        try:
            config = read(rest)
            break
        except UnknownKeys as error:
            now = {path for path in error.paths if path in wanted} - ignored
            if not now:
                raise
            ignored |= now
            rest = _without(rest, now)
    for name in wanted:
        if name not in ignored:
            raise UnknownConfig(
                f"{_OPTION} names {clip(name)!r}, which jaxkv knows and reads; only unknown keys can be ignored"
            )
    return config


def warn_of_ignored(raw: Mapping[str, object], names: Sequence[str]) -> None:
    """Logs a warning for each ignored key, with its value."""
    for name in check_names(names):
        _LOG.warning(
            "config.json: %s = %s is ignored, as %s asks; if it changes what the model computes, the output is wrong",
            clip(name),
            shown(value_at(raw, name)),
            _OPTION,
        )


def value_at(raw: Mapping[str, object], path: str) -> object:
    """Returns the value of a key, or of a nested key after a dot; a private object if there is none."""
    if path in raw:
        return raw[path]
    outer, _, inner = path.partition(".")
    for nested in _nested(raw, outer):
        found = value_at(nested, inner if outer in raw else path)
        if found is not _ABSENT:
            return found
    return _ABSENT


def describe_ignored(raw: Mapping[str, object], names: Iterable[str]) -> str:
    """Returns the ignored keys with their values."""
    return listed([f"{clip(name)} = {shown(value_at(raw, name))}" for name in names])


def _check_unknown(raw: Mapping[str, object], name: str) -> None:
    """Raises `UnknownConfig` if a key is not in the file, or its meaning is known for every family."""
    value = value_at(raw, name)
    beginning = f"{_OPTION} names {clip(name)!r}, which"
    if value is _ABSENT:
        close = difflib.get_close_matches(name[:80], [key for key in raw if len(key) <= 80], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownConfig(f"{beginning} config.json does not have{hint}")
    last = name if name in raw else name.rpartition(".")[2]
    if value is None:
        raise UnknownConfig(f"{beginning} is null in config.json and needs no option")
    reason = why_harmless(last, value)
    if reason is not None:
        raise UnknownConfig(f"{beginning} cannot change the logits ({reason}) and needs no option")
    if last in CHANGES and last not in _REPEATS:
        raise UnknownConfig(
            f"{beginning} is known to change the result ({CHANGES[last][0]}); only unknown keys can be ignored"
        )


def _nested(raw: Mapping[str, object], outer: str) -> list[Mapping[str, object]]:
    """Returns the objects that may hold a key: the named one and the objects in it, or the text part of the file."""
    inside = raw.get(outer if outer in raw else _TEXT)
    if not isinstance(inside, Mapping):
        return []
    deeper = [part for part in inside.values() if isinstance(part, Mapping)]
    return [inside, *deeper] if outer in raw else [inside]


def _without(raw: Mapping[str, object], paths: Iterable[str]) -> Mapping[str, object]:
    """Returns a copy of a parsed file without some keys."""
    for path in paths:
        raw = _drop(raw, path)
    return raw


def _drop(raw: Mapping[str, object], path: str) -> Mapping[str, object]:
    if path in raw:
        return {key: value for key, value in raw.items() if key != path}
    outer, _, inner = path.partition(".")
    if outer not in raw:
        outer, inner = _TEXT, path
    inside = raw.get(outer)
    if not isinstance(inside, Mapping):
        return raw
    parts = {
        key: _drop(value, inner)
        if isinstance(value, Mapping) and inner not in inside and inner in value
        else value
        for key, value in inside.items()
    }
    return {**raw, outer: _drop(parts, inner)}
