"""Prompts from a user's file: ShareGPT's JSON, or JSON lines with prompts or messages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.bench.client.completion import Prompt
from jaxkv.bench.client.prompts import TokenCounts

_FORMS = (
    'a JSON list of ShareGPT conversations, as {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", '
    '"value": ...}]}, or lines of such objects, of {"prompt": TEXT} or of {"messages": [...]}, perhaps with '
    '"output_tokens"'
)


@dataclass(frozen=True)
class Entry:
    """A prompt of a file.

    Attributes:
        prompt: a text, or the messages of a chat.
        text: what the prompt says, for counts of tokens.
        answer: the answer of the file; empty if there is none.
        output_tokens: tokens to generate, if the file has a number.
    """

    prompt: Prompt
    text: str
    answer: str = ""
    output_tokens: int | None = None


def load_entries(path: Path) -> list[Entry]:
    """Returns the prompts of a file, in its order; of a conversation the first two turns.

    Conversations that do not begin with a question and its answer are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not of a known form, or it has no prompt.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            objects = json.loads(text)
        else:
            objects = [json.loads(line) for line in text.splitlines() if line.strip()]
        entries = [entry for one in objects if (entry := _entry(one)) is not None]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be {_FORMS}; reading it failed: {error!r}") from error
    if not entries:
        raise ValueError(f"{path} has no prompt; it must be {_FORMS}")
    return entries


def _entry(one: dict[str, Any]) -> Entry | None:
    output_tokens = one.get("output_tokens")
    if output_tokens is not None and (type(output_tokens) is not int or output_tokens < 1):
        raise TypeError(f"output_tokens must be an int above 0, got {output_tokens!r}")
    if "conversations" in one:
        turns = one["conversations"][:2]
        if [turn["from"] for turn in turns] not in (["human", "gpt"], ["user", "assistant"]):
            return None
        question, answer = (turn["value"].strip() for turn in turns)
        return Entry(question, question, answer, output_tokens) if question and answer else None
    if "messages" in one:
        said = [str(message["content"]) for message in one["messages"]]
        return Entry(one["messages"], "\n".join(said), "", output_tokens)
    return Entry(one["prompt"], one["prompt"].strip(), "", output_tokens) if one["prompt"] else None


def chosen_entries(
    entries: Sequence[Entry],
    counts: TokenCounts,
    *,
    requests: int | None,
    output_tokens: tuple[int, int] | None,
    seed: int,
) -> list[tuple[Prompt, int]]:
    """Returns prompts in a random order, each with its number of output tokens.

    Args:
        entries: the entries of the file.
        counts: the counts of the server, which turn the length of an answer into tokens.
        requests: how many; `None` for all.
        output_tokens: least and most tokens to generate; `None` takes the file's number, or else the answer's length.
        seed: seed of the order and of the drawn numbers.

    Raises:
        ValueError: there are fewer, or a number of output tokens is missing.
    """
    wanted = len(entries) if requests is None else requests
    if wanted > len(entries):
        raise ValueError(
            f"the file has {len(entries)} usable prompts, but {wanted} requests were asked for; lower --requests"
        )
    draw = np.random.default_rng(seed)
    chosen = [entries[index] for index in draw.permutation(len(entries))[:wanted].tolist()]
    if output_tokens is not None:
        outputs = draw.integers(output_tokens[0], output_tokens[1] + 1, wanted).tolist()
        return [(entry.prompt, output) for entry, output in zip(chosen, outputs, strict=True)]
    return [(entry.prompt, _output_tokens(entry, counts)) for entry in chosen]


def _output_tokens(entry: Entry, counts: TokenCounts) -> int:
    if entry.output_tokens is not None:
        return entry.output_tokens
    if not entry.answer:
        raise ValueError(
            "a prompt of the file has neither an answer nor output_tokens; give --output-tokens"
        )
    return counts.tokens(entry.answer)
