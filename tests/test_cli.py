"""The command: offline on the small model, one line for a mistake, exit code 2, no traceback."""

import io
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxkv import __version__, cli
from jaxkv.cli import main
from jaxkv.config.cache import CacheConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import CachePoisoned
from jaxkv.options import cache_of
from tests.fake_llm import FakeLLM
from tests.one_layer import one_layer_model

FAST = ["--max-model-len", "64", "--max-tokens", "4"]


def test_generate_prints_the_prompt_and_goes_on(capsys, tmp_path):
    model = one_layer_model(tmp_path / "one")
    assert main(["generate", "--model", str(model), *FAST, "def "]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def ")
    assert len(out) > len("def \n")


@pytest.mark.slow
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
        (["generate", "--max-tokens", "0", "x"], "--max-tokens must be"),
        (["generate", *FAST, ""], "at least one token"),
        (["generate", "--max-model-len", "2", "def f():"], "raise --max-model-len"),
        (["plan", "--max-model-len", "1"], "--max-model-len must be"),
        (["plan", "--max-model-len", "8k"], "got 8192; the model supports at most 1,024 tokens"),
        (["bench"], "MODE"),
        (["bench", "latency"], "--rate"),
        (["bench", "latency", "--rate", "0"], "request rate must be above 0"),
        (
            ["bench", "throughput", "--data", "chat"],
            "data must be one of random, shared-prefix, sharegpt",
        ),
        (["bench", "throughput", "--shape", "gpt-5"], "shape must be one of"),
        (["bench", "throughput", "--shape", "tiny", "--model", "x"], "not both"),
        (["bench", "throughput", "--prompt-tokens", "9:8"], "--prompt-tokens must be"),
        (["bench", "throughput", "--prompt-tokens", "few"], "must be A:B or one number, got 'few'"),
        (["bench", "throughput", "--prompt-tokens", "9:8"], "got 8; the least is 9"),
        (
            ["bench", "startup", "--output-tokens", "99999"],
            "outputs of up to 99,999 exceed --max-model-len, 1,024; lower --prompt-tokens or",
        ),
        (["bench", "startup", "--max-model-len", "2k"], "got 2048; the model supports at most"),
        (["plan", "--page-size", "0"], "--page-size must be"),
        (["plan", "--cache-bytes", "1000"], "budget is 1,000"),
        (["plan", "--cache-bytes", "0"], "--cache-bytes must be"),
        (["generate", "--min-p", "2", "x"], "--min-p must be"),
        (["generate", "--max-tokens", "x", "a"], "--max-tokens: must be a number such as 4096, 8k"),
        (["generate", "--max_tokens", "x", "a"], "--max-tokens: must be a number"),
        (["generate", "--max-tokens"], "expected one argument; see jaxkv generate --help"),
        (["generate", "a", "b"], "unrecognized arguments: b"),
        (["generate", "--nonesuch", "a"], "--nonesuch"),
        (
            ["generate", "--trust-remote-code", "a"],
            "code: nothing in a model directory is executed",
        ),
        (["generate", "--repetition-penalty", "0", "x"], "--repetition-penalty must be"),
        (["generate", "--revision", "v1", "x"], "the model is the small model inside the package"),
        (["plan", "--model", "./x", "--revision", "v1"], "revision 'v1' is one of a name on the"),
        (
            ["bench", "startup", "--revision", "v1"],
            "the model is the small model inside the package",
        ),
        (["bench", "startup", "--shape", "tiny", "--revision", "v1"], "not both"),
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
    "arguments",
    [
        [],
        ["generate"],
        ["chat"],
        ["plan"],
        ["serve"],
        ["bench"],
        ["bench", "latency"],
        ["bench", "serve"],
        ["env"],
    ],
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


def test_plan_counts_the_token_histories_that_logits_processors_read(capsys):
    used = []
    for more in ([], ["--logits-processor", "tests.sampling.processors:allowed_range"]):
        assert main(["plan", "--max-model-len", "256", "--max-sequences", "4", *more]) == 0
        out = capsys.readouterr().out
        used.append(int(re.search(r"([\d,]+) of [\d,]+ bytes used", out)[1].replace(",", "")))
    assert used[1] - used[0] >= 4 * 256 * 4


def test_bench_prints_the_conventional_figures_as_text_or_json(capsys):
    small = (
        "--requests 3 --prompt-tokens 8:15 --output-tokens 2:4 --max-sequences 1 --token-budget 16"
    )
    tiny = ["--shape", "tiny", "--dtype", "float32"]
    sizes = [*tiny, *small.split(), "--cache-bytes", str(2**25)]
    assert main(["bench", "throughput", *sizes]) == 0
    out = capsys.readouterr().out
    for word in ("requests/s", "output tokens/s", "total tokens/s", "TTFT", "TPOT", "ITL", "E2E"):
        assert word in out
    assert main(["bench", "latency", "--rate", "1000", "--json", *sizes]) == 0
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


def test_logits_that_are_not_finite_end_the_command_with_code_2(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_llm", lambda options, screen: FakeLLM(reason="error"))
    assert main(["generate", "text"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "not finite" in captured.err
    assert captured.out == "textyes\n"


def test_a_lost_cache_ends_the_command_with_one_line_and_code_2(capsys, monkeypatch):
    def lose(options, screen):
        raise CachePoisoned("the cache cannot be used: injected")

    monkeypatch.setattr(cli, "_llm", lose)
    assert main(["generate", "text"]) == 2
    assert capsys.readouterr().err == "jaxkv: the cache cannot be used: injected\n"


def test_a_prompt_is_read_from_stdin_for_a_hyphen_or_from_a_pipe(capsys, monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(cli, "_llm", lambda options, screen: llm)
    for arguments in (["-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
        assert main(["generate", *arguments]) == 0
        assert capsys.readouterr().out == "two\nlinesyes\n"
    assert llm.conversations == ["two\nlines"] * 2


def test_without_a_prompt_a_terminal_is_not_waited_for(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["generate"]) == 2
    assert "no PROMPT was given" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"jaxkv {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "chat",
        "plan",
        "bench throughput",
        "bench latency",
        "bench startup",
        "bench serve",
    ],
)
def test_help_shows_the_default_of_every_option_and_what_numbers_mean(capsys, command):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "8k is 8192" in told
    listed = told[told.index("show this help") :]
    once = re.sub(r"(--[a-z-]+ [A-Z]+), --[a-z-]+ [A-Z]+", r"\1", listed)
    helps = re.split(r" (?=--[a-z-]+ [A-Z])", once)[1:]
    assert len(helps) > 8
    undocumented = [text.split()[0] for text in helps if "(default: " not in text]
    assert undocumented == (["--rate"] if command == "bench latency" else [])


def test_help_and_mistakes_import_nothing_that_takes_long():
    """They take less than 100 ms because they load no package but this one, and not the slowest of Python's own."""
    code = """
import sys
before = set(sys.modules)
from jaxkv.cli import main
main(['generate', '--top-p', '2', 'x'])
try:
    main(['--help'])
except SystemExit:
    pass
loaded = {name.partition('.')[0] for name in set(sys.modules) - before}
print(sorted(loaded - set(sys.stdlib_module_names) | loaded & {'asyncio', 'multiprocessing'}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "['jaxkv']"
    assert "--top-p must be" in run.stderr


@pytest.mark.parametrize(("command", "sequences"), [("generate", 1), ("chat", 1), ("plan", 8)])
def test_commands_of_one_conversation_take_a_cache_for_one_sequence(command, sequences):
    options = cli._parser().parse_args([command])
    assert cache_of(options).max_sequences == sequences


def test_sampling_options_reach_the_request(monkeypatch):
    llm = FakeLLM()
    monkeypatch.setattr(cli, "_llm", lambda options, screen: llm)
    options = "--max-tokens 3 --temperature 0.5 --top-p 0.75 --top-k 4 --min-p 0.25 --seed 6"
    assert main(["generate", *options.split(), "--repetition-penalty", "1.5", "text"]) == 0
    wanted = {"temperature": 0.5, "top_p": 0.75, "top_k": 4, "min_p": 0.25, "seed": 6}
    assert llm.sampling == SamplingParams(max_tokens=3, repetition_penalty=1.5, **wanted)


def test_cache_options_reach_the_cache(monkeypatch):
    made = {}

    def llm(model, **options):
        made.update(options, model=model)
        return FakeLLM()

    # `_llm` imports the class when it is called.
    monkeypatch.setitem(sys.modules, "jaxkv.llm", SimpleNamespace(LLM=llm))
    options = "--model owner/name --revision v1 --page-size 16 --max-sequences 2 --cache-bytes 4096 --max-model-len 99"
    assert main(["generate", *options.split(), "text"]) == 0
    assert made["cache"] == CacheConfig(page_size=16, max_sequences=2, budget_bytes=4096)
    assert (made["model"], made["revision"]) == ("owner/name", "v1")
    assert (made["max_model_len"], made["dtype"]) == (99, "auto")


def test_chat_without_a_template_says_so(capsys):
    assert main(["chat", *FAST]) == 2
    assert "template" in capsys.readouterr().err
