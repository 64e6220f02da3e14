"""Writes README.md and training.json into the directory of a trained model."""

import json
from pathlib import Path


def write_card(directory: Path, record: dict, samples: dict[str, str]) -> None:
    """Writes the record of a training run as training.json, and its summary with sample texts as README.md."""
    (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    data, result = record["data"], record["result"]
    blocks = "\n".join(f"{title}\n\n```text\n{text}\n```\n" for title, text in samples.items())
    text = f"""# The embedded default model

A Llama-shaped decoder of {result["parameters"]:,} parameters that writes something like Python. It is here so
that `jaxkv generate "def "` works offline; it knows nothing, and nothing should rest on what it says.

- Made by `python -m jaxkv.examples.train_small_model` in {result["seconds"]} s on {result["device"]},
  {result["date"]}, JAX {result["jax"]}. `training.json` holds the recipe, the sizes and the losses.
- Data: {data["files"]} source files ({data["bytes"]:,} bytes, {data["tokens"]:,} tokens) of the standard library of
  Python {data["python_version"]}, without its tests and tables. SHA-256 of the files joined in sorted order:
  `{data["sha256"]}`.
- Loss in nats per token at step {result["best_step"]} of {record["recipe"]["steps"]}, the best of the checks:
  {result["train_loss"]:.3f} in training (with dropout), {result["held_out_loss"]:.3f} on the
  {data["held_out_files"]} files held out ({result["held_out_bits_per_byte"]:.3f} bits per byte).
- Licence of the data: the Python Software Foundation's and others', in `LICENSE-PYTHON.txt`. It accompanies
  the weights because they may reproduce parts of what they were trained on.

{blocks}"""
    (directory / "README.md").write_text(text)
