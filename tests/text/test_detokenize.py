"""Pieces of text add up to the whole text, and no piece shows half a character."""

import random
from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxkv.text import tokenizer as ours
from jaxkv.text.detokenize import Detokenizer, text_after
from tests.example_counts import examples

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Zürich, ça va? naïve façade",
    "日本語のテキスト、中文文本 한국어 텍스트",
    "😀 👩‍👩‍👧 🇨🇭 ☃️",
    "def f(x):\n    return x ** 2  # comment\n\n\n",
]


def byte_level():
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["<tool>", AddedToken("  spaced ", special=False)])
    return library


def byte_fallback():
    """A tokenizer in the manner of SentencePiece: words with a mark for the space, rare characters as bytes."""
    words = ["▁", "▁the", "▁fox", "the", "é", "▁▁", "ab", "!", "<0xZZ>", "\ufffd"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    library = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>", "</s>"])
    return library


def metaspace():
    library = byte_fallback()
    library.decoder = decoders.Metaspace()
    return library


def wide_strip():
    library = byte_fallback()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 4, 0),
        ]
    )
    return library


def word_piece():
    pieces = ["[UNK]", "play", "##ing", "##ed", ".", "do", "n't", "'"]
    library = Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    library.decoder = decoders.WordPiece(cleanup=True)
    return library


def end_of_word():
    """Words end in a mark that is a space, but for the last one's."""
    words = ["the</w>", "fox</w>", "un", "known</w>", "!</w>"]
    library = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    library.decoder = decoders.BPEDecoder()
    return library


def no_decoder():
    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(9)}, "w0"))


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "wide strip": wide_strip,
    "word piece": word_piece,
    "end of word": end_of_word,
    "no decoder": no_decoder,
}
TOKENIZERS = {
    name: ours.Tokenizer(build(), model_vocab_size=400 if name == "byte level" else 0)
    for name, build in KINDS.items()
}


# Mostly words and a few bytes; all 256 bytes alike would leave hardly any words.
FEW_BYTES = (0, 1, 2, 3 + 0x41, 3 + 0xE2, 3 + 0x82, 3 + 0xAC, *range(259, 269))
USUAL_IDS = {
    name: FEW_BYTES if tokenizer.num_ids == 269 else range(tokenizer.num_ids)
    for name, tokenizer in TOKENIZERS.items()
}


