"""The weight rules of each family: which checkpoint tensors make up which parameter leaf.

A new family needs a new `RuleSet`, or a row of `RULES_OF_FAMILY` with an existing one.
"""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.weights.rule_parts import (
    attention,
    delta,
    embeddings,
    gated,
    gated_attention,
    latent_attention,
    mamba2,
    norms,
    sparse_latent_attention,
)
from jaxkv.weights.rules import Combine, Rule, RuleSet

_LEAF = "layers.{layer}."
_LAYER = "model.layers.{layer}."
_BACKBONE = "backbone.layers.{layer}."
# Old checkpoints contain the rotary frequencies, which are computed from the config.
_ROTARY = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
_TIED = (("lm_head.weight", "model.embed_tokens.weight"),)

LLAMA_LIKE = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *attention(f"{_LAYER}self_attn"),
        *gated(f"{_LAYER}mlp"),
    ),
    ignored=(_ROTARY,),
    tied=_TIED,
)

MAMBA2 = RuleSet(
    rules=(
        *embeddings("backbone.embeddings.weight", "backbone.norm_f.weight"),
        norms(f"{_BACKBONE}norm.weight"),
        *mamba2(f"{_BACKBONE}mixer"),
    ),
    tied=(("lm_head.weight", "backbone.embeddings.weight"),),
)

BAMBA_LIKE = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.final_layernorm.weight"),
        norms(f"{_LAYER}input_layernorm.weight", f"{_LAYER}pre_ff_layernorm.weight"),
        *attention(f"{_LAYER}self_attn"),
        *mamba2(f"{_LAYER}mamba"),
        *gated(f"{_LAYER}feed_forward"),
    ),
    # mup_vector: Falcon-H1's multipliers per channel, which are computed from the config.
    ignored=(_ROTARY, r"model\.layers\.\d+\.mamba\.mup_vector"),
    tied=_TIED,
)

GRANITE_HYBRID = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *attention(f"{_LAYER}self_attn"),
        *mamba2(f"{_LAYER}mamba"),
        Rule(f"{_LEAF}gate_up", (f"{_LAYER}shared_mlp.input_linear.weight",), block="gated"),
        Rule(f"{_LEAF}down", (f"{_LAYER}shared_mlp.output_linear.weight",), block="gated"),
        Rule(f"{_LEAF}shared_up", (f"{_LAYER}shared_mlp.input_linear.weight",), block="shared"),
        Rule(f"{_LEAF}shared_down", (f"{_LAYER}shared_mlp.output_linear.weight",), block="shared"),
        Rule(f"{_LEAF}router", (f"{_LAYER}block_sparse_moe.router.layer.weight",), block="mixture"),
        Rule(
            f"{_LEAF}experts_up",
            (f"{_LAYER}block_sparse_moe.input_linear.weight",),
            block="mixture",
        ),
        Rule(
            f"{_LEAF}experts_down",
            (f"{_LAYER}block_sparse_moe.output_linear.weight",),
            combine="transpose",
            block="mixture",
        ),
    ),
    ignored=(_ROTARY,),
    tied=_TIED,
)


def _nemotron(
    leaf: str,
    name: str,
    block: str,
    when: tuple[str, bool] | None = None,
    combine: Combine = "copy",
) -> Rule:
    return Rule(f"{_LEAF}{leaf}", (f"{_BACKBONE}mixer.{name}",), combine, when=when, block=block)


NEMOTRON_H = RuleSet(
    rules=(
        *embeddings("backbone.embeddings.weight", "backbone.norm_f.weight"),
        norms(f"{_BACKBONE}norm.weight"),
        *attention(f"{_BACKBONE}mixer"),
        *mamba2(f"{_BACKBONE}mixer"),
        _nemotron("up", "up_proj.weight", "plain"),
        _nemotron("up_bias", "up_proj.bias", "plain", ("mlp_bias", True)),
        _nemotron("down", "down_proj.weight", "plain"),
        _nemotron("down_bias", "down_proj.bias", "plain", ("mlp_bias", True)),
        _nemotron("router", "gate.weight", "mixture"),
        _nemotron("router_correction", "gate.e_score_correction_bias", "mixture"),
        _nemotron("experts_up", "experts.{expert}.up_proj.weight", "mixture", combine="stack"),
        _nemotron(
            "experts_down",
            "experts.{expert}.down_proj.weight",
            "mixture",
            combine="stack_transpose",
        ),
        _nemotron("latent_in", "fc1_latent_proj.weight", "mixture", ("mixture.has_latent", True)),
        _nemotron("latent_out", "fc2_latent_proj.weight", "mixture", ("mixture.has_latent", True)),
        _nemotron("shared_up", "shared_experts.up_proj.weight", "shared"),
        _nemotron("shared_down", "shared_experts.down_proj.weight", "shared"),
    ),
    # Layers that predict further tokens.
    ignored=(r"mtp\..*",),
)

