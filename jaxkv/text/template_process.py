"""The program of the worker process that renders chat templates: one JSON line in, one JSON line out.

A template is an untrusted program. Jinja's sandbox keeps it from Python's internals, but not from running forever or
from allocating `'a' * 10**12`. Neither can be stopped from inside the process, because such a call holds the
interpreter. A separate process can be killed, and its memory can be limited. This file imports nothing of jaxkv.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Errors that a template can cause. Any other error ends the process, and the parent reports it.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class GenerationBlock(Extension):
    """Accepts `{% generation %}` blocks, which mark the assistant's text for training and do not change it."""

    tags = {"generation"}  # noqa: RUF012 - as the parent class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the block's body in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> NoReturn:
    """Raises a template error; templates call it to reject their input."""
    raise jinja2.TemplateError(message)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; Jinja's own filter escapes JSON for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(pattern: str) -> str:
    """Returns the local time in the given format."""
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=4)
def compile_template(source: str) -> jinja2.Template:
    """Returns the compiled template, with the extensions and settings that Transformers uses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def render(source: str, variables: dict[str, object], max_characters: int) -> dict[str, str]:
    """Returns `{"text": ...}`, or `{"error": ...}` if the template fails or writes more than `max_characters`."""
    try:
        pieces, length = [], 0
        for piece in compile_template(source).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > max_characters:
                return {"error": f"it wrote more than {max_characters} characters"}
        return {"text": "".join(pieces)}
    except TEMPLATE_ERRORS as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    """Answers requests from stdin until its end; each line is one JSON object."""
    max_bytes, max_seconds, max_characters = (int(argument) for argument in sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("{}", flush=True)
    for line in sys.stdin.buffer:
        # The parent kills this process at the limit. If the parent is gone, SIGALRM ends it.
        signal.alarm(2 * max_seconds)
        request = json.loads(line)
        answer = render(request["template"], request["variables"], max_characters)
        print(json.dumps(answer), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()
