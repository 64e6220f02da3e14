"""A model whose next token depends on the last two, and an EAGLE-3 head that knows it, so all its drafts are right.

A token's embedding has a code of -1s and 1s and a constant. The first layer attends to the token before and puts its
code beside; no other layer adds anything. The logits are a random function of both codes. A head gets the code of the
token before from the hidden state, so a wrong hidden state or a wrong norm makes wrong drafts.
"""

import json
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.draft_heads.eagle3_files import SMALL, save_eagle3

CODE, CONSTANT = 24, 4.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; `drafted` of the ids are chosen often, which are those that the head can draft."""

    width: int = SMALL["hidden_size"]
    heads: int = 4
    ffn: int = SMALL["intermediate_size"]
    vocab: int = SMALL["vocab_size"]
    drafted: int = 160
    layers: int = 4

    @property
    def head_dim(self):
        return self.width // self.heads

    def rms(self, codes):
        """Returns the root of the mean square of so many codes and the constant."""
        return np.sqrt((codes * CODE + CONSTANT**2) / self.width)

    def config(self):
        return SMALL | {
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
        }


def arrays_of(sizes, rotary):
    """Returns embedding, final norm, output head, and the projections of the first attention by name."""
    draw, code = np.random.default_rng(7), np.arange(CODE)
    embed, head = np.zeros((2, sizes.vocab, sizes.width))
    embed[:, :CODE] = draw.choice((-1.0, 1.0), (sizes.vocab, CODE))
    embed[:, -1] = CONSTANT
    head[: sizes.drafted, : 2 * CODE] = 0.3 * draw.standard_normal((sizes.drafted, 2 * CODE))
    query, key, value, out = np.zeros((4, sizes.width, sizes.width))
    for weight, distance in ((query, 0), (key, 1)):
        weight[:, -1] = facing(distance, sizes, rotary) * sizes.rms(1)
    value[code, code] = sizes.rms(1)
    out[CODE + code, code] = 1
    norm = np.exp(draw.uniform(-1, 1, sizes.width))
    return embed, norm, head, {"q": query, "k": key, "v": value, "o": out}


def facing(distance, sizes, rotary):
    """Returns queries (distance 0) or keys of all heads; rotation lets a query see the key at this distance best."""
    half = rotary // 2
    angles = distance * 10000.0 ** (-np.arange(half) / half)
    vector = np.zeros(sizes.head_dim)
    vector[:half], vector[half:rotary] = np.cos(angles), np.sin(angles)
    return np.tile(24.0 / CONSTANT * vector, sizes.heads)


def llama(folder, sizes=Sizes(), **config):
    """Writes the model as a Llama; `config` has further keys."""
    folder.mkdir(parents=True)
    embed, norm, head, projections = arrays_of(sizes, sizes.head_dim)
    tensors = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": norm,
        "lm_head.weight": head,
    }
    shapes = {"gate": (sizes.ffn, sizes.width), "up": (sizes.ffn, sizes.width)}
    shapes["down"] = sizes.width, sizes.ffn
    for layer in range(sizes.layers):
        parts = {f"mlp.{name}_proj": np.zeros(shape) for name, shape in shapes.items()}
        for name, weight in projections.items():
            parts[f"self_attn.{name}_proj"] = weight * (layer == 0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            parts[name] = np.ones(sizes.width)
        tensors |= {f"model.layers.{layer}.{name}.weight": one for name, one in parts.items()}
    keys = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    keys |= sizes.config() | {"num_hidden_layers": sizes.layers, "torch_dtype": "float32"} | config
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(_in_float32(tensors), folder / "model.safetensors")


def eagle3(folder, model, sizes=Sizes()):
    """Writes the head of the model in a directory."""
    stored, width = load_file(model / "model.safetensors"), sizes.width
    draw = np.random.default_rng(8)
    beside, of_hidden = np.exp(draw.uniform(-1, 1, (2, width)))
    tensors = {
        "fc.weight": np.tile(np.eye(width) / 3, 3),
        "norm.weight": stored["model.norm.weight"],
        "lm_head.weight": stored["lm_head.weight"][: sizes.drafted],
        "midlayer.input_layernorm.weight": beside,
        "midlayer.hidden_norm.weight": of_hidden,
        "midlayer.post_attention_layernorm.weight": np.ones(width),
        "d2t": np.zeros(sizes.drafted, np.int64),
        "t2d": np.arange(sizes.vocab) < sizes.drafted,
    }
    query, key, value = np.zeros((3, width, 2 * width))
    query[:, width - 1] = key[:, width - 1] = (
        facing(0, sizes, sizes.head_dim) * sizes.rms(1) / beside[-1]
    )
    code, both = np.arange(CODE), np.arange(2 * CODE)
    # The stream has the codes of tokens t and t - 1, and gets those of t + 1 and t.
    value[code, code] = sizes.rms(1) / beside[:CODE]
    value[CODE + code, width + code] = sizes.rms(2) / of_hidden[:CODE]
    value[both, width + both] -= sizes.rms(2) / of_hidden[both]
    out = np.zeros((width, width))
    out[both, both] = 1
    for name, weight in {"q": query, "k": key, "v": value, "o": out}.items():
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = weight
    shapes = {"gate": (sizes.ffn, width), "up": (sizes.ffn, width), "down": (width, sizes.ffn)}
    for name, shape in shapes.items():
        tensors[f"midlayer.mlp.{name}_proj.weight"] = np.zeros(shape)
    config = sizes.config() | {"draft_vocab_size": sizes.drafted}
    save_eagle3(folder, _in_float32(tensors), **config)


def _in_float32(tensors):
    """Returns the tensors with floats of 32 bits."""
    return {
        name: value.astype(np.float32) if value.dtype.kind == "f" else value
        for name, value in tensors.items()
    }
