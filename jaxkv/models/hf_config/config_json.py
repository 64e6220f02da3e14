"""Reads a parsed `config.json` key by key, and rejects keys that were not read. Executes nothing."""

from collections.abc import Mapping, Sequence

from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config.known_keys import (
    CHANGES,
    LENGTHS,
    SAME_FACT,
    SPECIAL,
    USED_LENGTHS,
    is_neutral,
    same_value,
    why_harmless,
    why_refused_as_code,
)
from jaxkv.weights.quantised.config import read_quantised
from jaxkv.wording import clip, listed, shown

_REQUIRED = object()
_GROUPS = {name: names for names in SAME_FACT for name in names}
_MODEL_CODE = ("AutoModel", "AutoModelForCausalLM")


class UnknownKeys(UnknownConfig):
    """Keys that nothing reads, which the user may have ignored.

    Attributes:
        paths: the keys; those of a nested object after its own key and a dot.
    """

    def __init__(self, message: str, paths: Sequence[str]) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


def refuse_code(raw: Mapping[str, object], *, place: str = "config.json") -> None:
    """Raises `UnknownConfig` for a key that names code to run."""
    for key, value in raw.items():
        reason = why_refused_as_code(key, value)
        if reason is not None and not (key == "auto_map" and _is_replaced(raw)):
            raise UnknownConfig(f"{place} sets {clip(key)} = {shown(value)}, which {reason}")


def _is_replaced(raw: Mapping[str, object]) -> bool:
    """Whether jaxkv's own implementation stands for the code that `auto_map` names.

    Models are published with code before Transformers has their family, for instance
    `modeling_deepseek.DeepseekV3ForCausalLM`. Then our own implementation is used, as Transformers does; the family
    checks that it implements this class. Code of tokenizers and of other tasks does not matter.
    """
    auto_map, named = raw["auto_map"], raw.get("architectures")
    if not isinstance(auto_map, Mapping):
        return False
    if auto_map and not any(task in auto_map for task in _MODEL_CODE):
        return True
    if not isinstance(named, Sequence) or len(named) != 1:
        return False
    code = auto_map.get("AutoModelForCausalLM")
    return isinstance(code, str) and code.rpartition(".")[2] == named[0]


