"""The benchmark of the server: its models are those of the shapes, and its rows compare the same figures."""

from dataclasses import replace

import pytest

from benchmarks.engine_loads import Load, measure, parse_load
from benchmarks.server import _options, _row, write_model
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import load_config
from jaxkv.text.tokenizer import load_tokenizer

LOAD = Load(requests=4, prompt_tokens=8, output_tokens=10)
ALONE = {
    "output_tokens_per_second": 100.0,
    "ttft_ms": {"p50": 5.0, "p99": 9.0},
    "seconds": 4.0,
    "steps": 10,
    "wait_seconds": 3.0,
}
SERVED = {
    "failed": 0,
    "errors": [],
    "output_throughput": 98.0,
    "median_ttft_ms": 5.5,
    "p99_ttft_ms": 9.5,
    "cpu_seconds": [2.0, 3.0],
    "duration": 4.0,
    "total_output_tokens": 40,
    "steps": 10.0,
    "wait_seconds": 1.0,
    "evictions": 2.0,
}


@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b", "llama-3.1-8b"])
def test_a_written_model_has_the_shape_and_a_text_for_each_id(shape, tmp_path):
    write_model(shape, tmp_path)
    read, wanted = load_config(tmp_path), SHAPES[shape]
    names = ("vocab_size", "hidden_size", "num_layers", "heads", "kv_heads", "head_dim", "ffn_size")
    assert [getattr(read, name) for name in names] == [getattr(wanted, name) for name in names]
    assert read.tie_embeddings == wanted.tie_embeddings
    assert read.rope.kind == wanted.rope.kind
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    last = wanted.vocab_size - 1
    assert len(tokenizer.decode([last, last])) >= 2


def test_a_row_compares_the_server_with_the_engine():
    row = _row("tiny", LOAD, ALONE, SERVED)
    assert row["share"] == pytest.approx(0.98)
    assert (row["engine_ttft_p50_ms"], row["server_ttft_p50_ms"]) == (5.0, 5.5)
    assert (row["engine_ttft_p99_ms"], row["server_ttft_p99_ms"]) == (9.0, 9.5)
    assert row["http_process_cores"] == pytest.approx(0.5)
    assert row["engine_process_cores"] == pytest.approx(0.75)
    assert row["http_process_us_per_token"] == pytest.approx(50_000)
    assert row["engine_wait_ms_per_step"] == pytest.approx(300)
    assert row["engine_host_ms_per_step"] == pytest.approx(100)
    assert row["server_host_ms_per_step"] == pytest.approx(300)
    assert "server_host_ms_per_step" not in _row("tiny", replace(LOAD, rate=1.0), ALONE, SERVED)


def test_failed_requests_are_no_measurement():
    with pytest.raises(RuntimeError, match="2 requests failed"):
        _row("tiny", LOAD, ALONE, SERVED | {"failed": 2, "errors": ["", "x"]})


def test_a_load_is_written_as_options():
    sizes = ["--requests=4", "--prompt-tokens=8", "--output-tokens=10"]
    assert _options(LOAD) == [*sizes, "--open-connections=4"]
    assert _options(Load(1, 2, 3, 0.5))[-1] == "--rate=0.5"


@pytest.mark.parametrize("load", [LOAD, Load(1, 2, 3, 0.5)])
def test_a_load_is_read_as_it_is_written(load):
    assert parse_load(str(load)) == load


@pytest.mark.slow
def test_an_engine_alone_serves_each_load_with_programs_that_were_compiled_before():
    loads = [LOAD, LOAD, Load(2, 8, 4, 100.0)]
    found = measure("tiny", loads, max_sequences=4, max_model_len=32)
    assert [one["output_tokens"] for one in found] == [40, 40, 8]
    assert [one["cached_tokens"] for one in found] == [0, 0, 0]
    assert all(one["steps"] > 3 for one in found)
