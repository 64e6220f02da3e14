"""Chat templates: the text Transformers would make, within limits, in a process that can be killed."""

import json
import os
import re
import threading
import time
from datetime import datetime

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.text import chat_template as module
from jaxkv.text.chat_template import ChatOptions, ChatTemplate, read_templates
from jaxkv.text.tokenizer import load_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# Written for this test in the manner of the families they are named after.
LLAMA_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("One tool call at a time!") }}
        {%- endif %}
    {%- else %}
        {{- raise_exception("Unknown role " + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{% endif %}
"""
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" -%}
    {%- set system_message = messages[0]["content"] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
ODDITIES = """{% for message in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if message.role == 'skip' %}{% continue %}{% endif %}
  {% set kept = 'outer' %}
{% generation %}
  {% set kept = 'inner' %}
{{ message.content | tojson }}<b>&amp;{{ message | tojson(ensure_ascii=True, sort_keys=True) }}
{% endgeneration %}
{{ kept }}|{{ unknown }}|{{ tools is none }}|{{ documents is none }}
{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}
{{ twice(message.role) }}{{ messages | map(attribute='role') | join(',') }}
{% endfor %}
"""
TEMPLATES = {
    "llama": LLAMA_LIKE,
    "qwen": QWEN_LIKE,
    "mistral": MISTRAL_LIKE,
    "oddities": ODDITIES,
}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [
        {"role": "system", "content": " Be <brief> & 'kind'. "},
        {"role": "user", "content": "Zürich? 😀\n"},
    ],
    "long": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "{{ bos_token }} {% raw %}"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "e\u2028\\n"},
    ],
}
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"größe": [1, 2.5, None]}}}]


@pytest.fixture(scope="module")
def rendering():
    """Gives a template maker whose workers end with the module."""
    made = []

    def make(source, special=SPECIAL):
        templates = source if isinstance(source, dict) else {"default": source}
        made.append(ChatTemplate(templates, special))
        return made[-1]

    yield make
    for template in made:
        template.close()


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 2)
    monkeypatch.setattr(module, "MAX_MEMORY_BYTES", 2**28)
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)


@pytest.mark.torch
@pytest.mark.parametrize("family", TEMPLATES)
def test_the_text_is_that_of_transformers(tmp_path, family):
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    settings = SPECIAL | {
        "chat_template": TEMPLATES[family],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    compared = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for prompt in (False, True):
                for options in ({}, {"enable_thinking": False}, {"date_string": "1 May"}):
                    arguments = {"tools": tools, "add_generation_prompt": prompt}
                    wanted = theirs.apply_chat_template(
                        messages, tokenize=False, **arguments, **options
                    )
                    asked = ChatOptions(**arguments, chat_template_kwargs=options)
                    assert ours.chat_template.render(messages, asked) == wanted
                    assert ours.encode_chat(messages, asked) == theirs.encode(
                        wanted, add_special_tokens=False
                    )
                    compared += 1
    assert compared == 36
    ours.chat_template.close()


BLOCKS = """{%- for m in messages %}<{{ m.role }}>
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute="text") | join }}{% endif %}
{%- endfor %}{{ documents | tojson }}{{ tools | tojson }}"""
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
UNFINISHED = {
    "text": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1, 2, "}],
    "blocks": [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": " so "}, {"type": "image"}],
        }
    ],
    "twice": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}],
}
DOCUMENTS = [{"title": "a", "text": "größe <b>"}]


def weather(city: str, days: int = 1) -> str:
    """Returns the weather.

    Args:
        city: name of a city
        days: how many days from today
    """


@pytest.mark.torch
@pytest.mark.parametrize(
    ("template", "case"),
    [
        (BLOCKS, "text"),
        (BLOCKS, "blocks"),
        (BLOCKS, "twice"),
        (STRIPPING, "text"),
        (STRIPPING, "twice"),
    ],
)
def test_a_continued_message_tools_and_documents_are_rendered_as_by_transformers(
    rendering, template, case
):
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = {"tools": [weather, *TOOLS], "documents": DOCUMENTS, "continue_final_message": True}
    [wanted], _ = render_jinja_template([UNFINISHED[case]], chat_template=template, **asked)
    assert rendering(template).render(UNFINISHED[case], ChatOptions(**asked)) == wanted
    assert "documents" not in wanted
    assert UNFINISHED["text"][-1]["content"] == "1, 2, "


@pytest.mark.parametrize(
    ("messages", "asked", "reason"),
    [
        (USER, {"continue_final_message": True, "add_generation_prompt": True}, "choose one"),
        ([{"role": "user"}], {"continue_final_message": True}, "a text as its content"),
        (
            [{"role": "user", "content": [{"image": 1}]}],
            {"continue_final_message": True},
            "a text as",
        ),
        (
            [{"role": "drop", "content": "x"}],
            {"continue_final_message": True},
            "leaves out the last",
        ),
        (USER, {"documents": ["x"]}, "documents must be a list of JSON objects"),
        (USER, {"tools": ["x"]}, "a tool must be a JSON schema"),
        (USER, {"chat_template": "rag"}, "no chat template 'rag'; its templates are: default"),
        (USER, {"chat_template": "{" * (2**20 + 1)}, "too long"),
    ],
)
def test_impossible_options_are_refused(rendering, messages, asked, reason):
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match=reason):
        rendering(source).render(messages, ChatOptions(**asked))


def test_the_turn_of_the_assistant_begins_unless_a_message_is_continued(rendering):
    template = rendering("{{ messages[0].content }}{{ add_generation_prompt }}")
    assert template.render(USER) == "hiTrue"
    assert template.render(USER, ChatOptions(add_generation_prompt=False)) == "hiFalse"
    assert (
        rendering("{{ add_generation_prompt }}{{ messages[0].content }}").render(
            USER, ChatOptions(continue_final_message=True)
        )
        == "Falsehi"
    )


def test_a_template_is_chosen_by_name_or_given_as_source(rendering):
    template = rendering({"default": "plain", "rag": "{{ documents[0].title }}"})
    assert template.render(USER, ChatOptions(chat_template="rag", documents=DOCUMENTS)) == "a"
    assert template.render(USER, ChatOptions(chat_template="{{ bos_token }}!")) == "<s>!"


def test_what_the_template_writes_is_what_comes_out(rendering):
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert rendering(source).render(USER) == "<s>user: hi\n"


def test_a_refusal_is_passed_on(rendering):
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ValueError, match=r"TemplateError: Roles must alternate"):
        rendering(MISTRAL_LIKE).render(messages)


def test_the_date_is_today(rendering):
    before = datetime.now().strftime("%d %b %Y")
    text = rendering("{{ strftime_now('%d %b %Y') }}").render(USER)
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def test_named_templates_are_chosen_by_whether_there_are_tools(rendering):
    template = rendering({"default": "plain", "tool_use": "tools"})
    assert template.render(USER) == "plain"
    assert template.render(USER, ChatOptions(tools=[])) == "tools"
    with pytest.raises(
        ValueError, match="no default chat template; give chat_template, one of its names rag"
    ):
        rendering({"rag": "x"}).render(USER)


def test_a_jinja_file_wins_over_the_config(tmp_path):
    settings = {
        "chat_template": [
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
        ]
    }
    assert read_templates(tmp_path, {}) == {}
    assert read_templates(tmp_path, settings) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    assert read_templates(tmp_path, settings) == {"default": "c"}


def test_files_of_named_templates_win_over_the_config(tmp_path):
    settings = {"chat_template": "a"}
    folder = tmp_path / "chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("t")
    (folder / "notes.txt").write_text("n")
    assert read_templates(tmp_path, settings) == {"tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_templates(tmp_path, settings) == {"default": "d", "tool_use": "t"}
    (folder / "evil.jinja").symlink_to(tmp_path.parent / "outside")
    with pytest.raises(BadCheckpoint, match="link out of the model directory"):
        read_templates(tmp_path, settings)


def test_templates_in_the_cache_of_the_hub_are_links_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    (snapshot / "chat_templates").mkdir(parents=True)
    (blobs / "123").write_text("t")
    (snapshot / "chat_templates" / "rag.jinja").symlink_to("../../../blobs/123")
    assert read_templates(snapshot, {}) == {"rag": "t"}


def test_a_processors_template_is_the_last_resort(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "p"}))
    assert read_templates(tmp_path, {}) == {"default": "p"}
    assert read_templates(tmp_path, {"chat_template": {"default": "a", "rag": "b"}}) == {
        "default": "a",
        "rag": "b",
    }


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ config }}{{ request.application.__globals__ }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ get_flashed_messages.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(rendering, source):
    # Jinja makes some of what it withholds an error and the rest an empty text.
    try:
        assert rendering(source).render(USER) == ""
    except ValueError as error:
        assert re.fullmatch("the chat template failed: .+", str(error))  # noqa: PT017


FAILURES = {
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "undefined": ("{{ nothing.more }}", "UndefinedError"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "type": ("{{ 'a' + 1 }}", "TypeError"),
    "index": ("{{ 'abc' | attr }}", "TypeError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "range": ("{% for i in range(10**7) %}{% endfor %}", "OverflowError: Range too big"),
    "long int": ("{{ 10 ** 5000 }}", "ValueError"),
    "new lines": ("{{ raise_exception('a\nb\r\nc') }}", "TemplateError: a b c"),
    "output": ("{{ 'a' * 2000 }}", "it wrote more than 1000 characters"),
    "output in pieces": ("{% for i in range(2000) %}a{% endfor %}", "it wrote more than 1000"),
    "memory": ("{{ 'a' * 10**10 }}", "MemoryError"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_template_is_one_line(rendering, limits, case):
    source, reason = FAILURES[case]
    with pytest.raises(ValueError, match=reason) as caught:
        rendering(source).render(USER)
    assert "\n" not in str(caught.value)


RUNAWAYS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    # Within one call of the interpreter, which no exception and no thread can interrupt.
    "power": "{{ 9 ** (messages|length * 9 ** 9) }}",
    "long calls": "{% for a in range(99999) %}"
    "{% set x = (messages[0].content * 10**6) | replace('r', 'cc') %}{% endfor %}",
    # Jinja computes constants while it compiles.
    "compilation": "{% set x = 9 ** (9 ** 9) %}",
}


# Each takes all of its two seconds. One call is harder to stop than the calls of a loop.
LOOPING = ("loops", "long calls")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in LOOPING)) for case in RUNAWAYS],
)
def test_a_runaway_template_is_killed_and_the_next_request_is_served(rendering, limits, case):
    runaway = "{% if messages[0].content == 'run' %}" + RUNAWAYS[case] + "{% endif %}ok"
    template = rendering({"default": "ok", "tool_use": runaway})
    assert template.render(USER) == "ok"
    started = time.monotonic()
    with pytest.raises(ValueError, match="was stopped: it took more than 2 s or 256 MiB"):
        template.render([{"role": "user", "content": "run"}], ChatOptions(tools=[]))
    assert time.monotonic() - started < 30
    assert template._worker is None
    assert template.render(USER) == "ok"


def test_a_worker_that_died_meanwhile_is_replaced(rendering):
    template = rendering("ok")
    template.render(USER)
    first = template._worker
    first._process.kill()
    first._process.wait()
    assert template.render(USER) == "ok"
    assert template._worker is not first


def test_the_worker_is_reused_and_ends_with_the_template(rendering):
    template = ChatTemplate({"default": "ok"}, {})
    template.render(USER)
    worker = template._worker._process
    template.render(USER)
    assert template._worker._process is worker
    template.close()
    assert worker.poll() is not None
    template.render(USER)
    worker = template._worker._process
    del template
    assert worker.poll() is not None


def test_the_worker_sees_neither_our_secrets_nor_our_modules(rendering, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = rendering("ok")
    template.render(USER)
    pid = template._worker._process.pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    with open(f"/proc/{pid}/maps") as file:
        assert "jaxlib" not in file.read()
    assert os.getpgid(pid) != os.getpgid(0)


def test_threads_take_turns(rendering):
    template = rendering("{{ messages[0].content }}")
    got = {}

    def run(number):
        for _ in range(20):
            got.setdefault(number, set()).add(
                template.render([{"role": "u", "content": str(number)}])
            )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: {str(number)} for number in range(4)}


def test_large_messages_pass(rendering):
    content = "ü" * 3_000_000
    assert (
        rendering("{{ messages[0].content }}").render([{"role": "u", "content": content}])
        == content
    )


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([{"content": "x"}], {}),
        ([{"role": 5}], {}),
        ([{"role": "u", "content": object()}], {}),
        ([{"role": "u", "content": b"x"}], {}),
        (USER, {"messages": []}),
        (USER, {"not a name": 1}),
        (USER, {"x": {1, 2}}),
    ],
)
def test_what_is_no_conversation_is_refused_before_anything_runs(rendering, messages, options):
    template = rendering("ok")
    with pytest.raises(ValueError, match=r"messages|option"):
        template.render(messages, ChatOptions(chat_template_kwargs=options))
    assert template._worker is None


def test_messages_nested_too_deeply_are_refused(rendering):
    content = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(ValueError, match="must be JSON"):
        rendering("ok").render([{"role": "u", "content": content}])
    while content:
        content = content.pop()
