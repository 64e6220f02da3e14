"""The weight rules of blocks that families share, given the prefix of their tensors' names."""

from functools import partial
from typing import TypedDict, Unpack

from jaxkv.weights.rules import Combine, Regroup, Rule

LEAF = "layers.{layer}."
LAYER = "model.layers.{layer}."
BACKBONE = "backbone.layers.{layer}."
"""Beginnings of names: of a layer's parameters, and of its tensors in checkpoints (`BACKBONE` in Mamba's)."""

_QUERY_KEY_VALUE_ROWS = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "head_dim"))
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the three projections of a gated feed-forward."""


class RuleOptions(TypedDict, total=False):
    """The fields of `Rule` beside target, sources and block."""

    combine: Combine
    rows: tuple[tuple[str, ...], ...]
    when: tuple[str, bool] | None
    is_shared: bool
    regroup: Regroup | None
    offset: float
    fused: str
    either_last: bool
    interleaved: int


def layer_rule(
    leaf: str, *names: str, block: str = "", prefix: str = "", **options: Unpack[RuleOptions]
) -> Rule:
    """Returns the rule of one parameter of a layer.

    Args:
        leaf: name of the parameter in the layer.
        *names: names of its tensors in the checkpoint, behind `prefix`.
        block: name of the block that has the parameter; empty for all layers.
        prefix: beginning of the tensors' names.
        **options: fields of `Rule`.
    """
    return Rule(f"{LEAF}{leaf}", tuple(f"{prefix}{name}" for name in names), block=block, **options)


def norms(*sources: str, offset: float = 0.0) -> Rule:
    """Returns the rule of the norms before a layer's stages, in order; `offset` is added to the stored weights."""
    return layer_rule("norms", *sources, combine="stack", offset=offset)


def post_norms(*sources: str, offset: float = 0.0) -> Rule:
    """Returns the rule of the norms after a layer's stages, in order; `offset` is added to the stored weights."""
    return layer_rule("post_norms", *sources, combine="stack", offset=offset)


def embeddings(table: str, final_norm: str, *, offset: float = 0.0) -> tuple[Rule, ...]:
    """Returns the rules of embedding, final norm and output head; `offset` is that of the norm."""
    return (
        Rule("embed", (table,)),
        Rule("final_norm", (final_norm,), offset=offset),
        Rule("lm_head", ("lm_head.weight",), when=("tie_embeddings", False)),
    )


def attention(
    prefix: str,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
    norm: str = "norm",
    out: str = "o_proj",
) -> tuple[Rule, ...]:
    """Returns the rules of attention.

    Args:
        prefix: prefix of the tensors' names.
        offset: offset of the norms on queries and keys.
        interleaved: whether rotary pairs are rows 2i and 2i + 1 of a head, of queries and keys; otherwise i and
            i + rotary_dim / 2.
        norm: name of the norms on queries and keys, after "q_" and "k_".
        out: name of the output projection.
    """
    rule = partial(layer_rule, block="attention", prefix=f"{prefix}.")
    query_norm, key_norm = f"q_{norm}.weight", f"k_{norm}.weight"
    fused = {"combine": "concat", "rows": _QUERY_KEY_VALUE_ROWS, "interleaved": 2 * interleaved}
    biased = ("qkv_bias", True)
    return (
        rule("qkv", *(f"{name}_proj.weight" for name in "qkv"), **fused),
        rule("qkv_bias", *(f"{name}_proj.bias" for name in "qkv"), when=biased, **fused),
        rule(
            "qk_norm",
            query_norm,
            key_norm,
            combine="stack",
            when=("qk_norm", True),
            offset=offset,
        ),
        rule("wide_q_norm", query_norm, when=("wide_qk_norm", True)),
        rule("wide_k_norm", key_norm, when=("wide_qk_norm", True)),
        rule("o", f"{out}.weight"),
        rule("o_bias", f"{out}.bias", when=("o_bias", True)),
        rule("sinks", "sinks", when=("sinks", True)),
    )


