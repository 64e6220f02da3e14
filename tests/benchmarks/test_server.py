"""The benchmark of the server: its models are those of the shapes, and its rows compare the same figures."""

import pytest

from benchmarks.server import Load, _row, write_model
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import load_config
from jaxkv.text.tokenizer import load_tokenizer

LOAD = Load(requests=4, prompt_tokens=8, output_tokens=10)
ALONE = {"output_tokens_per_second": 100.0, "ttft_ms": {"p50": 5.0}}
SERVED = {
    "failed": 0,
    "errors": [],
    "output_throughput": 98.0,
    "median_ttft_ms": 5.5,
    "cpu_seconds": 2.0,
    "duration": 4.0,
    "total_output_tokens": 40,
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
    last = wanted.vocab_size - 1
    assert len(tokenizer.decode([last, last])) >= 2


def test_a_row_compares_the_server_with_the_engine():
    row = _row("tiny", LOAD, ALONE, SERVED)
    assert row["share"] == pytest.approx(0.98)
    assert (row["engine_ttft_p50_ms"], row["server_ttft_p50_ms"]) == (5.0, 5.5)
    assert row["http_process_cores"] == pytest.approx(0.5)
    assert row["http_process_us_per_token"] == pytest.approx(50_000)


def test_failed_requests_are_no_measurement():
    with pytest.raises(RuntimeError, match="2 requests failed"):
        _row("tiny", LOAD, ALONE, SERVED | {"failed": 2, "errors": ["", "x"]})


def test_a_load_is_written_as_options():
    assert LOAD.options() == ["--requests=4", "--prompt-tokens=8", "--output-tokens=10"]
    assert Load(1, 2, 3, 0.5).options()[-1] == "--rate=0.5"
