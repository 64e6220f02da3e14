"""EAGLE-3 heads in their published format: keys of config.json, and names of weights (Li et al., EAGLE-3, 2025)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxkv.config.model import ModelConfig
from jaxkv.errors import BadCheckpoint, UnknownConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.draft_heads.head import DraftHead
from jaxkv.models.families.llama_like import (
    ROTARY_TABLES,
    attention_biases,
    read_llama_like,
    require,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.directory import existing_directory, read_config_json
from jaxkv.weights.rule_parts import attention, gated, layer_rule, norms
from jaxkv.weights.rules import Rule, RuleSet
from jaxkv.weights.safetensors import StoredTensor, open_checkpoint
from jaxkv.wording import clip, shown

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_EMBED, _OFFSETS = "embed_tokens.weight", "d2t"
_INT_DTYPES = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}

_BLOCK = "midlayer."
_RULES = (
    Rule("project", ("fc.weight",)),
    Rule("final_norm", ("norm.weight",)),
    Rule("lm_head", ("lm_head.weight",)),
    norms(f"{_BLOCK}hidden_norm.weight", f"{_BLOCK}post_attention_layernorm.weight"),
    layer_rule("embedding_norm", f"{_BLOCK}input_layernorm.weight", block="eagle_attention"),
    *(replace(rule, block="eagle_attention") for rule in attention(f"{_BLOCK}self_attn")),
    *gated(f"{_BLOCK}mlp"),
)


def read_eagle3(directory: Path, verifier: Decoder) -> DraftHead:
    """Returns the head of a directory for a model that verifies its drafts; reads config.json alone.

    Raises:
        UnknownConfig: the directory has no EAGLE-3 head, or a key that would change its result is not supported.
        ValueError: the head is one of another model, or a key is missing, of the wrong type or out of range.
    """
    raw = read_config_json(existing_directory(directory))
    config, draft_vocab, reads, width = _read(ConfigJson(raw), verifier.config, raw)
    _check(config, width, reads, verifier.config)
    # Published heads name the lengths of their training; past them drafts are less often right, and no token changes.
    longest = max(config.max_positions, verifier.max_positions)
    config = replace(config, max_positions=longest, tie_embeddings=False)
    with_pattern = replace(config, pattern=(("eagle_attention", "gated"),))
    return DraftHead(
        Decoder(with_pattern),
        reads=reads,
        read_size=len(reads) * width,
        is_mtp=False,
        draft_vocab=None if draft_vocab == config.vocab_size else draft_vocab,
    )


def names_eagle3(directory: Path) -> bool:
    """Whether config.json of a directory names an EAGLE-3 head."""
    return read_config_json(existing_directory(directory)).get("architectures") == [_ARCHITECTURE]


def _read(
    keys: ConfigJson, verifier: ModelConfig, raw: Mapping[str, object]
) -> tuple[ModelConfig, int, tuple[int, ...], int]:
    """Returns config, number of drafted ids, the hidden states that it reads, and the verifying model's width."""
    named = raw.get("architectures")
    if named != [_ARCHITECTURE]:
        raise UnknownConfig(
            f"config.json sets architectures = {shown(named)}; an EAGLE-3 head has [{_ARCHITECTURE!r}]: take the "
            f"directory of the head, and not that of a model, whose method is draft_model"
        )
    require(keys, "eagle3", num_hidden_layers=1, norm_before_residual=False)
    vocab_size = keys.take_int("vocab_size")
    draft_vocab = keys.take_int("draft_vocab_size", vocab_size, high=vocab_size)
    width = keys.take_int("target_hidden_size", keys.take_int("hidden_size"))
    reads = _reads(keys, verifier.num_layers)
    config = read_llama_like(
        keys,
        "llama",
        architecture=_ARCHITECTURE,
        kv_heads=None,
        max_positions=2048,
        mlp_bias=keys.take_bool("mlp_bias", False),
        **attention_biases(keys),
    )
    return config, draft_vocab, reads, width


