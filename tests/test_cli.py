"""The command: offline on the small model, one line for a mistake, exit code 2, no traceback."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from jaxkv import cli
from jaxkv.cli import main
from jaxkv.config import CacheConfig, SamplingParams
from jaxkv.engine.request import Piece

FAST = ["--max-model-len", "64", "--max-tokens", "4"]


def test_generate_prints_the_prompt_and_goes_on(capsys):
    assert main(["generate", *FAST, "def "]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def ")
    assert len(out) > len("def \n")


def test_the_same_seed_gives_the_same_text(capsys):
    texts = []
    for _ in range(2):
        assert main(["generate", *FAST, "--temperature", "1", "--seed", "7", "import "]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "no/such/dir", "x"], "no/such/dir"),
        (["generate", "--dtype", "int4", "x"], "dtype"),
        (["generate", "--temperature", "-1", "x"], "temperature"),
        (["generate", "--max-tokens", "0", "x"], "max_tokens"),
        (["generate", *FAST, ""], "at least one token"),
        (["plan", "--max-model-len", "1"], "max_model_len"),
        (["bench"], "MODE"),
        (["bench", "latency"], "--rate"),
        (["bench", "latency", "--rate", "0"], "request rate must be above 0"),
        (["bench", "throughput", "--data", "chat"], "data must be one of"),
        (["bench", "throughput", "--shape", "gpt-5"], "shape must be one of"),
        (["bench", "throughput", "--shape", "tiny", "--model", "x"], "not both"),
        (["bench", "throughput", "--prompt-tokens", "9:8"], "prompt_tokens"),
        (["bench", "throughput", "--prompt-tokens", "few"], "must be A:B or one number, got 'few'"),
        (["bench", "startup", "--output-tokens", "99999"], "max_model_len"),
        (["plan", "--page-size", "0"], "page_size"),
        (["plan", "--cache-bytes", "1000"], "budget is 1,000"),
        (["plan", "--cache-bytes", "0"], "budget_bytes"),
        (["generate", "--min-p", "2", "x"], "min_p"),
        (["generate", "--max-tokens", "x", "a"], "--max-tokens: invalid int value: 'x'"),
        (["generate", "--max-tokens"], "expected one argument; see jaxkv generate --help"),
        (["generate"], "PROMPT"),
        (["generate", "a", "b"], "unrecognized arguments: b"),
        (["generate", "--nonesuch", "a"], "--nonesuch"),
        (["generate", "--max", "3", "a"], "ambiguous"),
        (["nonesuch"], "invalid choice: 'nonesuch'"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxkv: ")
    assert message in captured.err


@pytest.mark.parametrize(
    "arguments", [[], ["generate"], ["chat"], ["plan"], ["bench"], ["bench", "latency"], ["env"]]
)
def test_help_is_printed_on_stdout_and_is_no_mistake(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--help"])
    assert exit_.value.code == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: jaxkv")
    assert captured.err == ""


def test_plan_tells_bytes_and_programs_without_loading_weights(capsys):
    assert main(["plan", "--max-model-len", "256"]) == 0
    out = capsys.readouterr().out
    for word in (
        "weights: ",
        "runs as ",
        "bytes/token",
        "bytes/sequence",
        "gqa",
        "sampling",
        "prefill",
        "decode",
        "pages per row",
    ):
        assert word in out


def test_bench_prints_the_conventional_figures_as_text_or_json(capsys):
    small = (
        "--requests 3 --prompt-tokens 8:15 --output-tokens 2:4 --max-sequences 1 --token-budget 16"
    )
    sizes = [*small.split(), "--cache-bytes", str(2**25)]
    assert main(["bench", "throughput", *sizes]) == 0
    out = capsys.readouterr().out
    for word in ("requests/s", "output tokens/s", "total tokens/s", "TTFT", "TPOT", "ITL", "E2E"):
        assert word in out
    tiny = ["--shape", "tiny", "--dtype", "float32"]
    assert main(["bench", "latency", "--rate", "1000", "--json", *tiny, *sizes]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["request_rate"]) == (3, 1000.0)
    assert set(told["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert told["compiled_while_serving"] == 0


def test_env_names_versions_and_devices(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "jax 0." in out
    assert "device 0" in out
    assert re.search(r"^models run as (mosaic_gpu$|xla, since mosaic_gpu cannot: )", out, re.M)


class FakeLLM:
    """Answers "yes" in two pieces to conversations of up to `context` messages."""

    def __init__(self, context=100, reason="stop", can_chat=True):
        self.context, self.reason, self.can_chat = context, reason, can_chat
        self.conversations, self.sampling = [], None

    def chat_prompt(self, messages):
        if not self.can_chat:
            raise ValueError("the model directory has\nno chat template")
        return [dict(message) for message in messages]

    def stream(self, prompt, sampling):
        if len(prompt) > self.context:
            raise ValueError("a prompt leaves\nno room")
        self.conversations.append(prompt)
        self.sampling = sampling
        last = Piece(text="s", token_id=None, finish_reason=self.reason)
        return iter([Piece(text="ye", token_id=1), last])


def talk(monkeypatch, llm, *said):
    """Runs `chat` with what the user types; an exception is raised where it stands."""
    lines = iter(said)

    def typed(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(cli, "_llm", lambda options: llm)
    monkeypatch.setattr("builtins.input", typed)
    return main(["chat"])


def turn(said):
    return [{"role": "user", "content": said}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(("end", "code"), [(EOFError(), 0), (KeyboardInterrupt(), 130)])
def test_chat_remembers_the_conversation_until_the_user_ends_it(capsys, monkeypatch, end, code):
    llm = FakeLLM()
    assert talk(monkeypatch, llm, "one", "  ", "two", end) == code
    assert llm.conversations == [turn("one")[:1], turn("one") + turn("two")[:1]]
    captured = capsys.readouterr()
    assert captured.out.split() == ["yes", "yes"]
    assert captured.err == ""


def test_chat_asks_nothing_of_the_user_of_a_model_that_cannot_chat(capsys, monkeypatch):
    asked = AssertionError("the user was asked")
    assert talk(monkeypatch, FakeLLM(can_chat=False), asked) == 2
    assert capsys.readouterr().err == "jaxkv: the model directory has no chat template\n"


def test_chat_forgets_a_message_that_outgrows_the_context_and_says_so(capsys, monkeypatch):
    llm = FakeLLM(context=3)
    assert talk(monkeypatch, llm, "one", "two", "three", "four", EOFError()) == 0
    assert llm.conversations == [turn("one")[:1], turn("one") + turn("two")[:1]]
    message = "jaxkv: a prompt leaves no room (this message is forgotten)\n"
    assert capsys.readouterr().err == message * 2


def test_chat_goes_on_with_a_shorter_message_after_one_that_was_too_long(monkeypatch):
    llm = FakeLLM()
    refuse = llm.chat_prompt

    def chat_prompt(messages):
        if any(message["content"] == "long" for message in messages):
            raise ValueError("too long")
        return refuse(messages)

    llm.chat_prompt = chat_prompt
    assert talk(monkeypatch, llm, "long", "short", EOFError()) == 0
    assert llm.conversations == [turn("short")[:1]]


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_logits_that_are_not_finite_end_the_command_with_code_2(capsys, monkeypatch, command):
    llm = FakeLLM(reason="error")
    if command == "chat":
        code = talk(monkeypatch, llm, "one", AssertionError("asked again"))
    else:
        monkeypatch.setattr(cli, "_llm", lambda options: llm)
        code = main(["generate", "text"])
    assert code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "not finite" in captured.err
    assert captured.out.endswith("yes\n")


def test_sampling_options_reach_the_request(monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(cli, "_llm", lambda options: llm)
    options = "--max-tokens 3 --temperature 0.5 --top-p 0.75 --top-k 4 --min-p 0.25 --seed 6"
    assert main(["generate", *options.split(), "text"]) == 0
    assert llm.sampling == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.75, top_k=4, min_p=0.25, seed=6
    )


def test_cache_options_reach_the_cache(monkeypatch):
    made = {}

    def llm(model, **options):
        made.update(options, model=model)
        return FakeLLM()

    # `_llm` imports the class when it is called.
    monkeypatch.setitem(sys.modules, "jaxkv.llm", SimpleNamespace(LLM=llm))
    options = "--model dir --page-size 16 --max-sequences 2 --cache-bytes 4096 --max-model-len 99"
    assert main(["generate", *options.split(), "text"]) == 0
    assert made["cache"] == CacheConfig(page_size=16, max_sequences=2, budget_bytes=4096)
    assert (made["model"], made["max_model_len"], made["dtype"]) == ("dir", 99, "auto")


def test_chat_without_a_template_says_so(capsys):
    assert main(["chat", *FAST]) == 2
    assert "template" in capsys.readouterr().err
