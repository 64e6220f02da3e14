"""The program of the worker process that tries grammars: one JSON line in, one JSON line out.

A grammar is untrusted input. A regular expression or a schema of a few bytes can take minutes and gigabytes to compile,
which cannot be stopped from inside a process. A separate process can be killed, and its memory can be limited. The
server compiles only grammars that were compiled here. This file imports nothing of jaxkv.
"""

import json
import resource
import signal
import sys
from typing import Any

MAX_WHITESPACE = 64
"""Most whitespace characters between two tokens of JSON; a small model could otherwise write spaces without an end."""


def build_vocabulary(text: str, vocab_size: int, end_ids: list[int]) -> Any:  # noqa: ANN401 - llguidance is optional
    """Returns llguidance's vocabulary.

    Args:
        text: tokenizer.json.
        vocab_size: number of ids; at least those of the tokenizer.
        end_ids: ids that end a text; not empty.
    """
    import llguidance

    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)


def build_matcher(vocabulary: Any, kind: str, source: str) -> Any:  # noqa: ANN401 - llguidance is optional
    """Returns the matcher of a grammar in its initial state; `is_error` if the grammar is not valid or too large.

    Args:
        vocabulary: the result of `build_vocabulary`.
        kind: "json", "regex" or "grammar".
        source: the JSON schema, regular expression or Lark grammar.

    Raises:
        ValueError: the schema is not valid.
    """
    from llguidance import LLMatcher, LLParserLimits

    if kind == "json":
        space = rf"[ \n\r\t]{{0,{MAX_WHITESPACE}}}"
        grammar = LLMatcher.grammar_from_json_schema(
            source, overrides={"whitespace_flexible": True, "whitespace_pattern": space}
        )
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    else:
        grammar = LLMatcher.grammar_from_lark(source)
    # By llguidance's figures about 14 ms for the lexer and 3 ms for the parser of one mask, and 500 MB of lexer states.
    limits = LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def error_of(matcher: Any) -> str:  # noqa: ANN401 - llguidance is optional
    """Returns the error of a matcher in one line; empty if it has none."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:500]


def attempt(vocabulary: Any, kind: str, source: str) -> dict[str, str]:  # noqa: ANN401 - llguidance is optional
    """Compiles a grammar and computes the first masks; returns `{}`, or `{"error": ...}`.

    Some grammars, such as the regex "a{1000000}", have a first mask and exceed a limit with any token. So the masks
    behind three tokens are computed too: the first, the middle and the last one of those that may begin a text. It is
    an error if all three exceed it.
    """
    try:
        matcher = build_matcher(vocabulary, kind, source)
        if matcher.is_error():
            return {"error": error_of(matcher)}
        allowed = _ids(matcher.compute_bitmask())
        errors = []
        for token in {allowed[at] for at in (0, len(allowed) // 2, -1) if allowed}:
            behind = matcher.deep_copy()
            behind.consume_tokens([token])
            behind.compute_bitmask()
            errors.append(error_of(behind) if behind.is_error() else "")
        if errors and all(errors):
            return {"error": errors[0]}
    except (ValueError, RuntimeError) as error:
        return {"error": " ".join(str(error).split())[:500]}
    return {"error": error_of(matcher)} if matcher.is_error() else {}


def _ids(mask: bytes) -> list[int]:
    """Returns the numbers of the bits that are set, the lowest bit of a byte first."""
    return [
        8 * place + bit
        for place, byte in enumerate(mask)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]


def main() -> None:
    """Answers requests from stdin until its end. The first line is the vocabulary, each later one a grammar."""
    max_bytes, max_seconds = (int(argument) for argument in sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("{}", flush=True)
    vocabulary = None
    for line in sys.stdin.buffer:
        # The parent kills this process at the limit. If the parent is gone, SIGALRM ends it.
        signal.alarm(0 if vocabulary is None else 2 * max_seconds)
        request = json.loads(line)
        if vocabulary is None:
            vocabulary = build_vocabulary(**request)
            answer = {}
        else:
            answer = attempt(vocabulary, **request)
        print(json.dumps(answer), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
