"""The benchmark of several devices runs each number of them and records its measurements."""

import argparse
import json

import jax
import pytest

from benchmarks import tensor_parallel
from benchmarks.generate import Setting
from benchmarks.record import load_record
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.engine import EngineConfig
from jaxkv.models.registry import build_model
from tests.devices import needs_devices

pytestmark = needs_devices(2)


@pytest.mark.slow
def test_a_record_has_every_number_of_devices_of_every_batch(tmp_path):
    sizes = ["--shape", "tiny", "--batch", "1,2", "--context", "16", "--new-tokens", "3"]
    options = ["--devices", "1,2", "--repeats", "1", "--folder", str(tmp_path)]
    tensor_parallel.main([*sizes, *options])
    rows = load_record(tmp_path / "tensor-parallel-tiny.json").rows
    assert [(row["batch"], row["devices"]) for row in rows] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    for alone, both in zip(rows[:2], rows[2:], strict=True):
        assert both["speedup"] == pytest.approx(alone["ms_per_token"] / both["ms_per_token"])
        assert both["us_per_sum"] > 0


@pytest.mark.slow
def test_some_layers_of_a_published_config_run_with_several_steps_per_launch(tmp_path):
    published = {
        "model_type": "qwen3_moe",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published))
    sizes = ["--config", str(config), "--layers", "1:3", "--batch", "2", "--context", "16"]
    options = ["--devices", "2", "--steps-per-launch", "1,4", "--new-tokens", "12", "--compare"]
    places = ["--record", "tensor-parallel-experts", "--folder", str(tmp_path)]
    tensor_parallel.main([*sizes, *options, "--repeats", "1", *places])
    one, several = load_record(tmp_path / "tensor-parallel-experts.json").rows
    assert (one["steps_per_launch"], several["steps_per_launch"]) == (1, 4)
    assert one["layers"] == several["layers"] == 2
    # Before the one that is timed, a generation is thrown away; each has a prompt, 11 steps, and the last result again.
    assert (one["results"], one["different"]) == (2 * 13, 0)
    assert several["ms_per_token"] > 0


@pytest.mark.slow
def test_launches_that_were_not_sent_are_not_recorded(monkeypatch):
    monkeypatch.setattr(
        tensor_parallel, "EngineConfig", lambda steps_per_launch: EngineConfig(steps_per_launch=1)
    )
    model = build_model(SHAPES["tiny"])
    params = model.init_params(jax.random.key(0), "float32")
    setting = Setting(batch=1, context=16, new_tokens=12, repeats=1)
    with pytest.raises(RuntimeError, match=r"sent \d+ steps alone and 0 launches of 4"):
        tensor_parallel.measure_launches(model, params, setting, 4)


@pytest.mark.parametrize("given", [["--config", "config.json"], ["--layers", "0:1"]])
def test_the_record_of_a_whole_shape_is_not_replaced_by_another_model(given, capsys):
    with pytest.raises(SystemExit):
        tensor_parallel.main(["--shape", "tiny", *given])
    assert "need a --record" in capsys.readouterr().err


def test_layers_past_the_end_are_refused():
    options = argparse.Namespace(shape="tiny", config=None, layers=slice(1, 3))
    with pytest.raises(ValueError, match="has 2 layers, got 3"):
        tensor_parallel.chosen(options)
