"""Which checkpoint tensors make up which parameter leaf, as data. Reads no file and knows no arrays.

A new family is a new `RuleSet`, or a row of `RULES_OF_FAMILY` that points to an old one.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxkv.config import ModelConfig
from jaxkv.errors import UnknownConfig


@dataclass(frozen=True)
class Rule:
    """How one parameter leaf, or one per layer, is put together.

    Attributes:
        target: path of the leaf in the parameter tree, dotted; `{layer}` makes it one leaf per layer.
        sources: names of the tensors in the checkpoint, in order.
        combine: "copy" takes the only source as it is, "stack" puts sources of equal shape along a
            new first axis, "concat" joins them along their first axis.
        rows: "concat" only: for each source, the `ModelConfig` fields whose product is its first axis.
        when: the boolean `ModelConfig` field and the value of it that makes the rule apply.
    """

    target: str
    sources: tuple[str, ...]
    combine: Literal["copy", "stack", "concat"] = "copy"
    rows: tuple[tuple[str, ...], ...] = ()
    when: tuple[str, bool] | None = None

    def applies(self, config: ModelConfig) -> bool:
        """Whether a model of this config has the leaf."""
        return self.when is None or getattr(config, self.when[0]) is self.when[1]


@dataclass(frozen=True)
class RuleSet:
    """Everything that a family's checkpoints may hold.

    Attributes:
        rules: the leaves.
        ignored: patterns of names that hold nothing a model needs.
        tied: (copy, original) names; with tied embeddings a checkpoint may hold both, if they are equal.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name is known to be harmless."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Recipe:
    """A rule for one leaf of one model: `rows` are numbers, names are complete."""

    target: str
    sources: tuple[str, ...]
    combine: Literal["copy", "stack", "concat"]
    rows: tuple[int, ...]

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shape that each source must have for a leaf of `shape`."""
        if self.combine == "copy":
            assert len(self.sources) == 1, self
            return (shape,)
        if self.combine == "stack":
            assert len(self.sources) == shape[0], (self, shape)
            return (shape[1:],) * len(self.sources)
        assert sum(self.rows) == shape[0], (self, shape)
        return tuple((rows, *shape[1:]) for rows in self.rows)


def expand(rules: RuleSet, config: ModelConfig) -> dict[str, Recipe]:
    """Returns the recipe of every leaf that a model of this config has, by the leaf's dotted path."""
    recipes = {}
    for rule in rules.rules:
        if not rule.applies(config):
            continue
        rows = tuple(math.prod(getattr(config, name) for name in names) for names in rule.rows)
        for layer in range(config.num_layers if "{layer}" in rule.target else 1):
            target = rule.target.format(layer=layer)
            sources = tuple(name.format(layer=layer) for name in rule.sources)
            assert target not in recipes, f"two rules make {target}"
            recipes[target] = Recipe(target, sources, rule.combine, rows)
    return recipes


_LAYER = "model.layers.{layer}"
_QUERY_KEY_VALUE_ROWS = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "head_dim"))
_GATE_UP_ROWS = (("ffn_size",), ("ffn_size",))


def _attention(*projections: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}.self_attn.{projection}" for projection in projections)


def _feed_forward(*projections: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}.mlp.{projection}" for projection in projections)


LLAMA_LIKE = RuleSet(
    rules=(
        Rule("embed", ("model.embed_tokens.weight",)),
        Rule(
            "layers.{layer}.norms",
            (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.post_attention_layernorm.weight"),
            combine="stack",
        ),
        Rule(
            "layers.{layer}.qkv",
            _attention("q_proj.weight", "k_proj.weight", "v_proj.weight"),
            combine="concat",
            rows=_QUERY_KEY_VALUE_ROWS,
        ),
        Rule(
            "layers.{layer}.qkv_bias",
            _attention("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            combine="concat",
            rows=_QUERY_KEY_VALUE_ROWS,
            when=("qkv_bias", True),
        ),
        Rule(
            "layers.{layer}.qk_norm",
            _attention("q_norm.weight", "k_norm.weight"),
            combine="stack",
            when=("qk_norm", True),
        ),
        Rule("layers.{layer}.o", _attention("o_proj.weight")),
        Rule("layers.{layer}.o_bias", _attention("o_proj.bias"), when=("o_bias", True)),
        Rule(
            "layers.{layer}.gate_up",
            _feed_forward("gate_proj.weight", "up_proj.weight"),
            combine="concat",
            rows=_GATE_UP_ROWS,
        ),
        Rule(
            "layers.{layer}.gate_up_bias",
            _feed_forward("gate_proj.bias", "up_proj.bias"),
            combine="concat",
            rows=_GATE_UP_ROWS,
            when=("mlp_bias", True),
        ),
        Rule("layers.{layer}.down", _feed_forward("down_proj.weight")),
        Rule("layers.{layer}.down_bias", _feed_forward("down_proj.bias"), when=("mlp_bias", True)),
        Rule("final_norm", ("model.norm.weight",)),
        Rule("lm_head", ("lm_head.weight",), when=("tie_embeddings", False)),
    ),
    # Old exports saved the rotary frequencies, which follow from the config.
    ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    tied=(("lm_head.weight", "model.embed_tokens.weight"),),
)

RULES_OF_FAMILY: Mapping[str, RuleSet] = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
}


def rules_for(config: ModelConfig) -> RuleSet:
    """Returns the rules of a config's family.

    Raises:
        UnknownConfig: there are none.
    """
    if config.family not in RULES_OF_FAMILY:
        known = ", ".join(RULES_OF_FAMILY)
        raise UnknownConfig(f"no weight rules for the family {config.family!r}; known are {known}")
    return RULES_OF_FAMILY[config.family]
