"""Keys of config.json and names of weights that Llama and similar families share; their files add the differences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from jaxkv.config.blocks import (
    DeltaConfig,
    GlobalAttentionConfig,
    Mamba1Config,
    MambaConfig,
    MixtureConfig,
    Multipliers,
    QueryGrowth,
    ShortConvConfig,
    TransformerConfig,
)
from jaxkv.config.model import MAX_LAYERS, ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import MtpNames
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_rope
from jaxkv.models.hf_config.special_ids import take_special_ids
from jaxkv.weights.rule_parts import LAYER, attention, embeddings, gated, norms
from jaxkv.weights.rules import Rule, RuleSet
from jaxkv.wording import shown

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
# Old checkpoints contain the rotary frequencies, which are computed from the config.
ROTARY_TABLES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
TIED = (("lm_head.weight", "model.embed_tokens.weight"),)

FURTHER_LAYERS = r"model\.layers\.(\d+)\."
"""Beginning of the names of layers, and of those after the last one that predict further tokens."""

MTP_AFTER_LAST = MtpNames(
    prefix="model.layers.{after}.",
    block="model.layers.{after}.",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    join="eh_proj.weight",
    final_norm="shared_head.norm.weight",
    ignored=(r"embed_tokens\.weight", r"shared_head\.head\.weight"),
)
"""Names of DeepSeek-V3's layer that predicts further tokens: it stands after the last one."""


def llama_rules(
    *blocks: Rule,
    norm_names: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    offset: float = 0.0,
    ignored: tuple[str, ...] = (),
    further_layers: str | None = None,
) -> RuleSet:
    """Returns the rules of a checkpoint that has Llama's names of embeddings, output head and norms.

    Args:
        *blocks: the rules of its blocks.
        norm_names: names of the norms of a layer's stages, in order.
        offset: number that is added to the stored weights of these norms and of the final one.
        ignored: see `RuleSet`; rotary tables are always ignored.
        further_layers: see `RuleSet`.
    """
    layer_norms = norms(*(f"{LAYER}{name}.weight" for name in norm_names), offset=offset)
    return RuleSet(
        rules=(
            *embeddings("model.embed_tokens.weight", "model.norm.weight", offset=offset),
            *((layer_norms,) if norm_names else ()),
            *blocks,
        ),
        ignored=(ROTARY_TABLES, *ignored),
        tied=TIED,
        further_layers=further_layers,
    )


LLAMA_BLOCKS = (*attention(f"{LAYER}self_attn"), *gated(f"{LAYER}mlp"))
LLAMA_RULES = llama_rules(*LLAMA_BLOCKS)
"""The weights of Llama, which other families have under the same names."""

_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}
_DTYPES |= {f"torch.{name}": name for name in _DTYPES}


