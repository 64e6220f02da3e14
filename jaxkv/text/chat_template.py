"""A model's chat template: messages to prompt text, within limits of time, memory and length."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import BadCheckpoint
from jaxkv.text.line_worker import LineWorker
from jaxkv.text.tool_schema import tool_schema
from jaxkv.weights.directory import (
    files_below,
    has_file,
    read_json_if_there,
    read_text,
)
from jaxkv.wording import clip, listed

MAX_SECONDS = 10
MAX_MEMORY_BYTES = 2**30
MAX_CHARACTERS = 16 * 2**20
MAX_TEMPLATE_BYTES = 2**20
_PROGRAM = Path(__file__).with_name("template_process.py")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
# The trailing space shows whether the template strips the message; Transformers uses the same mark.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
_FOLDER = "chat_templates"


Tool = Mapping[str, object] | Callable[..., Any]
"""A JSON schema of a function, or a Python function with type hints and a docstring in Google's style."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of the prompt of a conversation, besides its messages.

    Attributes:
        tools: what the model may call: JSON schemas or Python functions.
        documents: JSON objects, usually with "title" and "text", for templates of retrieval.
        chat_template: name of one of the model's templates, or the Jinja source of another one.
        add_generation_prompt: end the prompt with the beginning of the assistant's turn; if not given, unless
            `continue_final_message`.
        continue_final_message: end the prompt inside the last message, for the model to continue its text.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.
    """

    tools: Sequence[Tool] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, object] | None = None


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
        self._worker: LineWorker | None = None

    def render(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None = None
    ) -> str:
        """Returns the text of the prompt.

        Args:
            messages: JSON objects with a "role" and usually a "content".
            options: tools, documents, the choice of a template and its variables.

        Raises:
            ValueError: an argument is malformed, or the template rejects the messages, fails or exceeds a limit.
        """
        options = options or ChatOptions()
        if not messages or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str)
            for message in messages
        ):
            raise ValueError('messages must be a non-empty list of {"role": ..., "content": ...}')
        variables = self._variables(messages, options)
        template = self._choose(options.chat_template, options.tools is not None)
        if not options.continue_final_message:
            return self._render(template, variables)
        marked, final = _marked(messages)
        return _cut(self._render(template, {**variables, "messages": marked}), final)

    def _variables(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions
    ) -> dict[str, object]:
        given = dict(options.chat_template_kwargs or {})
        for name in given:
            if name in _RESERVED or not name.isidentifier():
                raise ValueError(
                    f"the template option {clip(repr(name))} is reserved or no identifier; choose another name"
                )
        documents = options.documents
        if documents is not None and not all(isinstance(each, Mapping) for each in documents):
            raise ValueError(
                'documents must be a list of JSON objects such as {"title": ..., "text": ...}'
            )
        prompts, continues = options.add_generation_prompt, options.continue_final_message
        if prompts and continues:
            raise ValueError(
                "add_generation_prompt begins a new turn and continue_final_message continues the last one; "
                "choose one"
            )
        return {
            "messages": list(messages),
            "tools": None if options.tools is None else [tool_schema(t) for t in options.tools],
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": not continues if prompts is None else prompts,
            **self.special_tokens,
            **given,
        }

    def _render(self, template: str, variables: Mapping[str, object]) -> str:
        answer = self._ask(_to_json({"template": template, "variables": variables}))
        if "error" in answer:
            raise ValueError(f"the chat template failed: {clip(answer['error'], 300)}")
        return answer["text"]

    def close(self) -> None:
        """Ends the worker process if there is one; a later `render` starts another."""
        with self._lock:
            self._stop()

    def _choose(self, asked: str | None, has_tools: bool) -> str:
        if asked is not None and asked not in self.templates:
            return _checked_source(asked, self.templates)
        name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        name = asked or name
        if name not in self.templates:
            raise ValueError(
                f"the model has no default chat template; give chat_template, one of its names "
                f"{listed(sorted(self.templates))} or the source of another"
            )
        return self.templates[name]

    def _ask(self, request: bytes) -> dict[str, str]:
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                self._stop()
                limits = (MAX_MEMORY_BYTES, MAX_SECONDS, MAX_CHARACTERS)
                self._worker = LineWorker(_PROGRAM, limits)
            answer = self._worker.ask(request, MAX_SECONDS)
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


def _to_json(request: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages, tools and options must be JSON: {clip(error)}") from None


def _checked_source(source: str, templates: Mapping[str, str]) -> str:
    """Returns the Jinja source that a call gives.

    Raises:
        ValueError: it is too long, or looks like the name of a template that the model does not have.
    """
    if "{" not in source:
        names = listed(sorted(templates)) or "none"
        raise ValueError(
            f"the model has no chat template {clip(repr(source), 60)}; its templates are: {names}"
        )
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"the chat template is too long ({len(source)} characters), at most {MAX_TEMPLATE_BYTES} are allowed"
        )
    return source


def _marked(messages: Sequence[Mapping[str, object]]) -> tuple[list[dict[str, Any]], str]:
    """Returns the messages with a mark behind the last one's text, and that text.

    Raises:
        ValueError: the last message has no text.
    """
    marked = [dict(message) for message in messages]
    last = marked[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUED
        return marked, content
    blocks = deepcopy(content) if isinstance(content, list | tuple) else ()
    for block in reversed(blocks):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text = block["text"]
            block["text"] = text + _CONTINUED
            last["content"] = blocks
            return marked, text
    raise ValueError("continue_final_message needs a last message with a text as its content")


def _cut(text: str, final: str) -> str:
    """Returns the rendered text up to the end of the last message.

    Raises:
        ValueError: the template has dropped or changed that message.
    """
    at = text.rfind(_CONTINUED.rstrip())
    if at < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message is impossible here: the chat template changes or leaves out the last message"
        )
    # A template that strips its messages has taken the mark's space.
    kept = text.startswith(_CONTINUED, at)
    return text[:at] if kept else text[:at].rstrip()


def read_templates(directory: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Returns name -> Jinja source of a directory's chat templates; empty if there are none.

    `chat_template.jinja` ("default") and `chat_templates/NAME.jinja` take precedence over `chat_template` in
    tokenizer_config.json, which is a text or a list of `{"name": ..., "template": ...}`, and that over
    `chat_template.json`, where processors of multimodal models keep theirs.

    Raises:
        BadCheckpoint: a template is malformed or too long.
    """
    names = [name for name in files_below(directory, _FOLDER) if name.endswith(".jinja")]
    paths = {Path(name).stem: name for name in names}
    if has_file(directory, "chat_template.jinja"):
        paths["default"] = "chat_template.jinja"
    if paths:
        return {
            name: read_text(directory, path, max_bytes=MAX_TEMPLATE_BYTES)
            for name, path in sorted(paths.items())
        }
    templates = _named_templates(tokenizer_config, directory / "tokenizer_config.json")
    if templates:
        return templates
    other = read_json_if_there(directory, "chat_template.json")
    return _named_templates(other, directory / "chat_template.json")


def _named_templates(settings: Mapping[str, object], where: Path) -> dict[str, str]:
    found = settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        found = [{"name": "default", "template": found}]
    if isinstance(found, dict) and "template" not in found:
        found = [{"name": name, "template": template} for name, template in found.items()]
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
