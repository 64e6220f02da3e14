"""Models whose next token depends on the last two, and heads that know it, so that all their drafts are right.

A token's embedding has a code of -1s and 1s and a constant. The first layer attends to the token before and puts its
code beside; no other layer adds anything. The logits are a random function of both codes. A head gets the code of the
token before from the hidden state, so a wrong hidden state or a wrong norm makes wrong drafts.
"""

import json

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.models.draft_heads.checkpoints import SMALL, VOCAB, WIDTH, Verifier, save_eagle3
from tests.models.families.cases import Case

CODE, CONSTANT, HEADS = 24, 4.0, 4
HEAD_DIM = WIDTH // HEADS
DRAFTED = 160
_SHAPE = SMALL | {"num_key_value_heads": HEADS}
# Roots of mean squares: of an embedding, whose components are the code and the constant, and of both codes with it.
_ONE_CODE, _TWO_CODES = (np.sqrt((codes * CODE + CONSTANT**2) / WIDTH) for codes in (1, 2))


def llama(folder):
    """Writes the model as a Llama of four layers, and returns it."""
    model = _knowing(Case("Llama", {"num_hidden_layers": 4}, shape=_SHAPE))
    model.save_pretrained(folder)
    return Verifier(model)


def eagle3(folder, model):
    """Writes an EAGLE-3 head of the model in a directory; it cannot draft some of the ids, which are rarely chosen."""
    stored = load_file(model / "model.safetensors")
    draw = np.random.default_rng(8)
    beside, of_hidden = (np.exp(draw.uniform(-1, 1, WIDTH)) for _ in range(2))
    tensors = {
        "fc.weight": np.tile(np.eye(WIDTH) / 3, 3),
        "norm.weight": stored["model.norm.weight"],
        "lm_head.weight": stored["lm_head.weight"][:DRAFTED],
        "midlayer.input_layernorm.weight": beside,
        "midlayer.hidden_norm.weight": of_hidden,
        "midlayer.post_attention_layernorm.weight": np.ones(WIDTH),
        "d2t": np.zeros(DRAFTED, np.int64),
        "t2d": np.arange(VOCAB) < DRAFTED,
    }
    query, key, value, out = np.zeros((4, WIDTH, 2 * WIDTH))
    last = WIDTH - 1
    for weight, direction in ((query, _at(0)), (key, _at(0))):
        weight[:, last] = np.tile(direction, HEADS) * _ONE_CODE / beside[last]
    code, other = np.arange(CODE), WIDTH + np.arange(CODE)
    # The stream has the codes of tokens t and t - 1, and gets those of t + 1 and t.
    value[code, code] = _ONE_CODE / beside[:CODE]
    value[code, other] = -_TWO_CODES / of_hidden[:CODE]
    value[CODE + code, other] = _TWO_CODES / of_hidden[:CODE]
    value[CODE + code, CODE + other] = -_TWO_CODES / of_hidden[CODE : 2 * CODE]
    both = np.arange(2 * CODE)
    out[both, both] = 1
    projections = {"q": query, "k": key, "v": value, "o": out[:, :WIDTH]}
    tensors |= {f"midlayer.self_attn.{name}_proj.weight": one for name, one in projections.items()}
    shapes = {"gate": (96, WIDTH), "up": (96, WIDTH), "down": (WIDTH, 96)}
    tensors |= {f"midlayer.mlp.{name}_proj.weight": np.zeros(one) for name, one in shapes.items()}
    floats = {
        name: value.astype(np.float32) if value.dtype.kind == "f" else value
        for name, value in tensors.items()
    }
    save_eagle3(folder, floats, draft_vocab_size=DRAFTED, num_key_value_heads=HEADS)


def glm_with_mtp(folder):
    """Writes the model as a GLM-4.5 of two layers, with a layer behind them that predicts further tokens.

    Returns the model.
    """
    options = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": HEAD_DIM,
    }
    model = _knowing(Case("Glm4Moe", options, shape=_SHAPE))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(9)
    beside, of_hidden = (np.exp(draw.uniform(-1, 1, WIDTH)) for _ in range(2))
    final = tensors["model.norm.weight"].astype(np.float64)
    # What the final norm makes of codes of 1s and of the constant.
    normed = final * np.where(np.arange(WIDTH) < 2 * CODE, 1.0, 0.0) / _TWO_CODES
    normed[-1] = final[-1] * CONSTANT / _TWO_CODES
    square = (normed**2).sum()
    join, code = np.zeros((WIDTH, 2 * WIDTH)), np.arange(CODE)
    join[code, code] = _ONE_CODE / beside[:CODE]
    join[-1, WIDTH - 1] = _ONE_CODE / beside[-1]
    join[CODE + code, WIDTH + code] = np.sqrt(square / WIDTH) / (of_hidden * normed)[:CODE]
    own = {"enorm": beside, "hnorm": of_hidden, "eh_proj": join, "shared_head.norm": final}
    for name, value in own.items():
        tensors[f"model.layers.2.{name}.weight"] = value.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(config))
    # Its third layer adds nothing.
    return Verifier(model)


def _knowing(case):
    """Returns a model of Transformers of which only embedding, first attention, final norm and head do anything."""
    model = case.build()
    draw = np.random.default_rng(7)
    embed = np.zeros((VOCAB, WIDTH))
    embed[:, :CODE] = draw.choice((-1.0, 1.0), (VOCAB, CODE))
    embed[:, -1] = CONSTANT
    head = np.zeros((VOCAB, WIDTH))
    head[:DRAFTED, : 2 * CODE] = 0.3 * draw.standard_normal((DRAFTED, 2 * CODE))
    partial = getattr(model.config, "rope_parameters", None) or {}
    rotary = int(HEAD_DIM * partial.get("partial_rotary_factor", 1.0))
    value, out = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, WIDTH))
    code = np.arange(CODE)
    value[code, code] = _ONE_CODE
    out[CODE + code, code] = 1
    query, key = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, WIDTH))
    query[:, -1], key[:, -1] = (
        np.tile(_at(distance, rotary), HEADS) * _ONE_CODE for distance in (0, 1)
    )
    first = model.model.layers[0].self_attn
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            if "layernorm" in name:
                weight.fill_(1)
        values = {
            first.q_proj.weight: query,
            first.k_proj.weight: key,
            first.v_proj.weight: value,
            first.o_proj.weight: out,
            model.model.embed_tokens.weight: embed,
            model.model.norm.weight: np.exp(draw.uniform(-1, 1, WIDTH)),
            model.lm_head.weight: head,
        }
        for weight, wanted in values.items():
            weight.copy_(torch.tensor(wanted))
    return model


def _at(distance, rotary=HEAD_DIM):
    """Returns a head's query (distance 0) or key, of which a query sees the key at this distance best, by rotation."""
    half = rotary // 2
    angles = distance * 10000.0 ** (-np.arange(half) / half)
    vector = np.zeros(HEAD_DIM)
    vector[:half], vector[half:rotary] = np.cos(angles), np.sin(angles)
    return 24.0 / CONSTANT * vector
