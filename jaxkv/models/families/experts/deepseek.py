"""DeepSeek-V2 (and V2-Lite), -V3 and -V3.2: latent attention (sparse in -V3.2) and mixtures of many small experts.

Kimi-K2 is DeepSeek-V3 under a `model_type` of its own, Moonlight is one under its name, and GLM-4.7-Flash is one with
other defaults. GLM-5 is DeepSeek-V3.2 with other rotary pairs in the indexer. In Mistral Small 4 queries grow with
their position, and a softmax chooses experts.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from jaxkv.config.blocks import (
    MAX_EXPERTS,
    DeltaConfig,
    IndexConfig,
    LatentConfig,
    MixtureConfig,
    QueryGrowth,
)
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.layers.rope import yarn_mscale
from jaxkv.models.families.dense.mistral import take_query_growth
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    ACTIVATIONS,
    FURTHER_LAYERS,
    MTP_AFTER_LAST,
    check_architecture,
    llama_rules,
    require,
    take_dtype,
    take_mtp_layers,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_rope
from jaxkv.models.hf_config.special_ids import take_special_ids
from jaxkv.weights.rule_parts import (
    LAYER,
    gated,
    gated_experts,
    latent_attention,
    shared_expert,
    sparse_latent_attention,
)
from jaxkv.wording import shown


def from_hf_v2(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "deepseek_v2"."""
    keys = ConfigJson(raw)
    if keys.take("norm_topk_prob", False):
        raise UnknownConfig(
            "config.json sets norm_topk_prob, which DeepSeek's code and Transformers interpret differently for "
            "deepseek_v2; it is not supported"
        )
    grouped = keys.take_choice(
        "topk_method", "greedy", {"greedy": "", "group_limited_greedy": "groups"}
    )
    mixture = _mixture(
        keys,
        scoring="softmax",
        shared=keys.take_int("n_shared_experts", 2, high=MAX_EXPERTS),
        experts=keys.take_int("n_routed_experts", 64, high=MAX_EXPERTS),
        size=keys.take_int("moe_intermediate_size", 1407),
        scale=keys.take_float("routed_scaling_factor", 1.0),
        groups=_groups(keys, None, None) if grouped else _no_groups(keys),
        group_votes=1,
        renormalise=False,
    )
    return read_latent_model(
        keys,
        "deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        mixture=mixture,
        dense=keys.take_int("first_k_dense_replace", 0, low=0),
        max_positions=2048,
        pairs=True,
    )


def from_hf_v3(raw: Mapping[str, object], family: str = "deepseek_v3") -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "deepseek_v3", or `family`, another name of it."""
    keys = ConfigJson(raw)
    return read_latent_model(
        keys,
        family,
        architecture="DeepseekV3ForCausalLM",
        mixture=take_mixture_v3(keys),
        dense=keys.take_int("first_k_dense_replace", 3, low=0),
        max_positions=4096,
        pairs=keys.take_bool("rope_interleave", True),
        mtp_layers=take_mtp_layers(keys),
    )


def from_hf_glm4_moe_lite(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "glm4_moe_lite" (GLM-4.7-Flash)."""
    keys = ConfigJson({**_GLM4_MOE_LITE, **raw})
    return read_latent_model(
        keys,
        "glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        mixture=take_mixture_v3(keys),
        dense=take_dense(keys, 1),
        max_positions=202752,
        pairs=keys.take_bool("rope_interleave", True),
        mtp_layers=take_mtp_layers(keys),
    )


# What Transformers takes for keys that are not in the file, where it differs from DeepSeek-V3.
_GLM4_MOE_LITE = {
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}


