"""Hostile requests, as a table: each must be answered with 4xx and an error body, and reach no engine."""

import json
from dataclasses import dataclass, field

SECRET = "violet-secret-of-the-prompt"
"""Text of every prompt; no reply and no log may have it."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
JSON = {"content-type": "application/json"}
BIG = 10**6


@dataclass(frozen=True)
class Hostile:
    """One request.

    Attributes:
        path, body, headers: what is sent.
        status: of the reply.
        param: what the reply names, if the table says so.
    """

    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    headers: dict = field(default_factory=lambda: JSON)


def base(path):
    """Returns a body without a fault."""
    if path == COMPLETIONS:
        return {"model": "tiny", "prompt": SECRET, "max_tokens": 4}
    if path == RESPONSES:
        return {"model": "tiny", "input": SECRET, "max_output_tokens": 4}
    return {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}


def dump(value):
    return json.dumps(value).encode()


NUMBERS = [True, "7", [], {}, -(2**63), 2**63, 10**30]
FLOATS = [*NUMBERS, "NaN"]
INTS = [*NUMBERS, 1.5]
FIELDS = {
    "temperature": [*FLOATS, -0.1, 2.1],
    "top_p": [*FLOATS, 0, -1, 1.01],
    "min_p": [*FLOATS, -0.1, 1.1],
    "presence_penalty": [*FLOATS, -2.1, 2.1],
    "frequency_penalty": [*FLOATS, -2.1, 2.1],
    "repetition_penalty": [*FLOATS, 0, -1, 101],
    "top_k": [*INTS, -2, 2**31],
    "n": [*INTS, 0, -1, 129],
    "max_tokens": [*INTS, 0, -1],
    "min_tokens": [*INTS, -1],
    "seed": [True, "7", [], 1.5, 2**63],
    "priority": [*INTS, 2**31],
    "prompt_logprobs": [*INTS, -1, 21],
    "stop": [True, 7, [7], [""], "", "x" * 257, ["x"] * 65, ["x"] * BIG, {}],
    "stop_token_ids": [True, 7, "7", [-1], [2**31], ["7"], [True], [1] * 65, [4096], [2**40]],
    "bad_words": [True, "x", [""], ["x"] * 257],
    "logit_bias": [
        True,
        [],
        {"x": 1},
        {"-1": 1},
        {"5": 101},
        {"5": "1"},
        {"5": True},
        {"4096": 1},
        {str(2**40): 1},
        {str(each): 1 for each in range(1025)},
    ],
    "logits_processors": [
        True,
        [],
        "x",
        {"x": 1},
        {"": {}},
        {"x": {"": 1}},
        {"x": {"y": "1"}},
        {"x": {"y": None}},
        {"x": {"y": {}}},
        {"x": {"y": 10**30}},
        {"x": {"y": [2**64]}},
        {"x": {"y": [[1], [2, 3]]}},
        {"x": {"y": [0] * BIG}},
        {str(each): {} for each in range(65)},
    ],
    "stream": [1, "true", []],
    "stream_options": [True, [], {"include_usage": 1}, {"other": True}, {"include_usage": True}],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": [0, "no"],
    "include_stop_str_in_output": [1],
    "cache_salt": [7, "x" * 1025, []],
    "user": [7, "x" * 1025],
    "metadata": [7, {"a": 1}, {str(each): "" for each in range(17)}],
    "response_format": [7, "json", {}, {"type": "xml"}, {"type": "json_schema"}],
    "suffix": ["x", 7],
    "best_of": [2, 0, True],
    "use_beam_search": [True],
    "chat_template": ["{{ 1 }}"],
    "unknown_field": [1],
    "model": [7, True, [], None],
}
COMPLETION_FIELDS = {
    "prompt": [
        None,
        7,
        True,
        {},
        "",
        [],
        [""],
        [[]],
        [1, "a"],
        [1, [2]],
        [[1], 2],
        [1.5],
        [True],
        [None],
        [-1],
        [4096],
        [2**40],
        [[2**70]],
        "x " * 4_000_000,
        ["x"] * 257,
        list(range(1024)),
        [1] * BIG,
    ],
    "logprobs": [*INTS, -1, 21],
    "echo": [1, "yes"],
}
CHAT_FIELDS = {
    "messages": [
        None,
        [],
        {},
        "hello",
        [7],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "king", "content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": "x", "extra": 1}],
        [{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": "x", "function_call": {}}],
        [{"role": "assistant", "tool_calls": [{"id": "a"}]}],
        [
            {
                "role": "user",
                "content": "x",
                "tool_calls": [{"id": "a", "function": {"name": "b", "arguments": ""}}],
            }
        ],
    ],
    "tools": [
        True,
        [7],
        [{}],
        [{"type": "function"}],
        [{"type": "retrieval", "function": {"name": "a"}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "parameters": 7}}],
        [{"type": "function", "function": {"name": "a"}}] * 129,
    ],
    "tool_choice": [True, "any", "auto", "required", {"type": "function"}],
    "logprobs": [1, "true", 3],
    "top_logprobs": [*INTS, -1, 21, 2],
    "max_completion_tokens": [*INTS, 0, -1, 5],
    "reasoning_effort": [7, "enormous"],
    "chat_template_kwargs": [
        7,
        {"a b": 1},
        {"a": []},
        {"a": {}},
        {"messages": "x"},
        {"bos_token": "x"},
        {"a": "x" * 257},
        {f"a{each}": 1 for each in range(33)},
    ],
    "functions": [[{}]],
    "function_call": ["auto"],
    "modalities": [["audio"]],
    "audio": [{}],
}


SAMPLING = {name: FIELDS[name] for name in ("temperature", "top_p", "top_k", "stream")}
LONG = {"x" * 10**5: [1], "unknown_field": [1], "model": [7, True, [], None]}
RESPONSES_FIELDS = {
    **SAMPLING,
    **LONG,
    "input": [
        None,
        7,
        {"text": SECRET},
        [],
        [7],
        [SECRET],
        [{}],
        [{"type": {"a": SECRET}}],
        [{"role": [SECRET], "content": "x"}],
        [{"role": "user", "content": {"text": SECRET}}],
        [{"role": "user", "content": [SECRET]}],
        [{"role": "user", "content": [{"type": [SECRET]}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": [SECRET]}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///"}]}],
        [{"type": "function_call_output", "call_id": "a", "output": {"text": SECRET}}],
        [{"type": "item_reference", "id": "x"}],
    ],
    "instructions": [7, [SECRET]],
    "max_output_tokens": [*INTS, 0, -1],
    "max_tool_calls": [*INTS, 0],
    "top_logprobs": [*INTS, -1, 21],
    "include": [7, ["x"], [[SECRET]]],
    "text": [
        7,
        {"other": 1},
        {"format": 7},
        {"format": {"type": "xml"}},
        {"format": {"type": ["json"]}},
        {"format": {"type": "json_schema"}},
    ],
    "reasoning": [7, {"other": 1}, {"effort": "enormous"}, {"effort": [SECRET]}],
    "tools": [7, [7], [{}], [{"type": "web_search"}], [{"type": "function"}]],
    "tool_choice": [7, "any", "required", {"type": "function"}, {"type": [SECRET]}],
    "truncation": ["auto", [SECRET]],
    "background": [True, 1],
    "store": [1, "yes"],
    "stream_options": [7, {"other": 1}],
    "previous_response_id": ["x"],
    "conversation": ["x"],
    "prompt": [{"id": "x"}],
}
MESSAGES_FIELDS = {
    **SAMPLING,
    **LONG,
    "messages": [
        None,
        7,
        "hello",
        {},
        [],
        [7],
        [SECRET],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": {"text": SECRET}}],
        [{"role": "user", "content": [SECRET]}],
        [{"role": "user", "content": [{"type": [SECRET]}]}],
        [{"role": "user", "content": [{"type": "text", "text": [SECRET]}]}],
        [{"role": "user", "content": [{"type": "image", "source": {}}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": {"a": SECRET}}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "input": SECRET}]}],
        [{"role": [SECRET], "content": "x"}],
    ],
    "system": [7, {}, [SECRET], [{"type": "image"}], [{"type": [SECRET]}]],
    "max_tokens": [*INTS, 0, -1, None],
    "stop_sequences": [7, "x", [7], [""], ["x"] * 65],
    "metadata": [7, "x"],
    "service_tier": [7],
    "inference_geo": [7],
    "thinking": [7, {"other": 1}, {"type": "hard"}, {"type": [SECRET]}],
    "tools": [7, [7], [{}], [{"type": "bash", "name": "a"}], [{"name": "a b"}]],
    "tool_choice": [7, {"other": 1}, {"type": "all"}, {"type": "any"}, {"type": "tool", "name": 7}],
    "output_config": [7, {"other": 1}, {"format": 7}, {"format": {"type": [SECRET]}}],
    "output_format": [7],
}


def _fields():
    for path, own in (
        (COMPLETIONS, FIELDS | COMPLETION_FIELDS),
        (CHAT, FIELDS | CHAT_FIELDS),
        (RESPONSES, RESPONSES_FIELDS),
        (MESSAGES, MESSAGES_FIELDS),
    ):
        for name, values in own.items():
            for value in values:
                yield Hostile(path, dump(base(path) | {name: value}), param=name[:40])
    for n in ("2", [2]):
        yield Hostile(COMPLETIONS, dump(base(COMPLETIONS) | {"best_of": 1, "n": n}), param="n")


def _bodies():
    good = dump(base(COMPLETIONS))
    raw = [
        b"",
        b"{",
        b"null",
        b"7",
        b"[]",
        b'"x"',
        good[:-1],
        good + b"x",
        good + good,
        b"\xff\xfe" + good,
        b"\x00" + good,
        good.replace(b"violet", b"\xff\xfe"),
        good.replace(b"violet", b"\xed\xa0\x80"),
        good.replace(b"violet", b"\\ud800"),
        good.replace(b"violet", b"\\u0000"),
        good.replace(b"violet", b"\x00"),
        good.replace(b"violet", b"\n"),
        good.replace(b'"tiny"', b"'tiny'"),
        good.replace(b'"max_tokens": 4', b'"max_tokens": 4, "max_tokens": 5'),
        good.replace(b": 4", b": NaN"),
        good.replace(b": 4", b": Infinity"),
        good.replace(b": 4", b": -Infinity"),
        good.replace(b": 4", b": 1e400"),
        good.replace(b": 4", b": -1e400"),
        good.replace(b": 4", b": " + b"9" * 101),
        good.replace(b": 4", b": " + b"9" * 5000),
        good.replace(b": 4", b": -" + b"9" * 100_000),
        good.replace(b": 4", b": 0x10"),
        good.replace(b": 4", b": 04"),
        good.replace(b": 4", b": 4,"),
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        good.replace(b": 4", b": " + b"[" * 200 + b"]" * 200),
        good.replace(b": 4", b": " + b'{"a":' * 200 + b"1" + b"}" * 200),
        good.decode().encode("utf-16"),
        good.decode().encode("utf-32"),
        b'<?xml version="1.0"?><a/>',
        b"prompt=x&model=tiny",
    ]
    for body in raw:
        yield Hostile(COMPLETIONS, body)
    deep = b'{"a":' * 200 + b"{}" + b"}" * 200
    tool = (
        b'"tool_choice":"none","tools":[{"type":"function","function":{"name":"a","parameters":%b}}]'
        % deep
    )
    yield Hostile(CHAT, dump(base(CHAT))[:-1] + b"," + tool + b"}")
    # A duplicate key hides in a nested object too.
    nested = b'{"model":"tiny","messages":[{"role":"user","content":"a","content":"b"}]}'
    yield Hostile(CHAT, nested)


def _headers():
    good = dump(base(COMPLETIONS))
    for content in (
        "",
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "application/jsonx",
        "x" * 1000,
    ):
        yield Hostile(COMPLETIONS, good, 415, headers={"content-type": content})
    for length in ("99999999999", "9" * 30, "-1", "1e9", "x"):
        yield Hostile(COMPLETIONS, good, 413, headers=JSON | {"content-length": length})
    yield Hostile(COMPLETIONS, b" " * (9 * 2**20), 413)


def _paths():
    good = dump(base(COMPLETIONS))
    for path in ("/v1/nothing", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1"):
        yield Hostile(path, good, 404)
    for path in ("/health", "/v1/models", "/v1/models/tiny", "/openapi.json"):
        yield Hostile(path, good, 405)
    for name in ("other", "", "../tiny", "tiny\n", "x" * 10_000):
        yield Hostile(COMPLETIONS, dump(base(COMPLETIONS) | {"model": name}), 404, "model")
        yield Hostile(CHAT, dump(base(CHAT) | {"model": name}), 404, "model")


def _tokens():
    for body in (
        {},
        {"prompt": 7},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"messages": []},
        {"prompt": "x", "extra": 1},
        {"prompt": "x " * BIG},
        {"prompt": "x", "return_token_strs": 1},
    ):
        yield Hostile("/tokenize", dump(body))
    for tokens in (None, 7, "7", [-1], [4096], [2**40], [1.5], [True], ["7"]):
        yield Hostile("/detokenize", dump({"tokens": tokens}))


REQUESTS = (*_fields(), *_bodies(), *_headers(), *_paths(), *_tokens())
