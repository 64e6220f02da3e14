"""A text ends before its first stop string, however it is cut into pieces, and nothing of one is shown too early."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.config.sampling import SamplingParams
from jaxkv.text.text_stream import StopStrings, TextStream
from tests.engine.engines import TOKENIZER
from tests.example_counts import examples

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple)


def first_stop(text, stops):
    """Returns where the first stop string begins, read character by character; `None` if there is none."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found)
    return None


@given(st.lists(st.text("ab", max_size=3), max_size=8), STOPS)
@settings(max_examples=examples(300), deadline=None)
def test_a_stop_string_is_found_wherever_the_pieces_end(pieces, stops):
    shown, met, stream = "", False, StopStrings(stops)
    text = "".join(pieces)
    cut = first_stop(text, stops)
    for piece in pieces:
        new, met = stream.push(piece)
        shown += new
        assert text[:cut].startswith(shown)
        if met:
            break
    assert met == (cut is not None)
    assert shown + (stream.finish() if not met else "") == text[:cut]


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=8), STOPS, st.integers(0, 8))
@settings(max_examples=examples(200), deadline=None)
def test_what_ends_before_it_may_is_text(pieces, stops, allowed):
    """With `min_tokens`, strings that end within the first pieces do not count."""
    shown, met, stream = "", False, StopStrings(stops)
    text, before = "".join(pieces), len("".join(pieces[:allowed]))
    ends = [end for end in range(before + 1, len(text) + 1) if text[:end].endswith(stops)]
    for at, piece in enumerate(pieces):
        new, met = stream.push(piece, may_stop=at >= allowed)
        shown += new
        if met:
            break
    assert met == bool(ends)
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        # What was shown before it could count stays shown.
        assert shown in (text[: ends[0] - longest], text[: len(shown)])
    else:
        assert shown + stream.finish() == text


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = StopStrings(("END", "\n\n"))
    assert stream.push("one\n") == ("one", False)
    assert stream.push("two E") == ("\ntwo ", False)
    assert stream.push("N") == ("", False)
    assert stream.push("x") == ("ENx", False)
    assert stream.push("\n\nthree") == ("", True)


@given(st.text(max_size=12), st.text(min_size=1, max_size=2))
@settings(max_examples=examples(100), deadline=None)
def test_tokens_become_the_text_up_to_the_stop(text, stop):
    ids = TOKENIZER.encode(text, add_special=False)
    whole = TOKENIZER.decode(ids)
    shown, met, stream = "", False, TextStream(TOKENIZER, (), SamplingParams(stop=stop))
    for token in ids:
        new, met = stream.push(token)
        shown += new
        if met:
            break
    else:
        rest, met = stream.finish()
        shown += rest
    assert met == (stop in whole)
    assert shown == whole.split(stop)[0]


def test_the_text_may_end_behind_the_stop_string():
    stream = StopStrings(("END", "ND!"), included=True)
    assert stream.push("one E") == ("one ", False)
    assert stream.push("ND! two") == ("END", True)
