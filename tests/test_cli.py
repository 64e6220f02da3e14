"""The command: offline on the small model, one line for a mistake, exit code 2, no traceback."""

import pytest

from jaxkv.cli import main

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
        (["plan", "--page-size", "0"], "page_size"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxkv: ")
    assert message in captured.err


def test_plan_tells_bytes_and_programs_without_loading_weights(capsys):
    assert main(["plan", "--max-model-len", "256"]) == 0
    out = capsys.readouterr().out
    for word in ("bytes/token", "bytes/sequence", "gqa", "sampling", "generate", "decode"):
        assert word in out


def test_env_names_versions_and_devices(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "jax 0." in out
    assert "device 0" in out


def test_chat_without_a_template_says_so(capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert main(["chat", *FAST]) == 2
    assert "template" in capsys.readouterr().err
