"""Falcon-H1 (TII): attention and Mamba-2 in parallel in every layer, with constant factors of most activations."""

from collections.abc import Mapping

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.families.recurrent.bamba import BAMBA_RULES
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import BAMBA_KEYS, read_mamba


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "falcon_h1"."""
    keys = ConfigJson(raw)
    # Transformers reads the width of the MLP from intermediate_size alone.
    keys.ignore("mlp_expansion_factor")
    if not keys.take_bool("mamba_use_mlp", True):
        raise UnknownConfig(
            "config.json sets mamba_use_mlp = False; only layers with an MLP are supported"
        )
    num_layers = take_num_layers(keys)
    hidden_size = keys.take_int("hidden_size")
    heads = keys.take_int("num_attention_heads")
    expanded = keys.take_int("mamba_expand", 2, high=2**16) * hidden_size
    normalised = keys.take_bool("mamba_rms_norm", False)
    out_bias = keys.take_bool("projectors_bias", False)
    mamba = read_mamba(
        keys,
        BAMBA_KEYS,
        d_inner=take_nullable_int(keys, "mamba_d_ssm", 1024) or expanded,
        in_bias=keys.take_bool("mamba_proj_bias", False),
        out_bias=out_bias,
        norm_groups=-1 if normalised else 0,
        gate_first=not keys.take_bool("mamba_norm_before_gate", True),
    )
    gate, down = keys.take_floats("mlp_multipliers", (1.0, 1.0))
    sections = keys.take_floats("ssm_multipliers", (1.0,) * 5)
    before = keys.take_float("ssm_in_multiplier", 1.0)
    if mamba.in_bias and before != 1.0:
        raise UnknownConfig(
            f"config.json sets mamba_proj_bias and ssm_in_multiplier = {before}; only one of both is "
            "supported"
        )
    head_dim = take_nullable_int(keys, "head_dim", None) or hidden_size // heads
    return read_llama_like(
        keys,
        "falcon_h1",
        architecture="FalconH1ForCausalLM",
        kv_heads=8,
        max_positions=8192,
        norm_eps=1e-5,
        mlp_bias=keys.take_bool("mlp_bias", False),
        # Scores are linear in the keys, so the factor of keys can be applied to the scores.
        attention_scale=head_dim**-0.5 * keys.take_float("key_multiplier", 1.0),
        pattern=(("mamba2+attention", "gated"),) * num_layers,
        mamba=mamba,
        multipliers=Multipliers(
            embedding=keys.take_float("embedding_multiplier", 1.0),
            logits=keys.take_float("lm_head_multiplier", 1.0),
            attention_in=keys.take_float("attention_in_multiplier", 1.0),
            attention_out=keys.take_float("attention_out_multiplier", 1.0),
            gate=gate,
            down=down,
            ssm_in=tuple(before * section for section in sections),
            ssm_out=keys.take_float("ssm_out_multiplier", 1.0),
        ),
        **attention_biases(keys),
    )


FAMILY = Family("falcon_h1", from_hf, BAMBA_RULES)