def _reads(keys: ConfigJson, layers: int) -> tuple[int, ...]:
    """Returns the hidden states that the head reads: EAGLE's own choice, or those behind the layers that a file lists.

    EAGLE's code takes the inputs of three layers. `eagle_config` of NVIDIA's and LMSYS' heads lists the layers whose
    outputs are taken.
    """
    nested = ConfigJson(
        keys.take_object("eagle_config"), place="eagle_config", path="eagle_config."
    )
    require(
        nested,
        "eagle3",
        use_aux_hidden_state=True,
        use_input_layernorm_in_first_layer=True,
        use_last_layernorm=True,
        use_mtp_layernorm=False,
        parallel_draft_step=1,
    )
    listed = nested.take("eagle_aux_hidden_state_layer_ids", None)
    nested.finish()
    if listed is None:
        if layers < 3:
            raise ValueError(
                f"an EAGLE-3 head reads the hidden states of three layers, and the model has {layers}"
            )
        return (2, layers // 2, layers - 3)
    if not isinstance(listed, list) or not all(
        type(at) is int and 0 <= at < layers for at in listed
    ):
        raise ValueError(
            f"config.json: eagle_aux_hidden_state_layer_ids must list layers of a model of {layers}, got "
            f"{shown(listed)}"
        )
    return tuple(at + 1 for at in listed)


def _check(config: ModelConfig, width: int, reads: tuple[int, ...], verifier: ModelConfig) -> None:
    """Raises `ValueError` if the head is not one of this model."""
    for what, own, wanted in (
        ("vocabulary", config.vocab_size, verifier.vocab_size),
        ("hidden size", width, verifier.hidden_size),
    ):
        if own != wanted:
            raise ValueError(
                f"an EAGLE-3 head belongs to one model: its config.json has a model's {what} of {own:,}, and the model "
                f"here has {wanted:,}; choose the head of this model"
            )
    if len(reads) != 3:
        raise ValueError(f"an EAGLE-3 head reads three hidden states, got {len(reads)} layers")


def eagle3_rules(head: DraftHead) -> RuleSet:
    """Returns the weight rules of a head."""
    own = () if "embed" in head.shared else (Rule("embed", (_EMBED,)),)
    return RuleSet(
        rules=(*_RULES, *own),
        ignored=(ROTARY_TABLES, _OFFSETS, "t2d", *(["embed_tokens\\.weight"] if not own else [])),
        # SpecForge and others write the layer as the first of a model.
        prefixes=((r"(model\.)?layers\.0\.", _BLOCK), (r"model\.", "")),
    )


def with_shared(head: DraftHead, directory: Path, verifier: ModelConfig) -> DraftHead:
    """Returns the head with the names of the parameters that its file lacks, and the verifying model has.

    Raises:
        BadCheckpoint: the file has no embeddings, and those of the verifying model have another width.
    """
    with open_checkpoint(directory) as stored:
        if {_EMBED, f"model.{_EMBED}"} & stored.keys():
            return head
    if head.config.hidden_size != verifier.hidden_size:
        raise BadCheckpoint(
            f"{directory}: the head lacks {_EMBED!r}, and its hidden size, {head.config.hidden_size:,}, is not that of "
            f"the model, {verifier.hidden_size:,}, so it cannot take the model's embeddings"
        )
    return replace(head, shared=("embed",))


def draft_places(head: DraftHead, directory: Path) -> np.ndarray | None:
    """Returns per id of the vocabulary its place among the ids that the head drafts, int32; `None` if it drafts all.

    `d2t` has for each of these ids the difference between the id and its place. An id that the head cannot draft has a
    place past the end.

    Raises:
        BadCheckpoint: `d2t` is missing, has another shape or dtype, or names an id twice or one out of the vocabulary.
    """
    if head.draft_vocab is None:
        return None
    with open_checkpoint(directory) as stored:
        tensor = stored.get(_OFFSETS, stored.get(f"model.{_OFFSETS}"))
        if tensor is None:
            raise BadCheckpoint(
                f"{directory}: the head drafts {head.draft_vocab:,} of {head.vocab_size:,} ids and lacks {_OFFSETS!r}, "
                f"which says which ones"
            )
        offsets = _read_ints(tensor, head.draft_vocab)
    ids = offsets + np.arange(head.draft_vocab)
    if ids.min() < 0 or ids.max() >= head.vocab_size or len(np.unique(ids)) < len(ids):
        raise BadCheckpoint(
            f"{tensor.path}: {_OFFSETS!r} must name {head.draft_vocab:,} different ids below {head.vocab_size:,}"
        )
    places = np.full(head.vocab_size, head.draft_vocab, np.int32)
    places[ids] = np.arange(head.draft_vocab, dtype=np.int32)
    return places


def _read_ints(tensor: StoredTensor, count: int) -> np.ndarray:
    """Returns the integers of a tensor, int64 [count]."""
    if tensor.shape != (count,) or tensor.dtype not in _INT_DTYPES:
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} has dtype {tensor.dtype} and shape {list(tensor.shape)}, wanted "
            f"I64 and [{count}]"
        )
    numbers = np.empty(count, _INT_DTYPES[tensor.dtype])
    tensor.read_bytes(numbers.view(np.uint8), tensor.start)
    return numbers.astype(np.int64)
