"""The token counts (`usage`) and the JSON schema of replies of completions and chat completions."""

from collections.abc import Mapping
from typing import Any

from jaxkv.serve.http.work import Usage

_USAGE: dict[str, Any] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object"},
    },
}
"""Its JSON schema."""


def usage_json(usage: Usage, reasoning: int | None = None) -> dict[str, Any]:
    """Returns the counts.

    Args:
        usage: the counts.
        reasoning: how many generated tokens are reasoning; `None` if that is not counted.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def reply_schema(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a whole reply.

    Args:
        kind: its field "object".
        choice: the schema of one of its choices.
    """
    properties = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
        "usage": _USAGE,
    }
    return {"type": "object", "required": list(properties), "properties": properties}
