"""`ForwardCall`: the arguments of one call of a model's forward, by name (tokens, padding, positions, outputs)."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PER_COLUMN = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Outputs with one entry per column, requested by an argument or by the model's config."""

# Arguments that do not change the keys and values, or that this module reads itself; any other may change them.
_HARMLESS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "cache_position",
    "use_cache",
    "labels",
    "logits_to_keep",
    "return_dict",
    *_PER_COLUMN,
}
CACHE_NAMES = ("past_key_values", "cache_params")


def by_name(module: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a forward by their names."""
    if not args:
        return dict(kwargs)
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


@dataclass(frozen=True)
class ForwardCall:
    """Arguments of one forward.

    Attributes:
        arguments: all arguments by name.
        tokens: `input_ids` [rows, queries], or `inputs_embeds` [rows, queries, hidden_size] where there are none.
    """

    arguments: dict[str, Any]
    tokens: torch.Tensor

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> "ForwardCall":
        """Reads the arguments.

        Raises:
            ValueError: there is neither `input_ids` nor `inputs_embeds`, or `use_cache` is False.
        """
        if arguments.get("use_cache") is False:
            raise ValueError(
                "a forward was given a JaxkvCache and use_cache=False, with which generate() repeats all tokens at "
                "each step; pass use_cache=True to generate(), which overrides the model's config"
            )
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if tokens is None or tokens.ndim < 2:
            raise ValueError(
                "a forward with a JaxkvCache needs input_ids [rows, queries] or inputs_embeds; got "
                f"{None if tokens is None else list(tokens.shape)}"
            )
        return cls(arguments, tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, queries)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def ids(self) -> torch.Tensor | None:
        """The token ids [rows, queries], if the keys depend on no other argument; else `None`."""
        alone = all(name in _HARMLESS or value is None for name, value in self.arguments.items())
        mask = self.arguments.get("attention_mask")
        plain = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
        return self.arguments.get("input_ids") if alone and plain else None

    @property
    def positions(self) -> torch.Tensor | None:
        """`position_ids`, if given."""
        return self.arguments.get("position_ids")

    def can_leave_out(self, config: Any) -> int:  # noqa: ANN401 - every family has a class of its own
        """Returns how many leading columns can be left out without changing the outputs that the caller asked for.

        Args:
            config: the model's config, for output options that the call leaves unset.
        """
        wanted = self.arguments.get("logits_to_keep")
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            return 0
        for name in _PER_COLUMN:
            asked = self.arguments.get(name)
            if getattr(config, name, False) if asked is None else asked:
                return 0
        return 0 if self.arguments.get("labels") is not None else max(0, self.shape[1] - wanted)

    def real_columns(self, known: np.ndarray, *, has_pages: bool = True) -> np.ndarray:
        """Returns which of the step's columns hold tokens, bool [rows, queries].

        Args:
            known: bool [rows, columns], which of the earlier columns hold tokens.
            has_pages: whether a layer attends to earlier columns. Models without attention may be given a mask of the
                step's columns alone, and none after a prompt.

        Raises:
            ValueError: the mask's shape is wrong, or it differs from the earlier masks on earlier columns.
        """
        rows, queries = self.shape
        mask = self.arguments.get("attention_mask")
        if mask is None or not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            if mask is None and has_pages and not known.all():
                raise ValueError(
                    "earlier forwards had an attention_mask with padding, this one has none; give a mask over all "
                    f"{known.shape[1] + queries} columns"
                )
            return np.ones((rows, queries), bool)
        columns = known.shape[1] + queries
        if not has_pages and mask.shape == (rows, queries):
            return mask.to("cpu", torch.bool).numpy()
        if mask.shape != (rows, columns):
            raise ValueError(
                f"attention_mask must be {[rows, columns]} ({known.shape[1]} remembered columns and {queries} new "
                f"ones), got {list(mask.shape)}; before another prompt, call reset()"
            )
        if known.all() and bool(mask.all()):
            return np.ones((rows, queries), bool)
        shown = mask.to("cpu", torch.bool).numpy()
        if (shown[:, : known.shape[1]] != known).any():
            raise ValueError(
                "attention_mask hides or shows other columns than when they were computed, which pages cannot follow; "
                "keep the mask and append to it, or reset() the cache"
            )
        return shown[:, known.shape[1] :]

    def without_columns(self, count: int) -> dict[str, Any]:
        """Returns the arguments without the first `count` columns; the mask covers past columns and is unchanged."""
        if count == 0:
            return self.arguments
        changed = dict(self.arguments)
        changed["input_ids"] = self.tokens[:, count:]
        for name in ("position_ids", "cache_position"):
            given = changed.get(name)
            if isinstance(given, torch.Tensor) and given.shape[-1] == self.shape[1]:
                changed[name] = given[..., count:]
        return changed
