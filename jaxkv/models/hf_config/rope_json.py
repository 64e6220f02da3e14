"""Reads the rotary part of `config.json`, in the form of Transformers 4 (`rope_scaling`) or 5 (`rope_parameters`)."""

import logging
from collections.abc import Mapping

from jaxkv.config.model import RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.wording import listed, shown

_KINDS = {
    kind: kind
    for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
}
_KINDS["mrope"] = "default"
_LOG = logging.getLogger(__name__)
_MAX_POSITIONS = 2**31 - 1


def read_rope(
    config: ConfigJson, *, head_dim: int, max_positions: int, partial: float | None = None
) -> tuple[RopeConfig, int]:
    """Returns the rotary embedding, and the longest sequence that it supports, in tokens.

    Args:
        config: config.json, whose rotary keys are read.
        head_dim: components of a head.
        max_positions: `max_position_embeddings`; for "linear" and "dynamic", the context length before scaling.
        partial: default of the share of components that is rotated; `None` if the family always rotates all.

    Raises:
        UnknownConfig: the kind or a key is not supported.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    # If both are given, Transformers uses the older one.
    newer, older = config.take_object("rope_parameters"), config.take_object("rope_scaling")
    name = "rope_scaling" if older else "rope_parameters"
    keys = ConfigJson(_with_kind(older or newer), place=f"config.json: {name}", path=f"{name}.")
    # The part of an embedding for images: all its positions of a text token are equal, so that the sections do nothing.
    keys.ignore("mrope_section mrope_interleaved")
    theta = _take_theta(config, keys)
    kind = keys.take_choice("rope_type", "default", _KINDS)
    options, longest = _READERS[kind](keys, max_positions)
    original = keys.take("original_max_position_embeddings", None)
    config.lengths |= {longest} | ({original} if isinstance(original, int) else set())
    rotary_dim, share = head_dim, 1.0
    if partial is not None:
        share = config.take_float("partial_rotary_factor", partial)
    if partial is not None or kind == "proportional":
        share = keys.take_float("partial_rotary_factor", share)
    if kind == "proportional":
        # Frequencies are those of a whole head.
        options["turning"] = int(share * head_dim // 2)
    else:
        rotary_dim = int(head_dim * share)
    config.settle("rotary_dim", rotary_dim)
    keys.finish()
    rope = RopeConfig(theta=theta, rotary_dim=rotary_dim, kind=kind, **options)
    return rope, min(longest, _MAX_POSITIONS)


def with_theta(raw: Mapping[str, object], theta: float) -> Mapping[str, object]:
    """Returns a parsed config.json with a family's default base of the frequencies if the file has none."""
    rotary = raw.get("rope_scaling") or raw.get("rope_parameters")
    if isinstance(rotary, Mapping) and "rope_theta" in rotary:
        return raw
    return {"rope_theta": theta, **raw}