def global_attention(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of attention over all tokens, whose sizes differ from those of windows."""
    rule = partial(layer_rule, block="global_attention", prefix=f"{prefix}.")
    head_dim = "global_attention.head_dim"
    keys = ("global_attention.kv_heads", head_dim)
    rows = (("heads", head_dim), keys, keys)
    return (
        *(
            rule(
                "qkv",
                *(f"{name}_proj.weight" for name in names),
                combine="concat",
                rows=rows,
                when=("global_attention.keys_are_values", names[1] == names[2]),
            )
            for names in ("qkv", "qkk")
        ),
        rule("qk_norm", "q_norm.weight", "k_norm.weight", combine="stack"),
        rule("o", "o_proj.weight"),
    )


def kv_shared_attention(prefix: str, block: str) -> tuple[Rule, ...]:
    """Returns the rules of attention to the keys and values of an earlier layer."""
    rule = partial(layer_rule, block=block, prefix=f"{prefix}.")
    return (
        rule("q", "q_proj.weight"),
        rule("q_norm", "q_norm.weight", when=("qk_norm", True)),
        rule("o", "o_proj.weight"),
    )


def gated_attention(prefix: str, *, offset: float) -> tuple[Rule, ...]:
    """Returns the rules of gated attention, whose query projection yields each head's query and then its gate."""
    rule = partial(layer_rule, block="attention", prefix=f"{prefix}.")
    return (
        rule(
            "qkv",
            *(f"{name}_proj.weight" for name in "qkv"),
            combine="concat",
            rows=(("heads", "query_rows"), *_QUERY_KEY_VALUE_ROWS[1:]),
            regroup=Regroup(("heads",), (("head_dim",), ("head_dim",)), order=(1, 0)),
        ),
        rule("qk_norm", "q_norm.weight", "k_norm.weight", combine="stack", offset=offset),
        rule("o", "o_proj.weight"),
    )


def latent_attention(prefix: str, block: str = "latent") -> tuple[Rule, ...]:
    """Returns the rules of latent attention, whose `kv_b_proj` yields each head's key and then its value."""
    rule = partial(layer_rule, block=block, prefix=f"{prefix}.")
    stored, queries = ("latent.stored",), ("heads", "latent.query_dim")
    halves = (("latent.nope_dim",), ("latent.value_dim",))
    has, lacks = (("latent.has_query_latent", value) for value in (True, False))
    stored_name = "kv_a_proj_with_mqa.weight"
    return (
        rule(
            "qkv_down",
            "q_a_proj.weight",
            stored_name,
            combine="concat",
            rows=(("latent.q_lora_rank",), stored),
            when=has,
        ),
        rule(
            "qkv_down",
            "q_proj.weight",
            stored_name,
            combine="concat",
            rows=(queries, stored),
            when=lacks,
        ),
        rule("q_norm", "q_a_layernorm.weight", when=has),
        rule("q_up", "q_b_proj.weight", when=has),
        rule("kv_norm", "kv_a_layernorm.weight"),
        *(
            rule(
                leaf,
                "kv_b_proj.weight",
                combine="select",
                regroup=Regroup(("heads",), halves, (half,)),
            )
            for half, leaf in enumerate(("k_up", "v_up"))
        ),
        rule("o", "o_proj.weight"),
    )


def sparse_latent_attention(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of sparse latent attention, the indexer included."""
    rule = partial(layer_rule, block="sparse_latent", prefix=f"{prefix}.indexer.")
    return (
        *latent_attention(prefix, "sparse_latent"),
        rule("index_q", "wq_b.weight"),
        rule("index_k", "wk.weight"),
        rule("index_norm", "k_norm.weight"),
        rule("index_norm_bias", "k_norm.bias"),
        rule("index_weights", "weights_proj.weight"),
    )


def delta(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated delta mixer with two fused projections, which are ordered by key head."""
    rule = partial(layer_rule, block="delta", prefix=f"{prefix}.")
    key, values = ("delta.key_dim",), ("delta.values_per_key", "delta.value_dim")
    heads, gates = ("delta.key_heads",), ("delta.values_per_key",)
    return (
        rule(
            "delta_in",
            "in_proj_qkvz.weight",
            regroup=Regroup(heads, (key, key, values, values), order=(0, 1, 2, 3)),
        ),
        rule("delta_gates", "in_proj_ba.weight", regroup=Regroup(heads, (gates, gates), (0, 1))),
        *_delta_state(prefix),
    )


def split_delta(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated delta mixer with a projection each for queries to values and for three gates."""
    rule = partial(layer_rule, block="delta", prefix=f"{prefix}.")
    heads = ("delta.value_heads",)
    return (
        rule(
            "delta_in",
            "in_proj_qkv.weight",
            "in_proj_z.weight",
            combine="concat",
            rows=(("delta.conv_channels",), ("delta.width",)),
        ),
        rule(
            "delta_gates",
            "in_proj_b.weight",
            "in_proj_a.weight",
            combine="concat",
            rows=(heads, heads),
        ),
        *_delta_state(prefix),
    )


def kimi_delta(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of Kimi Delta Attention."""
    rule = partial(layer_rule, block="kimi_delta", prefix=f"{prefix}.")
    keys, values = ("delta.key_heads", "delta.key_dim"), ("delta.width",)
    rank, heads = ("delta.gate_rank",), ("delta.value_heads",)
    projections = (f"{part}_proj.weight" for part in "qkv")
    convolutions = (f"{part}_conv1d.weight" for part in "qkv")
    gates = ("f_a_proj.weight", "g_a_proj.weight", "b_proj.weight")
    return (
        rule("delta_in", *projections, combine="concat", rows=(keys, keys, values)),
        rule("conv", *convolutions, combine="taps", rows=(keys, keys, values)),
        rule("delta_gates", *gates, combine="concat", rows=(rank, rank, heads)),
        rule("delta_decay", "f_b_proj.weight"),
        rule("delta_gate", "g_b_proj.weight"),
        rule("a_log", "A_log", combine="squeeze"),
        rule("dt_bias", "dt_bias"),
        rule("delta_norm", "o_norm.weight"),
        rule("delta_out", "o_proj.weight"),
    )


def _delta_state(prefix: str) -> tuple[Rule, ...]:
    rule = partial(layer_rule, block="delta", prefix=f"{prefix}.")
    return (
        rule("conv", "conv1d.weight", combine="taps"),
        rule("a_log", "A_log"),
        rule("dt_bias", "dt_bias"),
        rule("delta_norm", "norm.weight"),
        rule("delta_out", "out_proj.weight"),
    )


def short_conv(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated short convolution."""
    rule = partial(layer_rule, block="short_conv", prefix=f"{prefix}.")
    biased = ("short_conv.bias", True)
    return (
        rule("short_in", "in_proj.weight"),
        rule("short_in_bias", "in_proj.bias", when=biased),
        rule("conv", "conv.weight", combine="taps"),
        rule("conv_bias", "conv.bias", when=biased),
        rule("short_out", "out_proj.weight"),
        rule("short_out_bias", "out_proj.bias", when=biased),
    )


def mamba1(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a Mamba mixer."""
    rule = partial(layer_rule, block="mamba1", prefix=f"{prefix}.")
    biased, normed = ("mamba1.bias", True), ("mamba1.norms", True)
    return (
        rule("ssm_in", "in_proj.weight"),
        rule("ssm_in_bias", "in_proj.bias", when=biased),
        rule("conv", "conv1d.weight", combine="taps"),
        rule("conv_bias", "conv1d.bias", when=("mamba1.conv_bias", True)),
        rule("select", "x_proj.weight"),
        rule("step", "dt_proj.weight"),
        rule("dt_bias", "dt_proj.bias"),
        rule("a_log", "A_log"),
        rule("skip", "D"),
        rule("ssm_out", "out_proj.weight"),
        rule("ssm_out_bias", "out_proj.bias", when=biased),
        rule("dt_norm", "dt_layernorm.weight", when=normed),
        rule("b_norm", "b_layernorm.weight", when=normed),
        rule("c_norm", "c_layernorm.weight", when=normed),
    )


def mamba2(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a Mamba-2 mixer."""
    rule = partial(layer_rule, block="mamba2", prefix=f"{prefix}.")
    return (
        rule("ssm_in", "in_proj.weight"),
        rule("ssm_in_bias", "in_proj.bias", when=("mamba.in_bias", True)),
        rule("conv", "conv1d.weight", combine="taps"),
        rule("conv_bias", "conv1d.bias", when=("mamba.conv_bias", True)),
        rule("a_log", "A_log"),
        rule("dt_bias", "dt_bias"),
        rule("skip", "D"),
        rule("ssm_norm", "norm.weight", when=("mamba.has_norm", True)),
        rule("ssm_out", "out_proj.weight"),
        rule("ssm_out_bias", "out_proj.bias", when=("mamba.out_bias", True)),
    )


def gated(
    prefix: str,
    names: tuple[str, str, str] = GATED_NAMES,
    *,
    block: str = "gated",
    size: str = "ffn_size",
) -> tuple[Rule, ...]:
    """Returns the rules of a gated feed-forward.

    Args:
        prefix: prefix of the tensors' names.
        names: names of gate, its factor and their product's projection.
        block: name of the block that has them.
        size: field of `ModelConfig` that is its inner width.
    """
    rule = partial(layer_rule, block=block, prefix=f"{prefix}.")
    gate, up, down = names
    biased = ("mlp_bias", True)
    fused = {"combine": "concat", "rows": ((size,), (size,))}
    return (
        rule("gate_up", f"{gate}.weight", f"{up}.weight", **fused),
        rule("gate_up_bias", f"{gate}.bias", f"{up}.bias", when=biased, **fused),
        rule("down", f"{down}.weight"),
        rule("down_bias", f"{down}.bias", when=biased),
    )


def fused_gated(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated feed-forward whose gate and up projections are one tensor in the checkpoint."""
    rule = partial(layer_rule, block="gated", prefix=f"{prefix}.")
    return rule("gate_up", "gate_up_proj.weight"), rule("down", "down_proj.weight")


def plain(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a feed-forward of two linear maps with an activation between them."""
    rule = partial(layer_rule, block="plain", prefix=f"{prefix}.")
    biased = ("mlp_bias", True)
    return (
        rule("up", "up_proj.weight"),
        rule("up_bias", "up_proj.bias", when=biased),
        rule("down", "down_proj.weight"),
        rule("down_bias", "down_proj.bias", when=biased),
    )


def gated_experts(
    prefix: str,
    names: tuple[str, str, str] = GATED_NAMES,
    *,
    fused: str = "",
    router: str = "gate.weight",
    correction: str = "gate.e_score_correction_bias",
    correction_combine: Combine = "copy",
    fused_correction: str = "",
    block: str = "mixture",
) -> tuple[Rule, ...]:
    """Returns the rules of a router and of gated experts, one tensor per expert and projection, or all experts in one.

    Args:
        prefix: beginning of the names.
        names: an expert's gate, its factor and the projection of their product.
        fused: beginning of the names where all experts are in one tensor; empty for `prefix`.
        router: end of the router's name.
        correction: end of the name of the router's correction.
        correction_combine: how the correction is stored, see `Rule`.
        fused_correction: its other name, where Transformers has one for it.
        block: name of the block that has them.
    """
    rule = partial(layer_rule, block=block, prefix=f"{prefix}.")
    experts, fused = "experts.{expert}", fused or prefix
    gate, up, down = names
    return (
        rule("router", router, fused=f"{fused}.{router}"),
        rule(
            "router_correction",
            correction,
            combine=correction_combine,
            when=("mixture.correction", True),
            fused=fused_correction,
        ),
        rule(
            "experts_up",
            f"{experts}.{gate}.weight",
            f"{experts}.{up}.weight",
            combine="stack",
            fused=f"{fused}.experts.gate_up_proj",
        ),
        rule(
            "experts_down",
            f"{experts}.{down}.weight",
            combine="stack_transpose",
            fused=f"{fused}.experts.down_proj",
        ),
    )


def shared_expert(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated expert that runs on all tokens."""
    rule = partial(layer_rule, block="shared", prefix=f"{prefix}.")
    size = ("mixture.shared_size",)
    return (
        rule(
            "shared_up",
            "gate_proj.weight",
            "up_proj.weight",
            combine="concat",
            rows=(size, size),
        ),
        rule("shared_down", "down_proj.weight"),
    )


def gated_shared_expert(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a shared expert and of the linear map whose sigmoid multiplies its output."""
    gate = layer_rule(
        "shared_gate", "shared_expert_gate.weight", block="shared", prefix=f"{prefix}."
    )
    return (*shared_expert(f"{prefix}.shared_expert"), gate)
