"""The model inside the package: its size, its licence, and that its record describes its files."""

import json

from safetensors import safe_open
from tokenizers import Tokenizer

from jaxkv import default_model


def test_the_directory_is_at_most_10_megabytes_and_carries_the_licence_of_its_data():
    files = [file for file in default_model.path().iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 10_000_000
    licence = (default_model.path() / "LICENSE-PYTHON.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence


def test_the_record_describes_the_weights_and_the_tokenizer_that_lie_beside_it():
    record = json.loads((default_model.path() / "training.json").read_text())
    config = json.loads((default_model.path() / "config.json").read_text())
    with safe_open(default_model.path() / "model.safetensors", "np") as weights:
        sizes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
    counted = sum(size[0] * (size[1] if len(size) == 2 else 1) for size in sizes)
    assert counted == record["result"]["parameters"]
    tokenizer = Tokenizer.from_file(str(default_model.path() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == record["model"]["vocab_size"]
    assert tokenizer.token_to_id("<|end|>") == config["eos_token_id"]
