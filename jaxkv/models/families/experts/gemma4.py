"""Gemma 4 (Google), 26B-A4B and 31B: wider heads without a window, and experts beside a dense feed-forward."""

from collections.abc import Mapping, Sequence

from jaxkv.config.blocks import MAX_EXPERTS, GlobalAttentionConfig, MixtureConfig, Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    layer_windows,
    llama_rules,
    read_llama_like,
    require,
    take_nullable_float,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_ropes
from jaxkv.weights.rule_parts import (
    LAYER,
    attention,
    gated,
    gated_experts,
    global_attention,
    layer_rule,
    post_norms,
)
from jaxkv.wording import shown

_POSITIONS = 131072
_FULL_EVERY = 6
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}
_EMBEDDED = "hidden_size_per_layer_input"


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gemma4_text"."""
    ropes = raw.get("rope_parameters") or _ROPES
    keys = ConfigJson({_EMBEDDED: 256, **raw, "rope_parameters": ropes})
    _refuse_small_models(keys)
    # Transformers reads rope_parameters alone.
    require(keys, "gemma4_text", attention_bias=False, rope_scaling=None)
    if keys.take("use_bidirectional_attention", None) not in (None, "vision"):
        raise UnknownConfig(
            "config.json sets use_bidirectional_attention = "
            f"{shown(keys.take('use_bidirectional_attention'))}; only causal attention is supported"
        )
    # Of models with embeddings or keys that layers share, and of training.
    keys.ignore("vocab_size_per_layer_input use_double_wide_mlp expert_intermediate_size")
    windows = _windows(keys)
    sizes = _global_sizes(keys, windows)
    full, windowed = read_ropes(
        keys,
        head_dim=keys.take_int("head_dim", 256, high=2**16),
        full_head_dim=sizes.head_dim,
        max_positions=keys.take_int("max_position_embeddings", _POSITIONS),
        theta=1e6,
        window_theta=1e4,
    )
    mixture = _mixture(keys)
    feed_forward = "gated" if mixture is None else "dense_and_mixture"
    return read_llama_like(
        keys,
        "gemma4_text",
        architecture=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        kv_heads=4,
        head_dim=256,
        max_positions=_POSITIONS,
        windows=windows,
        rope=full,
        window_rope=windowed,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        global_attention=sizes,
        pattern=tuple(
            ("global_attention" if reach is None else "attention", feed_forward)
            for reach in windows
        ),
        mixture=mixture,
        qk_norm=True,
        value_norm=True,
        wide_norms=True,
        post_norms=True,
        layer_scalars=True,
        attention_scale=1.0,
        logit_cap=take_nullable_float(keys, "final_logit_softcapping", None),
        multipliers=Multipliers(embedding=keys.take_int("hidden_size") ** 0.5),
    )


def _refuse_small_models(keys: ConfigJson) -> None:
    """Raises `UnknownConfig` for Gemma 4 E2B and E4B."""
    for name in (_EMBEDDED, "num_kv_shared_layers"):
        if keys.take(name, 0) not in (0, None):
            raise UnknownConfig(
                f"config.json sets {name} = {shown(keys.take(name))}; embeddings of each layer, and layers that share "
                "keys (Gemma 4 E2B and E4B) are not supported: take Gemma 4 26B-A4B or 31B, where both are 0"
            )


def _windows(keys: ConfigJson) -> tuple[int | None, ...]:
    """Returns the window of each layer; the last layer has none, also if the file names one."""
    windows = layer_windows(keys, keys.take_int("sliding_window", 512), full_every=_FULL_EVERY)
    return (*windows[:-1], None)


def _global_sizes(keys: ConfigJson, windows: Sequence[int | None]) -> GlobalAttentionConfig:
    """Reads the sizes of keys in layers without a window; Transformers writes them for each layer."""
    same = keys.take_bool("attention_k_eq_v", False)
    sizes = {
        "head_dim": keys.take_int("global_head_dim", 512, high=2**16),
        "num_key_value_heads": take_nullable_int(keys, "num_global_key_value_heads", None),
    }
    if keys.has("per_layer_config"):
        sizes = _equal_sizes(keys.take_object("per_layer_config"), windows)
    elif not same:
        sizes["num_key_value_heads"] = None
    return GlobalAttentionConfig(
        head_dim=sizes.get("head_dim") or keys.take_int("head_dim", 256, high=2**16),
        kv_heads=sizes.get("num_key_value_heads")
        or keys.take_int("num_key_value_heads", 4, high=2**16),
        keys_are_values=same,
    )


def _equal_sizes(
    layers: Mapping[str, object], windows: Sequence[int | None]
) -> dict[str, int | None]:
    """Returns the sizes that `per_layer_config` gives all layers without a window; raises if they differ."""
    full = [layer for layer, reach in enumerate(windows) if reach is None]
    parts = ConfigJson(layers, place="config.json: per_layer_config")
    # Transformers fills numbers up with zeros.
    given = {int(key): parts.take_object(key) for key in layers if key.isdecimal()}
    first, *others = (given.get(layer, {}) for layer in full)
    names = {"head_dim", "num_key_value_heads"}
    are_others = len(given) != len(layers) or given.keys() - {*full}
    if are_others or first.keys() - names or any(one != first for one in others):
        raise UnknownConfig(
            f"config.json: per_layer_config must give the {len(full)} layers without a window, and no others, the same "
            f"{' and '.join(sorted(names))}, got {shown(layers)}"
        )
    sizes = ConfigJson(first, place="config.json: per_layer_config")
    return {name: take_nullable_int(sizes, name, None) for name in names}


def _mixture(keys: ConfigJson) -> MixtureConfig | None:
    """Reads the sizes of the experts; returns `None` for a model without them."""
    if not keys.take_bool("enable_moe_block", False):
        keys.ignore("num_experts top_k_experts moe_intermediate_size")
        return None
    return MixtureConfig(
        experts=keys.take_int("num_experts", high=MAX_EXPERTS),
        top_k=keys.take_int("top_k_experts", high=MAX_EXPERTS),
        size=keys.take_int("moe_intermediate_size"),
        gated=True,
    )


_BESIDE = "dense_and_mixture"
_FEED_FORWARD = f"{LAYER}mlp"
_NORMS = {
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
    "expert_scales": "router.per_expert_scale",
}

_RULES = llama_rules(
    post_norms(
        f"{LAYER}post_attention_layernorm.weight", f"{LAYER}post_feedforward_layernorm.weight"
    ),
    *attention(f"{LAYER}self_attn"),
    *global_attention(f"{LAYER}self_attn"),
    *gated(_FEED_FORWARD),
    *gated(_FEED_FORWARD, block=_BESIDE),
    *gated_experts(LAYER.removesuffix("."), router="router.proj.weight", block=_BESIDE),
    *(layer_rule(leaf, name, block=_BESIDE, prefix=LAYER) for leaf, name in _NORMS.items()),
    layer_rule("layer_scalar", "layer_scalar", prefix=LAYER),
    norm_names=("input_layernorm", "pre_feedforward_layernorm"),
)

FAMILY = Family("gemma4_text", from_hf, _RULES)
