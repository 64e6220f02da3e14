"""A checkpoint that `convert` has written gives the weights that rounding the plain one gives, here and elsewhere."""

import json

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxkv import default_model, load_model
from jaxkv.cli import main
from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import convert_checkpoint
from jaxkv.weights.quantised.weight_forms import weight_forms
from tests.models.driver import Driver


def assert_same_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(
            np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8)
        )


@pytest.mark.parametrize(
    "quantization",
    ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8"))],
)
def test_a_converted_checkpoint_has_the_bits_of_one_that_is_rounded_as_it_is_read(
    tmp_path, quantization, capsys
):
    made = tmp_path / "made"
    given = [str(default_model.path()), "-o", str(made), "--quantization", quantization]
    assert main(["convert", *given]) == 0
    assert f"42 of 56 tensors in {quantization}" in capsys.readouterr().out
    params, model = load_model(made)
    wanted, _ = load_model(quantization=quantization)
    assert_same_bits(params, wanted)
    assert len(weight_forms(params)) > 1
    assert (made / "tokenizer.json").read_bytes() == (
        default_model.path() / "tokenizer.json"
    ).read_bytes()
    assert model.config.family == "llama"
    # As `--quantization` twice would be.
    with pytest.raises(ValueError, match="quantised already"):
        convert_checkpoint(made, tmp_path / "again", quantization=quantization)


@pytest.mark.slow
def test_large_checkpoints_are_written_in_several_files_a_few_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxkv.weights.write_rounded.SHARD_BYTES", 2**20)
    monkeypatch.setattr("jaxkv.weights.write_rounded._CHUNK_BYTES", 2**15)
    made = tmp_path / "made"
    convert_checkpoint(default_model.path(), made, quantization="int4")
    index = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    for name, shard in index.items():
        with safe_open(made / shard, "numpy") as file:
            assert name in file.keys()  # noqa: SIM118 - it is no mapping
    assert_same_bits(load_model(made)[0], load_model(quantization="int4")[0])


def test_a_directory_that_is_there_is_left_alone(tmp_path):
    with pytest.raises(
        FileExistsError, match=r"is there already.*give the name of a new directory"
    ):
        convert_checkpoint(default_model.path(), tmp_path, quantization="int4")
    assert not list(tmp_path.iterdir())


def test_one_that_was_cut_off_has_no_config_and_is_not_read(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr("jaxkv.weights.write_rounded._write", fail)
    with pytest.raises(OSError, match="no space"):
        convert_checkpoint(default_model.path(), tmp_path / "made", quantization="int4")
    with pytest.raises(BadCheckpoint, match=r"holds no config\.json"):
        load_model(tmp_path / "made")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_transformers_reads_it_with_compressed_tensors_and_computes_the_same(
    tmp_path, quantization
):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    library = pytest.importorskip("compressed_tensors.quantization")
    made = tmp_path / "made"
    convert_checkpoint(default_model.path(), made, quantization=quantization)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    # It rounds activations of float32 too.
    theirs.apply(library.disable_quantization)
    tokens = list(range(5, 45))
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0].numpy()
    params, model = load_model(made, dtype="float32")
    [got] = Driver(model, params).prefill([tokens])
    np.testing.assert_allclose(got, wanted, atol=1e-4)
