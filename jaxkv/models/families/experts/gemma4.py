"""Gemma 4 (Google): wider heads without a window, and in 26B-A4B experts beside a dense feed-forward.

E2B and E4B have embeddings of each layer, and their last layers attend to keys and values of earlier ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    kv_shared_attention,
    layer_rule,
    post_norms,
)
from jaxkv.weights.rules import Rule
from jaxkv.wording import shown

_POSITIONS, _VOCAB = 131072, 262144
_FULL_EVERY = 6
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}
_BESIDE = "dense_and_mixture"


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gemma4_text"."""
    ropes = raw.get("rope_parameters") or _ROPES
    keys = ConfigJson({**raw, "rope_parameters": ropes})
    # Transformers reads rope_parameters alone.
    require(keys, "gemma4_text", attention_bias=False, rope_scaling=None)
    if keys.take("use_bidirectional_attention", None) not in (None, "vision"):
        raise UnknownConfig(
            "config.json sets use_bidirectional_attention = "
            f"{shown(keys.take('use_bidirectional_attention'))}; only causal attention is supported"
        )
    # Transformers does not read it.
    keys.ignore("expert_intermediate_size")
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
    key_owners = _key_owners(keys, windows)
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
        pattern=_pattern(keys, windows, key_owners, has_experts=mixture is not None),
        key_owners=key_owners,
        mixture=mixture,
        qk_norm=True,
        value_norm=True,
        wide_norms=True,
        post_norms=True,
        layer_embedding_size=_layer_embedding_size(keys),
        layer_scalars=True,
        attention_scale=1.0,
        logit_cap=take_nullable_float(keys, "final_logit_softcapping", None),
        multipliers=Multipliers(embedding=keys.take_int("hidden_size") ** 0.5),
    )


def _layer_embedding_size(keys: ConfigJson) -> int:
    """Reads the width of each layer's embeddings; 0 for none, as in 26B-A4B and 31B."""
    size = _take_count(keys, "hidden_size_per_layer_input", 256)
    vocab_size = keys.take_int("vocab_size")
    own = keys.take_int("vocab_size_per_layer_input", _VOCAB, high=2**24)
    if size and own != vocab_size:
        raise UnknownConfig(
            f"config.json sets vocab_size_per_layer_input = {own} and vocab_size = {vocab_size}; for gemma4_text, only "
            "tables of the same ids are supported"
        )
    return size


def _take_count(keys: ConfigJson, name: str, default: int) -> int:
    """Returns a number that may be 0, as null is."""
    if keys.take(name, default) is None:
        return 0
    return keys.take_int(name, default, low=0, high=2**16)


def _key_owners(keys: ConfigJson, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the layer whose keys each layer attends to; () if each has its own.

    The last `num_kv_shared_layers` layers take those of the last layer before them with the same window.
    """
    count = _take_count(keys, "num_kv_shared_layers", 0)
    own = windows[: max(0, len(windows) - count)]
    lacking = {*windows} - {*own}
    if lacking:
        kind = "without" if None in lacking else "with"
        raise UnknownConfig(
            f"config.json sets num_kv_shared_layers = {count}, which leaves no layer {kind} a window before them whose "
            "keys they could take; give fewer"
        )
    last = {reach: layer for layer, reach in enumerate(own)}
    shared = tuple(last[reach] for reach in windows[len(own) :])
    return (*range(len(own)), *shared) if count else ()


def _pattern(
    keys: ConfigJson,
    windows: Sequence[int | None],
    key_owners: Sequence[int],
    *,
    has_experts: bool,
) -> tuple[tuple[str, str], ...]:
    """Returns the blocks of each layer; those with shared keys may have a feed-forward of twice the width."""
    has_double = keys.take_bool("use_double_wide_mlp", False)
    if has_double and has_experts and key_owners:
        raise UnknownConfig(
            "config.json sets use_double_wide_mlp and enable_moe_block; for gemma4_text, only one of them is "
            "supported"
        )
    layers = []
    for layer, reach in enumerate(windows):
        is_shared = bool(key_owners) and key_owners[layer] != layer
        attending = "kv_shared_" * is_shared + "global_" * (reach is None) + "attention"
        plain = "double_gated" if has_double and is_shared else "gated"
        layers.append((attending, _BESIDE if has_experts else plain))
    return tuple(layers)


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


_FEED_FORWARD = f"{LAYER}mlp"
_NORMS = {
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
    "expert_scales": "router.per_expert_scale",
}

_OF_LAYERS = {
    "layer_embed": "embed_tokens_per_layer.weight",
    "layer_embed_in": "per_layer_model_projection.weight",
    "layer_embed_norm": "per_layer_projection_norm.weight",
}
_IN_LAYERS = {
    "layer_gate": "per_layer_input_gate.weight",
    "layer_out": "per_layer_projection.weight",
    "layer_out_norm": "post_per_layer_input_norm.weight",
}
_EMBEDDED = ("has_layer_embeddings", True)
_ATTENTION = f"{LAYER}self_attn"
_KV_SHARED = ("kv_shared_attention", "kv_shared_global_attention")

_RULES = llama_rules(
    post_norms(
        f"{LAYER}post_attention_layernorm.weight", f"{LAYER}post_feedforward_layernorm.weight"
    ),
    *attention(_ATTENTION),
    *global_attention(_ATTENTION),
    *(rule for block in _KV_SHARED for rule in kv_shared_attention(_ATTENTION, block)),
    *gated(_FEED_FORWARD),
    *gated(_FEED_FORWARD, block="double_gated", size="double_ffn_size"),
    *gated(_FEED_FORWARD, block=_BESIDE),
    *gated_experts(LAYER.removesuffix("."), router="router.proj.weight", block=_BESIDE),
    *(layer_rule(leaf, name, block=_BESIDE, prefix=LAYER) for leaf, name in _NORMS.items()),
    *(Rule(leaf, (f"model.{name}",), when=_EMBEDDED) for leaf, name in _OF_LAYERS.items()),
    *(layer_rule(leaf, name, prefix=LAYER, when=_EMBEDDED) for leaf, name in _IN_LAYERS.items()),
    layer_rule("layer_scalar", "layer_scalar", prefix=LAYER),
    norm_names=("input_layernorm", "pre_feedforward_layernorm"),
)

# Checkpoints may hold keys and values of these layers too; Transformers ignores the same names.
_UNUSED = tuple(
    (block, rf"model\.layers\.(\d+)\.self_attn\.{part}\.weight")
    for block in _KV_SHARED
    for part in ("k_proj", "v_proj", "k_norm")
)

FAMILY = Family("gemma4_text", from_hf, replace(_RULES, unused=_UNUSED))