class ConfigJson:
    """Reads the values of one JSON object; `finish` rejects the keys that were not read.

    Args:
        raw: the parsed object.
        place: name of the object in messages.
        path: the key of the object in config.json and a dot; empty for config.json itself.

    Attributes:
        is_quantised: whether the checkpoint's weights are quantised.
        lengths: lengths of sequences that the file implies, in tokens, besides `max_position_embeddings`.

    Raises:
        UnknownConfig: a key names code to run.
    """

    def __init__(
        self, raw: Mapping[str, object], *, place: str = "config.json", path: str = ""
    ) -> None:
        refuse_code(raw, place=place)
        self._raw = raw
        self._place = place
        self._path = path
        # Both are judged here.
        self._taken = {"auto_map", "quantization_config", "compression_config"}
        self._facts: dict[str, object] = {}
        self.lengths: set[int] = set()
        self.is_quantised = read_quantised(raw) is not None

    def take(self, key: str, default: object = _REQUIRED) -> object:
        """Returns a value of any type; the default replaces a missing key, but not null."""
        self._taken.add(key)
        if key not in self._raw and default is _REQUIRED:
            raise ValueError(f"{self._place} lacks {key}")
        value = self._raw.get(key, default)
        self._facts[key] = value
        return value

    def has(self, key: str) -> bool:
        """Whether the file has a key with a value other than null."""
        return self._raw.get(key) is not None

    def lacks(self, key: str) -> bool:
        """Whether the file does not have a key, not even with null."""
        return key not in self._raw

    def settle(self, key: str, value: object) -> None:
        """Records what the file amounts to for a key that it need not have, to compare other names of it with."""
        self._facts[key] = value

    def take_int(
        self, key: str, default: object = _REQUIRED, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        """Returns an integer in [`low`, `high`]."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(
                f"{self._place}: {key} must be an integer in [{low}, {high}], got {shown(value)}"
            )
        return value

    def take_float(self, key: str, default: object = _REQUIRED) -> float:
        """Returns a finite number as a float."""
        value = self.take(key, default)
        # The bound rejects NaN, infinity, and integers out of a float's range.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        raise ValueError(f"{self._place}: {key} must be a finite number, got {shown(value)}")

    def take_bool(self, key: str, default: object = _REQUIRED) -> bool:
        """Returns a bool."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._place}: {key} must be true or false, got {shown(value)}")
        return value

    def take_choice(self, key: str, default: str, choices: Mapping[str, str]) -> str:
        """Returns `choices[value]`; raises `UnknownConfig` if the value is not in `choices`."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in choices:
            raise UnknownConfig(
                f"{self._place} sets {key} = {shown(value)}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def take_ids(self, key: str, vocab_size: int, default: object = None) -> tuple[int, ...]:
        """Returns one id, a list of ids or null as a tuple, without ids that are not below `vocab_size`.

        The default replaces a missing key, but not null.

        Files of models with a reduced vocabulary still have such ids; they have no logits.
        """
        value = self.take(key, default)
        given = [] if value is None else value if isinstance(value, Sequence) else [value]
        ids = [token for token in given if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) != len(given) or min(ids, default=0) < 0:
            raise ValueError(f"{self._place}: {key} must hold token ids, got {shown(value)}")
        return tuple(token for token in ids if token < vocab_size)

    def take_object(self, key: str) -> Mapping[str, object]:
        """Returns a nested object; an empty one for null or a missing key."""
        value = self.take(key, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._place}: {key} must be an object, got {shown(value)}")
        return value

    def ignore(self, names: str) -> None:
        """Marks keys, separated by blanks, as read; for keys of a family that do not change its logits."""
        self._taken.update(names.split())

    def take_floats(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """Returns a list of finite numbers of the default's length; the default replaces null."""
        value = self.take(key, None)
        value = default if value is None else value
        if not isinstance(value, Sequence) or len(value) != len(default):
            raise ValueError(
                f"{self._place}: {key} must hold {len(default)} numbers, got {shown(value)}"
            )
        parts = ConfigJson(
            {f"{key}[{index}]": part for index, part in enumerate(value)}, place=self._place
        )
        return tuple(parts.take_float(f"{key}[{index}]") for index in range(len(value)))

    def finish(self) -> None:
        """Judges the keys that were not read, as `known_keys` describes.

        Raises:
            UnknownConfig: a key is known to change the result, or repeats another one with another value.
            UnknownKeys: keys are unknown.
        """
        rest = {
            key: value
            for key, value in self._raw.items()
            if key not in self._taken and value is not None and why_harmless(key, value) is None
        }
        unknown, repeating = {}, {}
        for key, value in rest.items():
            repeated = self._repeated_by(key)
            if repeated is not None:
                repeating[key] = repeated
            elif key not in CHANGES:
                unknown[key] = value
            elif not is_neutral(key, value):
                what = SPECIAL.get(key, "changes the result and is not supported for this family")
                raise UnknownConfig(f"{self._place} sets {key} = {shown(value)}, which {what}")
        for key, repeated in repeating.items():
            self._check_repeated(key, rest[key], repeated)
        if unknown:
            settings = [f"{clip(key)} = {shown(value)}" for key, value in unknown.items()]
            raise UnknownKeys(
                f"{self._place} sets {listed(settings)}, which may change the result and is not supported; "
                f"{self._way_on(next(iter(unknown)))}",
                [f"{self._path}{key}" for key in unknown],
            )

    def _way_on(self, key: str) -> str:
        name = f" as {clip(self._path + key)!r}" if self._path else ""
        return f"a key that cannot change it may be named in ignore_config_keys{name}"

    def _repeated_by(self, key: str) -> Mapping[str, object] | None:
        """Returns the values that the file has under other names of a key; `None` if there are none."""
        if key in LENGTHS or key in USED_LENGTHS:
            return {"max_position_embeddings": self._facts.get("max_position_embeddings")}
        names = _GROUPS.get(key, frozenset())
        return {
            name: self._facts[name] for name in names if self._facts.get(name) is not None
        } or None

    def _check_repeated(self, key: str, value: object, repeated: Mapping[str, object]) -> None:
        """Raises `UnknownKeys` if a key contradicts what the file says under other names."""
        if key in LENGTHS or key in USED_LENGTHS:
            agrees = self._has_length(value, exactly=key in LENGTHS)
        else:
            agrees = all(same_value(value, other) for other in repeated.values())
        if not agrees:
            others = [f"{name} = {shown(other)}" for name, other in repeated.items()]
            raise UnknownKeys(
                f"{self._place} sets {key} = {shown(value)}, which contradicts {listed(others)}; "
                f"{self._way_on(key)}",
                [f"{self._path}{key}"],
            )

    def _has_length(self, value: object, *, exactly: bool) -> bool:
        """Whether the model's positions reach a length; all do in a family without positions."""
        known = {*self.lengths, self._facts.get("max_position_embeddings")} - {None}
        if not known or value in known:
            return True
        return not exactly and isinstance(value, int) and value <= max(known)
