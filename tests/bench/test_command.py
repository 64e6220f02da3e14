"""Defaults of `jaxkv bench`: they fit the model and the device. No model is loaded."""

import re

import jax
import pytest

from jaxkv import cli, default_model
from jaxkv.bench.command import _asked
from jaxkv.bench.workload import Workload
from jaxkv.errors import BadCheckpoint
from jaxkv.terminal import Screen


def asked(*arguments):
    options = cli._parser().parse_args(["bench", "throughput", *arguments])
    return _asked(options, Screen())


def test_the_defaults_fit_the_model_in_the_package_and_the_user_is_told(capsys):
    for data in ("random", "shared-prefix"):
        workload, served = asked("--data", data)
        assert workload.prompt_tokens == workload.output_tokens == (100, 512)
        assert served.max_model_len == served.max_positions == 1024
        told = capsys.readouterr().err
        assert told.startswith("jaxkv: prompts have up to 512 tokens and outputs up to 512, ")
        assert told.count("\n") == 1


def test_the_defaults_are_the_published_benchmark_where_the_model_supports_it(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    workload, served = asked("--shape", "tiny")
    assert workload == Workload()
    assert (served.max_model_len, served.cache.max_sequences) == (2048, 256)
    assert capsys.readouterr().err == ""


def test_a_cpu_is_asked_for_less():
    workload, served = asked("--shape", "tiny")
    assert workload.requests == served.cache.max_sequences == 16


def test_given_lengths_are_kept_and_the_others_make_room(capsys):
    workload, _ = asked("--prompt-tokens", "1000", "--requests", "2", "--max-sequences", "3")
    assert (workload.prompt_tokens, workload.output_tokens) == ((1000, 1000), (24, 24))
    workload, served = asked("--prompt-tokens", "8:1k", "--output-tokens", "3", "--shape", "tiny")
    assert (workload.prompt_tokens, served.max_model_len) == ((8, 1024), 1027)


def test_max_model_len_is_an_option_that_bounds_and_sizes_the_cache():
    workload, served = asked("--max-model-len", "256")
    assert (workload.longest, served.max_model_len) == (256, 256)
    workload, served = asked(
        "--max-model-len", "1k", "--prompt-tokens", "9", "--output-tokens", "9"
    )
    assert (workload.longest, served.max_model_len) == (18, 1024)
    with pytest.raises(ValueError, match=r"exceed max_model_len, 64; lower --prompt-tokens"):
        asked("--max-model-len", "64", "--prompt-tokens", "60", "--output-tokens", "60")


def test_a_cache_for_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"max_sequences must be an int in \[1, 65536\], got 0"):
        asked("--shape", "tiny", "--max-sequences", "0")


def test_lengths_of_sharegpt_have_bounds_of_their_own(capsys):
    workload, _ = asked("--data", "sharegpt", "--shape", "tiny", "--output-tokens", "5")
    assert (workload.prompt_tokens, workload.output_tokens) == ((4, 1024), (5, 5))
    assert capsys.readouterr().err == ""


def test_a_model_is_measured_without_its_weights(tmp_path):
    """A config.json is enough, so a published model need not be there."""
    (tmp_path / "config.json").write_bytes((default_model.path() / "config.json").read_bytes())
    sizes = ["--requests", "1", "--prompt-tokens", "5", "--output-tokens", "3"]
    command = ["--model", str(tmp_path), "--dtype", "float32", *sizes]
    _, served = asked(*command)
    with pytest.raises(BadCheckpoint, match=r"holds neither model\.safetensors"):
        served.build()
    _, served = asked(*command, "--load-format", "dummy")
    assert jax.tree.leaves(served.build().runner.params)[0].dtype == "float32"


# Rates are several runs in test_serve_command.py, an engine is measured in test_serving.py, and plots are drawn in
# tests/bench/plots.
@pytest.mark.slow
def test_several_rates_are_measured_in_one_engine_and_drawn(capsys, tmp_path):
    page = tmp_path / "out.html"
    small = "--shape tiny --dtype float32 --requests 3 --prompt-tokens 8:15 --output-tokens 2:4"
    sizes = [
        "--max-sequences",
        "1",
        "--token-budget",
        "16",
        "--cache-bytes",
        "32MB",
        "--rate",
        "500,1000",
    ]
    command = ["bench", "latency", *small.split(), *sizes]
    assert cli.main([*command, "--plot", str(page)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^\d+ requests/s", out, re.M) == ["500 requests/s", "1000 requests/s"]
    assert out.count("0 programs compiled while serving") == 2
    text = page.read_text()
    assert text.count("<svg ") == 6 + 2
    # One sequence at a time: later requests wait in the engine's queue.
    assert "queued" in text
