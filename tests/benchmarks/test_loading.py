"""The loading benchmark writes a checkpoint that loads, in shards, and records both sources."""

import json

import jax
import pytest

from benchmarks import loading
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model, load_params


def test_the_checkpoint_has_several_shards_and_every_parameter(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SHARD_BYTES", 50_000)
    size = loading.write_checkpoint("tiny", tmp_path)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert size < sum(path.stat().st_size for path in shards) < 2 * size
    model = build_model(SHAPES["tiny"])
    params = load_params(tmp_path, model, dtype="bfloat16", progress=False)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) >= size


def test_a_load_is_timed_and_a_failing_one_is_an_error(tmp_path):
    loading.write_checkpoint("tiny", tmp_path)
    once = loading.load_once("tiny", tmp_path, None)
    assert once["seconds"] > 0
    rounded = loading.load_once("tiny", tmp_path, "int8")
    assert rounded["on device"] < once["on device"]
    next(tmp_path.glob("*.safetensors")).write_bytes(b"cut short")
    with pytest.raises(Exception, match="declares a header"):
        loading.load_once("tiny", tmp_path, None)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
