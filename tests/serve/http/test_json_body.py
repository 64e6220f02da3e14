"""Bodies of requests: the fast way reads what the careful one reads, and leaves the rest to it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.serve.http import json_body
from jaxkv.serve.http.errors import ApiError
from jaxkv.serve.http.json_body import parse_json

DEPTH = 6
NAMES = st.text(alphabet='ab:"\\{', max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def read(parse, body):
    """Returns what a way to read gives: a tree, or the text of its refusal."""
    try:
        return parse(body, DEPTH)
    except ApiError as error:
        return str(error.message)


@given(st.dictionaries(NAMES, VALUES, max_size=5), st.data())
def test_both_ways_read_the_same_of_any_body(tree, data):
    text = json.dumps(tree, ensure_ascii=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(['"a":1,', ":", "\\u003a", "1", '"', "[", "}"]))
            + text[at:]
        )
    body = text.encode()
    assert read(parse_json, body) == read(json_body._careful_tree, body)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": list(range(300)), "stream": True, "temperature": 0.5},
        {
            "model": "m",
            "messages": [{"role": "user", "content": "a: b\n\"c\": 'd' é"}],
            "stop": None,
        },
        {"model": "m", "prompt": ["x:", [1, 2]], "logit_bias": {"5": -1.0}},
    ],
)
def test_ordinary_bodies_are_read_the_fast_way(body):
    assert json_body._plain_tree(json.dumps(body, ensure_ascii=False).encode(), 128) == body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a":1,"a":2}', "a key twice"),
        (b'{"b":{"a":":","a":2}}', "a key twice"),
        (b'{"a:":1,"a":{"a":2,"a":3}}', "a key twice"),
        (b'{"a":%s}' % (b"9" * 101), "more than 100 digits"),
        (b'{"a":[1,%s]}' % (b"9" * 101), "more than 100 digits"),
        (b'{"a":[null,%s]}' % (b"9" * 101), "more than 100 digits"),
        (b'{"a":%s1%s}' % (b"[" * DEPTH, b"]" * DEPTH), "nested deeper than 6"),
        (b'{"a":NaN}', "the number NaN"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":"\\ud800"}', "lone surrogate"),
        (b'{"a":"\\u0000"}', "a NUL"),
        (b'{"a":"\xff"}', "not in UTF-8"),
        (b"[1]", "no object"),
        (b'{"a":1}x', "Extra data"),
    ],
)
def test_what_two_readers_might_understand_differently_is_refused(body, why):
    assert why in read(parse_json, body)


def test_the_longest_number_and_the_deepest_nesting_are_read():
    body = {"a": int("9" * 100), "b": [[[[[1]]]]]}
    assert read(parse_json, json.dumps(body).encode()) == body
