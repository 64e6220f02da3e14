"""Layers of a model's own checkpoint that predict further tokens (MTP), as heads that draft for the model.

DeepSeek-V3 and GLM-4.5 have one after the last layer, Qwen3-Next and Qwen3.5 one beside the layers.
"""

import re
from dataclasses import replace

from jaxkv.config.model import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.draft_heads.head import DraftHead
from jaxkv.models.families.family import Family, MtpNames
from jaxkv.models.registry import FAMILIES
from jaxkv.weights.rule_parts import LAYER
from jaxkv.weights.rules import Rule, RuleSet

_ATTENDING = frozenset(("attention", "latent", "sparse_latent"))
"""Blocks of the layers that a layer which predicts further tokens is like."""


def read_mtp(verifier: Decoder) -> DraftHead:
    """Returns the first layer of a model that predicts further tokens, as a head.

    It reads what the final norm makes of the last layer's output, as the published engines have it.

    Raises:
        ValueError: the model has no such layer.
    """
    config = verifier.config
    names = _family(config).mtp
    if names is None or ("{after}" in names.prefix and not config.mtp_layers):
        raise ValueError(
            f"this {config.family} model has no layers that predict further tokens (MTP); use another method of "
            f"speculation"
        )
    like = max(
        layer for layer in range(config.num_layers) if _ATTENDING & {*config.blocks_of(layer)}
    )
    one_layer = replace(
        config,
        num_layers=1,
        pattern=(config.pattern[like],),
        windows=(config.windows[like],),
        mtp_layers=0,
    )
    return DraftHead(
        Decoder(one_layer),
        reads=(config.num_layers + 1,),
        read_size=config.hidden_size,
        is_mtp=True,
        shared=("embed",) if config.tie_embeddings else ("embed", "lm_head"),
    )


def mtp_rules(verifier: ModelConfig) -> RuleSet:
    """Returns the weight rules of the layer, of which all tensors but its own are ignored."""
    family = _family(verifier)
    names = _complete(family.mtp, verifier.num_layers)
    final = next(rule for rule in family.rules.rules if rule.target == "final_norm")
    own = {
        "embedding_norm": names.embedding_norm,
        "hidden_norm": names.hidden_norm,
        "final_norm": names.final_norm,
    }
    return RuleSet(
        rules=(
            *(
                Rule(leaf, (f"{names.prefix}{name}",), offset=final.offset)
                for leaf, name in own.items()
            ),
            Rule("join", (f"{names.prefix}{names.join}",)),
            *(
                _renamed(rule, names.block)
                for rule in family.rules.rules
                if rule.target.startswith("layers.")
            ),
        ),
        ignored=(
            rf"(?!{re.escape(names.prefix)}).*",
            *(re.escape(names.prefix) + pattern for pattern in names.ignored),
        ),
        prefixes=family.rules.prefixes,
    )


def _complete(names: MtpNames | None, layers: int) -> MtpNames:
    assert names is not None, "the head was read from a family with these names"
    return names._replace(
        prefix=names.prefix.format(after=layers), block=names.block.format(after=layers)
    )


def _renamed(rule: Rule, block: str) -> Rule:
    """Returns the rule of a layer for the tensors of the block with other names."""
    sources = tuple(source.replace(LAYER, block) for source in rule.sources)
    return replace(rule, sources=sources, fused=rule.fused.replace(LAYER, block))


def _family(config: ModelConfig) -> Family:
    return FAMILIES[config.family]
