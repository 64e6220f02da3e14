"""The body of `/v1/chat/completions`: messages, tools, and how to answer."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxkv.config.sampling import MAX_LOGPROBS
from jaxkv.serve.api.sampling_fields import Label, Name, SamplingFields
from jaxkv.serve.http.errors import bad_request

MAX_TOOLS = 128
_FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Variable = Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
Setting = bool | int | float | Annotated[str, Meta(max_length=256)] | None


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A struct without unknown fields."""


class TextPart(_Strict, tag_field="type", tag="text", frozen=True):
    """A part of a message's content."""

    text: str


class RefusalPart(_Strict, tag_field="type", tag="refusal", frozen=True):
    """A part of an assistant's earlier content."""

    refusal: str


class CalledFunction(_Strict, frozen=True):
    """The function that an earlier tool call named, and its arguments as JSON."""

    name: _FunctionName
    arguments: str


class ToolCall(_Strict, frozen=True):
    """An earlier tool call."""

    id: Label
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Message(_Strict, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: Label | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(_Strict, frozen=True):
    """The name, purpose and parameters of a function that the model may call."""

    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict, frozen=True):
    """A function that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(_Strict, frozen=True):
    """The name of the function that a request demands."""

    name: _FunctionName


class ChosenTool(_Strict, frozen=True):
    """The one function that a request demands."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class ChatBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The body of a request."""

    messages: Annotated[list[Message], Meta(min_length=1, description="the conversation")]
    tools: (
        Annotated[
            list[Tool], Meta(max_length=MAX_TOOLS, description="functions that may be called")
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: (
        Annotated[bool, Meta(description="false: only the first call is returned")] | None
    ) = None
    logprobs: (
        Annotated[bool, Meta(description="the log-probabilities of the answer's tokens")] | None
    ) = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description="likeliest tokens at each place")]
        | None
    ) = None
    max_completion_tokens: (
        Annotated[int, Meta(ge=1, le=2**31 - 1, description="as max_tokens")] | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: Annotated[bool, Meta(description="false: none is returned")] | None = None
    chat_template_kwargs: (
        Annotated[
            dict[Variable, Setting],
            Meta(max_length=32, description="variables of the chat template"),
        ]
        | None
    ) = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="the prompt ends with the beginning of an answer")] | None
    ) = None
    continue_final_message: (
        Annotated[bool, Meta(description="the answer continues the last message")] | None
    ) = None
    store: Annotated[bool, Meta(description="accepted; nothing is stored")] | None = None
    service_tier: Annotated[Name, Meta(description="accepted; has no effect")] | None = None
    safety_identifier: Annotated[Label, Meta(description="accepted; has no effect")] | None = None
    prompt_cache_key: Annotated[Label, Meta(description="accepted; has no effect")] | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    def check(self) -> None:
        """Raises `ApiError` for fields that contradict one another."""
        self.check_stream_options()
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("a stream has no prompt_logprobs", "prompt_logprobs")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs need logprobs to be true", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise bad_request(
                "max_tokens and max_completion_tokens are one option; give one of them",
                "max_completion_tokens",
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            if all(each.function.name != name for each in self.offered):
                raise bad_request(
                    "tool_choice names a function that is none of tools", "tool_choice"
                )
        for index, message in enumerate(self.messages):
            check_message(message, f"messages[{index}]")


def check_message(message: Message, path: str) -> None:
    """Raises `ApiError` if a message lacks what its role needs.

    Args:
        message: the message.
        path: where it is in the request.
    """
    if message.content is None and message.role != "assistant":
        raise bad_request(f"{path}.content is missing", f"{path}.content")
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{path}.tool_calls belong to the role assistant", f"{path}.tool_calls")
    if message.tool_call_id is None and message.role == "tool":
        raise bad_request(f"{path}.tool_call_id is missing", f"{path}.tool_call_id")
