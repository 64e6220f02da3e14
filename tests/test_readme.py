"""What the README shows runs as it stands, but for the model's path and length."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxkv import LLM, SamplingParams, default_model
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


def test_strict_mode_is_warmed_up_as_shown():
    names = {"SamplingParams": SamplingParams, "LLM": LLM}
    block = ready(blocks()[1], default_model.path()).replace(
        "prompt_tokens=1024", "prompt_tokens=32"
    )
    exec(block, names)
    assert len(names["llm"].executor.programs.manifest()) == 3


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
    assert len(capsys.readouterr().out) > 0
