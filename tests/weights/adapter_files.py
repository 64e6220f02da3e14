"""Adapters in PEFT's layout with random factors, written for tests."""

import json

import numpy as np
from safetensors.numpy import save_file


def save_adapter(folder, shapes, *, rank=4, alpha=8, seed=0, size=0.1, **config):
    """Writes an adapter of some modules; returns what it adds to the weight of each, in float64, by PEFT's formula.

    Args:
        folder: is made.
        shapes: module -> (outputs, inputs).
        rank: rank of each module, or module -> rank.
        alpha: `lora_alpha`.
        seed: draws the factors.
        size: standard deviation of the factors.
        config: further keys of adapter_config.json.
    """
    draw = np.random.default_rng(seed)
    tensors, added = {}, {}
    for name, (outputs, inputs) in shapes.items():
        its_rank = rank if isinstance(rank, int) else rank[name]
        inner = draw.normal(size=(its_rank, inputs), scale=size).astype(np.float32)
        outer = draw.normal(size=(outputs, its_rank), scale=size).astype(np.float32)
        tensors[f"base_model.model.{name}.lora_A.weight"] = inner
        tensors[f"base_model.model.{name}.lora_B.weight"] = outer
        scale = alpha / (its_rank**0.5 if config.get("use_rslora") else its_rank)
        added[name] = scale * outer.astype(np.float64) @ inner.astype(np.float64)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "r": rank if isinstance(rank, int) else max(rank.values())}
    keys |= {"lora_alpha": alpha, "target_modules": sorted({n.split(".")[-1] for n in shapes})}
    (folder / "adapter_config.json").write_text(json.dumps(keys | config))
    return added