GEMMA = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight", offset=1.0),
        norms(
            f"{_LAYER}input_layernorm.weight",
            f"{_LAYER}pre_feedforward_layernorm.weight",
            offset=1.0,
        ),
        Rule(
            f"{_LEAF}post_norms",
            (
                f"{_LAYER}post_attention_layernorm.weight",
                f"{_LAYER}post_feedforward_layernorm.weight",
            ),
            combine="stack",
            offset=1.0,
        ),
        *attention(f"{_LAYER}self_attn", offset=1.0),
        *gated(f"{_LAYER}mlp"),
    ),
    ignored=(_ROTARY,),
    tied=_TIED,
)


def _experts(leaf: str, name: str, combine: Combine = "copy") -> Rule:
    return Rule(f"{_LEAF}{leaf}", (f"{_LAYER}mlp.{name}",), combine, block="mixture")


GPT_OSS = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *attention(f"{_LAYER}self_attn"),
        _experts("router", "router.weight"),
        _experts("router_bias", "router.bias"),
        # Rows of gate and up alternate, and the input axis comes first.
        _experts("experts_up", "experts.gate_up_proj", "deinterleave_transpose"),
        _experts("experts_up_bias", "experts.gate_up_proj_bias", "deinterleave"),
        _experts("experts_down", "experts.down_proj", "last_axis_first"),
        _experts("experts_down_bias", "experts.down_proj_bias"),
    ),
    ignored=(_ROTARY,),
    tied=_TIED,
)

QWEN3_NEXT = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight", offset=1.0),
        norms(
            f"{_LAYER}input_layernorm.weight",
            f"{_LAYER}post_attention_layernorm.weight",
            offset=1.0,
        ),
        *gated_attention(f"{_LAYER}self_attn", offset=1.0),
        *delta(f"{_LAYER}linear_attn"),
        *gated(f"{_LAYER}mlp"),
        Rule(f"{_LEAF}router", (f"{_LAYER}mlp.gate.weight",), block="mixture"),
        Rule(
            f"{_LEAF}experts_up",
            tuple(f"{_LAYER}mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up")),
            combine="stack",
            block="mixture",
        ),
        Rule(
            f"{_LEAF}experts_down",
            (f"{_LAYER}mlp.experts.{{expert}}.down_proj.weight",),
            combine="stack_transpose",
            block="mixture",
        ),
        Rule(
            f"{_LEAF}shared_up",
            tuple(f"{_LAYER}mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
            combine="concat",
            rows=(("mixture.shared_size",), ("mixture.shared_size",)),
            block="shared",
        ),
        Rule(
            f"{_LEAF}shared_down", (f"{_LAYER}mlp.shared_expert.down_proj.weight",), block="shared"
        ),
        Rule(f"{_LEAF}shared_gate", (f"{_LAYER}mlp.shared_expert_gate.weight",), block="shared"),
    ),
    # Layers that predict further tokens.
    ignored=(_ROTARY, r"mtp\..*"),
    tied=_TIED,
)


def _deepseek(
    leaf: str,
    *names: str,
    block: str,
    combine: Combine = "copy",
    rows: tuple[tuple[str, ...], ...] = (),
    when: tuple[str, bool] | None = None,
) -> Rule:
    sources = tuple(f"{_LAYER}mlp.{name}" for name in names)
    return Rule(f"{_LEAF}{leaf}", sources, combine, rows, when, block)


DEEPSEEK = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *latent_attention(f"{_LAYER}self_attn"),
        *sparse_latent_attention(f"{_LAYER}self_attn"),
        *gated(f"{_LAYER}mlp"),
        _deepseek("router", "gate.weight", block="mixture"),
        _deepseek(
            "router_correction",
            "gate.e_score_correction_bias",
            block="mixture",
            when=("mixture.correction", True),
        ),
        _deepseek(
            "experts_up",
            *(f"experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up")),
            combine="stack",
            block="mixture",
        ),
        _deepseek(
            "experts_down",
            "experts.{expert}.down_proj.weight",
            combine="stack_transpose",
            block="mixture",
        ),
        _deepseek(
            "shared_up",
            *(f"shared_experts.{name}_proj.weight" for name in ("gate", "up")),
            combine="concat",
            rows=(("mixture.shared_size",), ("mixture.shared_size",)),
            block="shared",
        ),
        _deepseek("shared_down", "shared_experts.down_proj.weight", block="shared"),
    ),
    ignored=(_ROTARY,),
    tied=_TIED,
    further_layers=r"model\.layers\.(\d+)\.",
)

RULES_OF_FAMILY: Mapping[str, RuleSet] = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT_OSS,
    "mamba2": MAMBA2,
    "bamba": BAMBA_LIKE,
    "falcon_h1": BAMBA_LIKE,
    "granitemoehybrid": GRANITE_HYBRID,
    "nemotron_h": NEMOTRON_H,
    "qwen3_next": QWEN3_NEXT,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
}


def rules_for(config: ModelConfig) -> RuleSet:
    """Returns the rules of a config's family.

    Raises:
        UnknownConfig: the family has no rules.
    """
    if config.family not in RULES_OF_FAMILY:
        known = ", ".join(RULES_OF_FAMILY)
        raise UnknownConfig(f"no weight rules for the family {config.family!r}; known are {known}")
    return RULES_OF_FAMILY[config.family]
