"""What the config.json of Llama and its relatives have in common. The family files say where they differ."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from jaxkv.config.blocks import DeltaConfig, MambaConfig, MixtureConfig, Multipliers
from jaxkv.config.model import MAX_LAYERS, ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_rope
from jaxkv.wording import shown

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}
_SIZE = 2**31 - 1


class Differences(TypedDict, total=False):
    """The fields of `ModelConfig` a family sets by itself."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_gate: bool
    unit_offset: bool
    wide_norms: bool
    post_norms: bool
    attention_cap: float | None
    logit_cap: float | None
    sinks: bool
    window_rope: RopeConfig | None
    delta: DeltaConfig | None
    attention_scale: float | None
    pattern: tuple[tuple[str, ...], ...]
    mamba: MambaConfig | None
    mixture: MixtureConfig | None
    multipliers: Multipliers


def read_llama_like(
    keys: ConfigJson,
    family: str,
    *,
    architecture: str,
    kv_heads: int | None,
    max_positions: int,
    windows: Sequence[int | None],
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    ffn_key: str = "intermediate_size",
    partial: float | None = None,
    rope: RopeConfig | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    **differences: Unpack[Differences],
) -> ModelConfig:
    """Takes the keys all the families share and refuses those that nobody took.

    Args:
        keys: the file, from which the family has taken its own keys.
        family: its `model_type`.
        architecture: its causal language model in `architectures`.
        kv_heads: what Transformers assumes where the file says nothing; `None` for as many as heads.
        max_positions: likewise.
        windows: per layer.
        head_dim: likewise; `None` for the hidden size divided by the heads.
        norm_eps: likewise.
        ffn_key: what holds the dense feed-forward's width.
        partial: share of a head that is rotated, likewise; `None` for all of it, whatever the file says.
        rope: the angles, if the family has read them, which then do not change `max_positions`.
        activation_key: what names the activation.
        activation: what it is where the file says nothing.
        tied: whether embeddings are tied where the file says nothing.
        **differences: fields the family sets by itself.
    """
    check_architecture(keys, family, architecture)
    vocab_size = keys.take_int("vocab_size", high=_SIZE)
    hidden_size = keys.take_int("hidden_size", high=_SIZE)
    heads = keys.take_int("num_attention_heads", high=_SIZE)
    head_dim = _head_dim(keys, hidden_size, heads, head_dim)
    limit = keys.take_int("max_position_embeddings", max_positions, high=_SIZE)
    longest = limit
    if rope is None:
        rope, longest = read_rope(keys, head_dim=head_dim, max_positions=limit, partial=partial)
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=take_num_layers(keys),
        heads=heads,
        kv_heads=take_nullable_int(keys, "num_key_value_heads", kv_heads) or heads,
        head_dim=head_dim,
        ffn_size=keys.take_int(ffn_key, high=_SIZE),
        max_positions=longest,
        rope=rope,
        windows=tuple(windows),
        norm_eps=keys.take_float("rms_norm_eps", norm_eps),
        activation=keys.take_choice(activation_key, activation, ACTIVATIONS),
        tie_embeddings=keys.take_bool("tie_word_embeddings", tied),
        eos_ids=keys.take_ids("eos_token_id", vocab_size),
        bos_id=next(iter(keys.take_ids("bos_token_id", vocab_size)), None),
        dtype=take_dtype(keys),
        **differences,
    )
    keys.finish()
    return config


def check_architecture(keys: ConfigJson, family: str, architecture: str) -> None:
    """Raises `UnknownConfig` if the file says that it is not the family's causal language model."""
    named = keys.take("architectures", None)
    if named is not None and (not isinstance(named, Sequence) or architecture not in named):
        raise UnknownConfig(
            f"config.json names architectures = {shown(named)}; of {family}, only {architecture} is supported"
        )


def take_num_layers(keys: ConfigJson) -> int:
    """Returns the number of layers, checked before anything of that length is built."""
    return keys.take_int("num_hidden_layers", high=MAX_LAYERS)


def take_nullable_int(keys: ConfigJson, key: str, default: int | None) -> int | None:
    """Returns a positive integer or null."""
    return None if keys.take(key, default) is None else keys.take_int(key, default, high=_SIZE)


def layer_windows(
    keys: ConfigJson, window: int | None, *, full_layers: int = 0, full_every: int | None = None
) -> tuple[int | None, ...]:
    """Returns the window of each layer: `None` for the first `full_layers`, `window` for the others.

    Of those, every `full_every`-th, counted from the first layer of all, has none either.

    Raises:
        UnknownConfig: `layer_types` is there and says something else that needs a window we do not have.
    """
    num_layers = take_num_layers(keys)
    windows = tuple(
        None if layer < full_layers or (full_every and (layer + 1) % full_every == 0) else window
        for layer in range(num_layers)
    )
    kinds = keys.take("layer_types", None)
    if kinds is None:
        return windows
    choices: dict[object, int | None] = {"full_attention": None}
    if window is not None:
        choices["sliding_attention"] = window
    named = [kind for kind in kinds if str(kind) in choices] if isinstance(kinds, list) else []
    if named != kinds or len(named) != num_layers:
        raise UnknownConfig(
            f"config.json: layer_types must name one of {', '.join(map(str, choices))} for each of the "
            f"{num_layers} layers, got {str(kinds)[:80]}"
        )
    return tuple(choices[kind] for kind in named)


def take_nullable_float(keys: ConfigJson, key: str, default: float | None) -> float | None:
    """Returns a number or null."""
    return None if keys.take(key, default) is None else keys.take_float(key, default)


def _head_dim(keys: ConfigJson, hidden_size: int, heads: int, default: int | None) -> int:
    given = take_nullable_int(keys, "head_dim", default)
    if given is None and hidden_size % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {heads}, "
            "and there is no head_dim"
        )
    return given or hidden_size // heads


def take_dtype(keys: ConfigJson) -> str:
    """Returns the checkpoint's dtype; Transformers 4 called it `torch_dtype`.

    Null means float32, or bfloat16 beside quantised weights, whose other tensors are of that dtype (GPT-OSS).
    """
    older = keys.take("torch_dtype", None)
    newer = keys.take("dtype", None)
    if newer is None and older is None:
        return "bfloat16" if keys.is_quantised else "float32"
    return keys.take_choice("torch_dtype" if newer is None else "dtype", "float32", _DTYPES)
