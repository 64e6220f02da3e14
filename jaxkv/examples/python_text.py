"""The default model's training text: the Python standard library's sources, and the tokenizer learned from them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
# Tests, vendored packages and generated tables are no examples of hand-written library code.
SKIPPED_FOLDERS = frozenset(
    ("test", "idlelib", "site-packages", "lib2to3", "encodings", "pydoc_data", "__phello__")
)
# A space is never part of the word after it, so a prompt that ends in a space ("def ") is cut as in training.
WORDS = r"[\p{L}_]+|\p{N}+|[^\s\p{L}\p{N}_]+|\n+| +|[^\S\n ]+"


def read_sources(source: Path) -> dict[str, str]:
    """Returns path below `source` -> text of each source file, sorted; raises `ValueError` if there are none."""
    found = {}
    for file in source.rglob("*.py"):
        name = file.relative_to(source)
        generated = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
        if not generated and SKIPPED_FOLDERS.isdisjoint(name.parts[:-1]):
            found[name.as_posix()] = file.read_text("utf-8")
    if not found:
        raise ValueError(f"no Python sources below {source}; pass --source with a standard library")
    return dict(sorted(found.items()))


def is_held_out(name: str) -> bool:
    """Returns whether a file is held out: one in twenty, by the hash of its name, independent of other files."""
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns a byte-level BPE whose token 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, max_positions: int, directory: Path) -> None:
    """Writes tokenizer.json and the tokenizer_config.json that names its special token."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tokenise(tokenizer: Tokenizer, texts: Sequence[str]) -> Int[np.ndarray, " tokens"]:
    """Joins the documents into one stream, each closed by the end token."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.asarray([*one.ids, end], np.int32) for one in encoded])


def line_starts(
    tokenizer: Tokenizer, stream: Int[np.ndarray, " tokens"], context: int
) -> Int[np.ndarray, " starts"]:
    """Returns the starts of lines that `context + 1` tokens follow; training windows begin there, as prompts do.

    Raises:
        ValueError: the stream has no such line.
    """
    breaks = [
        id_
        for token, id_ in tokenizer.get_vocab().items()
        if token == END or set(tokenizer.decode([id_])) == {"\n"}
    ]
    starts = np.flatnonzero(np.isin(stream, breaks)) + 1
    starts = starts[starts + context + 1 <= len(stream)]
    if not len(starts):
        raise ValueError(f"no line is followed by {context + 1} of the {len(stream)} tokens")
    return starts.astype(np.int32)