def read_ropes(
    config: ConfigJson,
    *,
    head_dim: int,
    max_positions: int,
    theta: float,
    window_theta: float,
    full_head_dim: int | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotary embeddings of layers without a window, and of those with one.

    Transformers 5 has both in `rope_parameters`; before, `rope_scaling` applied to the first only.

    Args:
        config: config.json, whose rotary keys are read, but for the bases.
        head_dim: components of a head.
        full_head_dim: components of a head of layers without a window; `None` for `head_dim`.
        max_positions: `max_position_embeddings`.
        theta: base of layers without a window, if it is not in `rope_parameters`.
        window_theta: base of layers with a window, if it is not in `rope_parameters`.

    Raises:
        UnknownConfig: a kind or a key is not supported.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    both, scaling = config.take_object("rope_parameters"), config.take_object("rope_scaling")
    thetas = {"full_attention": theta, "sliding_attention": window_theta}
    parts = {"full_attention": scaling, "sliding_attention": {}}
    if both:
        if scaling:
            raise UnknownConfig(
                "config.json sets rope_parameters, which names a rotary embedding for each kind of layer, and "
                "rope_scaling too; keep one of them"
            )
        if both.keys() != thetas.keys():
            raise UnknownConfig(
                f"config.json: rope_parameters must name {' and '.join(thetas)}, got {listed(both)}"
            )
        named = ConfigJson(both, place="config.json: rope_parameters")
        parts = {kind: named.take_object(kind) for kind in thetas}
    widths = {"full_attention": full_head_dim or head_dim, "sliding_attention": head_dim}
    ropes = {
        kind: read_rope(
            ConfigJson({"rope_parameters": _with_theta(part, thetas[kind])}),
            head_dim=widths[kind],
            max_positions=max_positions,
        )[0]
        for kind, part in parts.items()
    }
    return ropes["full_attention"], ropes["sliding_attention"]


def _with_theta(part: Mapping[str, object], theta: float) -> Mapping[str, object]:
    """Returns a rotary part with a base of the frequencies if it has none."""
    return part if part.get("rope_theta") is not None else {**part, "rope_theta": theta}


def _with_kind(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the keys with the oldest spelling `type` replaced by `rope_type`, without nulls."""
    named = {key: value for key, value in keys.items() if value is not None}
    old = named.pop("type", None)
    return named if old is None else {"rope_type": old} | named


def _take_theta(config: ConfigJson, keys: ConfigJson) -> float:
    """Returns the base of the frequencies, which may stand in config.json and in the nested object."""
    outer = config.take_float("rope_theta", 10000.0)
    theta = keys.take_float("rope_theta", outer)
    if theta != outer and config.has("rope_theta"):
        raise UnknownConfig(
            f"config.json sets rope_theta = {outer}, which contradicts {theta} of its rotary part"
        )
    config.settle("rope_theta", theta)
    return theta


def _read_default(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    factor = keys.take("factor", 1.0)
    if factor != 1.0:
        raise UnknownConfig(
            f"config.json: the default rope sets factor = {shown(factor)}, which it does not have"
        )
    return {}, max_positions


def _read_linear(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    factor = keys.take_float("factor")
    return {"factor": factor}, int(max_positions * factor)


def _read_proportional(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    return {"factor": keys.take_float("factor", 1.0)}, max_positions


def _read_dynamic(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    factor = keys.take_float("factor")
    original = keys.take("original_max_position_embeddings", max_positions)
    if original != max_positions:
        raise UnknownConfig(
            f"config.json: dynamic rope sets original_max_position_embeddings = {shown(original)}, which must "
            f"equal max_position_embeddings = {max_positions}"
        )
    return {"factor": factor, "original_max_positions": max_positions}, int(max_positions * factor)


def _read_llama3(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    options = {
        "factor": keys.take_float("factor"),
        "low_freq_factor": keys.take_float("low_freq_factor"),
        "high_freq_factor": keys.take_float("high_freq_factor"),
        "original_max_positions": _original(keys, max_positions),
    }
    return options, max_positions


def _read_yarn(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    original = _original(keys, max_positions)
    # A null factor, dropped with the other nulls, means the ratio of the two lengths.
    factor = keys.take_float("factor", max_positions / original)
    options: dict[str, object] = {"factor": factor, "original_max_positions": original}
    # Transformers treats 0 as missing here.
    options["beta_fast"] = keys.take_float("beta_fast", 32.0) or 32.0
    options["beta_slow"] = keys.take_float("beta_slow", 1.0) or 1.0
    options["truncate"] = keys.take_bool("truncate", True)
    if not keys.take_bool("finetuned", True):
        raise UnknownConfig(
            "config.json: rope_scaling sets finetuned = False, a yarn that grows with the text; it is not supported"
        )
    if keys.take("attn_factor", None) not in (None, 1.0):
        _LOG.warning(
            "config.json: rope_scaling sets attn_factor = %s, which is ignored, as Transformers does; vLLM multiplies "
            "the attention factor by it. Set attention_factor there to choose another one",
            shown(keys.take("attn_factor")),
        )
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        given = keys.take(name, None) is not None
        options[name] = keys.take_float(name) if given else None
    return options, max(max_positions, int(original * factor))


def _read_longrope(keys: ConfigJson, max_positions: int) -> tuple[dict, int]:
    original = _original(keys, max_positions)
    options: dict[str, object] = {
        "factor": max(1.0, keys.take_float("factor", max_positions / original)),
        "original_max_positions": original,
    }
    for name in ("short_factor", "long_factor"):
        factors = keys.take(name, None)
        if not isinstance(factors, list):
            raise UnknownConfig(
                f"config.json: longrope in the rotary part needs a list of numbers {name}, got {shown(factors)}"
            )
        options[f"{name}s"] = keys.take_floats(name, [1.0] * len(factors))
    given = keys.take("attention_factor", None) is not None
    options["attention_factor"] = keys.take_float("attention_factor") if given else None
    return options, max_positions


def _original(keys: ConfigJson, max_positions: int) -> int:
    return keys.take_int("original_max_position_embeddings", max_positions, high=_MAX_POSITIONS)


_READERS = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "proportional": _read_proportional,
}
