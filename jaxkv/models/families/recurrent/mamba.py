"""Mamba without attention (Gu and Dao): one mixer per layer and nothing else."""

from collections.abc import Mapping

from jaxkv.config.blocks import Mamba1Config
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import check_architecture, require
from jaxkv.models.families.recurrent.mamba2 import read_mixers, take_inner
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU
from jaxkv.weights.rule_parts import BACKBONE, embeddings, mamba1, norms
from jaxkv.weights.rules import RuleSet


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mamba"."""
    keys = ConfigJson(raw)
    check_architecture(keys, "mamba", "MambaForCausalLM")
    keys.ignore("use_mambapy use_associative_scan time_step_scale time_step_init_scheme")
    keys.take_choice("hidden_act", "silu", SILU)
    hidden_size = keys.take_int("hidden_size", 768, high=2**20)
    channels = take_inner(keys, hidden_size)
    # Keys of the authors' own code, which the first published files repeat.
    require(keys, "mamba", d_inner=channels, rms_norm=True, ssm_cfg={})
    sizes = Mamba1Config(
        channels=channels,
        d_state=keys.take_int("state_size", 16, high=2**16),
        dt_rank=take_rank(keys, "time_step_rank", hidden_size),
        d_conv=keys.take_int("conv_kernel", 4, low=2, high=64),
        conv_bias=keys.take_bool("use_conv_bias", True),
        bias=keys.take_bool("use_bias", False),
    )
    return read_mixers(
        keys, "mamba", "mamba1", hidden_size, vocab_size=50280, tied=True, mamba1=sizes
    )


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