class Differences(TypedDict, total=False):
    """The fields of `ModelConfig` that a family's file sets."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    layer_norms: bool
    pre_norms: bool
    qk_norm: bool
    wide_qk_norm: bool
    late_qk_norm: bool
    nope_layers: tuple[int, ...]
    attention_gate: bool
    unit_offset: bool
    wide_norms: bool
    post_norms: bool
    attention_cap: float | None
    logit_cap: float | None
    sinks: bool
    window_rope: RopeConfig | None
    global_attention: GlobalAttentionConfig | None
    value_norm: bool
    key_owners: tuple[int, ...]
    layer_embedding_size: int
    layer_scalars: bool
    delta: DeltaConfig | None
    mamba1: Mamba1Config | None
    short_conv: ShortConvConfig | None
    attention_scale: float | None
    query_growth: QueryGrowth | None
    pattern: tuple[tuple[str, ...], ...]
    owners: tuple[int, ...]
    mamba: MambaConfig | None
    transformer: TransformerConfig | None
    mixture: MixtureConfig | None
    mtp_layers: int
    multipliers: Multipliers


def read_llama_like(
    keys: ConfigJson,
    family: str,
    *,
    architecture: str | tuple[str, ...],
    kv_heads: int | None,
    max_positions: int,
    windows: Sequence[int | None] | None = None,
    head_dim: int | None = None,
    norm_key: str = "rms_norm_eps",
    norm_eps: float = 1e-6,
    ffn_key: str = "intermediate_size",
    partial: float | None = None,
    rope: RopeConfig | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    **differences: Unpack[Differences],
) -> ModelConfig:
    """Reads the keys that all these families share, and returns the model's config.

    Args:
        keys: config.json, from which the family has read its own keys.
        family: its `model_type`.
        architecture: name of its causal language model in `architectures`; several names if files differ.
        kv_heads: Transformers' default of this number; `None` for the number of heads.
        max_positions: Transformers' default.
        windows: for each layer, its window in tokens, or `None` for all tokens; by default, no layer has a window.
        head_dim: Transformers' default; `None` for the hidden size divided by the heads.
        norm_key: key of the norms' epsilon.
        norm_eps: Transformers' default.
        ffn_key: key of the dense feed-forward's width.
        partial: Transformers' default share of a head that is rotated; `None` if the family always rotates all of it.
        rope: the rotary embedding, if the family has read it; then it does not change `max_positions`.
        activation_key: key of the activation.
        activation: Transformers' default activation.
        tied: Transformers' default for tied embeddings.
        **differences: fields that the family sets.

    Raises:
        UnknownConfig: a key that would change the result was not read, or has an unsupported value.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    check_architecture(
        keys, family, *([architecture] if isinstance(architecture, str) else architecture)
    )
    vocab_size = keys.take_int("vocab_size")
    hidden_size = keys.take_int("hidden_size")
    heads = keys.take_int("num_attention_heads")
    head_dim = take_head_dim(keys, head_dim)
    limit = keys.take_int("max_position_embeddings", max_positions)
    longest = limit
    if rope is None:
        rope, longest = read_rope(keys, head_dim=head_dim, max_positions=limit, partial=partial)
    kv_heads = take_nullable_int(keys, "num_key_value_heads", kv_heads) or heads
    keys.settle("head_dim", head_dim)
    keys.settle("num_key_value_heads", kv_heads)
    if differences.get("qk_norm"):
        keys.settle("use_qk_norm", True)
    num_layers = take_num_layers(keys)
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=keys.take_int(ffn_key),
        max_positions=longest,
        rope=rope,
        windows=(None,) * num_layers if windows is None else tuple(windows),
        norm_eps=keys.take_float(norm_key, norm_eps),
        activation=keys.take_choice(activation_key, activation, ACTIVATIONS),
        tie_embeddings=keys.take_bool("tie_word_embeddings", tied),
        **take_special_ids(keys, family, vocab_size),
        dtype=take_dtype(keys),
        **differences,
    )
    keys.finish()
    return config


class AttentionBiases(TypedDict):
    """The fields of `ModelConfig` for the biases of attention's projections."""

    qkv_bias: bool
    o_bias: bool


def attention_biases(keys: ConfigJson, *, default: bool = False) -> AttentionBiases:
    """Reads `attention_bias`, which gives biases to all four projections or to none."""
    biased = keys.take_bool("attention_bias", default)
    return {"qkv_bias": biased, "o_bias": biased}


def without_rotation(config: ModelConfig) -> ModelConfig:
    """Returns a model's config without rotary embedding."""
    return replace(config, rope=RopeConfig(rotary_dim=config.rope.rotary_dim, kind="none"))


def check_architecture(keys: ConfigJson, family: str, *architectures: str) -> None:
    """Raises `UnknownConfig` if `architectures` is there without the family's causal language model.

    Upper and lower case are the same: the first checkpoints of Llama name LLaMAForCausalLM.
    """
    named = keys.take("architectures", None)
    known = [str(name).lower() for name in named] if isinstance(named, Sequence) else []
    if named is not None and not any(name.lower() in known for name in architectures):
        raise UnknownConfig(
            f"config.json sets architectures = {shown(named)}; for {family}, only {' or '.join(architectures)} is "
            "supported: take a checkpoint of the language model, not one of another task"
        )


def require(keys: ConfigJson, family: str, **values: object) -> None:
    """Raises `UnknownConfig` if one of these keys has another value, neither missing nor null."""
    for key, value in values.items():
        if keys.take(key, value) not in (value, None):
            raise UnknownConfig(
                f"config.json sets {key} = {shown(keys.take(key))}; for {family}, only {shown(value)} is supported"
            )


