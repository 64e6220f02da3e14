"""Zamba2 (Zyphra): Mamba-2 in every layer; some have a transformer block before it, whose weights they share."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Unpack

from jaxkv.config.blocks import MambaConfig, TransformerConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    TIED,
    read_llama_like,
    require,
    take_num_layers,
    without_rotation,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import MambaKeys, read_mamba, take_layer_kinds
from jaxkv.weights.rule_parts import (
    LAYER,
    RuleOptions,
    attention,
    embeddings,
    fused_gated,
    layer_rule,
    mamba2,
    norms,
)
from jaxkv.weights.rules import Rule, RuleSet
from jaxkv.wording import shown

_KEYS = MambaKeys(
    heads=("n_mamba_heads", 8),
    head_dim=("mamba_headdim", "auto"),
    d_state=("mamba_d_state", 64),
    d_conv=("mamba_d_conv", 4),
    groups=("mamba_ngroups", 1),
    chunk_size=("chunk_size", 256),
    conv_bias=("use_conv_bias", True),
    activation=("mamba_hidden_act", "silu"),
)
_OLDER = {
    "expansion_factor": "mamba_expand",
    "state_size": "mamba_d_state",
    "conv_dimension": "mamba_d_conv",
    "ffn_hidden_size": "intermediate_size",
    "lora_rank": "adapter_rank",
    "use_shared_block_lora": "use_shared_mlp_adapter",
    "use_shared_attention_lora": "use_shared_attention_adapter",
}
"""Key in Zyphra's files from before Transformers had the family -> key after that."""

_MAMBA, _HYBRID = ("mamba2",), ("transformer>mamba2",)
_KINDS = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "hybrid": _HYBRID,
    # Zyphra's first files.
    "m": _MAMBA,
    "g": _HYBRID,
}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "zamba2".

    Step sizes are bounded by `time_step_limit` only, in prefill and decode, as in training. Transformers also applies
    `time_step_min` as a lower bound, but in prefill only.
    """
    keys = ConfigJson(_renamed(raw))
    keys.ignore("use_mem_eff_path num_query_groups")
    num_layers = take_num_layers(keys)
    hidden_size = keys.take_int("hidden_size", high=2**20)
    heads = keys.take_int("num_attention_heads")
    head_dim, rest = divmod(2 * hidden_size, heads)
    if rest:
        raise ValueError(
            f"config.json: twice the hidden_size {hidden_size} must be a multiple of num_attention_heads {heads}"
        )
    kinds = keys.take("layers_block_type", None) or keys.take("layer_types", None)
    pattern = take_layer_kinds(kinds, num_layers, _KINDS)
    hybrid = [layer for layer, stages in enumerate(pattern) if stages == _HYBRID]
    require(
        keys,
        "zamba2",
        attention_hidden_size=2 * hidden_size,
        attention_head_dim=head_dim,
        head_dim=head_dim,
        kv_channels=hidden_size // heads,
        hybrid_layer_ids=hybrid,
        # The norms of the mixers have this epsilon whatever the key is.
        rms_norm_eps=1e-5,
        use_conv_bias=True,
        gated_linear_unit=True,
        ft_lora=False,
        use_shared_mlp_adapter=True,
        # It changed the base of the rotary frequencies in older versions of Transformers, and does not in newer ones.
        use_long_context=False,
        # Newer versions share no blocks otherwise, and older ones do.
        tie_word_embeddings=True,
    )
    bias = keys.take_bool("add_bias_linear", False)
    rotates = keys.take_bool("use_mem_rope", False)
    config = read_llama_like(
        keys,
        "zamba2",
        architecture="Zamba2ForCausalLM",
        kv_heads=None,
        max_positions=4096,
        head_dim=head_dim,
        norm_eps=1e-5,
        activation="gelu",
        tied=True,
        mlp_bias=bias,
        attention_scale=(head_dim / 2) ** -0.5,
        pattern=pattern,
        owners=_owners(hybrid, num_layers, keys.take_int("num_mem_blocks", 1, high=2**16)),
        mamba=_mamba(keys, hidden_size, bias=bias),
        transformer=_adapters(keys, heads),
    )
    if rotates:
        return config
    return without_rotation(config)


def _renamed(raw: Mapping[str, object]) -> dict[str, object]:
    """Returns the file with newer names of its keys; raises `UnknownConfig` if two names contradict each other.

    Zyphra's first files give the width of a mixer's head and not the number of heads. Transformers 5 adds its default
    number when it saves such a file again. So the default number is left out, and the width decides.
    """
    renamed = dict(raw)
    heads, default = _KEYS.heads
    if renamed.get("mamba_headdim") is not None and renamed.get(heads) == default:
        del renamed[heads]
    for older, newer in _OLDER.items():
        value = renamed.pop(older, None)
        if value is not None and renamed.setdefault(newer, value) != value:
            raise UnknownConfig(
                f"config.json sets {older} = {shown(value)}, which contradicts {newer} = {shown(renamed[newer])}"
            )
    return renamed


def _owners(hybrid: list[int], num_layers: int, blocks: int) -> tuple[int, ...]:
    """Returns the owner of each layer: hybrid layers use the blocks in turn, and the first ones store them."""
    owners = list(range(num_layers))
    for use, layer in enumerate(hybrid):
        owners[layer] = hybrid[use % blocks]
    return tuple(owners)


def _mamba(keys: ConfigJson, hidden_size: int, *, bias: bool) -> MambaConfig:
    """Reads the mixers' keys; files without a number of heads have their width, `mamba_headdim`."""
    d_inner = keys.take_int("mamba_expand", 2, high=2**16) * hidden_size
    names = _KEYS
    if keys.has("mamba_headdim") and not keys.has("n_mamba_heads"):
        heads = d_inner // keys.take_int("mamba_headdim")
        names = replace(_KEYS, heads=("n_mamba_heads", heads))
    return read_mamba(keys, names, d_inner=d_inner, in_bias=bias, out_bias=bias, norm_groups=-1)


