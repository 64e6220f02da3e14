"""EAGLE-3 heads as files in their published layout."""

import json

import numpy as np
from safetensors.numpy import save_file

VOCAB, WIDTH = 199, 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_eagle3(folder, tensors, **config):
    """Writes a head; `config` replaces keys of a head with the sizes here."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **SMALL,
    } | config
    # As published heads say of their training.
    keys["max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(tensors, folder / "model.safetensors")
    return keys


def eagle3_tensors(seed, *, width=WIDTH, target=WIDTH, drafted=VOCAB, vocab=VOCAB, own_embed=False):
    """Returns random tensors of a head in the published layout; `drafted` of the ids can be drafted."""
    draw = np.random.default_rng(seed)
    ffn, keys = 96, width // 2

    def matrix(*shape):
        return (0.15 * draw.standard_normal(shape)).astype(np.float32)

    shapes = {
        "fc": (width, 3 * target),
        "lm_head": (drafted, width),
        "midlayer.self_attn.q_proj": (width, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, width),
        "midlayer.mlp.gate_proj": (ffn, width),
        "midlayer.mlp.up_proj": (ffn, width),
        "midlayer.mlp.down_proj": (width, ffn),
    } | ({"embed_tokens": (vocab, width)} if own_embed else {})
    tensors = {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    layer_norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in layer_norms)):
        tensors[f"{name}.weight"] = (1 + 0.2 * draw.standard_normal(width)).astype(np.float32)
    if drafted < vocab:
        ids = np.sort(draw.choice(vocab, drafted, replace=False))
        tensors |= {"d2t": ids - np.arange(drafted), "t2d": np.isin(np.arange(vocab), ids)}
    return tensors
