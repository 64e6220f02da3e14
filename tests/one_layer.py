"""The small model inside the package with its first layer alone, for tests that compile much and ask no sense of it."""

import json

from safetensors.flax import load_file, save_file

from jaxkv import default_model


def one_layer_model(folder):
    """Writes the model into a folder, which it makes if there is none and returns."""
    folder.mkdir(exist_ok=True)
    for file in default_model.path().iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    kept = [name for name in tensors if ".layers." not in name or ".layers.0." in name]
    assert 1 < len(kept) < len(tensors)
    save_file({name: tensors[name] for name in kept}, folder / "model.safetensors")
    return folder
