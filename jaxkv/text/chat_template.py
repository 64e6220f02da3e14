"""A model's chat template: messages to prompt text, within limits of time, memory and length."""

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.directory import has_file, read_text
from jaxkv.wording import clip

MAX_SECONDS = 10
MAX_MEMORY_BYTES = 2**30
MAX_CHARACTERS = 16 * 2**20
MAX_TEMPLATE_BYTES = 2**20
_START_SECONDS = 120
_PROGRAM = str(Path(__file__).with_name("template_process.py"))
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


class ChatTemplate:
    """Renders messages in a sandbox inside a worker process, which is started at the first use.

    A worker that exceeds its limits is killed, and the next use starts another. Thread-safe.

    Attributes:
        templates: name -> Jinja source. "tool_use" is used for calls with tools if there is one, otherwise "default".
        special_tokens: name -> text of special tokens such as `bos_token`, as variables of the template.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the text of the prompt.

        Args:
            messages: JSON objects with a "role" and usually a "content".
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end the text with the beginning of the assistant's turn.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: an argument is malformed, or the template rejects the messages, fails or exceeds a limit.
        """
        if not messages or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str)
            for message in messages
        ):
            raise ValueError('messages must be a non-empty list of {"role": ..., "content": ...}')
        options = dict(options or {})
        for name in options:
            if name in _RESERVED or not name.isidentifier():
                raise ValueError(
                    f"the template option {clip(repr(name))} is reserved or no identifier; choose another name"
                )
        variables = {
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
            **options,
        }
        request = _to_json({"template": self._choose(tools is not None), "variables": variables})
        answer = self._ask(request)
        if "error" in answer:
            raise ValueError(f"the chat template failed: {clip(answer['error'], 300)}")
        return answer["text"]

    def close(self) -> None:
        """Ends the worker process if there is one; a later `render` starts another."""
        with self._lock:
            self._stop()

    def _choose(self, has_tools: bool) -> str:
        name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise ValueError(f"the model has no default chat template, only {clip(names)}")
        return self.templates[name]

    def _ask(self, request: bytes) -> dict[str, str]:
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                self._stop()
                self._worker = _Worker()
            answer = self._worker.ask(request)
            if answer is None:
                self._stop()
        if answer is None:
            raise ValueError(
                f"the chat template was stopped: it took more than {MAX_SECONDS} s or "
                f"{MAX_MEMORY_BYTES >> 20} MiB"
            )
        return answer

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None


class _Worker:
    """The worker process, which gets one JSON line per request and answers with one."""

    def __init__(self) -> None:
        limits = (MAX_MEMORY_BYTES, MAX_SECONDS, MAX_CHARACTERS)
        process = subprocess.Popen(
            # Run as a file, so that the worker imports neither jaxkv nor a module beside the file.
            [sys.executable, "-P", _PROGRAM, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ},
            # In a session of its own, so that Ctrl-C at the terminal does not reach the worker.
            start_new_session=True,
        )
        self._process = process
        self.stop = weakref.finalize(self, _end, process)
        if self._read_line(_START_SECONDS) is None:
            self.stop()
            raise RuntimeError(f"{sys.executable} cannot run {_PROGRAM}")

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, str] | None:
        """Returns the answer; `None` if the worker died or exceeded `MAX_SECONDS`."""
        assert self._process.stdin is not None
        unsent = memoryview(request)
        try:
            while unsent:
                unsent = unsent[self._process.stdin.write(unsent) :]
        except BrokenPipeError:
            return None
        line = self._read_line(MAX_SECONDS)
        return None if line is None else json.loads(line)

    def _read_line(self, seconds: int) -> bytes | None:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        line = bytearray()
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(1000 * remaining):
                return None
            piece = os.read(descriptor, 2**20)
            if not piece:
                return None
            line += piece
        return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _to_json(request: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages, tools and options must be JSON: {clip(error)}") from None


def read_templates(directory: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Returns name -> Jinja source of a directory's chat templates; empty if there are none.

    `chat_template.jinja` takes precedence over `chat_template` in tokenizer_config.json, which is a text or a list of
    `{"name": ..., "template": ...}`.

    Raises:
        BadCheckpoint: `chat_template` is malformed or too long.
    """
    where = directory / "tokenizer_config.json"
    if has_file(directory, "chat_template.jinja"):
        text = read_text(directory, "chat_template.jinja", max_bytes=MAX_TEMPLATE_BYTES)
        return {"default": text}
    found = tokenizer_config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        found = [{"name": "default", "template": found}]
    templates: dict[str, str] = {}
    for item in found if isinstance(found, list) else [found]:
        name, template = (
            (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str) or name in templates:
            raise BadCheckpoint(
                f'{where}: chat_template is neither text nor a list of {{"name": ..., "template": ...}}'
            )
        if len(template) > MAX_TEMPLATE_BYTES:
            raise BadCheckpoint(
                f"{where}: the chat template is too long ({len(template)} characters), at most "
                f"{MAX_TEMPLATE_BYTES} are allowed"
            )
        templates[name] = template
    return templates