def _adapters(keys: ConfigJson, heads: int) -> TransformerConfig:
    """Reads the adapters' keys."""
    adapts = keys.take_bool("use_shared_attention_adapter", False)
    kv_heads = keys.take("num_key_value_heads", None)
    if adapts and kv_heads not in (None, heads):
        raise UnknownConfig(
            f"config.json sets num_key_value_heads = {shown(kv_heads)}; with use_shared_attention_adapter, only "
            f"num_attention_heads = {heads} is supported"
        )
    rank = keys.take_int("adapter_rank", 128, high=2**16)
    return TransformerConfig(adapter_rank=rank, adapts_attention=adapts)


_SHARED = "model.layers.{owner}.shared_transformer."


_rule = partial(layer_rule, block="transformer", prefix=_SHARED)


def _adapter(leaf: str, *names: str, **options: Unpack[RuleOptions]) -> tuple[Rule, ...]:
    """Returns the rules of the two products of adapters."""
    return tuple(
        _rule(
            f"{leaf}_{side}",
            *(f"{name}_adapter_list.{{use}}.{half}.weight" for name in names),
            **options,
        )
        for half, side in enumerate(("in", "out"))
    )


def _shared(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns rules of other blocks as those of leaves that the transformer block shares."""
    return tuple(replace(rule, block="transformer", is_shared=True) for rule in rules)


_OLDER_BLOCK = r"model\.blocks\.\d{1,6}\."
_OLDER_PARTS = (
    (r"feed_forward\.linear_fc1\.(weight|bias)", r"feed_forward.gate_up_proj.\1"),
    (r"feed_forward\.linear_fc2\.(weight|bias)", r"feed_forward.down_proj.\1"),
    (r"((?:self_attn\.[qkvo]_proj|input_layernorm|pre_ff_layernorm)\.weight)", r"\1"),
)
_OLDER_ADAPTERS = (
    (r"feed_forward\.linear_fc1_lora", "feed_forward.gate_up_proj_adapter_list"),
    *(
        (rf"self_attn\.linear_{name}_lora", f"self_attn.linear_{name}_adapter_list")
        for name in "qkv"
    ),
)
"""(Pattern of what follows a block's number in the older layout, what follows a layer's in the newer one)."""


def older_name(stored: str, config: ModelConfig) -> str:
    """Returns the newer name of a tensor of the layout of Zyphra's own code, in which most files were published first.

    There `mamba_layers` has all layers, `linear_layers` counts the layers with a transformer block, and `blocks` counts
    the blocks that they share. The correspondence is that of Zyphra's code (github.com/Zyphra/Zamba2, mamba_model.py,
    and transformers_zamba2) and of MLX's, which read both layouts.

    Args:
        stored: the tensor's name; returned unchanged if it is none of these, or an adapter that no layer uses.
        config: the model's.
    """
    found = re.fullmatch(r"model\.(mamba_layers|linear_layers|blocks)\.(\d{1,6})\.(.+)", stored)
    if found is None:
        return stored
    kind, number, rest = found[1], int(found[2]), found[3]
    if kind == "mamba_layers":
        return f"model.layers.{number}.{rest}"
    uses = [layer for layer in range(config.num_layers) if "transformer" in config.blocks_of(layer)]
    if kind == "linear_layers":
        return f"model.layers.{uses[number]}.linear.{rest}" if number < len(uses) else stored
    owners = list(dict.fromkeys(config.owner(layer) for layer in uses))
    if number >= len(owners):
        return stored
    block = f"model.layers.{owners[number]}.shared_transformer."
    for pattern, newer in _OLDER_PARTS:
        if part := re.fullmatch(pattern, rest):
            return block + part.expand(newer)
    for pattern, newer in _OLDER_ADAPTERS:
        if part := re.fullmatch(rf"{pattern}_([AB])_list\.(\d{{1,6}})\.weight", rest):
            use = int(part[2])
            if use < len(uses) and config.owner(uses[use]) == owners[number]:
                return f"{block}{newer}.{use}.{'AB'.index(part[1])}.weight"
    return stored


_BIASED = ("mlp_bias", True)
_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.final_layernorm.weight"),
        norms(f"{LAYER}input_layernorm.weight"),
        *mamba2(f"{LAYER}mamba"),
        *_shared(attention(f"{_SHARED}self_attn")),
        *_shared(fused_gated(f"{_SHARED}feed_forward")),
        _rule("gate_up_bias", "feed_forward.gate_up_proj.bias", when=_BIASED, is_shared=True),
        _rule("down_bias", "feed_forward.down_proj.bias", when=_BIASED, is_shared=True),
        _rule("side_norm", "input_layernorm.weight", is_shared=True),
        _rule("inner_norm", "pre_ff_layernorm.weight", is_shared=True),
        *_adapter("gate_up_adapter", "feed_forward.gate_up_proj"),
        *_adapter(
            "qkv_adapter",
            *(f"self_attn.linear_{name}" for name in "qkv"),
            combine="stack",
            when=("transformer.adapts_attention", True),
        ),
        layer_rule("side_out", f"{LAYER}linear.weight", block="transformer"),
    ),
    tied=TIED,
    # Of layers with the transformer block.
    prefixes=((r"(model\.layers\.\d+)\.mamba_decoder\.", r"\1."),),
    older_name=older_name,
    # In the older layout each block has adapters for all layers, also for those that use another block.
    ignored=(rf"{_OLDER_BLOCK}(self_attn|feed_forward)\.linear_\w+_lora_[AB]_list\.\d+\.weight",),
)

FAMILY = Family("zamba2", from_hf, _RULES)
