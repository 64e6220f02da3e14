import itertools

import pytest

from jaxkv.serve.api.text_offsets import TextOffsets, echo_offsets, unfinished_bytes
from jaxkv.serve.token_texts import TokenTexts
from jaxkv.text.detokenize import text_after
from tests.text.test_detokenize import TOKENIZERS

FALLBACK = TOKENIZERS["byte fallback"]
TEXT = "é漢x😀ab"


def offsets_of(tokenizer, ids, prompt=(), *, start=0, end=0):
    texts = TokenTexts(tokenizer)
    counted = TextOffsets(tokenizer, texts, prompt, skip_special_tokens=True, start=start, end=end)
    return [counted.push(token) for token in ids]


def byte_ids(data):
    return [FALLBACK.id_of(f"<0x{byte:02X}>") for byte in data]


def ends(data):
    return set(itertools.accumulate(len(each.encode()) for each in data.decode()))


def ids_of(tokenizer, pieces):
    return [tokenizer.id_of(piece) for piece in pieces]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_each_part_of_a_character_has_the_offset_of_the_character(kind):
    data = TEXT.encode()
    if kind == "byte fallback":
        tokenizer, ids = FALLBACK, byte_ids(data)
    else:
        tokenizer = TOKENIZERS[kind]
        bytes_to_ids = {
            tuple(found): token
            for token in tokenizer.token_ids
            if len(found := TokenTexts(tokenizer).of(token)[1]) == 1
        }
        ids = [bytes_to_ids[byte,] for byte in data]
    wanted = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4, 5]
    assert offsets_of(tokenizer, ids) == wanted
    assert echo_offsets(tokenizer, TokenTexts(tokenizer), ids, TEXT) == (wanted, len(TEXT))
    for cut in range(len(ids)):
        # Whether the prompt is in the text or not, the completion has the whole of a character that it ends.
        prompt, rest = ids[:cut], ids[cut:]
        assert offsets_of(tokenizer, rest, prompt, start=wanted[cut], end=99) == wanted[cut:]
        text = text_after(tokenizer, prompt, rest)
        if kind == "byte level":
            first = len(TEXT) - len(text)
            assert offsets_of(tokenizer, rest, prompt) == [at - first for at in wanted[cut:]]


def test_a_character_that_stays_broken_is_counted_where_the_text_has_it():
    ids = [*byte_ids("漢".encode()[:2]), *ids_of(FALLBACK, ["ab", "!"])]
    assert text_after(FALLBACK, (), ids) == "\ufffd\ufffdab!"
    # The broken bytes are two characters, which is known behind them.
    assert offsets_of(FALLBACK, ids)[-1] == 4
    prompt, rest = ids[:2], ids[2:]
    assert text_after(FALLBACK, prompt, rest) == "ab!"
    assert offsets_of(FALLBACK, rest, prompt) == [0, 2]
    assert offsets_of(FALLBACK, rest, prompt, start=7, end=9) == [9, 11]


def test_the_space_that_a_text_loses_is_not_counted():
    ids = ids_of(FALLBACK, ["▁the", "▁fox", "▁the"])
    assert text_after(FALLBACK, (), ids) == "the fox the"
    assert offsets_of(FALLBACK, ids) == [0, 3, 7]
    # Behind a prompt it is not lost.
    assert offsets_of(FALLBACK, ids, ids[:1], start=3, end=3) == [3, 7, 11]


def test_special_tokens_count_where_the_text_has_their_names():
    ids = ids_of(FALLBACK, ["<s>", "▁the", "</s>", "▁fox"])
    texts = TokenTexts(FALLBACK)
    assert echo_offsets(FALLBACK, texts, ids, "the</s> fox") == ([0, 0, 3, 7], 11)
    assert echo_offsets(FALLBACK, texts, ids, "<s> the</s> fox") == ([0, 3, 7, 11], 15)
    assert offsets_of(FALLBACK, ids) == [0, 0, 3, 3]
    # A special token without text does not break the character around it.
    first, *rest = byte_ids("漢".encode())
    ids = [first, *ids_of(FALLBACK, ["</s>"]), *rest, *ids_of(FALLBACK, ["ab"])]
    assert text_after(FALLBACK, (), ids) == "漢ab"
    assert offsets_of(FALLBACK, ids) == [0, 0, 0, 0, 1]


def test_without_a_tokenizer_all_offsets_are_the_start():
    assert offsets_of(None, [5, 6], [7], start=0) == [0, 0]


@pytest.mark.parametrize(("text", "cut"), [("漢", 0), ("漢", 1), ("漢", 2), ("x😀", 4), ("é漢", 3)])
def test_the_bytes_of_an_unfinished_character_are_found(text, cut):
    data = text.encode()[:cut]
    at = max(end for end in {0, *ends(text.encode())} if end <= cut)
    assert unfinished_bytes(TokenTexts(FALLBACK), byte_ids(data)) == data[at:]
    assert unfinished_bytes(TokenTexts(FALLBACK), byte_ids(text.encode())) == b""
