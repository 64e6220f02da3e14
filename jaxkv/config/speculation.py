"""`SpeculationConfig`: who drafts the next tokens, and how many, for decode steps to verify."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jaxkv.config.checks import as_int, check_fields
from jaxkv.config.vllm_names import accepts_vllm_names
from jaxkv.wording import shown

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
_MODEL_METHODS = ("draft_model", "eagle3")
_HEAD_METHODS = ("eagle3", "mtp")
_VLLM_MTP = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's names of "mtp", one for each family."""


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Options of speculation, checked on construction. Drafts change no token of a request.

    A draft is accepted if it equals the token that its position yields anyhow, greedy or drawn. With
    `EngineConfig.batch_invariant` results are equal bit for bit with and without drafts; otherwise sums are rounded
    differently, as in any batch of another size, so two tokens with almost equal scores may change places.

    Attributes:
        method: "ngram" repeats what came after the last few tokens earlier in the prompt or output (prompt lookup); it
            needs no weights. "draft_model" asks a smaller model with the same vocabulary, "eagle3" an EAGLE-3 head of
            this model, and "mtp" the layers of this model's own checkpoint that predict further tokens (vLLM's
            "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp" and "qwen3_5_mtp" are the same).
            `None` for "draft_model" if a model is given, and else for "ngram".
        model: directory or hub id of the smaller model or head; `None` for the others.
        tokens: most drafts of a row in a step (vLLM: num_speculative_tokens). A step of many rows verifies half as
            many, and so on to one, because each token beyond 64 costs time: of 4 drafts, 2 from 13 rows on, 1 from 22
            on, and none from 33 on.
        longest_ngram: most tokens at the end of the text that are searched for earlier in it (vLLM: prompt_lookup_max).
        shortest_ngram: fewest such tokens (vLLM: prompt_lookup_min).
        adaptive: draft only while a token takes less time with drafts than without, and as many tokens as gain most,
            as measured while requests are served. Without it, every step that can have drafts has all that fit.

    Raises:
        ValueError: a field is out of range or of the wrong type.
    """

    method: str | None = None
    model: str | None = None
    tokens: int = 4
    longest_ngram: int = 4
    shortest_ngram: int = 2
    adaptive: bool = True

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or of the wrong type."""
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        if self.method in _VLLM_MTP:
            object.__setattr__(self, "method", "mtp")
        if self.method not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(METHODS)}, got {shown(self.method)}"
            )
        if isinstance(self.model, PurePath):
            object.__setattr__(self, "model", str(self.model))
        if not (self.model is None or isinstance(self.model, str)):
            raise ValueError(f"model must be a directory or a hub id, got {shown(self.model)}")
        if (self.method in _MODEL_METHODS) != (self.model is not None):
            raise ValueError(
                f"{' and '.join(_MODEL_METHODS)} need the model that drafts, and other methods have none; got "
                f"method={self.method!r} and model={self.model!r}"
            )
        check_fields(self, as_int, 1, 31, "tokens")
        check_fields(self, as_int, 1, 64, "longest_ngram", "shortest_ngram")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, got {shown(self.adaptive)}")
        if self.shortest_ngram > self.longest_ngram:
            raise ValueError(
                f"shortest_ngram must be at most longest_ngram, got {self.shortest_ngram} and {self.longest_ngram}"
            )

    @property
    def reads_hidden(self) -> bool:
        """Whether what drafts reads hidden states of the model, so that its cache keeps them."""
        return self.method in _HEAD_METHODS


def speculation_of(value: object) -> SpeculationConfig | None:
    """Returns the options of speculation: a `SpeculationConfig`, or a mapping of its fields; `None` for none.

    Raises:
        ValueError: the value is neither, or a field is unknown or out of range.
    """
    if value is None or isinstance(value, SpeculationConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"speculation must be a SpeculationConfig, got {shown(value)}")
    fields: dict[str, Any] = {str(name): each for name, each in value.items()}
    return SpeculationConfig(**fields)
