"""`LoraConfig`: how many low-rank adapters requests may choose from, and of which rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.config.checks import as_int, check_fields
from jaxkv.config.vllm_names import ALIASES, accepts_vllm_names
from jaxkv.wording import shown

MAX_NAME_CHARACTERS = 256


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The room for low-rank adapters, checked on construction. All of it is allocated at the start.

    Attributes:
        max_adapters: most adapters that are loaded at once (vLLM: max_loras). A step computes the products of all of
            them for each of its tokens and selects, so adapters without requests cost time too.
        max_rank: highest rank of an adapter (vLLM: max_lora_rank); those of lower ranks take as much memory.

    Raises:
        ValueError: a number is out of range.
    """

    max_adapters: int = 4
    max_rank: int = 16

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or of the wrong type."""
        check_fields(self, as_int, 1, 256, "max_adapters")
        check_fields(self, as_int, 1, 512, "max_rank")


def lora_of(lora: LoraConfig | bool | None, options: Mapping[str, Any]) -> LoraConfig | None:
    """Returns the room for adapters of an `LLM`; `None` if requests may choose none.

    Args:
        lora: a `LoraConfig`, `True` for its defaults, or `False` or `None` for none.
        options: vLLM's option name -> value, of any configuration; those of `LoraConfig` replace what it has.

    Raises:
        ValueError: `lora` has another type, adapters are turned on twice, or options are given without them.
    """
    ours = {alias.theirs: alias.ours for alias in ALIASES if alias.owner == "LoraConfig"}
    changes = {ours[name]: value for name, value in options.items() if name in ours}
    if "enable_lora" in options:
        if lora is not None:
            raise ValueError("lora and enable_lora are one option of LLM; give one of them")
        lora = options["enable_lora"]
    if not isinstance(lora, LoraConfig | bool | None):
        raise ValueError(f"lora must be a LoraConfig, True or False, got {shown(lora)}")
    if isinstance(lora, LoraConfig):
        return replace(lora, **changes)
    if lora:
        return LoraConfig(**changes)
    if changes:
        given = next(name for name in options if name in ours)
        raise ValueError(f"{given} needs adapters; give enable_lora=True, or lora=LoraConfig(...)")
    return None


def check_adapter_name(name: object) -> None:
    """Raises `ValueError` unless a value can be the name of an adapter."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(
            f"lora must be the name of an adapter, of 1 to {MAX_NAME_CHARACTERS} characters, got {shown(name)}"
        )
