"""A small Llama-shaped decoder in plain JAX for training, without a cache."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors.numpy import save_file

Params = dict[str, Array]


@dataclass(frozen=True)
class SmallLlama:
    """The sizes of one model; the embedding table is also the output projection."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 576
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024


def init_params(model: SmallLlama, key: PRNGKeyArray) -> Params:
    """Draws float32 weights under their Hugging Face names, every matrix as [out, in].

    The two matrices that write into the residual stream start smaller, by the number of their additions.
    """
    hidden, heads_size = model.hidden_size, model.num_heads * model.head_dim
    kv_size = model.num_kv_heads * model.head_dim
    residual_scale = 0.02 / np.sqrt(2 * model.num_layers)
    shapes = {"model.embed_tokens.weight": ((model.vocab_size, hidden), 0.02)}
    params = {"model.norm.weight": jnp.ones(hidden)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        params[prefix + "input_layernorm.weight"] = jnp.ones(hidden)
        params[prefix + "post_attention_layernorm.weight"] = jnp.ones(hidden)
        shapes |= {
            prefix + "self_attn.q_proj.weight": ((heads_size, hidden), 0.02),
            prefix + "self_attn.k_proj.weight": ((kv_size, hidden), 0.02),
            prefix + "self_attn.v_proj.weight": ((kv_size, hidden), 0.02),
            prefix + "self_attn.o_proj.weight": ((hidden, heads_size), residual_scale),
            prefix + "mlp.gate_proj.weight": ((model.ffn_size, hidden), 0.02),
            prefix + "mlp.up_proj.weight": ((model.ffn_size, hidden), 0.02),
            prefix + "mlp.down_proj.weight": ((hidden, model.ffn_size), residual_scale),
        }
    keys = jax.random.split(key, len(shapes))
    for (name, (shape, scale)), leaf_key in zip(shapes.items(), keys, strict=True):
        params[name] = float(scale) * jax.random.normal(leaf_key, shape)
    return params


def rms_norm(
    x: Float[Array, "batch tokens hidden"], weight: Float[Array, " hidden"], eps: float
) -> Float[Array, "batch tokens hidden"]:
    """Divides by the root mean square in float32, as Hugging Face's Llama does, and scales."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight[None, None, :] * (wide * scale).astype(x.dtype)


def rotate(
    x: Float[Array, "batch tokens heads head_dim"], theta: float
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotates each pair of components (i, i + head_dim / 2) by its position's angle (Hugging Face's order)."""
    tokens, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def drop(
    x: Float[Array, "batch tokens hidden"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "batch tokens hidden"]:
    """Dropout; without a key, the identity."""
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def attention(
    model: SmallLlama, weights: Params, x: Float[Array, "batch tokens hidden"]
) -> Float[Array, "batch tokens hidden"]:
    """Causal grouped-query attention over whole sequences; `weights` holds one layer's matrices."""
    split = (*x.shape[:2], -1, model.head_dim)
    q, k, v = ((x @ weights[f"self_attn.{name}_proj.weight"].T).reshape(split) for name in "qkv")
    q, k = rotate(q, model.rope_theta), rotate(k, model.rope_theta)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*x.shape[:2], -1) @ weights["self_attn.o_proj.weight"].T


def feed_forward(
    weights: Params, x: Float[Array, "batch tokens hidden"]
) -> Float[Array, "batch tokens hidden"]:
    """SwiGLU: silu(gate) * up, projected back down."""
    gate, up = x @ weights["mlp.gate_proj.weight"].T, x @ weights["mlp.up_proj.weight"].T
    return (jax.nn.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def forward(
    model: SmallLlama,
    params: Params,
    token_ids: Int[Array, "batch tokens"],
    *,
    dtype: DTypeLike = jnp.float32,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch tokens vocab"]:
    """Computes every position's next-token logits in float32; layers run in `dtype`."""
    params = {name: leaf.astype(dtype) for name, leaf in params.items()}
    keys = [None] * (2 * model.num_layers + 1)
    if key is not None:
        keys = list(jax.random.split(key, len(keys)))
    x = drop(params["model.embed_tokens.weight"][token_ids], dropout, keys[-1])
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        weights = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        normed = rms_norm(x, weights["input_layernorm.weight"], model.norm_eps)
        x = x + drop(attention(model, weights, normed), dropout, keys[2 * layer])
        normed = rms_norm(x, weights["post_attention_layernorm.weight"], model.norm_eps)
        x = x + drop(feed_forward(weights, normed), dropout, keys[2 * layer + 1])
    x = rms_norm(x, params["model.norm.weight"], model.norm_eps)
    table = params["model.embed_tokens.weight"]
    return jnp.einsum("bth,vh->btv", x, table, preferred_element_type=jnp.float32)


def save_hf(model: SmallLlama, params: Params, directory: Path, *, dtype: str = "bfloat16") -> None:
    """Writes config.json, generation_config.json and model.safetensors as Hugging Face would name them."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": dtype,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arrays = {name: np.asarray(leaf).astype(numpy_dtype) for name, leaf in params.items()}
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