def take_num_layers(keys: ConfigJson) -> int:
    """Returns the number of layers, at most `MAX_LAYERS`."""
    return keys.take_int("num_hidden_layers", high=MAX_LAYERS)


def take_mtp_layers(keys: ConfigJson) -> int:
    """Returns the number of layers that predict further tokens; Transformers 5 and DeepSeek use different keys."""
    count = keys.take_int("num_nextn_predict_layers", 1, low=0, high=MAX_LAYERS)
    return keys.take_int("num_mtp_layers", count, low=0, high=MAX_LAYERS)


def take_nullable_int(keys: ConfigJson, key: str, default: int | None) -> int | None:
    """Returns a positive integer, or `None` for null."""
    return None if keys.take(key, default) is None else keys.take_int(key, default)


def layer_windows(
    keys: ConfigJson, window: int | None, *, full_layers: int = 0, full_every: int | None = None
) -> tuple[int | None, ...]:
    """Returns the window of each layer in tokens, or `None` for all tokens; `layer_types` takes precedence.

    Args:
        keys: config.json.
        window: window of the layers that have one; `None` if no layer has one.
        full_layers: number of first layers without a window.
        full_every: every `full_every`-th layer has no window; `None` if all others have one.

    Raises:
        UnknownConfig: `layer_types` has an unknown kind, names a window that is not given, or has the wrong length.
    """
    num_layers = take_num_layers(keys)
    windows = tuple(
        None if layer < full_layers or (full_every and (layer + 1) % full_every == 0) else window
        for layer in range(num_layers)
    )
    kinds = keys.take("layer_types", None)
    if kinds is None:
        return windows
    choices: dict[object, int | None] = {"full_attention": None}
    if window is not None:
        choices["sliding_attention"] = window
    named = [kind for kind in kinds if str(kind) in choices] if isinstance(kinds, list) else []
    if named != kinds or len(named) != num_layers:
        raise UnknownConfig(
            f"config.json: layer_types must name one of {', '.join(map(str, choices))} for each of the "
            f"{num_layers} layers, got {str(kinds)[:80]}"
        )
    return tuple(choices[kind] for kind in named)


def equal_windows(keys: ConfigJson, window: int | None, family: str) -> tuple[int | None, ...]:
    """Returns the same window for every layer; raises `UnknownConfig` if `layer_types` mixes windows."""
    windows = layer_windows(keys, window)
    if any(reach != window for reach in windows):
        raise UnknownConfig(
            f"config.json: layer_types mixes windows; for {family}, all layers must have the same one"
        )
    return windows


def take_nullable_float(keys: ConfigJson, key: str, default: float | None) -> float | None:
    """Returns a finite number, or `None` for null."""
    return None if keys.take(key, default) is None else keys.take_float(key, default)


def take_head_dim(keys: ConfigJson, default: int | None = None) -> int:
    """Returns the components of a head; without a default, the hidden size divided by the heads."""
    hidden_size = keys.take_int("hidden_size")
    heads = keys.take_int("num_attention_heads")
    given = take_nullable_int(keys, "head_dim", default)
    if given is None and hidden_size % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    return given or hidden_size // heads


def take_dtype(keys: ConfigJson) -> str:
    """Returns the checkpoint's dtype name, from `dtype` or Transformers 4's `torch_dtype`.

    Null means float32; for quantised checkpoints bfloat16, the dtype of their other tensors (GPT-OSS).

    Raises:
        UnknownConfig: the dtype is not supported, or the two keys contradict each other.
    """
    older = keys.take("torch_dtype", None)
    newer = keys.take("dtype", None)
    if newer is None and older is None:
        return "bfloat16" if keys.is_quantised else "float32"
    if None not in (newer, older) and newer != older:
        raise UnknownConfig(
            f"config.json sets dtype = {shown(newer)}, which contradicts torch_dtype = {shown(older)}"
        )
    return keys.take_choice("torch_dtype" if newer is None else "dtype", "float32", _DTYPES)
