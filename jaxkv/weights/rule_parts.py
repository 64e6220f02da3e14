"""The weight rules of blocks that families share, given the prefix of their tensors' names."""

from jaxkv.weights.rules import Regroup, Rule

LEAF = "layers.{layer}."
LAYER = "model.layers.{layer}."
BACKBONE = "backbone.layers.{layer}."
"""Beginnings of names: of a layer's parameters, and of its tensors in checkpoints (`BACKBONE` in Mamba's)."""

_QUERY_KEY_VALUE_ROWS = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "head_dim"))
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the three projections of a gated feed-forward."""

_GATE_UP_ROWS = (("ffn_size",), ("ffn_size",))


def norms(*sources: str, offset: float = 0.0) -> Rule:
    """Returns the rule of the norms of a layer's stages, in order; `offset` is added to the stored weights."""
    return Rule(f"{LEAF}norms", sources, combine="stack", offset=offset)


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
    heads = 2 * interleaved

    def projections(kind: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}_proj.{kind}" for name in "qkv")

    return (
        Rule(
            f"{LEAF}qkv",
            projections("weight"),
            combine="concat",
            rows=_QUERY_KEY_VALUE_ROWS,
            block="attention",
            interleaved=heads,
        ),
        Rule(
            f"{LEAF}qkv_bias",
            projections("bias"),
            combine="concat",
            rows=_QUERY_KEY_VALUE_ROWS,
            when=("qkv_bias", True),
            block="attention",
            interleaved=heads,
        ),
        Rule(
            f"{LEAF}qk_norm",
            (f"{prefix}.q_{norm}.weight", f"{prefix}.k_{norm}.weight"),
            combine="stack",
            when=("qk_norm", True),
            block="attention",
            offset=offset,
        ),
        *(
            Rule(
                f"{LEAF}wide_{name}_norm",
                (f"{prefix}.{name}_{norm}.weight",),
                when=("wide_qk_norm", True),
                block="attention",
            )
            for name in "qk"
        ),
        Rule(f"{LEAF}o", (f"{prefix}.{out}.weight",), block="attention"),
        Rule(f"{LEAF}o_bias", (f"{prefix}.{out}.bias",), when=("o_bias", True), block="attention"),
        Rule(f"{LEAF}sinks", (f"{prefix}.sinks",), when=("sinks", True), block="attention"),
    )


