"""Reads the sizes of Mamba-2 mixers from `config.json`, under each family's own keys."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.config.blocks import MambaConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config.config_json import ConfigJson

SILU = {"silu": "silu", "swish": "silu"}
"""Names of SiLU, the one activation of convolutions."""


@dataclass(frozen=True)
class MambaKeys:
    """A family's keys of the mixer's sizes, and Transformers' defaults.

    Attributes:
        heads, head_dim, d_state, d_conv, groups, chunk_size, conv_bias, activation: (key, default) each.
    """

    heads: tuple[str, int]
    head_dim: tuple[str, int | str]
    d_state: tuple[str, int]
    d_conv: tuple[str, int]
    groups: tuple[str, int]
    chunk_size: tuple[str, int]
    conv_bias: tuple[str, bool]
    activation: tuple[str, str]


BAMBA_KEYS = MambaKeys(
    heads=("mamba_n_heads", 128),
    head_dim=("mamba_d_head", "auto"),
    d_state=("mamba_d_state", 256),
    d_conv=("mamba_d_conv", 4),
    groups=("mamba_n_groups", 1),
    chunk_size=("mamba_chunk_size", 256),
    conv_bias=("mamba_conv_bias", True),
    activation=("hidden_act", "silu"),
)
"""The keys of Bamba, Granite 4 and Falcon-H1."""


def read_mamba(
    keys: ConfigJson,
    names: MambaKeys,
    *,
    d_inner: int | None,
    in_bias: bool,
    out_bias: bool,
    norm_groups: int = 1,
    gate_first: bool = True,
) -> MambaConfig:
    """Reads the mixer's keys.

    Args:
        keys: config.json.
        names: the family's keys.
        d_inner: required width of all heads together; `None` if there is no such requirement.
        in_bias: whether the input projection has a bias.
        out_bias: whether the output projection has a bias.
        norm_groups: see `MambaConfig`; -1 for the number of groups.
        gate_first: see `MambaConfig`.

    Raises:
        UnknownConfig: the convolution's activation is not SiLU.
        ValueError: a size is out of range, or the width of all heads is not `d_inner`.
    """
    heads = keys.take_int(*names.heads)
    if d_inner is not None and keys.take(*names.head_dim) == "auto":
        head_dim = d_inner // heads
    else:
        head_dim = keys.take_int(*names.head_dim)
    if d_inner is not None and heads * head_dim != d_inner:
        raise ValueError(
            f"config.json sets {names.heads[0]} = {heads} and {names.head_dim[0]} = {head_dim}, which contradict "
            f"the mixers' width of {d_inner}: take the published config.json, whose sizes are those of the weights"
        )
    keys.take_choice(*names.activation, SILU)
    groups = keys.take_int(*names.groups)
    return MambaConfig(
        heads=heads,
        head_dim=head_dim,
        d_state=keys.take_int(*names.d_state),
        d_conv=keys.take_int(*names.d_conv, low=2, high=64),
        groups=groups,
        chunk_size=keys.take_int(*names.chunk_size),
        conv_bias=keys.take_bool(*names.conv_bias),
        in_bias=in_bias,
        out_bias=out_bias,
        norm_groups=groups if norm_groups == -1 else norm_groups,
        gate_first=gate_first,
        dt_limit=_take_limits(keys),
    )


def read_bamba_mixer(keys: ConfigJson) -> MambaConfig:
    """Reads the mixer of Bamba and Granite 4: both projections have biases, or none."""
    bias = keys.take_bool("mamba_proj_bias", False)
    d_inner = keys.take_int("mamba_expand", 2, high=2**16) * keys.take_int("hidden_size")
    return read_mamba(keys, BAMBA_KEYS, d_inner=d_inner, in_bias=bias, out_bias=bias)


def take_layer_kinds(
    kinds: object, num_layers: int | None, choices: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Returns the stages of each layer.

    Args:
        kinds: a list with the name of each layer's kind, or a string with a letter for each layer.
        num_layers: required number of layers; `None` for any.
        choices: kind -> stages.

    Raises:
        UnknownConfig: a kind is not in `choices`, or the number of layers is wrong.
    """
    given = list(kinds) if isinstance(kinds, Sequence) else []
    known = [kind for kind in given if isinstance(kind, str) and kind in choices]
    if not given or known != given or (num_layers is not None and len(given) != num_layers):
        count = "" if num_layers is None else f" {num_layers}"
        raise UnknownConfig(
            f"config.json must name the kind of each of its{count} layers, one of {', '.join(choices)}; "
            f"got {str(kinds)[:80]}"
        )
    return tuple(choices[kind] for kind in known)


def _take_limits(keys: ConfigJson) -> tuple[float, float]:
    """Returns the bounds of the step size; infinity may be a number or an object."""
    given = keys.take("time_step_limit", None)
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"config.json: time_step_limit must be a pair, got {str(given)[:80]}")
    low, high = (_as_bound(bound) for bound in given)
    return low, high


def _as_bound(value: object) -> float:
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return math.inf
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise ValueError(
        f"config.json: time_step_limit must hold non-negative numbers or Infinity, got {str(value)[:80]}"
    )
