"""Sampling parameters as plain values, for other processes, and back."""

from dataclasses import asdict, fields
from typing import Any

from jaxkv.config.processor_calls import ProcessorCalls
from jaxkv.config.reasoning_tokens import ReasoningTokens
from jaxkv.config.sampling import SamplingParams, TokenBias, kept_sampling
from jaxkv.config.structured_outputs import StructuredOutputs

_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


def pack_sampling(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of sampling parameters that differ from their defaults, as plain values."""
    return {
        name: _plain(value)
        for name, default in _DEFAULTS.items()
        if (value := getattr(params, name)) is not default and value != default
    }


def _plain(value: object) -> object:
    if isinstance(value, TokenBias | ProcessorCalls):
        return dict(value)
    if not isinstance(value, StructuredOutputs):
        return value
    form = {value.kind: getattr(value, value.kind)}
    return form if value.reasoning is None else form | {"reasoning": asdict(value.reasoning)}


def unpack_sampling(packed: dict[str, Any]) -> SamplingParams:
    """Returns the sampling parameters of `pack_sampling`.

    Raises:
        ValueError: a field is unknown or out of range.
    """
    if "structured_outputs" not in packed:
        return kept_sampling(packed)
    form = dict(packed["structured_outputs"])
    if "reasoning" in form:
        form["reasoning"] = ReasoningTokens(**form["reasoning"])
    made: dict[str, Any] = packed | {"structured_outputs": StructuredOutputs(**form)}
    return SamplingParams(**made)
