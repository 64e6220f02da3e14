"""Prompts from files: ShareGPT's JSON and lines of JSON."""

import json

import pytest

from jaxkv.bench.client.data_file import chosen_entries, load_entries
from jaxkv.bench.client.prompts import TokenCounts

COUNTS = TokenCounts(5.0, 0.5)


def turns(*values, names=("human", "gpt")):
    return {
        "id": "x",
        "conversations": [
            {"from": name, "value": value} for name, value in zip(names, values, strict=False)
        ],
    }


def load(tmp_path, text):
    file = tmp_path / "data"
    file.write_text(text)
    return load_entries(file)


def test_sharegpt_gives_the_first_question_and_the_length_of_its_answer(tmp_path):
    conversations = [
        turns("  why? ", "x" * 30),
        turns("alone"),
        turns("", "an answer to nothing"),
        turns("reversed", "order", names=("gpt", "human")),
        turns("hello", "y" * 8, names=("user", "assistant")),
    ]
    for text in (json.dumps(conversations), "\n\n".join(map(json.dumps, conversations))):
        entries = load(tmp_path, text)
        chosen = chosen_entries(entries, COUNTS, requests=None, output_tokens=None, seed=0)
        assert sorted(chosen) == [("hello", 4), ("why?", 15)]


def test_lines_have_prompts_or_messages_with_their_own_numbers(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a", "output_tokens": 3}, {"messages": messages, "output_tokens": 4}]
    entries = load(tmp_path, "\n".join(map(json.dumps, lines)))
    chosen = chosen_entries(entries, COUNTS, requests=2, output_tokens=None, seed=0)
    assert ("a", 3) in chosen
    assert (messages, 4) in chosen


def test_the_order_and_given_lengths_are_drawn_from_the_seed(tmp_path):
    lines = [{"prompt": str(number)} for number in range(50)]
    entries = load(tmp_path, "\n".join(map(json.dumps, lines)))

    def choose(seed):
        return chosen_entries(entries, COUNTS, requests=20, output_tokens=(3, 5), seed=seed)

    assert choose(0) == choose(0) != choose(1)
    assert {output for _, output in choose(0)} == {3, 4, 5}
    assert len({prompt for prompt, _ in choose(0)}) == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompt"),
        ("{nonsense", "must be a JSON list of ShareGPT conversations"),
        ('["text"]', "must be a JSON list"),
        ('{"question": "a"}', "must be a JSON list"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens must be an int above 0"),
        (json.dumps([turns("alone")]), "has no prompt"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


def test_what_the_file_does_not_have_is_not_made_up(tmp_path):
    entries = load(tmp_path, '{"prompt": "a"}')
    with pytest.raises(ValueError, match="1 usable prompts, but 2 requests"):
        chosen_entries(entries, COUNTS, requests=2, output_tokens=(1, 1), seed=0)
    with pytest.raises(ValueError, match="neither an answer nor output_tokens"):
        chosen_entries(entries, COUNTS, requests=1, output_tokens=None, seed=0)
