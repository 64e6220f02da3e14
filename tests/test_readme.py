"""What the README shows runs as it stands, but for the model's path and length."""

import io
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jaxkv
from jaxkv import LLM, EngineConfig, SamplingParams, default_model
from jaxkv.cli import main
from jaxkv.errors import ProgramRefused
from jaxkv.programs.manifest import compile_count

README = Path(__file__).parents[1] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def ready(block, directory):
    block = block.replace('"path/to/hf_dir"', repr(str(directory)))
    return re.sub(r"max_model_len=\d+", "max_model_len=192", block)


@pytest.fixture
def directory(tmp_path):
    """The small model inside the package, with a chat template."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in default_model.path().iterdir():
        if file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_the_library_is_used_as_shown(directory, capsys):
    names = {}
    exec(ready(blocks()[0], directory), names)
    assert names["outs"][1].prompt_token_ids == [1, 2, 3]
    assert len(capsys.readouterr().out) > 0
    answer = names["llm"].chat([{"role": "user", "content": "hi"}])
    assert answer.finish_reason in ("stop", "length")
    exec(blocks()[2], names)
    assert "gqa page" in capsys.readouterr().out


def test_strict_mode_is_warmed_up_as_shown(capsys):
    names = {"SamplingParams": SamplingParams, "LLM": LLM}
    block = ready(blocks()[1], default_model.path())
    for shown, small in (
        ("batch=8", "batch=2"),
        ("=1024", "=16"),
        ("max_tokens=128", "max_tokens=8"),
    ):
        assert shown in block
        block = block.replace(shown, small)
    exec(block, names)
    llm, before = names["llm"], compile_count()
    assert capsys.readouterr().out.startswith(f"{llm.stats().programs} programs")
    llm.generate([[1] * 16, "def "], SamplingParams(temperature=0.0, max_tokens=8))
    assert compile_count() == before
    with pytest.raises(ProgramRefused, match="draws"):
        llm.generate("def ", SamplingParams(temperature=1.0, max_tokens=8))


def test_the_options_of_the_engine_are_those_in_the_table_with_their_defaults():
    [table] = re.findall(r"^\| Option .*?\n\n", README.read_text(), re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", table, re.MULTILINE)
    shown = {
        name.strip("` "): value.strip("` ")
        for names, values in rows
        for name, value in zip(names.split(","), values.split(","), strict=True)
    }
    assert shown == {
        field.name: f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        for field in fields(EngineConfig)
    }


def test_a_trainer_calls_generate_as_shown():
    names = {}
    exec(ready(blocks()[3], default_model.path()), names)
    assert names["out"].tokens.shape == (8, 64)
    assert len({tuple(row) for row in names["out"].tokens.tolist()}) == 8


def test_a_module_of_ones_own_generates_as_shown():
    names = {"jaxkv": jaxkv}
    exec(blocks()[4], names)
    assert names["out"].tokens.shape == (2, 16)


def test_many_users_are_served_as_shown(capsys):
    names = {"SamplingParams": SamplingParams, "llm": LLM(max_model_len=64)}
    exec(blocks()[5], names)
    assert "cached_tokens" in capsys.readouterr().out


def commands():
    [block] = re.findall(r"```\n(jaxkv .*?)```", README.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for line in block.splitlines()]


def follow(command, directory, monkeypatch, *more):
    """Runs a command of the README with the path of a model, and with the user's message on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    return main([str(directory) if word == "DIR" else word for word in command] + list(more))


# Compiling for the sizes of the defaults takes minutes on a CPU.
SMALL = {
    "generate": "--max-model-len 64 --max-tokens 4",
    "chat": "--max-model-len 64 --max-tokens 4",
    "bench": "--requests 3 --prompt-tokens 8:15 --output-tokens 2:4 --prefix-tokens 4 "
    "--max-sequences 1 --token-budget 16 --cache-bytes 32MB",
}


def test_the_commands_run_as_shown(directory, capsys, monkeypatch):
    assert [words[0] for words in commands()].count("bench") == 4
    for command in commands():
        small = SMALL.get(command[0], "").split()
        assert follow(command, directory, monkeypatch, *small) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_run_as_shown_without_other_options(directory, capsys, monkeypatch):
    for command in commands():
        assert follow(command, directory, monkeypatch) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip()