def from_hf_mistral4(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mistral4" (Mistral Small 4)."""
    given = {**_MISTRAL4, **raw}
    sizes = ConfigJson(given)
    rotated, others = sizes.take_int("qk_rope_head_dim", 64), sizes.take_int("qk_nope_head_dim")
    keys, growth = take_query_growth(given, _MISTRAL4_ROPE, share=rotated / (rotated + others))
    return read_latent_model(
        keys,
        "mistral4",
        architecture="Mistral4ForCausalLM",
        mixture=_mixture(
            keys,
            scoring="softmax",
            shared=keys.take_int("n_shared_experts", 1, high=MAX_EXPERTS),
            experts=keys.take_int("n_routed_experts", 128, high=MAX_EXPERTS),
            size=keys.take_int("moe_intermediate_size", 2048),
            scale=keys.take_float("routed_scaling_factor", 1.0),
            groups=_groups(keys, 1, 1),
            group_votes=2,
            renormalise=keys.take_bool("norm_topk_prob", True),
        ),
        dense=keys.take_int("first_k_dense_replace", 0, low=0),
        max_positions=1048576,
        pairs=keys.take_bool("rope_interleave", True),
        growth=growth,
    )


# What Transformers takes for keys that are not in the file, where it differs from DeepSeek-V3.
_MISTRAL4 = {
    "kv_lora_rank": 256,
    "num_experts_per_tok": 4,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def from_hf_v32(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "deepseek_v32"."""
    return _read_sparse(
        ConfigJson(raw),
        "deepseek_v32",
        architecture="DeepseekV32ForCausalLM",
        max_positions=163840,
        index_heads=64,
        index_pairs=False,
    )


def from_hf_glm_moe_dsa(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "glm_moe_dsa" (GLM-5 and 5.1)."""
    keys = ConfigJson({**_GLM_MOE_DSA, **raw})
    _refuse_shared_indexers(keys)
    # Files repeat what Transformers' class always does.
    require(keys, "glm_moe_dsa", rope_interleave=True, indexer_rope_interleave=True)
    require(keys, "glm_moe_dsa", moe_router_dtype="float32")
    return _read_sparse(
        keys,
        "glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        max_positions=202752,
        index_heads=32,
        index_pairs=True,
    )


# What Transformers takes for keys that are not in the file, where it differs from DeepSeek-V3.2.
_GLM_MOE_DSA = {
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}


def _refuse_shared_indexers(keys: ConfigJson) -> None:
    """Raises `UnknownConfig` if layers attend to the tokens that the indexer of an earlier layer chose (GLM-5.2)."""
    # They matter to layers that share alone.
    keys.ignore("index_skip_topk_offset index_share_for_mtp_iteration")
    shares = {
        "indexer_types": (None, ["full"] * take_num_layers(keys)),
        "index_topk_freq": (None, 1),
        "index_topk_pattern": (None, "F" * take_num_layers(keys)),
    }
    for name, alone in shares.items():
        if keys.take(name, None) not in alone:
            raise UnknownConfig(
                f"config.json sets {name} = {shown(keys.take(name))}; layers that attend to what an earlier layer's "
                "indexer chose (GLM-5.2) are not supported: take GLM-5 or 5.1"
            )


def _read_sparse(
    keys: ConfigJson,
    family: str,
    *,
    architecture: str,
    max_positions: int,
    index_heads: int,
    index_pairs: bool,
) -> ModelConfig:
    """Reads the keys of a version with sparse attention; `index_heads` is Transformers' default."""
    num_layers, dense = take_num_layers(keys), take_dense(keys, 3)
    attending = keys.take("layer_types", None)
    if attending not in (None, ["deepseek_sparse_attention"] * num_layers):
        raise UnknownConfig(
            f"config.json: layer_types must name deepseek_sparse_attention for each of the {num_layers} layers, "
            f"got {str(attending)[:80]}"
        )
    return read_latent_model(
        keys,
        family,
        architecture=architecture,
        mixture=take_mixture_v3(keys),
        dense=dense,
        max_positions=max_positions,
        pairs=True,
        mtp_layers=take_mtp_layers(keys),
        index=IndexConfig(
            heads=keys.take_int("index_n_heads", index_heads),
            head_dim=keys.take_int("index_head_dim", 128),
            topk=keys.take_int("index_topk", 2048),
            pairs=index_pairs,
        ),
    )


def take_dense(keys: ConfigJson, default: int) -> int:
    """Reads the number of first layers without experts; raises `UnknownConfig` if they are others than the first."""
    num_layers = take_num_layers(keys)
    dense = keys.take_int("first_k_dense_replace", default, low=0)
    named = keys.take("mlp_layer_types", None)
    if isinstance(named, list) and set(named) <= {"dense", "sparse"}:
        dense = named.count("dense")
        kinds = ["dense" if layer < dense else "sparse" for layer in range(num_layers)]
        named = None if named == kinds else named
    if named is not None:
        raise UnknownConfig(
            f"config.json: mlp_layer_types must list dense layers, then sparse ones, {num_layers} in all, "
            f"got {str(named)[:80]}"
        )
    return dense


def take_mixture_v3(keys: ConfigJson) -> MixtureConfig:
    """Reads the sizes of DeepSeek-V3's experts, whose routers have a sigmoid and a correction."""
    keys.take_choice("topk_method", "noaux_tc", {"noaux_tc": "noaux_tc"})
    return _mixture(
        keys,
        scoring="sigmoid",
        shared=keys.take_int("n_shared_experts", 1, high=MAX_EXPERTS),
        experts=keys.take_int("n_routed_experts", 256, high=MAX_EXPERTS),
        size=keys.take_int("moe_intermediate_size", 2048),
        scale=keys.take_float("routed_scaling_factor", 2.5),
        groups=_groups(keys, 8, 4),
        group_votes=2,
        renormalise=keys.take_bool("norm_topk_prob", True),
    )


def _mixture(
    keys: ConfigJson,
    *,
    scoring: str,
    shared: int,
    experts: int,
    size: int,
    scale: float,
    groups: tuple[int, int],
    group_votes: int,
    renormalise: bool,
) -> MixtureConfig:
    keys.take_choice("scoring_func", scoring, {scoring: scoring})
    every = keys.take_int("moe_layer_freq", 1)
    if every != 1:
        raise UnknownConfig(
            f"config.json sets moe_layer_freq = {every}; only 1 is supported (experts in all but the first layers)"
        )
    return MixtureConfig(
        experts=experts,
        top_k=keys.take_int("num_experts_per_tok", 8, high=MAX_EXPERTS),
        size=size,
        gated=True,
        scoring=scoring,
        correction=scoring == "sigmoid",
        groups=groups[0],
        top_groups=groups[1],
        group_votes=group_votes,
        renormalise=renormalise,
        scale=scale,
        shared_size=shared * size,
    )


def _groups(keys: ConfigJson, groups: int | None, top_groups: int | None) -> tuple[int, int]:
    return (
        keys.take_int("n_group", groups, high=MAX_EXPERTS),
        keys.take_int("topk_group", top_groups, high=MAX_EXPERTS),
    )


def _no_groups(keys: ConfigJson) -> tuple[int, int]:
    keys.ignore("n_group topk_group")
    return 1, 1


def read_latent_model(
    keys: ConfigJson,
    family: str,
    *,
    architecture: str,
    mixture: MixtureConfig,
    dense: int,
    max_positions: int,
    pairs: bool,
    mtp_layers: int = 0,
    index: IndexConfig | None = None,
    growth: QueryGrowth | None = None,
    mixers: Sequence[str] | None = None,
    delta: DeltaConfig | None = None,
) -> ModelConfig:
    """Reads the keys that all models with latent attention share.

    Args:
        keys: config.json, from which the family has read its own keys.
        family: its `model_type`.
        architecture: name of its causal language model in `architectures`.
        mixture: sizes of the experts.
        dense: number of first layers without experts.
        max_positions: Transformers' default.
        pairs: see `LatentConfig`.
        mtp_layers: layers of the file that predict further tokens.
        index: sizes of the indexers; `None` for dense attention.
        growth: see `ModelConfig.query_growth`.
        mixers: the block of each layer before its feed-forward; `None` for latent attention in all.
        delta: sizes of "kimi_delta" blocks, with which latent attention has no positions.

    Raises:
        UnknownConfig: a key that would change the result was not read, or has an unsupported value.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    check_architecture(keys, family, architecture)
    # Transformers ignores the file's values of these and derives them.
    keys.ignore("head_dim qk_head_dim")
    heads = _take_heads(keys)
    latent = LatentConfig(
        kv_lora_rank=keys.take_int("kv_lora_rank", 512),
        rope_dim=keys.take_int("qk_rope_head_dim", 64),
        nope_dim=keys.take_int("qk_nope_head_dim", 128),
        value_dim=keys.take_int("v_head_dim", 128),
        q_lora_rank=take_nullable_int(keys, "q_lora_rank", 1536),
        pairs=pairs,
        index=index,
    )
    limit = keys.take_int("max_position_embeddings", max_positions)
    rope, longest = read_rope(keys, head_dim=latent.rope_dim, max_positions=limit)
    vocab_size, num_layers = keys.take_int("vocab_size"), take_num_layers(keys)
    if delta is not None:
        rope = RopeConfig(rotary_dim=latent.rope_dim, kind="none")
    if mixers is None:
        mixers = ("latent" if index is None else "sparse_latent",) * num_layers
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=keys.take_int("hidden_size"),
        num_layers=num_layers,
        heads=heads,
        kv_heads=heads,
        head_dim=latent.query_dim,
        ffn_size=keys.take_int("intermediate_size"),
        max_positions=longest,
        rope=rope,
        windows=(None,) * num_layers,
        pattern=tuple(
            (mixer, "gated" if layer < dense else "mixture+shared")
            for layer, mixer in enumerate(mixers)
        ),
        norm_eps=keys.take_float("rms_norm_eps", 1e-6),
        activation=keys.take_choice("hidden_act", "silu", ACTIVATIONS),
        tie_embeddings=keys.take_bool("tie_word_embeddings", False),
        attention_scale=_scale(latent, rope),
        query_growth=growth,
        mixture=mixture,
        latent=latent,
        delta=delta,
        mtp_layers=mtp_layers,
        **take_special_ids(keys, family, vocab_size),
        dtype=take_dtype(keys),
    )
    keys.finish()
    return config


def _take_heads(keys: ConfigJson) -> int:
    heads = keys.take_int("num_attention_heads")
    if take_nullable_int(keys, "num_key_value_heads", None) not in (None, heads):
        raise UnknownConfig(
            f"config.json: num_key_value_heads must equal num_attention_heads = {heads} in latent attention"
        )
    return heads


def _scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """Returns the factor of attention scores; YaRN's mscale applies twice, to queries and to keys."""
    scale = latent.query_dim**-0.5
    if rope.kind != "yarn" or not rope.mscale_all_dim:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


_RULES = llama_rules(
    *latent_attention(f"{LAYER}self_attn"),
    *sparse_latent_attention(f"{LAYER}self_attn"),
    *gated(f"{LAYER}mlp"),
    *gated_experts(f"{LAYER}mlp"),
    *shared_expert(f"{LAYER}mlp.shared_experts"),
    further_layers=FURTHER_LAYERS,
)

KIMI_FAMILIES = (
    Family("kimi_k2", partial(from_hf_v3, family="kimi_k2"), _RULES, MTP_AFTER_LAST),
    Family("deepseek_v3", from_hf_v3, _RULES, MTP_AFTER_LAST),
)
"""Names of Kimi-K2: its own, and that with which Transformers saves the text part of Kimi-K2.5."""

MISTRAL4 = Family("mistral4", from_hf_mistral4, _RULES)

FAMILIES = (
    Family("deepseek_v2", from_hf_v2, _RULES),
    *KIMI_FAMILIES,
    Family("deepseek_v32", from_hf_v32, _RULES, MTP_AFTER_LAST),
    MISTRAL4,
    Family("glm_moe_dsa", from_hf_glm_moe_dsa, _RULES, MTP_AFTER_LAST),
    Family("glm4_moe_lite", from_hf_glm4_moe_lite, _RULES, MTP_AFTER_LAST),
)
