"""The options of `jaxkv serve`: mistakes are one line and exit code 2, before any process is started."""

import socket
import subprocess

import msgspec
import pytest

from jaxkv import EngineConfig, SpeculationConfig
from jaxkv.cli import _parser, main
from jaxkv.serve import command
from jaxkv.serve.listener import open_listener, url_of
from jaxkv.serve.wire import Start

KEY = "a-key-of-many-characters"


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """No test here may get as far as an engine process."""

    def refuse(*given, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.delenv(command.KEY_VARIABLE, raising=False)


def mistake(capsys, *arguments):
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxkv: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "--port: must be in [0, 65535], got '65536'"),
        (["some/name", "--model", "other/name"], "the model is given twice, as 'some/name' and"),
        (["--port", "-1"], "--port: must be in"),
        (["--host", "0.0.0.0"], "lets other machines in, which needs a key; give --api-key,"),
        (["--host", "::"], "needs a key"),
        (["--host", ""], "--host must be a name or an address"),
        (["--host", "no.such.host.invalid"], "cannot be resolved"),
        (["--api-key", "short"], "at least 8 visible ASCII characters"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--warm-up", "8"], "must be BATCH:TOKENS such as 8:1024, or"),
        (["--warm-up", "8:8:greedy+cold"], "greedy, drawn, filtered such as"),
        (["--warm-up", "8:8:"], "got '8:8:'"),
        (["--warm-up", "a:8"], "must be a number such as"),
        (["--warm-up", "0:8"], "--warm-up: BATCH and TOKENS must be above 0, got '0:8'"),
        (["--warm-up", "8:-1"], "--warm-up: BATCH and TOKENS must be above 0, got '8:-1'"),
        (["--logits-processor", "module"], "must be MODULE:FUNCTION or NAME=MODULE:FUNCTION"),
        (["--logits-processor", "=module:f"], "must be MODULE:FUNCTION or NAME=MODULE:FUNCTION"),
        (["--logits-processor", "a:f", "--logits-processor", "b:f"], "have the same name"),
        (["--lora-modules", "folder"], "must be NAME=FOLDER, got 'folder'"),
        (["--lora-modules", "a=x", "a=y"], "two adapters of --lora-modules have the same name"),
        (["--lora-modules", "default=x"], "has the model's name, 'default'; give it another, or"),
        (["--lora-modules", "a=x", "--max-lora-rank", "0"], "--max-lora-rank must be"),
        (["--hang-seconds", "0"], "must be above 0"),
        (["--busy-seconds", "-1"], "must be above 0"),
        (["--drain-seconds", "nan"], "must be above 0"),
        (["--max-waiting", "0"], "--max-waiting must be"),
        (["--tool-parser", "nonesuch"], "nonesuch"),
        (["--reasoning-parser", "nonesuch"], "nonesuch"),
        (["--max-sequences", "0"], "--max-sequences must be"),
        (["--token-budget", "0"], "--token-budget must be"),
        (["--tool-parser", "hermes3"], "there is no tool parser 'hermes3'; choose one of "),
        (["--reasoning-parser", "hermes"], "there is no reasoning parser 'hermes'; choose one of "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert message in mistake(capsys, *arguments)


def test_adapters_are_named_as_in_vllm():
    given = [
        "--lora-modules",
        "a=one",
        "b=two",
        "--lora-modules",
        "c=three",
        "--max-lora-rank",
        "8",
    ]
    start = command._start(command_options(given))
    assert start.lora_modules == {"a": "one", "b": "two", "c": "three"}
    assert start.lora == {"max_adapters": 3, "max_rank": 8}
    assert command._start(command_options([])).lora is None


def test_parsers_are_named_as_in_vllm():
    options = command_options(["--tool-call-parser", "qwen3_xml", "--reasoning-parser", "none"])
    assert (options.tool_parser, options.reasoning_parser) == ("qwen3_xml", "none")
    options = command_options([])
    assert (options.tool_parser, options.reasoning_parser) == (None, None)


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}: " in mistake(capsys, "--port", port)


def test_a_missing_extra_is_an_error_that_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvloop" else name)
    assert 'needs uvloop, not installed here; run pip install "jaxkv[serve]"' in mistake(capsys)


def test_an_empty_file_of_keys_is_no_server_without_keys(capsys, tmp_path):
    (tmp_path / "keys").write_text("\n \n")
    assert "holds no key" in mistake(capsys, "--api-key-file", str(tmp_path / "keys"))


def test_keys_come_from_options_a_file_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("second-key\n\n third-key \n")
    monkeypatch.setenv(command.KEY_VARIABLE, "fourth-key")
    given = ["--api-key", "first-key", "--api-key-file", str(tmp_path / "keys")]
    assert command._keys(command_options(given)) == [
        "first-key",
        "second-key",
        "third-key",
        "fourth-key",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_alone_needs_no_key(host):
    with open_listener(host, 0, has_keys=False) as listener:
        url = url_of(listener, host)
    assert url.startswith("http://[::1]:" if host == "::1" else f"http://{host}:")
    assert not url.endswith(":0")


def test_other_machines_may_come_with_a_key():
    open_listener("0.0.0.0", 0, has_keys=True).close()


def test_drafts_reach_the_engine_process():
    start = command._start(command_options(["--speculation", "ngram", "--draft-tokens", "3"]))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=Start)
    assert EngineConfig(**sent.engine).speculation == SpeculationConfig(tokens=3)
    assert "speculation" not in command._start(command_options([])).engine
    start = command._start(command_options(["--draft-model", "folder"]))
    drafted = EngineConfig(**start.engine).speculation
    assert drafted == SpeculationConfig(method="draft_model", model="folder")
    given = ["--speculation", "eagle3", "--draft-model", "folder"]
    drafted = EngineConfig(**command._start(command_options(given)).engine).speculation
    assert drafted == SpeculationConfig(method="eagle3", model="folder")


def test_what_differs_from_the_defaults_is_sent_to_the_engine():
    given = ["--max-sequences", "4", "--token-budget", "64", "--dtype", "bf16"]
    given += ["--warm-up", "8:1k", "--warm-up", "2:16:drawn+greedy"]
    given += ["--logits-processor", "a.b:f", "--logits-processor=g=a.b:f", "--programs", "bundle"]
    start = command._start(command_options(given))
    assert start.logits_processors == {"f": "a.b:f", "g": "a.b:f"}
    assert start.cache == {"max_sequences": 4}
    assert start.engine == {"token_budget": 64}
    every = ("greedy", "drawn", "filtered")
    assert start.warm_up == ((8, 1024, every), (2, 16, ("drawn", "greedy")))
    assert start.dtype == "bf16"
    assert start.programs == "bundle"
    assert not start.warm_up_in_background
    behind = ["--warm-up", "8:1k", "--warm-up-in-background"]
    assert command._start(command_options(behind)).warm_up_in_background
    with pytest.raises(ValueError, match="of which there is none"):
        command._start(command_options(["--warm-up-in-background"]))
    assert start.busy_seconds == 0
    assert command._start(command_options(["--busy-seconds", "0.5"])).busy_seconds == 0.5
    assert start.sampling_defaults
    assert not command._start(command_options(["--generation-config", "none"])).sampling_defaults


def command_options(arguments):
    return _parser().parse_args(["serve", *arguments])


@pytest.mark.parametrize("arguments", [["some/name"], ["--model", "some/name"]])
def test_the_model_may_be_given_as_vllm_takes_it(monkeypatch, capsys, arguments):
    def started(options):
        raise ValueError(f"starts with {options.model}")

    monkeypatch.setattr(command, "_start", started)
    assert "starts with some/name" in mistake(capsys, *arguments)
