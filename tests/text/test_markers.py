"""Markers in a text that arrives in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.text.markers import Markers


@pytest.mark.parametrize(
    ("text", "more", "found"),
    [
        ("ab<x>c", True, (2, 5)),
        ("ab<", True, (2, 2)),
        ("ab<", False, (3, 3)),
        ("ab<y", True, (4, 4)),
        ("<x>", True, (0, 3)),
        ("<xx", True, (0, 0)),
        ("<xx>", True, (0, 4)),
        ("a\n<x", True, (1, 1)),
        ("a\n<x>", True, (1, 5)),
    ],
)
def test_the_first_marker_is_found_once_it_is_certain(text, more, found):
    assert Markers(["<x>", "<xx>", "\n<x>"]).search(text, more=more) == found


def test_the_longest_of_two_markers_with_one_start_is_waited_for():
    markers = Markers(["end", "ending"])
    assert markers.search("the end", more=True) == (4, 4)
    assert markers.search("the end", more=False) == (4, 7)
    assert markers.search("the ends", more=True) == (4, 7)
    assert markers.search("the ending", more=True) == (4, 10)


def test_a_marker_inside_the_beginning_of_an_earlier_one_waits():
    markers = Markers(["abcX", "bc"])
    assert markers.search("abc", more=True) == (0, 0)
    assert markers.search("abcd", more=True) == (1, 3)
    assert markers.search("abcX", more=True) == (0, 4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    strings=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("ab<", max_size=12),
)
def test_a_possible_beginning_is_the_longest_end_that_a_marker_begins_with(strings, text):
    start = Markers(strings).possible_beginning(text)
    ends = [
        at
        for at in range(len(text))
        if any(s.startswith(text[at:]) and s != text[at:] for s in strings)
    ]
    assert start == min(ends, default=len(text))
