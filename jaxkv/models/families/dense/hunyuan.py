"""Hunyuan (Tencent), dense: Llama with norms on queries and keys after the rotation, whose base is multiplied."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.layers.rope import attention_factor
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    attention_biases,
    llama_rules,
    read_llama_like,
    take_head_dim,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, layer_rule
from jaxkv.wording import shown

_POSITIONS = 2048
# Transformers' model has these values and ignores the keys.
_FIXED = {"use_qk_norm": True, "use_rotary_pos_emb": True, "use_cla": False, "norm_type": "rms"}
# Keys of other tasks, of the training and of other models of the series.
_OTHERS = (
    "add_classification_head class_num pool_type cla_share_factor dense_list im_start_id im_end_id im_newline_id "
    "mask_init_id text_start_id text_end_id org_vocab_size pad_id eod_token_id"
)


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "hunyuan_v1_dense"."""
    keys = ConfigJson(raw)
    keys.ignore(_OTHERS)
    for name, fixed in _FIXED.items():
        if keys.take(name, fixed) != fixed:
            raise UnknownConfig(
                f"config.json sets {name} = {shown(keys.take(name))}; for hunyuan_v1_dense, only {fixed} is supported"
            )
    head_dim = take_head_dim(keys)
    repeated = keys.take("attention_head_dim", head_dim)
    if repeated != head_dim:
        raise UnknownConfig(
            f"config.json sets attention_head_dim = {shown(repeated)}, which contradicts head_dim = {head_dim}"
        )
    config = read_llama_like(
        keys,
        "hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        kv_heads=None,
        max_positions=_POSITIONS,
        norm_eps=1e-5,
        rope=_alpha_rope(raw, keys, head_dim),
        late_qk_norm=True,
        **attention_biases(keys),
    )
    if attention_factor(config.rope) != 1.0:
        # A norm after the rotation removes the factor, and the layers take it to be 1.
        raise UnknownConfig(
            f"config.json: hunyuan_v1_dense supports no rotary scaling of the kind {config.rope.kind}, which scales "
            "queries and keys"
        )
    return config


def _alpha_rope(raw: Mapping[str, object], keys: ConfigJson, head_dim: int) -> RopeConfig | None:
    """Returns the rotary embedding if its base is multiplied by a power of `alpha`; otherwise `None`."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = keys.take_object(name)
    part = ConfigJson(scaling, place=f"config.json: {name}")
    if not part.take("alpha", None):
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "dynamic":
        raise UnknownConfig(
            f"config.json: {name} sets alpha with the kind {shown(kind)}; only dynamic has it"
        )
    # Transformers does not read them beside alpha.
    part.ignore("type rope_type factor beta_fast beta_slow mscale mscale_all_dim")
    theta = part.take_float("rope_theta", keys.take_float("rope_theta", 10000.0))
    alpha = part.take_float("alpha")
    part.finish()
    keys.ignore("rope_scaling rope_parameters")
    return RopeConfig(theta=theta * alpha ** (head_dim / (head_dim - 2)), rotary_dim=head_dim)


_RULES = llama_rules(
    *LLAMA_BLOCKS,
    layer_rule(
        "late_qk_norm",
        f"{LAYER}self_attn.query_layernorm.weight",
        f"{LAYER}self_attn.key_layernorm.weight",
        combine="stack",
    ),
)

FAMILY = Family("hunyuan_v1_dense", from_hf, _RULES)
