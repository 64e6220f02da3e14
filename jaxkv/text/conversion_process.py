"""The program of the process that writes a tokenizer.json with Transformers, for a directory that has none.

It runs in a process of its own, so that Transformers and what it imports stay out of the server's. Code of the
directory is never run: `trust_remote_code` is off, and the directory that it is given holds no code.
"""

import json
import sys


def convert(source: str, target: str, fewest: int) -> None:
    """Reads a tokenizer in any form that Transformers converts, and saves tokenizer.json and tokenizer_config.json.

    Raises:
        ValueError: Transformers made no tokenizer of the files, or one of less than `fewest` tokens.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source,
        use_fast=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no counterpart in the tokenizers library")
    if len(tokenizer) < fewest:
        raise ValueError(
            f"{type(tokenizer).__name__} found only {len(tokenizer)} tokens in the files"
        )
    tokenizer.save_pretrained(target)


def main() -> None:
    """Converts the directory of the first argument into that of the second; prints `{}` or `{"error": ...}`."""
    try:
        convert(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except (
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    else:
        print("{}")


if __name__ == "__main__":
    main()
