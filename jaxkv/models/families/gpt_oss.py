"""GPT-OSS: attention sinks, a window in every other layer, experts with biases and a clamped activation."""

from collections.abc import Mapping

from jaxkv.config.blocks import MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.llama_like import layer_windows, read_llama_like, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson

_SIZE = 2**31 - 1
_CLAMP = 7.0
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gpt_oss"; its experts may be stored in 4 bits (MXFP4)."""
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": _ROPE}
    keys = ConfigJson({"rope_theta": _ROPE["rope_theta"], **raw})
    # initial_context_length repeats a value of the rotary part.
    keys.ignore("output_router_logits router_aux_loss_coef initial_context_length")
    top_k = keys.take_int("num_experts_per_tok", 4, high=2**16)
    for key, wanted in (("experts_per_token", top_k), ("swiglu_limit", _CLAMP)):
        if keys.take(key, wanted) != wanted:
            raise UnknownConfig(
                f"config.json sets {key} = {str(keys.take(key))[:80]}; for gpt_oss, only {wanted} is supported"
            )
    biases = keys.take_bool("attention_bias", True)
    window = keys.take_int("sliding_window", 128, high=_SIZE)
    return read_llama_like(
        keys,
        "gpt_oss",
        architecture="GptOssForCausalLM",
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        max_positions=131072,
        windows=layer_windows(keys, window, full_every=2),
        pattern=(("attention", "mixture"),) * take_num_layers(keys),
        qkv_bias=biases,
        o_bias=biases,
        sinks=True,
        wide_norms=True,
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 128, high=2**16),
            top_k=top_k,
            size=keys.take_int("intermediate_size", high=_SIZE),
            gated=True,
            biases=True,
            clamp=_CLAMP,
        ),
    )
