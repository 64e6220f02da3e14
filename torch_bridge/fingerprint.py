"""What a model computes with, as far as kept prefixes depend on it. Reads the model and changes nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

_TURNS_WITH_LENGTH = ("dynamic", "longrope")


def fingerprint(model: PreTrainedModel) -> tuple:
    """Returns something that differs when the same tokens may give other keys than before.

    It sees weights that were replaced or written to in place, training mode, and autocast. It does not see writes
    through `.data`, nor adapters that are switched on or off.
    """
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    weights = ((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())
    return (model.training, autocast, *weights)


def turns_with_length(model: PreTrainedModel) -> bool:
    """Whether angles depend on how long a text is, so that a longer one that begins alike has other keys."""
    config = model.config.get_text_config(decoder=True)
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models whose kinds of layers turn differently have parameters for each kind.
    kinds = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return any(one.get("rope_type") in _TURNS_WITH_LENGTH for one in kinds)
