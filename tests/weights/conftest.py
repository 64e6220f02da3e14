"""A toy model whose parameter tree and checkpoint are spelled out by hand, independent of the rules under test."""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.config.model import ModelConfig, RopeConfig

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 11, 6, 2, 3, 1, 4, 5
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    ffn_size=FFN,
    max_positions=32,
    rope=RopeConfig(rotary_dim=HEAD_DIM),
    windows=(None,) * LAYERS,
)


def leaf_shapes(config):
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "norms": (2, HIDDEN),
        "qkv": (q + 2 * kv, HIDDEN),
        "o": (HIDDEN, q),
        "gate_up": (2 * FFN, HIDDEN),
        "down": (HIDDEN, FFN),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (q + 2 * kv,)
    if config.o_bias:
        layer["o_bias"] = (HIDDEN,)
    if config.qk_norm:
        layer["qk_norm"] = (2, HEAD_DIM)
    if config.mlp_bias:
        layer |= {"gate_up_bias": (2 * FFN,), "down_bias": (HIDDEN,)}
    tree = {
        "embed": (VOCAB, HIDDEN),
        "final_norm": (HIDDEN,),
        "layers": (layer,) * config.num_layers,
    }
    return tree if config.tie_embeddings else tree | {"lm_head": (VOCAB, HIDDEN)}


@dataclass(frozen=True)
class Toy:
    """Answers what the loader asks of a model."""

    config: ModelConfig

    def param_shapes(self, dtype):
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype),
            leaf_shapes(self.config),
            is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
        )

    def few_bits_leaves(self):
        names = ("qkv", "o", "gate_up", "down")
        return frozenset(
            f"layers.{layer}.{name}" for layer in range(self.config.num_layers) for name in names
        )


def checkpoint_tensors(config, dtype=np.float32):
    rng = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        for name, count in rows.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (count, HIDDEN)
            if config.qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (count,)
            if config.qk_norm and name != "v":
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (HEAD_DIM,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if config.o_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (HIDDEN,)
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        if config.mlp_bias:
            shapes |= {f"{at}.mlp.{name}_proj.bias": (FFN,) for name in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.bias"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_raw(path, header, data=b"", *, length=None):
    """Writes a safetensors file with any header: text, bytes, or an object to be dumped as JSON."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    encoded = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)


FORMAT_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"} | {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
}


def layout(tensors):
    """Returns the header and the data of a safetensors file that holds the tensors in the given order."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {
            "data_offsets": [len(data), len(data) + len(raw)],
            "shape": list(tensor.shape),
            "dtype": FORMAT_NAMES[tensor.dtype.name],
        }
        data += raw
    return header, data


def write_shards(directory: Path, tensors, count=3):
    """Writes the tensors over several files, and their index."""
    names = sorted(tensors)
    weight_map = {}
    for part in range(count):
        shard = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
        held = names[part::count]
        save_file({name: tensors[name] for name in held}, directory / shard)
        weight_map |= dict.fromkeys(held, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


class Kit:
    """What the tests of this folder build with; tests cannot import one another's helpers."""

    CONFIG = CONFIG
    Toy = Toy
    replace = staticmethod(replace)
    checkpoint_tensors = staticmethod(checkpoint_tensors)
    write_raw = staticmethod(write_raw)
    layout = staticmethod(layout)
    write_shards = staticmethod(write_shards)
    save_file = staticmethod(save_file)


@pytest.fixture
def kit():
    return Kit
