"""Tiny random Hugging Face models, one for each family and each option, with their logits and greedy tokens."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import transformers

from jaxkv.models.registry import build_model, load_config, load_params

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that logits differ by whole units, so that an error is not hidden in the tolerance.
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """One tiny model.

    Attributes:
        name: of the family's classes in transformers, such as "Llama".
        options: config keys beside `shape`.
        seed: draws weights and prompt; chosen so that greedy decoding has clear winners.
        shape: config keys that cases share.
        around_zero: substrings of the names of norms that multiply by one plus their weight.
        model: name of its class in transformers; `None` for `name` with "ForCausalLM" appended.
    """

    name: str
    options: dict = field(default_factory=dict)
    seed: int = 0
    shape: dict = field(default_factory=lambda: SHAPE)
    around_zero: tuple = ()
    model: str | None = None

    def config(self):
        return getattr(transformers, f"{self.name}Config")(**(self.shape | self.options))

    def build(self):
        """Returns the model in float32; norms and biases are drawn too, or they would hide their own absence."""
        torch.manual_seed(self.seed)
        config = self.config()
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model or f"{self.name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1 or name.endswith("_bias"):
                    zero = "norm" not in name or any(part in name for part in self.around_zero)
                    weight.normal_(mean=0.0 if zero else 1.0, std=0.2)
            for name, buffer in model.named_buffers():
                if "correction" in name or "expert_bias" in name:
                    buffer.normal_(std=0.2)
                if "layer_scalar" in name:
                    buffer.normal_(mean=1.0, std=0.2)
        return model

    def prompt(self, length, *, offset=0):
        draw = torch.Generator().manual_seed(1000 * self.seed + offset)
        return torch.randint(0, SHAPE["vocab_size"], (length,), generator=draw).tolist()


def rope(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | keys}


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "rope_parameters": None}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
# The last three layers take keys of the third and of the second one. Two and four devices can divide the ids.
OF_LAYERS = {
    "vocab_size": 200,
    "num_hidden_layers": 6,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "full")
    ],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 200,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
    "attention_multiplier": 0.2,
}
MIXTRAL = {
    "num_hidden_layers": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
}
QWEN_EXPERTS = {
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GLM_EXPERTS = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
SMALL = {"num_hidden_layers": 2, "pad_token_id": None}
WINDOWS = ["sliding_attention", "full_attention"]
LONGROPE = {
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.3, 1.4, 2.0],
        "long_factor": [1.1, 1.4, 2.1, 5.9, 9.0, 20.0],
    },
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LOOKING = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
STRETCHED = {"original_max_position_embeddings": 32, "factor": 4.0}

CASES = {
    "llama": Case("Llama", seed=1),
    "llama-theta": Case("Llama", rope("default", rope_theta=500000.0)),
    "llama-biases-tied": Case(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "llama-one-kv-head": Case("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama-linear": Case("Llama", rope("linear", factor=4.0) | {"max_position_embeddings": 32}),
    "llama-dynamic": Case("Llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 32}),
    "llama3": Case("Llama", rope("llama3", **STRETCHED, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama-yarn": Case("Llama", rope("yarn", **STRETCHED)),
    "llama-yarn-mscale": Case(
        "Llama",
        rope("yarn", **STRETCHED, mscale=0.7, mscale_all_dim=1.4, beta_fast=8.0, truncate=False)
        | {"head_dim": 40},
    ),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral-window": Case("Mistral", {"sliding_window": 7}),
    "qwen2": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen2-yarn": Case("Qwen2", rope("yarn", **STRETCHED, attention_factor=1.3)),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3-bias-window-tied": Case(
        "Qwen3",
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "mistral-window-yarn": Case(
        "Mistral", rope("yarn", **STRETCHED) | {"sliding_window": 12, "head_dim": 20}
    ),
    "qwen2-layer-types": Case(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": Case(
        "Granite",
        SMALL
        | GRANITE_FACTORS
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "seed-oss": Case(
        "SeedOss", SMALL | {"head_dim": 20, "attention_out_bias": True, "mlp_bias": True}
    ),
    "smollm3": Case(
        "SmolLM3",
        SMALL | {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2},
        seed=2,
    ),
    "smollm3-flags": Case(
        "SmolLM3",
        SMALL
        | {
            "head_dim": 24,
            "no_rope_layers": [0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": Case("Phi3", SMALL | {"sliding_window": 9, "tie_word_embeddings": True}, seed=1),
    "phi3-longrope": Case("Phi3", SMALL | LONGROPE),
    "mistral3": Case(
        "Mistral3",
        {
            "text_config": SHAPE
            | SMALL
            | {"model_type": "mistral", "sliding_window": 11, "head_dim": 20},
            "vision_config": VISION | {"model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
        shape={},
        model="Mistral3ForConditionalGeneration",
        seed=4,
    ),
    "ministral3": Case(
        "Ministral3",
        SMALL
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
        | {"sliding_window": 21, "head_dim": 20},
    ),
    "arcee": Case("Arcee", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "ernie4.5": Case("Ernie4_5", SMALL | {"head_dim": 24, "use_bias": True}),
    "ernie4.5-moe": Case(
        "Ernie4_5_Moe",
        SMALL
        | {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
    ),
    "mistral-small-4": Case(
        "Mistral3",
        {
            "text_config": SHAPE
            | SMALL
            | rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            )
            | {
                "model_type": "mistral4",
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
                "moe_intermediate_size": 24,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "first_k_dense_replace": 1,
                "head_dim": 24,
            },
            "vision_config": VISION | {"model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
        shape={},
        model="Mistral3ForConditionalGeneration",
    ),
    "glm": Case("Glm", SMALL | {"head_dim": 16, "attention_bias": False}),
    "glm-proportional": Case(
        "Glm", SMALL | rope("proportional", partial_rotary_factor=0.5) | {"head_dim": 16}
    ),
    "glm4": Case("Glm4", SMALL | {"head_dim": 24}),
    "olmo2": Case("Olmo2", SMALL | {"attention_bias": True}, seed=1),
    "olmo3": Case(
        "Olmo3",
        SMALL
        | {
            "sliding_window": 7,
            "layer_types": WINDOWS,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0} | STRETCHED,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        seed=1,
    ),
    "exaone4": Case(
        "Exaone4", SMALL | {"head_dim": 20, "sliding_window": 7, "layer_types": WINDOWS}
    ),
    "exaone4-without-windows": Case(
        "Exaone4", SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "cohere": Case("Cohere", SMALL | {"logit_scale": 0.5}),
    "cohere2": Case(
        "Cohere2",
        SMALL
        | {
            "sliding_window": 7,
            "layer_types": WINDOWS,
            "attention_bias": True,
            "logit_scale": 0.5,
        },
    ),
    "hunyuan": Case(
        "HunYuanDenseV1",
        rope("dynamic", alpha=50.0, factor=1.0) | SMALL | {"head_dim": 20},
    ),
    "gemma": Case("Gemma", SMALL | {"head_dim": 24}, around_zero=("norm",)),
    "gemma-untied": Case(
        "Gemma",
        SMALL
        | {
            "head_dim": 20,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
        },
        around_zero=("norm",),
        seed=1,
    ),
    "gemma2": Case("Gemma2", GEMMA | {"sliding_window": 7}, around_zero=("norm",)),
    "gemma2-bias-untied": Case(
        "Gemma2",
        GEMMA
        | {
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        around_zero=("norm",),
    ),
    "gemma3": Case(
        "Gemma3Text",
        GEMMA | {"sliding_window": 6, "num_hidden_layers": 6, "final_logit_softcapping": 20.0},
        around_zero=("norm",),
        model="Gemma3ForCausalLM",
    ),
    "gemma3-stretched": Case(
        "Gemma3Text",
        GEMMA
        | {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        around_zero=("norm",),
        model="Gemma3ForCausalLM",
    ),
    "gemma3-multimodal": Case(
        "Gemma3",
        {
            "text_config": SHAPE | GEMMA | SMALL | {"sliding_window": 6, "layer_types": WINDOWS},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
        shape={},
        around_zero=("norm",),
        model="Gemma3ForConditionalGeneration",
    ),
    "gemma4": Case(
        "Gemma4Text",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 20.0,
        },
        model="Gemma4ForCausalLM",
    ),
    "gemma4-dense": Case(
        "Gemma4Text", GEMMA4 | {"tie_word_embeddings": False}, model="Gemma4ForCausalLM"
    ),
    "gemma4-shared-keys": Case(
        "Gemma4Text",
        GEMMA4 | OF_LAYERS | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        model="Gemma4ForCausalLM",
    ),
    "gemma4-layer-embeddings": Case(
        "Gemma4Text", GEMMA4 | OF_LAYERS | {"num_kv_shared_layers": 0}, model="Gemma4ForCausalLM"
    ),
    "gemma4-shared-keys-experts": Case(
        "Gemma4Text",
        GEMMA4
        | OF_LAYERS
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
        | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        model="Gemma4ForCausalLM",
    ),
    "gemma4-e2b": Case(
        "Gemma4",
        {
            "text_config": SHAPE
            | GEMMA4
            | OF_LAYERS
            | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1},
            "vision_config": VISION
            | {"head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16}
            | {"num_key_value_heads": 2},
            "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        },
        shape={},
        model="Gemma4ForConditionalGeneration",
    ),
    "gemma4-multimodal": Case(
        "Gemma4",
        {
            "text_config": SHAPE
            | GEMMA4
            | {"final_logit_softcapping": 20.0, "use_bidirectional_attention": "vision"},
            "vision_config": VISION
            | {"head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16}
            | {"num_key_value_heads": 2},
            "audio_config": None,
        },
        shape={},
        model="Gemma4ForConditionalGeneration",
    ),
    "gpt-oss": Case(
        "GptOss",
        rope("yarn", **STRETCHED, truncate=False)
        | {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
        },
    ),
    "mixtral": Case("Mixtral", MIXTRAL),
    "mixtral-window-tied": Case(
        "Mixtral", MIXTRAL | {"sliding_window": 7, "head_dim": 20, "tie_word_embeddings": True}
    ),
    "minimax-m2": Case(
        "MiniMaxM2", MIXTRAL | rope("default", partial_rotary_factor=0.5) | {"head_dim": 20}
    ),
    "olmoe": Case(
        "Olmoe",
        SMALL
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "attention_bias": True,
        },
    ),
    "qwen2-moe": Case(
        "Qwen2Moe",
        QWEN_EXPERTS
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3-moe": Case("Qwen3Moe", QWEN_EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-moe-step-window": Case(
        "Qwen3Moe",
        QWEN_EXPERTS
        | {
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl": Case(
        "Qwen3VL",
        {
            "text_config": SHAPE | SMALL | {"head_dim": 16, "rope_parameters": MROPE},
            "vision_config": LOOKING,
            "tie_word_embeddings": True,
        },
        shape={},
        model="Qwen3VLForConditionalGeneration",
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoe",
        {
            "text_config": SHAPE
            | QWEN_EXPERTS
            | {"head_dim": 16, "rope_parameters": MROPE, "mlp_only_layers": [0]},
            "vision_config": LOOKING,
            "tie_word_embeddings": False,
        },
        shape={},
        model="Qwen3VLMoeForConditionalGeneration",
    ),
    "granite-moe": Case("GraniteMoe", MIXTRAL | GRANITE_FACTORS | {"tie_word_embeddings": True}),
    "granite-moe-shared": Case(
        "GraniteMoeShared",
        MIXTRAL | GRANITE_FACTORS | {"shared_intermediate_size": 40, "attention_bias": True},
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        GLM_EXPERTS
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 20,
        },
    ),
    "glm4-moe-plain": Case(
        "Glm4Moe",
        GLM_EXPERTS
        | rope("default", partial_rotary_factor=0.25)
        | {"n_shared_experts": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}
SLOW = (
    "arcee",
    "cohere",
    "ernie4.5",
    "exaone4-without-windows",
    "gemma2-bias-untied",
    "gemma3",
    "gemma3-multimodal",
    "gemma4-dense",
    "gemma4-layer-embeddings",
    "gemma4-multimodal",
    "gemma4-shared-keys",
    "gemma4-shared-keys-experts",
    "gemma-untied",
    "glm",
    "glm-proportional",
    "glm4-moe-plain",
    "granite-moe-shared",
    "llama-biases-tied",
    "llama-dynamic",
    "llama-linear",
    "llama-theta",
    "llama-yarn",
    "mistral",
    "mistral-window",
    "mistral-window-yarn",
    "mixtral-window-tied",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2-moe",
    "qwen2-window",
    "qwen2-yarn",
    "qwen3",
    "qwen3-moe-step-window",
    "qwen3-vl",
    "smollm3-flags",
)
"""Cases of a family with another case whose options are further ones, or ones that another case combines.

