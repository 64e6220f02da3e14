"""A model's tokenizer as llguidance reads it: texts never hold special tokens, and there is an end id."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.text.tokenizer import Tokenizer

_MARK = "\ue000"
"""Makes the names of special tokens differ from every text, a character for private use."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the form that llguidance reads.

    Attributes:
        text: tokenizer.json. llguidance writes forced texts with the tokenizer, which would turn the name of a special
            token, such as "<|end|>" inside a JSON string, into that token. So the names of special tokens are changed.
        vocab_size: number of ids.
        end_ids: ids that end a text; not empty.
        invented_end: an end id that llguidance needs but the model lacks; `None` otherwise.
    """

    text: str
    vocab_size: int
    end_ids: tuple[int, ...]
    invented_end: int | None


def vocabulary_of(tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int) -> Vocabulary:
    """Returns the vocabulary of a model.

    Args:
        tokenizer: its tokenizer.
        end_ids: ids that end a text. Those without a token are left out: llguidance takes none.
        vocab_size: number of its logits.
    """
    tree = json.loads(tokenizer.to_json())
    added: list[dict[str, Any]] = tree.get("added_tokens") or []
    model = tree["model"]
    for token in added:
        if token["special"]:
            _rename(model, token["content"], _MARK + token["content"])
            token["content"] = _MARK + token["content"]
    known = tokenizer.token_ids
    ends = tuple(token for token in end_ids if token in known)
    invented = None if ends else 1 + max(known)
    if invented is not None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": invented, "content": _MARK, "special": True, **flags})
    tree["added_tokens"] = added
    size = max(vocab_size, tokenizer.num_ids, 0 if invented is None else invented + 1)
    return Vocabulary(json.dumps(tree), size, ends or (invented or 0,), invented)


def _rename(model: dict[str, Any], name: str, other: str) -> None:
    """Gives a token of a tokenizer's model another name, with the same id."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and name in vocab:
        vocab[other] = vocab.pop(name)
    elif isinstance(vocab, list):
        for entry in vocab:
            if entry[0] == name:
                entry[0] = other
    if model.get("unk_token") == name:
        model["unk_token"] = other
