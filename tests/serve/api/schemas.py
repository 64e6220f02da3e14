"""The published schemas of the APIs, from the package llm-comply."""

import warnings
from functools import cache
from pathlib import Path

from llm_comply import schema

MESSAGE_EVENTS = {
    "message_start": "MessageStartEvent",
    "message_delta": "MessageDeltaEvent",
    "message_stop": "MessageStopEvent",
    "content_block_start": "ContentBlockStartEvent",
    "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
}


@cache
def _spec(name):
    return schema.SpecLoader(str(Path(schema.__file__).parent / "specs" / f"{name}.json"))


def faults(spec, value, name):
    """Returns what is wrong with a value by a schema of "openresponses", "anthropic" or "openai_chat"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _spec(spec).validate(value, name)


def event_faults(events):
    """Returns what is wrong with the events of a stream of `/v1/responses`."""
    names = schema.SSE_EVENT_TO_SCHEMA
    return [
        fault for each in events for fault in faults("openresponses", each, names[each["type"]])
    ]


def message_faults(events):
    """Returns what is wrong with the events of a stream of `/v1/messages`."""
    return [
        fault
        for each in events
        for fault in faults("anthropic", each, MESSAGE_EVENTS[each["type"]])
    ]