Multimodal Gemma 3 gives the tokens of Transformers in test_prefix_reuse.py.
"""


@torch.no_grad()
def logits(model, tokens, *, chunks=None):
    """Returns the logits of every position [tokens, vocab], computed in one go or in chunks over a cache."""
    pieces, past, start = [], None, 0
    for size in chunks or (len(tokens),):
        scores, past = _forward(model, tokens[start : start + size], past, start)
        start += size
        pieces.append(scores)
    return torch.cat(pieces).numpy()


def far(got, wanted):
    """Returns how far the two are apart where they differ most."""
    return np.max(np.abs(got - wanted))


def maker(cases, folders):
    """Returns what makes a case's Hugging Face model and ours, with its parameters read from a directory, once each.

    Args:
        cases: by name.
        folders: pytest's `tmp_path_factory`.
    """

    @cache
    def make(name):
        case = cases[name]
        theirs = case.build()
        directory = folders.mktemp(name)
        theirs.save_pretrained(directory)
        model = build_model(load_config(directory))
        return case, theirs, model, load_params(directory, model, dtype="float32", progress=False)

    return make


@torch.no_grad()
def greedy(model, tokens, steps):
    """Returns the next `steps` most likely tokens, and the smallest lead any of them had over the second."""
    scores, past = _forward(model, tokens, None, 0)
    chosen, leads = [], []
    for step in range(steps):
        best = scores[-1].topk(2)
        chosen.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
        scores, past = _forward(model, chosen[-1:], past, len(tokens) + step)
    return chosen, min(leads)


def _forward(model, tokens, past, start):
    """Returns the logits of new tokens and the cache after them."""
    name = "cache_params" if model.config.model_type in ("mamba", "mamba2") else "past_key_values"
    # Said, because not every family counts on from its cache by itself.
    positions = torch.arange(start, start + len(tokens))[None]
    ids = torch.tensor([tokens])
    out = model(input_ids=ids, position_ids=positions, use_cache=True, **{name: past})
    return out.logits[0], out[name]