def pieces_of(tokenizer, ids, prompt=(), *, skip_special_tokens=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_ids_add_up_to_their_text(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.sampled_from(USUAL_IDS[kind]), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_of_long_runs_add_up_to_their_text(kind):
    # Few distinct ids make the runs of bytes and broken characters that free drawing hardly makes.
    tokenizer = TOKENIZERS[kind]
    rng = random.Random(3)
    for _ in range(40):
        few = rng.sample(USUAL_IDS[kind], rng.randint(1, 5))
        ids = rng.choices(few, k=rng.randint(1, 300))
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids), ids


@cache
def texts_of(kind):
    """Draws ids that have text, and so begin no new text: no special ones, and whole characters if bytes."""
    tokenizer = TOKENIZERS[kind]
    alone = [
        token
        for token in USUAL_IDS[kind]
        if not tokenizer.is_special(token) and "\ufffd" not in tokenizer.decode([token])
    ]
    euro = [3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    words = st.sampled_from([[token] for token in alone] + [euro] * (tokenizer.num_ids == 269))
    return st.lists(words, max_size=40).map(lambda found: [*chain(*found)])


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_behind_a_prompt_the_text_is_that_of_both_less_the_prompts(kind, data):
    tokenizer = TOKENIZERS[kind]
    prompt, ids = data.draw(texts_of(kind)), data.draw(texts_of(kind))
    before, both = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    if not both.startswith(before):  # Clean-up, as of "do n't", changes what stands before.
        return
    assert text_after(tokenizer, prompt, ids) == both[len(before) :]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_the_pieces_behind_any_prompt_add_up_to_the_text_behind_it(kind, skip, data):
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.sampled_from(USUAL_IDS[kind]), max_size=30)
    prompt, answer = data.draw(ids), data.draw(ids)
    pieces = pieces_of(tokenizer, answer, prompt, skip_special_tokens=skip)
    assert "".join(pieces) == text_after(tokenizer, prompt, answer, skip_special_tokens=skip)


SPACED = ("byte fallback", "metaspace")
THE, FOX, TIGHT = 260, 261, 262


@pytest.mark.parametrize("kind", SPACED)
@pytest.mark.parametrize("prompt", [[THE], [FOX, THE], [FOX] * 300, [3 + 0x41], [3 + 0x41] * 300])
def test_the_space_between_prompt_and_answer_is_kept(kind, prompt):
    tokenizer = TOKENIZERS[kind]
    assert text_after(tokenizer, prompt, [FOX, TIGHT]) == " foxthe"
    assert pieces_of(tokenizer, [FOX, TIGHT], prompt) == [" fox", "the", ""]
    assert pieces_of(tokenizer, [TIGHT, FOX], prompt) == ["the", " fox", ""]


@pytest.mark.parametrize("kind", SPACED)
@pytest.mark.parametrize("prompt", [[], [1], [THE, 2], [THE, 2, 1]])
def test_a_special_token_at_the_prompts_end_begins_a_new_text(kind, prompt):
    """An answer in a chat begins without the space that the decoder strips from a text's first word."""
    tokenizer = TOKENIZERS[kind]
    assert text_after(tokenizer, prompt, [FOX, THE]) == "fox the"
    assert pieces_of(tokenizer, [FOX, THE], prompt) == ["fox", " the", ""]


def test_a_character_that_the_prompt_leaves_incomplete_is_the_answers():
    tokenizer = TOKENIZERS["byte fallback"]
    for cut in 1, 2:
        ids = [3 + 0xE2, 3 + 0x82, 3 + 0xAC, FOX]
        assert text_after(tokenizer, [THE, *ids[:cut]], ids[cut:]) == "€ fox"
        assert "".join(pieces_of(tokenizer, ids[cut:], [THE, *ids[:cut]])) == "€ fox"
    tokenizer = TOKENIZERS["byte level"]
    first, *rest = (tokenizer._library.token_to_id(byte) for byte in "ðŁĺ¶")
    assert pieces_of(tokenizer, rest, [40, first]) == ["", "", "😶", ""]
    assert text_after(tokenizer, [40, first], rest) == "😶"


def test_a_character_that_never_is_completed_is_the_prompts():
    tokenizer = TOKENIZERS["byte level"]
    half, letter = (tokenizer._library.token_to_id(piece) for piece in "ða")
    for ids, text in ([letter], "a"), ([half, letter], "\ufffda"), ([], ""), ([half], "\ufffd"):
        assert text_after(tokenizer, [letter, half], ids) == text
        assert "".join(pieces_of(tokenizer, ids, [letter, half])) == text


def test_a_long_run_of_bytes_at_the_prompts_end_is_read_as_a_whole():
    """Cut within a character, the run would be no valid text, nor would the answer's bytes."""
    tokenizer = TOKENIZERS["byte fallback"]
    euro = [3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    assert text_after(tokenizer, [THE, *euro * 40], [*euro, FOX]) == "€ fox"
    assert "".join(pieces_of(tokenizer, [*euro, FOX], [THE, *euro * 40])) == "€ fox"


def test_special_tokens_show_their_names_if_they_are_not_skipped():
    tokenizer = TOKENIZERS["metaspace"]
    ids = [FOX, 2, THE, 2]
    assert pieces_of(tokenizer, ids, [THE], skip_special_tokens=False) == [
        " fox",
        "</s>",
        " the",
        "</s>",
        "",
    ]
    assert "".join(pieces_of(tokenizer, ids, [THE])) == " fox the"


def test_ids_of_a_prompt_that_only_the_model_has_have_no_text():
    tokenizer = TOKENIZERS["metaspace"]
    assert text_after(tokenizer, [THE, 9999], [FOX]) == " fox"


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_piece_of_a_valid_text_shows_a_broken_character(text):
    tokenizer = TOKENIZERS["byte level"]
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_spread_over_tokens_comes_with_the_last_of_them():
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("a😶b")
    assert len(ids) > 4, "the trainer has merged the character: choose a rarer one"
    pieces = pieces_of(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "😶", "b"]
    assert pieces[-1] == ""


def test_most_tokens_show_at_once():
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("The quick brown fox")
    assert pieces_of(tokenizer, ids)[-1] == ""
    assert all(pieces_of(tokenizer, ids)[:-1])


def test_bytes_that_never_become_a_character_neither_pile_up_nor_get_lost():
    tokenizer = TOKENIZERS["byte level"]
    half = tokenizer.encode("😶")[0]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(half) for _ in range(5000)]
    assert len(detokenizer._window) < 100
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode([half] * 5000)


def test_a_character_that_is_completed_after_much_nonsense_is_whole():
    # Wherever the window is cut, it must not be cut within the character.
    tokenizer = TOKENIZERS["byte level"]
    *three, last = (tokenizer._library.token_to_id(byte) for byte in "ðŁĺ¶")
    assert tokenizer.decode([*three, last]) == "😶"
    for length in range(50, 150):
        for shift in range(3):
            ids = [*(three[:1] * shift + three * 50)[:length], last, last]
            assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_and_ids_without_a_name_are_silent():
    tokenizer = TOKENIZERS["byte level"]
    end = tokenizer.encode("<|end|>")
    assert len(end) == 1
    assert pieces_of(tokenizer, [*end, 399, *tokenizer.encode("x"), *end]) == ["", "", "x", "", ""]


def test_a_special_token_does_not_eat_the_space_of_the_next_word():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [*tokenizer.encode("<s>", add_special=False), 260, 2, 260]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize("token", [-1, 400, 2**40, 2**70])
def test_an_id_out_of_range_is_refused_and_leaves_the_text_as_it_was(token):
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer)
    first = detokenizer.push(tokenizer.encode("x")[0])
    with pytest.raises(ValueError, match=r"outside the model's \[0, 400\)"):
        detokenizer.push(token)
    assert first + detokenizer.push(tokenizer.encode("y")[0]) + detokenizer.finish() == "xy"
