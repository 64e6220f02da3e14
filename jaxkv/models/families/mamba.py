"""Mamba without attention (Gu and Dao): one mixer per layer and nothing else."""

from collections.abc import Mapping

from jaxkv.config.blocks import Mamba1Config
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import check_architecture, take_dtype, take_num_layers
from jaxkv.models.families.mamba2 import MAX_POSITIONS
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU
from jaxkv.weights.rule_parts import BACKBONE, embeddings, mamba1, norms
from jaxkv.weights.rules import RuleSet

_SIZE = 2**31 - 1


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mamba"."""
    keys = ConfigJson(raw)
    check_architecture(keys, "mamba", "MambaForCausalLM")
    keys.ignore("use_mambapy use_associative_scan time_step_scale time_step_init_scheme")
    keys.take_choice("hidden_act", "silu", SILU)
    hidden_size = keys.take_int("hidden_size", 768, high=2**20)
    vocab_size = keys.take_int("vocab_size", 50280, high=_SIZE)
    num_layers = take_num_layers(keys)
    channels = keys.take_int("expand", 2, high=2**16) * hidden_size
    keys.settle("intermediate_size", channels)
    config = ModelConfig(
        family="mamba",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        heads=1,
        kv_heads=1,
        head_dim=2,
        ffn_size=1,
        max_positions=MAX_POSITIONS,
        rope=RopeConfig(rotary_dim=2, kind="none"),
        windows=(None,) * num_layers,
        pattern=(("mamba1",),) * num_layers,
        norm_eps=keys.take_float("layer_norm_epsilon", 1e-5),
        tie_embeddings=keys.take_bool("tie_word_embeddings", True),
        wide_residual=keys.take_bool("residual_in_fp32", True),
        mamba1=Mamba1Config(
            channels=channels,
            d_state=keys.take_int("state_size", 16, high=2**16),
            dt_rank=take_rank(keys, "time_step_rank", hidden_size),
            d_conv=keys.take_int("conv_kernel", 4, low=2, high=64),
            conv_bias=keys.take_bool("use_conv_bias", True),
            bias=keys.take_bool("use_bias", False),
        ),
        eos_ids=keys.take_ids("eos_token_id", vocab_size),
        bos_id=next(iter(keys.take_ids("bos_token_id", vocab_size)), None),
        dtype=take_dtype(keys),
    )
    keys.finish()
    return config


def take_rank(keys: ConfigJson, key: str, hidden_size: int) -> int:
    """Returns the rank of the step sizes; "auto" is a sixteenth of the hidden size, rounded up."""
    if keys.take(key, "auto") == "auto":
        return -(-hidden_size // 16)
    return keys.take_int(key, high=2**16)


_RULES = RuleSet(
    rules=(
        *embeddings("backbone.embeddings.weight", "backbone.norm_f.weight"),
        norms(f"{BACKBONE}norm.weight"),
        *mamba1(f"{BACKBONE}mixer"),
    ),
    tied=(("lm_head.weight", "backbone.embeddings.weight"),),
)

FAMILY = Family("mamba", from_hf, _RULES)