def gated_attention(prefix: str, *, offset: float) -> tuple[Rule, ...]:
    """Returns the rules of gated attention, whose query projection yields each head's query and then its gate."""
    queries = Regroup(("heads",), (("head_dim",), ("head_dim",)), order=(1, 0))
    return (
        Rule(
            f"{LEAF}qkv",
            tuple(f"{prefix}.{name}_proj.weight" for name in "qkv"),
            combine="concat",
            rows=(("heads", "query_rows"), *_QUERY_KEY_VALUE_ROWS[1:]),
            block="attention",
            regroup=queries,
        ),
        Rule(
            f"{LEAF}qk_norm",
            (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"),
            combine="stack",
            block="attention",
            offset=offset,
        ),
        Rule(f"{LEAF}o", (f"{prefix}.o_proj.weight",), block="attention"),
    )


def latent_attention(prefix: str, block: str = "latent") -> tuple[Rule, ...]:
    """Returns the rules of latent attention, whose `kv_b_proj` yields each head's key and then its value."""
    stored, queries = ("latent.stored",), ("heads", "latent.query_dim")
    halves = (("latent.nope_dim",), ("latent.value_dim",))

    def rule(leaf: str, *names: str, **options: object) -> Rule:
        sources = tuple(f"{prefix}.{name}.weight" for name in names)
        return Rule(f"{LEAF}{leaf}", sources, block=block, **options)  # type: ignore[arg-type]

    has, lacks = (("latent.has_query_latent", value) for value in (True, False))
    down = {"combine": "concat", "rows": (("latent.q_lora_rank",), stored), "when": has}
    direct = {"combine": "concat", "rows": (queries, stored), "when": lacks}
    return (
        rule("qkv_down", "q_a_proj", "kv_a_proj_with_mqa", **down),
        rule("qkv_down", "q_proj", "kv_a_proj_with_mqa", **direct),
        rule("q_norm", "q_a_layernorm", when=has),
        rule("q_up", "q_b_proj", when=has),
        rule("kv_norm", "kv_a_layernorm"),
        *(
            rule(leaf, "kv_b_proj", combine="select", regroup=Regroup(("heads",), halves, (half,)))
            for half, leaf in enumerate(("k_up", "v_up"))
        ),
        rule("o", "o_proj"),
    )


def sparse_latent_attention(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of sparse latent attention, the indexer included."""
    index = {
        "index_q": "wq_b.weight",
        "index_k": "wk.weight",
        "index_norm": "k_norm.weight",
        "index_norm_bias": "k_norm.bias",
        "index_weights": "weights_proj.weight",
    }
    return latent_attention(prefix, "sparse_latent") + tuple(
        Rule(f"{LEAF}{leaf}", (f"{prefix}.indexer.{name}",), block="sparse_latent")
        for leaf, name in index.items()
    )


def delta(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated delta mixer with two fused projections, which are ordered by key head."""
    key, values = ("delta.key_dim",), ("delta.values_per_key", "delta.value_dim")
    heads, gates = ("delta.key_heads",), ("delta.values_per_key",)
    return (
        Rule(
            f"{LEAF}delta_in",
            (f"{prefix}.in_proj_qkvz.weight",),
            block="delta",
            regroup=Regroup(heads, (key, key, values, values), order=(0, 1, 2, 3)),
        ),
        Rule(
            f"{LEAF}delta_gates",
            (f"{prefix}.in_proj_ba.weight",),
            block="delta",
            regroup=Regroup(heads, (gates, gates), (0, 1)),
        ),
        *_delta_state(prefix),
    )


def split_delta(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated delta mixer with a projection each for queries to values and for three gates."""
    heads = ("delta.value_heads",)
    return (
        Rule(
            f"{LEAF}delta_in",
            (f"{prefix}.in_proj_qkv.weight", f"{prefix}.in_proj_z.weight"),
            combine="concat",
            rows=(("delta.conv_channels",), ("delta.width",)),
            block="delta",
        ),
        Rule(
            f"{LEAF}delta_gates",
            (f"{prefix}.in_proj_b.weight", f"{prefix}.in_proj_a.weight"),
            combine="concat",
            rows=(heads, heads),
            block="delta",
        ),
        *_delta_state(prefix),
    )


def _delta_state(prefix: str) -> tuple[Rule, ...]:
    def rule(leaf: str, name: str, **options: object) -> Rule:
        return Rule(f"{LEAF}{leaf}", (f"{prefix}.{name}",), block="delta", **options)  # type: ignore[arg-type]

    return (
        rule("conv", "conv1d.weight", combine="taps"),
        rule("a_log", "A_log"),
        rule("dt_bias", "dt_bias"),
        rule("delta_norm", "norm.weight"),
        rule("delta_out", "out_proj.weight"),
    )


def short_conv(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated short convolution."""

    def rule(leaf: str, name: str, **options: object) -> Rule:
        return Rule(f"{LEAF}{leaf}", (f"{prefix}.{name}",), block="short_conv", **options)  # type: ignore[arg-type]

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

    def rule(leaf: str, name: str, **options: object) -> Rule:
        return Rule(f"{LEAF}{leaf}", (f"{prefix}.{name}",), block="mamba1", **options)  # type: ignore[arg-type]

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

    def rule(leaf: str, name: str, **options: object) -> Rule:
        return Rule(f"{LEAF}{leaf}", (f"{prefix}.{name}",), block="mamba2", **options)  # type: ignore[arg-type]

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


def gated(prefix: str, names: tuple[str, str, str] = GATED_NAMES) -> tuple[Rule, ...]:
    """Returns the rules of a gated feed-forward, given the names of gate, its factor and their product's projection."""
    gate, up, down = names

    def halves(kind: str) -> tuple[str, ...]:
        return f"{prefix}.{gate}.{kind}", f"{prefix}.{up}.{kind}"

    return (
        Rule(
            f"{LEAF}gate_up",
            halves("weight"),
            combine="concat",
            rows=_GATE_UP_ROWS,
            block="gated",
        ),
        Rule(
            f"{LEAF}gate_up_bias",
            halves("bias"),
            combine="concat",
            rows=_GATE_UP_ROWS,
            when=("mlp_bias", True),
            block="gated",
        ),
        Rule(f"{LEAF}down", (f"{prefix}.{down}.weight",), block="gated"),
        Rule(
            f"{LEAF}down_bias",
            (f"{prefix}.{down}.bias",),
            when=("mlp_bias", True),
            block="gated",
        ),
    )


def fused_gated(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated feed-forward whose gate and up projections are one tensor in the checkpoint."""
    return (
        Rule(f"{LEAF}gate_up", (f"{prefix}.gate_up_proj.weight",), block="gated"),
        Rule(f"{LEAF}down", (f"{prefix}.down_proj.weight",), block="gated"),
    )


def gated_experts(
    prefix: str,
    names: tuple[str, str, str] = GATED_NAMES,
    *,
    fused: str = "",
    router: str = "gate.weight",
    correction: str = "gate.e_score_correction_bias",
) -> tuple[Rule, ...]:
    """Returns the rules of a router and of gated experts, one tensor per expert and projection, or all experts in one.

    Args:
        prefix: beginning of the names.
        names: an expert's gate, its factor and the projection of their product.
        fused: beginning of the names where all experts are in one tensor; empty for `prefix`.
        router: end of the router's name.
        correction: end of the name of the router's correction.
    """
    experts, fused = f"{prefix}.experts.{{expert}}", fused or prefix
    gate, up, down = names
    return (
        Rule(
            f"{LEAF}router",
            (f"{prefix}.{router}",),
            block="mixture",
            fused=f"{fused}.{router}",
        ),
        Rule(
            f"{LEAF}router_correction",
            (f"{prefix}.{correction}",),
            when=("mixture.correction", True),
            block="mixture",
        ),
        Rule(
            f"{LEAF}experts_up",
            (f"{experts}.{gate}.weight", f"{experts}.{up}.weight"),
            combine="stack",
            block="mixture",
            fused=f"{fused}.experts.gate_up_proj",
        ),
        Rule(
            f"{LEAF}experts_down",
            (f"{experts}.{down}.weight",),
            combine="stack_transpose",
            block="mixture",
            fused=f"{fused}.experts.down_proj",
        ),
    )


def shared_expert(prefix: str) -> tuple[Rule, ...]:
    """Returns the rules of a gated expert that runs on all tokens."""
    return (
        Rule(
            f"{LEAF}shared_up",
            (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            combine="concat",
            rows=(("mixture.shared_size",), ("mixture.shared_size",)),
            block="shared",
        ),
        Rule(f"{LEAF}shared_down", (f"{prefix}.down_proj.weight",), block="shared"),
    )
