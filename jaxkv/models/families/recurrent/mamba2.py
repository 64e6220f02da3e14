"""Mamba-2 without attention (Dao and Gu): one mixer per layer and nothing else."""

from collections.abc import Mapping

from jaxkv.config.blocks import Mamba1Config, MambaConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    check_architecture,
    take_dtype,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import MambaKeys, read_mamba
from jaxkv.models.hf_config.special_ids import take_special_ids
from jaxkv.weights.rule_parts import BACKBONE, embeddings, mamba2, norms
from jaxkv.weights.rules import RuleSet

MAX_POSITIONS = 2**20
"""Longest supported sequence in tokens; the model itself has no limit."""

_KEYS = MambaKeys(
    heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    d_state=("state_size", 128),
    d_conv=("conv_kernel", 4),
    groups=("n_groups", 8),
    chunk_size=("chunk_size", 256),
    conv_bias=("use_conv_bias", True),
    activation=("hidden_act", "silu"),
)


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mamba2"."""
    keys = ConfigJson(raw)
    check_architecture(keys, "mamba2", "Mamba2ForCausalLM")
    if not keys.take_bool("rms_norm", True):
        raise UnknownConfig(
            "config.json sets rms_norm = False; mixers without a norm are not supported"
        )
    # Transformers ignores this key and always gates before the norm.
    keys.ignore("norm_before_gate")
    bias = keys.take_bool("use_bias", False)
    hidden_size = keys.take_int("hidden_size", 4096, high=2**20)
    d_inner = take_inner(keys, hidden_size)
    mamba = read_mamba(keys, _KEYS, d_inner=d_inner, in_bias=bias, out_bias=bias)
    return read_mixers(keys, "mamba2", "mamba2", hidden_size, vocab_size=32768, mamba=mamba)


def take_inner(keys: ConfigJson, hidden_size: int) -> int:
    """Returns the mixers' inner width, a multiple of the hidden size."""
    d_inner = keys.take_int("expand", 2, high=2**16) * hidden_size
    keys.settle("intermediate_size", d_inner)
    return d_inner


def read_mixers(
    keys: ConfigJson,
    family: str,
    block: str,
    hidden_size: int,
    *,
    vocab_size: int,
    tied: bool = False,
    mamba: MambaConfig | None = None,
    mamba1: Mamba1Config | None = None,
) -> ModelConfig:
    """Reads the other keys of a model that has one mixer per layer, without attention and feed-forwards.

    Args:
        keys: config.json, from which the family has read its own keys.
        family: its `model_type`.
        block: name of the mixers' block.
        hidden_size: width of the residual stream.
        vocab_size: Transformers' default.
        tied: Transformers' default for tied embeddings.
        mamba: sizes of Mamba-2 mixers.
        mamba1: sizes of Mamba mixers.
    """
    vocab_size = keys.take_int("vocab_size", vocab_size)
    num_layers = take_num_layers(keys)
    config = ModelConfig(
        family=family,
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
        pattern=((block,),) * num_layers,
        norm_eps=keys.take_float("layer_norm_epsilon", 1e-5),
        tie_embeddings=keys.take_bool("tie_word_embeddings", tied),
        wide_residual=keys.take_bool("residual_in_fp32", True),
        **take_special_ids(keys, family, vocab_size),
        dtype=take_dtype(keys),
        mamba=mamba,
        mamba1=mamba1,
    )
    keys.finish()
    return config


_RULES = RuleSet(
    rules=(
        *embeddings("backbone.embeddings.weight", "backbone.norm_f.weight"),
        norms(f"{BACKBONE}norm.weight"),
        *mamba2(f"{BACKBONE}mixer"),
    ),
    tied=(("lm_head.weight", "backbone.embeddings.weight"),),
)

FAMILY = Family("mamba2", from_hf, _RULES)
