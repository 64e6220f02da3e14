"""Families on the GPU kernels in bfloat16 are as near to float32 as on XLA's products.

Head sizes are those that the kernels support; depth and width are small.
"""

from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import init_cache
from jaxkv.models.implementation import _batch
from jaxkv.models.registry import FAMILIES, build_model, read_config
from pallas_kernels import device
from pallas_kernels.argument_weights import EARLY, argument_weights, computed_weights
from pallas_kernels.dispatch import fallbacks
from pallas_kernels.mosaic import jax_versions
from tests.models.driver import Driver

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = SHAPE | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
GROUPS = {"q_lora_rank": 128, "n_group": 4, "topk_group": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 64}
DELTA = {"head_dim": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPARSE = LATENT | GROUPS | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 64}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1] * 24,
    "long_factor": [3.0] * 24,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
BESIDE = {
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 128,
}
LOOKING = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
GROWING = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    }
}
CASES = {
    "llama": ("Llama", SHAPE | {"head_dim": 64}, "bfloat16"),
    "mistral": ("Mistral", SHAPE | {"head_dim": 128, "sliding_window": 64}, "bfloat16"),
    "qwen2": ("Qwen2", SHAPE | {"num_attention_heads": 4}, "bfloat16"),
    "qwen3": ("Qwen3", SHAPE | {"head_dim": 128}, "bfloat16"),
    "gemma2": ("Gemma2", SHAPE | {"head_dim": 256, "sliding_window": 64}, "bfloat16"),
    "gemma3": (
        "Gemma3Text",
        SHAPE | {"head_dim": 256, "sliding_window": 64, "layer_types": WINDOWS},
        "bfloat16",
    ),
    "gemma": ("Gemma", SHAPE | {"head_dim": 256}, "bfloat16"),
    "gemma3, multimodal": (
        "Gemma3",
        {
            "text_config": SHAPE | {"head_dim": 256, "sliding_window": 64, "layer_types": WINDOWS},
            "vision_config": VISION,
        },
        "bfloat16",
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": SHAPE | {"model_type": "mistral", "head_dim": 128},
            "vision_config": VISION | {"model_type": "pixtral"},
        },
        "bfloat16",
    ),
    "mistral3, ministral": (
        "Mistral3",
        {
            "text_config": SHAPE | {"model_type": "ministral3", "head_dim": 128} | GROWING,
            "vision_config": VISION | {"model_type": "pixtral"},
        },
        "bfloat16",
    ),
    "mistral4": (
        "Mistral4",
        LATENT
        | {"kv_lora_rank": 256, "q_lora_rank": 128, "qk_nope_head_dim": 64, "n_group": 1}
        | {"topk_group": 1}
        | GROWING,
        "bfloat16",
    ),
    "ministral3": ("Ministral3", SHAPE | {"head_dim": 128} | GROWING, "bfloat16"),
    "arcee": ("Arcee", SHAPE | {"head_dim": 128}, "bfloat16"),
    # Five query heads for each of keys.
    "ernie4.5": ("Ernie4_5", SHAPE | {"num_attention_heads": 10, "head_dim": 128}, "bfloat16"),
    "granite": (
        "Granite",
        SHAPE
        | {"num_attention_heads": 4, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
        | {"attention_multiplier": 0.02, "logits_scaling": 2.0},
        "bfloat16",
    ),
    "phi3": (
        "Phi3",
        SHAPE
        | {"num_attention_heads": 4, "sliding_window": 64, "partial_rotary_factor": 0.75}
        | {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "bfloat16",
    ),
    "smollm3": (
        "SmolLM3",
        SHAPE | {"head_dim": 64, "no_rope_layers": [1, 0, 1]},
        "bfloat16",
    ),
    "seed-oss": ("SeedOss", SHAPE | {"head_dim": 64}, "bfloat16"),
    "glm": ("Glm", SHAPE | {"head_dim": 128}, "bfloat16"),
    "glm4": ("Glm4", SHAPE | {"head_dim": 64}, "bfloat16"),
    "olmo2": ("Olmo2", SHAPE | {"num_attention_heads": 4}, "bfloat16"),
    "olmo3": (
        "Olmo3",
        SHAPE | {"num_attention_heads": 4, "sliding_window": 64, "layer_types": WINDOWS},
        "bfloat16",
    ),
    "exaone4": (
        "Exaone4",
        SHAPE | {"head_dim": 64, "sliding_window": 64, "layer_types": WINDOWS},
        "bfloat16",
    ),
    "cohere": ("Cohere", SHAPE | {"num_attention_heads": 4}, "bfloat16"),
    "cohere2": (
        "Cohere2",
        SHAPE | {"num_attention_heads": 4, "sliding_window": 64, "layer_types": WINDOWS},
        "bfloat16",
    ),
    "hunyuan": ("HunYuanDenseV1", SHAPE | {"head_dim": 64}, "bfloat16"),
    "gemma4": (
        "Gemma4Text",
        SHAPE | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1} | BESIDE,
        "bfloat16",
    ),
    "gemma4, multimodal": (
        "Gemma4",
        {
            "text_config": SHAPE | GEMMA4,
            "vision_config": VISION
            | {"head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16}
            | {"num_key_value_heads": 2},
        },
        "bfloat16",
    ),
    "gemma4, shared keys": (
        "Gemma4Text",
        SHAPE
        | GEMMA4
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"layer_types": GEMMA4["layer_types"] * 2, "num_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512},
        "bfloat16",
    ),
    "gpt-oss": (
        "GptOss",
        SHAPE
        | {"head_dim": 64, "sliding_window": 64, "layer_types": WINDOWS}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128},
        "bfloat16",
    ),
    "mixtral": (
        "Mixtral",
        SHAPE | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
        "bfloat16",
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        SHAPE
        | {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 128}
        | {"num_attention_heads": 4},
        "bfloat16",
    ),
    "minimax-m2": (
        "MiniMaxM2",
        SHAPE
        | {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128}
        | {"head_dim": 128}
        | {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        "bfloat16",
    ),
    "olmoe": (
        "Olmoe",
        SHAPE
        | {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128}
        | {"num_attention_heads": 2},
        "bfloat16",
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        SHAPE
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 256, "num_attention_heads": 4},
        "bfloat16",
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        SHAPE
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
        | {"head_dim": 64, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "bfloat16",
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {"text_config": SHAPE | {"head_dim": 128}, "vision_config": LOOKING},
        "bfloat16",
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "text_config": SHAPE
            | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
            | {"head_dim": 64, "mlp_only_layers": [0]},
            "vision_config": LOOKING,
        },
        "bfloat16",
    ),
    "granite-moe": (
        "GraniteMoe",
        SHAPE
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128}
        | {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0}
        | {"num_attention_heads": 4},
        "bfloat16",
    ),
    "granite-moe, shared expert": (
        "GraniteMoeShared",
        SHAPE
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128}
        | {"shared_intermediate_size": 128, "num_attention_heads": 4},
        "bfloat16",
    ),
    "glm-4.5": (
        "Glm4Moe",
        SHAPE
        | {"head_dim": 128, "use_qk_norm": True, "attention_bias": True}
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
        "bfloat16",
    ),
    "kimi-k2, 64 heads": (
        "DeepseekV3",
        LATENT
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 128}
        | {"n_group": 1, "topk_group": 1},
        "bfloat16",
    ),
    "moonlight": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        "bfloat16",
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        LATENT
        | {"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 128}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256},
        "bfloat16",
    ),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | {"q_lora_rank": None}, "bfloat16"),
    "deepseek-v3, 128 heads": (
        "DeepseekV3",
        LATENT | GROUPS | {"num_attention_heads": 128, "num_key_value_heads": 128},
        "bfloat16",
    ),
    "deepseek-v3.2": ("DeepseekV32", SPARSE, "bfloat16"),
    "deepseek-v3.2, 128 heads, bytes": (
        "DeepseekV32",
        SPARSE | {"num_attention_heads": 128, "num_key_value_heads": 128},
        "fp8",
    ),
    "glm-5": (
        "GlmMoeDsa",
        SPARSE
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32},
        "bfloat16",
    ),
    "kimi-k2.5": (
        "Kimi_K25",
        {
            "text_config": LATENT
            | {"model_type": "deepseek_v3", "q_lora_rank": 128, "n_group": 1, "topk_group": 1},
            "vision_config": {key: VISION[key] for key in VISION if key != "image_size"},
        },
        "bfloat16",
    ),
    "granite-4-tiny": (
        "GraniteMoeHybrid",
        SHAPE
        | MAMBA
        | {"layer_types": ["mamba", "attention", "mamba"], "num_attention_heads": 4}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 128}
        | {"shared_intermediate_size": 256},
        "bfloat16",
    ),
    "bamba": (
        "Bamba",
        SHAPE | MAMBA | {"attn_layer_indices": [1], "num_attention_heads": 4},
        "bfloat16",
    ),
    "nemotron-h": (
        "NemotronH",
        {name: value for name, value in SHAPE.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "head_dim": 64}
        | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "chunk_size": 64}
        | {"n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
        | {"topk_group": 2, "moe_intermediate_size": 128}
        | {"moe_shared_expert_intermediate_size": 128},
        "bfloat16",
    ),
    "qwen3-next": (
        "Qwen3Next",
        SHAPE
        | DELTA
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 128},
        "bfloat16",
    ),
    "kimi-linear": (
        "KimiLinear",
        {name: value for name, value in LATENT.items() if name != "n_routed_experts"}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_num_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 4}
        | {"q_lora_rank": None},
        "bfloat16",
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        SHAPE | DELTA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        "bfloat16",
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
        | DELTA
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 128},
        "bfloat16",
    ),
    "mamba": (
        "Mamba",
        {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        "bfloat16",
    ),
    "mamba2": (
        "Mamba2",
        {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        | {"num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 2, "chunk_size": 64}
        | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        "bfloat16",
    ),
    "jamba": (
        "Jamba",
        SHAPE
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 8}
        | {"num_attention_heads": 4, "use_mamba_kernels": False},
        "bfloat16",
    ),
    "zamba2": (
        "Zamba2",
        SHAPE
        | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_key_value_heads": 8}
        | {"n_mamba_heads": 8, "adapter_rank": 16, "use_mem_rope": True}
        | {"use_shared_attention_adapter": True},
        "bfloat16",
    ),
    "lfm2": (
        "Lfm2",
        SHAPE | {"layer_types": ["conv", "full_attention", "conv"], "num_attention_heads": 4},
        "bfloat16",
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        SHAPE
        | {"layer_types": ["conv", "full_attention", "conv"], "num_attention_heads": 4}
        | {"num_dense_layers": 1, "num_experts": 8, "moe_intermediate_size": 128},
        "bfloat16",
    ),
    "falcon-h1": ("FalconH1", SHAPE | MAMBA | {"mamba_d_ssm": 512, "head_dim": 64}, "bfloat16"),
}
# Other names of families that are here: the same blocks with other weight names or a wrapper.
ALIASES = {"kimi_k2", "qwen3_5", "qwen3_5_moe", "qwen3_vl_text", "qwen3_vl_moe_text"}
PROMPTS = (150, 33, 90)


def scores(model, params, cache_dtype):
    """Returns the logits of two prefills, the second one behind cached tokens, and of four decode steps."""
    driver = Driver(
        model, params, page_size=64, max_tokens=256, step_tokens=320, cache_dtype=cache_dtype
    )
    draw = np.random.default_rng(0)
    found = driver.prefill([draw.integers(0, 512, length).tolist() for length in PROMPTS])
    found += driver.prefill([draw.integers(0, 512, length).tolist() for length in (5, 40, 1)])
    found += [driver.decode(draw.integers(0, 512, 3).tolist()) for _ in range(4)]
    return np.concatenate(found).astype(np.float64)


def test_every_family_is_here():
    tried = {getattr(transformers, f"{family}Config").model_type for family, *_ in CASES.values()}
    assert set(FAMILIES) - tried == ALIASES


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_our_kernels_are_as_near_to_float32_as_xla(name):
    """In bfloat16 both round alike, and may choose another expert or key where two are nearly equal."""
    family, options, cache_dtype = CASES[name]
    config = getattr(transformers, f"{family}Config")(**deepcopy(options)).to_dict()
    model = build_model(read_config(config | {"torch_dtype": "bfloat16"}))
    drawn = model.init_params(jax.random.key(1), jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 and len(leaf) > 2 else leaf, drawn)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    right = scores(model.running("xla"), wide, "float32")
    told = [key for key in fallbacks() if key[0] == "grouped_matmul"]
    off = {}
    for implementation in ("mosaic_gpu", "xla"):
        # XLA would copy pools of fp8; that its bytes are right other tests say.
        found = scores(model.running(implementation), params, cache_dtype)
        off[implementation] = np.sqrt(np.mean((found - right) ** 2) / np.var(right))
    print(f"{name}: off by {off}")
    assert np.all(np.isfinite(right))
    assert [key for key in fallbacks() if key[0] == "grouped_matmul"] == told
    assert off["xla"] < 0.3
    assert off["mosaic_gpu"] < 1.3 * off["xla"] + 0.01


QUICK = ("llama", "gpt-oss", "deepseek-v3.2", "qwen3-next", "falcon-h1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_no_family_computes_a_weight(name, monkeypatch):
    """Their kernels may copy weights before the kernel before has ended."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    monkeypatch.setattr(jax_versions, "OVERLAPS_LAUNCHES", True)
    family, options, cache_dtype = CASES[name]
    config = getattr(transformers, f"{family}Config")(**deepcopy(options)).to_dict()
    model = build_model(read_config(config | {"torch_dtype": "bfloat16"})).running("mosaic_gpu")
    layout = group_layers(model.cache_specs(page_size=64, dtype=cache_dtype))
    cache = init_cache(layout, {group.name: 9 for group in layout.groups})
    batch = _batch(layout, 2, decode=True)

    def step(params):
        return model.logits(params, model.forward(params, cache, batch)[1])

    with argument_weights():
        traced = jax.make_jaxpr(step)(model.param_shapes("bfloat16"))
    assert computed_weights(traced.jaxpr, [True] * len(traced.jaxpr.invars)) == set()
    assert EARLY in str(traced)
