"""Values in error messages are one short line."""

from jaxkv.wording import clip, listed, shown


def test_a_text_is_one_line_of_at_most_its_limit():
    assert clip("a\n b\t c") == "a b c"
    assert clip("x" * 160) == "x" * 160
    assert clip("x" * 161) == "x" * 157 + "..."
    assert len(shown(["y"] * 10**5)) == 80


def test_the_first_items_are_named_and_the_others_counted():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"{at}" for at in range(6)]) == "0, 1, 2, 3, 4, 5"
    assert listed(dict.fromkeys(range(2007)), most=2) == "0, 1, and 2,005 more"
    assert listed(["a\nb", "c" * 999], separator="; ") == "a b; " + "c" * 157 + "..."
