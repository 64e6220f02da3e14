"""The model of `copycats` as a GLM-4.5, with a layer that predicts further tokens and knows it."""

import json

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.models.draft_heads.checkpoints import Verifier
from tests.models.draft_heads.copycats import CODE, CONSTANT, Sizes, arrays_of
from tests.models.families.cases import Case

_SIZES = Sizes(layers=2)
_WIDTH = _SIZES.width


def glm_with_mtp(folder):
    """Writes a model of two layers and the one behind them, and returns the model of Transformers."""
    options = {
        "num_hidden_layers": _SIZES.layers + 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": _SIZES.head_dim,
    }
    # The layer behind adds nothing either, so the model is the same with it.
    model = _knowing(Case("Glm4Moe", options, shape=_SIZES.config()))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    own = _layer_behind(tensors["model.norm.weight"].astype(np.float64))
    for name, value in own.items():
        tensors[f"model.layers.{_SIZES.layers}.{name}.weight"] = value.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": _SIZES.layers, "num_nextn_predict_layers": 1}
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][: _SIZES.layers]
    (folder / "config.json").write_text(json.dumps(config))
    return Verifier(model)


def _layer_behind(final):
    """Returns norms and projection of the layer: it puts the code of the embedding before that of the hidden state."""
    draw, code = np.random.default_rng(9), np.arange(CODE)
    beside, of_hidden = np.exp(draw.uniform(-1, 1, (2, _WIDTH)))
    # What the model's final norm makes of codes of 1s and of the constant.
    normed = final * (np.arange(_WIDTH) < 2 * CODE)
    normed[-1] = final[-1] * CONSTANT
    normed /= _SIZES.rms(2)
    join = np.zeros((_WIDTH, 2 * _WIDTH))
    join[code, code] = _SIZES.rms(1) / beside[code]
    join[-1, _WIDTH - 1] = _SIZES.rms(1) / beside[-1]
    join[CODE + code, _WIDTH + code] = np.sqrt((normed**2).mean()) / (of_hidden * normed)[code]
    return {"enorm": beside, "hnorm": of_hidden, "eh_proj": join, "shared_head.norm": final}


def _knowing(case):
    """Returns a model of Transformers of which only embedding, first attention, final norm and head do anything."""
    model = case.build()
    partial = (model.config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    embed, norm, head, projections = arrays_of(_SIZES, int(_SIZES.head_dim * partial))
    first = model.model.layers[0].self_attn
    values = {
        model.model.embed_tokens: embed,
        model.model.norm: norm,
        model.lm_head: head,
        **{getattr(first, f"{name}_proj"): weight for name, weight in projections.items()},
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            if "layernorm" in name:
                weight.fill_(1)
        for module, wanted in values.items():
            module.weight.copy_(torch.tensor(wanted))
    return model
