"""What the README shows runs as it stands, but for the model's path and length."""

import re
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxkv import LLM, EngineConfig, SamplingParams, default_model
from jaxkv.engine.programs import compile_count
from jaxkv.errors import ProgramRefused
from jaxkv.models.registry import build_model, load_config

README = Path(__file__).parents[1] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def ready(block, directory):
    block = block.replace('"path/to/hf_dir"', repr(str(directory)))
    return re.sub(r"max_model_len=\d+", "max_model_len=192", block)


def test_the_library_is_used_as_shown(tmp_path, capsys):
    directory = tmp_path / "model"
    directory.mkdir()
    for file in default_model.path().iterdir():
        if file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
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
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", README.read_text(), re.MULTILINE)
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
    model = build_model(load_config(default_model.path()))
    names = {
        "params": model.init_params(jax.random.key(0), jnp.float32),
        "model": model,
        "prompts": [[5, 6, 7]],
    }
    exec(blocks()[3], names)
    assert names["out"].tokens.shape == (1, 64)


def test_many_users_are_served_as_shown(capsys):
    names = {"SamplingParams": SamplingParams, "llm": LLM(max_model_len=64)}
    exec(blocks()[4], names)
    assert "cached_tokens" in capsys.readouterr().out
