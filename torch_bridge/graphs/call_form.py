"""What of a step's arguments a recording fixes, and what it reads anew; and why a call cannot be replayed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.transformers_cache.forward_call import CACHE_NAMES

LOGITS_TO_KEEP = "logits_to_keep"
_READ_ANEW = ("input_ids", "attention_mask", "position_ids", *CACHE_NAMES)
_FIXED = (bool, int, float, str)
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class CallForm:
    """The part of a call's arguments that a recording fixes.

    Attributes:
        cache_name: name of the argument that has the cache.
        options: names, types and values of plain arguments; the types, since `True` equals 1.
    """

    cache_name: str
    options: tuple[tuple[str, type, Any], ...]


def form_of(
    arguments: Mapping[str, Any],
    shape: tuple[int, int],
    config: Any,  # noqa: ANN401 - every family has a class of its own
    *,
    needs_positions: bool,
) -> CallForm | str:
    """Returns the form of a step's call, or the reason why no graph can stand for it.

    Args:
        arguments: the forward's arguments by name.
        shape: shape of the call's ids: (rows, columns).
        config: the model's config, for outputs that the call leaves unset.
        needs_positions: whether the model's forward takes positions.
    """
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if ids is None:
        return "the call has no input_ids"
    rows, columns = shape
    for name, firsts in (("input_ids", (rows,)), ("position_ids", (1, rows))):
        given = arguments.get(name)
        if given is not None and not _are_numbers(given, firsts, columns):
            return f"{name} must be whole numbers {[rows, columns]}"
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return "attention_mask is not a 2-D tensor"
    options = []
    for name, value in arguments.items():
        if name in _READ_ANEW or value is None:
            continue
        if not isinstance(value, _FIXED):
            return f"the call has the argument {name}"
        options.append((name, type(value), value))
    for name in _OUTPUTS:
        asked = arguments.get(name)
        if getattr(config, name, False) if asked is None else asked:
            return f"the call has {name}"
    if needs_positions and arguments.get("position_ids") is None:
        # Models compute them in ways of their own: from the mask, or with an offset that an image has left.
        return "the call has no position_ids, which generate() gives"
    cache_name = next(name for name in CACHE_NAMES if arguments.get(name) is not None)
    return CallForm(cache_name, tuple(sorted(options)))


def _are_numbers(given: Any, firsts: tuple[int, ...], columns: int) -> bool:  # noqa: ANN401 - an argument may be anything
    if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
        return False
    return given.ndim == 2 and given.shape[0] in firsts and given.shape[1] == columns
