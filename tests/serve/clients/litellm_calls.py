"""Calls a server through litellm, whose packages are on PYTHONPATH, and prints as JSON what came."""

import json
import sys

import litellm
import openai

URL, KEY = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "add"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
OPENAI = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
ANTHROPIC = {"model": "anthropic/tiny", "api_base": URL, "api_key": KEY, "max_retries": 0}


def joined(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def call_of(reply):
    [call] = reply.choices[0].message.tool_calls
    return [call.function.name, json.loads(call.function.arguments), reply.choices[0].finish_reason]


def streamed_call(given):
    chunks = list(litellm.completion(messages=MESSAGES, tools=TOOLS, stream=True, **given))
    return call_of(litellm.stream_chunk_builder(chunks, messages=MESSAGES))


def error_of(**given):
    try:
        litellm.completion(messages=MESSAGES, **given)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code]
    return "none"


def results():
    for name, given in (("openai", OPENAI), ("anthropic", ANTHROPIC)):
        limit = {"max_tokens": 64}
        whole = litellm.completion(messages=MESSAGES, **limit, **given)
        yield f"{name} whole", whole.choices[0].message.content
        yield f"{name} tokens", whole.usage.completion_tokens
        yield (
            f"{name} stream",
            joined(litellm.completion(messages=MESSAGES, stream=True, **limit, **given)),
        )
        tools = {"messages": MESSAGES, "tools": TOOLS, **limit, **given}
        yield f"{name} call", call_of(litellm.completion(**tools))
        yield f"{name} streamed call", streamed_call({**limit, **given})
        yield f"{name} wrong key", error_of(**{**limit, **given, "api_key": "other"})
    yield "too long", error_of(max_tokens=10**6, **OPENAI)
    completed = litellm.text_completion(prompt="add", max_tokens=64, **OPENAI)
    yield "completion", completed.choices[0].text
    response = litellm.responses(input="add", max_output_tokens=64, **OPENAI)
    yield "response", response.output[0].content[0].text


litellm.suppress_debug_info = True
print(json.dumps(dict(results())))
