"""Multimodal models of which only the text part runs.

Gemma 3 4B to 27B, Gemma 4, Mistral-Small 3.x and 4, Ministral 3, Qwen3-VL, Qwen3.5 and 3.6, Kimi-K2.5.

Given text alone, the whole model computes the same as its text part. config.json has the text part's keys in
`text_config`; the tensors of the other parts are ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense import gemma3, mistral, qwen3
from jaxkv.models.families.experts import deepseek, gemma4, qwen3_moe
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import check_architecture
from jaxkv.models.families.recurrent import qwen3_5
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rules import RuleSet
from jaxkv.wording import shown


class Multimodal(NamedTuple):
    """One kind of multimodal model.

    Attributes:
        model_type: its name in config.json.
        architectures: names of its class in config.json's `architectures`.
        texts: the families that its text part may have; the first if none is named.
        sizes: Transformers' defaults of sizes that `text_config` may leave out.
        ignored: keys of the other parts, separated by blanks.
        caps_logits: whether the whole model has the soft cap of its text part's logits.
        unties: whether Transformers unties embeddings and output head if the whole model's config does not say.
        other_sizes: model_type of a text -> `sizes` that it has instead.
    """

    model_type: str
    architectures: tuple[str, ...]
    texts: tuple[Family, ...]
    sizes: Mapping[str, int]
    ignored: str
    caps_logits: bool = False
    unties: bool = False
    other_sizes: Mapping[str, Mapping[str, int]] = MappingProxyType({})


_KINDS = (
    Multimodal(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        (gemma3.FAMILY,),
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        "boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
        "boi_token_id eoi_token_id image_token_id",
    ),
    Multimodal(
        "gemma4",
        ("Gemma4ForConditionalGeneration",),
        (gemma4.FAMILY,),
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
        },
        "",
        caps_logits=True,
    ),
    Multimodal(
        "mistral3",
        ("Mistral3ForConditionalGeneration",),
        (*mistral.FAMILIES, deepseek.MISTRAL4),
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        "image_token_index image_token_id multimodal_projector_bias projector_hidden_act spatial_merge_size "
        "vision_feature_layer",
        other_sizes={
            "ministral3": {"vocab_size": 131072, "num_hidden_layers": 34},
            "mistral4": {"vocab_size": 131072, "intermediate_size": 12288, "num_hidden_layers": 36},
        },
    ),
    Multimodal(
        "qwen3_vl",
        ("Qwen3VLForConditionalGeneration",),
        (qwen3.VL_TEXT,),
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        "",
        unties=True,
    ),
    Multimodal(
        "qwen3_vl_moe",
        ("Qwen3VLMoeForConditionalGeneration",),
        (qwen3_moe.VL_TEXT,),
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        "",
        unties=True,
    ),
    Multimodal(
        "qwen3_5",
        ("Qwen3_5ForConditionalGeneration",),
        (qwen3_5.TEXT,),
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
        },
        "",
        unties=True,
    ),
    Multimodal(
        "qwen3_5_moe",
        ("Qwen3_5MoeForConditionalGeneration",),
        (qwen3_5.EXPERTS,),
        {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
        },
        "",
        unties=True,
    ),
    Multimodal(
        "kimi_k25",
        # The second name is Transformers' own.
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        deepseek.KIMI_FAMILIES,
        {},
        "use_unified_vision_chunk video_placeholder projection_hidden_size projection_layer_norm_eps",
    ),
)

_PREFIXES = (
    # As Transformers 5.17 saves Kimi-K2.5.
    (r"language_model\.model\.blocks\.", "model.layers."),
    (r"language_model\.model\.", "model."),
    (r"language_model\.lm_head\.", "lm_head."),
    (r"model\.language_model\.", "model."),
)
"""Prefix in the checkpoint (a pattern), of either version of Transformers -> prefix in a model of text alone."""

_OTHER_PARTS = (
    r"(model\.)?"
    r"(vision_tower|audio_tower|multi_modal_projector|mm_projector|embed_vision|embed_audio|visual)\..+"
)


def from_hf(kind: Multimodal, raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is that of `kind`."""
    keys = ConfigJson(raw)
    check_architecture(keys, kind.model_type, *kind.architectures)
    keys.ignore(f"vision_config {kind.ignored}")
    text = keys.take_object("text_config")
    families = {family.model_type: family for family in kind.texts}
    named = text.get("model_type", kind.texts[0].model_type)
    family = families.get(named) if isinstance(named, str) else None
    if family is None:
        raise UnknownConfig(
            f"config.json: text_config sets model_type = {shown(named)}; for {kind.model_type}, only "
            f"{' or '.join(families)} is supported"
        )
    if text.get("final_logit_softcapping") is not None and not kind.caps_logits:
        raise UnknownConfig(
            "config.json: text_config sets final_logit_softcapping, which Transformers applies to a model of text "
            "alone and not to a multimodal one; set it to null if the model was trained without it"
        )
    sizes = {**kind.sizes, **kind.other_sizes.get(family.model_type, {})}
    merged = {**sizes, **text, **_of_whole_model(keys, text, kind)}
    keys.finish()
    return replace(family.read(merged), family=kind.model_type)


def _of_whole_model(
    keys: ConfigJson, text: Mapping[str, object], kind: Multimodal
) -> dict[str, object]:
    """Returns the keys of the text part that the whole model's config sets; they take precedence over `text_config`."""
    names = ("eos_token_id", "bos_token_id", "quantization_config")
    found = {name: value for name in names if (value := keys.take(name, None)) is not None}
    dtypes = {name: keys.take(name, None) for name in ("dtype", "torch_dtype")}
    if any(dtypes.values()):
        found |= dtypes
    # Transformers 5 writes its default, true, for models whose text part has an output head of its own.
    tied = keys.take("tie_word_embeddings", False if kind.unties else None)
    if tied is not None:
        found["tie_word_embeddings"] = tied and text.get("tie_word_embeddings", tied)
    return found


def _rules(kind: Multimodal) -> RuleSet:
    """Returns the rules of all its texts, of which each model uses those of the blocks that it has."""
    texts = [family.rules for family in kind.texts]
    ignored = (*(name for rules in texts for name in rules.ignored), _OTHER_PARTS)
    return replace(
        texts[-1],
        # Most are the same in all of them.
        rules=tuple(dict.fromkeys(rule for rules in texts for rule in rules.rules)),
        ignored=tuple(dict.fromkeys(ignored)),
        prefixes=_PREFIXES,
    )


FAMILIES = tuple(
    Family(kind.model_type, partial(from_hf, kind), _rules(kind), kind.texts[0].mtp)
    for kind in _KINDS
)
