"""The parsers that a model's files or the operator's words choose."""

# ruff: noqa: RUF001 - DeepSeek's markers have wide bars.

import pytest

from jaxkv.serve.parsers.choose import ParserChoice, choose_parsers, open_parser
from jaxkv.serve.parsers.events import Content
from jaxkv.serve.parsers.formats import OTHER_NAMES, REASONING_FORMATS, TOOL_FORMATS

HERMES = "return a json object within <tool_call></tool_call> XML tags{%- if tools %}"
THINK = "{%- set content = content.split('</think>')[-1] %}{{ '<think>\\n' }}"
# What tells each template, as the published ones have it; first of a kind of model, then its special tokens.
MODELS = {
    "Qwen2.5": (HERMES, (), "qwen2", "hermes", None),
    "Qwen3": (HERMES + THINK, ("<|im_end|>",), "qwen3", "hermes", "qwen3"),
    "QwQ": (HERMES + THINK, (), "qwen2", "hermes", "deepseek_r1"),
    "Qwen3.5": (HERMES + "<function=example>" + THINK, (), "qwen3_5", "qwen3_coder", "qwen3"),
    "Granite 4": (HERMES, ("<|tool_call|>",), "granitemoehybrid", "hermes", None),
    "Granite 3.3": (
        "with <|tool_call|> followed by a JSON list of tools between <think></think> and "
        "<response></response>",
        ("<|tool_call|>",),
        "granite",
        "granite",
        "granite33",
    ),
    "Granite 3.2": (
        "with <|tool_call|> followed by a JSON list of tools. Here is my thought process:",
        ("<|tool_call|>",),
        "granite",
        "granite",
        "granite",
    ),
    "Llama 3.1": (
        '{{- "<|python_tag|>" + tool_call.name + ".call(" }}',
        ("<|python_tag|>", "<|eot_id|>"),
        "llama",
        "llama3_json",
        None,
    ),
    "Llama 3": ("{{ message['content'] }}", ("<|python_tag|>",), "llama", None, None),
    "R1 Distill Llama": (
        "{{ tool }}<｜tool▁calls▁begin｜>\n```json" + THINK,
        ("<|python_tag|>",),
        "llama",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>tools" + THINK,
        (),
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_r1",
    ),
    "MiniMax M2": (
        "<minimax:tool_call> tools" + THINK,
        ("<minimax:tool_call>",),
        "minimax_m2",
        "minimax_m2",
        "deepseek_r1",
    ),
    "Kimi K2": ("<|tool_calls_section_begin|>tools", (), "kimi_k2", "kimi_k2", None),
    "Mistral 7B": ("[TOOL_CALLS] [AVAILABLE_TOOLS]", ("[TOOL_CALLS]",), "mistral", "mistral", None),
    "Magistral": ("tools", ("[TOOL_CALLS]", "[THINK]"), "mistral", "mistral", "mistral"),
    "GLM 4.5": ("<tool_call>{name}\n<arg_key>" + THINK, (), "glm4_moe", "glm45", "glm45"),
    "GPT-OSS": (
        "<|channel|>analysis<|message|> tools",
        ("<|channel|>",),
        "gpt_oss",
        "openai",
        "openai_gptoss",
    ),
    "LFM2": ("<|tool_list_start|>", ("<|tool_call_start|>",), "lfm2", "lfm2", None),
    "Gemma 2": ("<start_of_turn>", ("<end_of_turn>",), "gemma2", None, None),
    "no template": (None, ("<|im_end|>",), "llama", None, None),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_models_files_show_its_parsers(model):
    template, special, model_type, tools, reasoning = MODELS[model]
    choice = choose_parsers(template, special, model_type)
    assert (choice.tools, choice.reasoning) == (tools, reasoning)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_format_is_found_by_its_own_signs(name):
    entry = TOOL_FORMATS[name]
    if entry.signs:
        assert choose_parsers(f"tools {entry.signs}", (), "").tools == name


def test_special_tokens_are_kept_only_if_a_marker_is_one():
    special = ("<|im_end|>", "<tool_call>")
    assert choose_parsers(HERMES, special, "").keeps_special_tokens
    assert not choose_parsers(HERMES, special[:1], "").keeps_special_tokens
    assert not choose_parsers(HERMES, special, "", tools="none").keeps_special_tokens
    mistral = choose_parsers(None, ("[ARGS]",), "", tools="mistral")
    assert mistral == ParserChoice("mistral", None, True, ("[ARGS]",))


def test_the_operators_names_come_first():
    choice = choose_parsers(HERMES + THINK, (), "", tools="pythonic", reasoning="none")
    assert (choice.tools, choice.reasoning) == ("llama4_pythonic", None)


def test_every_further_name_means_a_format():
    for name in OTHER_NAMES:
        found = [
            choose_parsers(None, (), "", **{option: name})
            for option, entries in (("tools", TOOL_FORMATS), ("reasoning", REASONING_FORMATS))
            if OTHER_NAMES[name] in entries
        ]
        assert found


@pytest.mark.parametrize("option", ["tools", "reasoning"])
def test_an_unknown_name_is_refused_with_the_names(option):
    for name in ("hermes3", "gpt_oss" if option == "tools" else "hermes"):
        with pytest.raises(ValueError, match="choose one of") as caught:
            choose_parsers(None, (), "", **{option: name})
        assert "mistral, " in str(caught.value)
        assert "none" in str(caught.value)
        assert name in str(caught.value)


def test_a_model_without_formats_answers_with_content():
    parser = open_parser(
        ParserChoice(None, None, False),
        tools=[{"function": {"name": "f"}}],
        thinking=True,
        prompt_end="",
    )
    assert [*parser.push("<think>{"), *parser.finish()] == [Content("<think>{")]
