"""The kinds of mixer and feed-forward that a decoder's pattern may name, and the parameters each one needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.spec import PagedSpec, StateSpec
from jaxkv.cache.variants import gqa, window
from jaxkv.config import ModelConfig
from jaxkv.layers.attention import attention
from jaxkv.layers.feed_forward import gated_feed_forward
from jaxkv.layers.rope import Angles


class Leaf(NamedTuple):
    """One parameter before it exists; a scale starts as ones, anything else is drawn."""

    shape: tuple[int, ...]
    is_scale: bool = False


@dataclass(frozen=True)
class Step:
    """What every block of one step is given.

    Attributes:
        batch: the step's metadata.
        tables: where the layer's group reads and writes.
        angles: the tokens' rotary angles.
        implementation: of the ops; `None` takes the best.
    """

    batch: StepBatch
    tables: PagedTables
    angles: Angles
    implementation: str | None


class Mixer(NamedTuple):
    """How tokens exchange what they know: parameters, memory, computation."""

    leaves: Callable[[ModelConfig], dict[str, Leaf]]
    spec: Callable[[ModelConfig, int, int, str], PagedSpec | StateSpec]
    run: Callable[..., tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]]


class FeedForward(NamedTuple):
    """What each token computes for itself."""

    leaves: Callable[[ModelConfig], dict[str, Leaf]]
    run: Callable[..., Float[Array, "tokens hidden_size"]]


def _attention_leaves(config: ModelConfig) -> dict[str, Leaf]:
    fused = (config.heads + 2 * config.kv_heads) * config.head_dim
    leaves = {
        "qkv": Leaf((fused, config.hidden_size)),
        "o": Leaf((config.hidden_size, config.heads * config.head_dim)),
    }
    if config.qkv_bias:
        leaves["qkv_bias"] = Leaf((fused,))
    if config.o_bias:
        leaves["o_bias"] = Leaf((config.hidden_size,))
    if config.qk_norm:
        leaves["qk_norm"] = Leaf((2, config.head_dim), is_scale=True)
    return leaves


def _attention_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> PagedSpec:
    shape = (config.kv_heads, config.head_dim)
    reach = config.windows[layer]
    if reach is None:
        return gqa(*shape, dtype=dtype, page_size=page_size)
    return window(*shape, dtype=dtype, page_size=page_size, window=reach)


def _run_attention(
    config: ModelConfig,
    layer: int,
    params: Mapping[str, Array],
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    step: Step,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    return attention(
        params,
        layer_cache,
        x,
        step.batch,
        step.tables,
        step.angles,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        window=config.windows[layer],
        implementation=step.implementation,
    )


def _gated_leaves(config: ModelConfig) -> dict[str, Leaf]:
    leaves = {
        "gate_up": Leaf((2 * config.ffn_size, config.hidden_size)),
        "down": Leaf((config.hidden_size, config.ffn_size)),
    }
    if config.mlp_bias:
        leaves["gate_up_bias"] = Leaf((2 * config.ffn_size,))
        leaves["down_bias"] = Leaf((config.hidden_size,))
    return leaves


def _run_gated(
    config: ModelConfig, params: Mapping[str, Array], x: Float[Array, "tokens hidden_size"]
) -> Float[Array, "tokens hidden_size"]:
    return gated_feed_forward(params, x, activation=config.activation)


MIXERS: Mapping[str, Mixer] = {
    "attention": Mixer(leaves=_attention_leaves, spec=_attention_spec, run=_run_attention),
}
FEED_FORWARDS: Mapping[str, FeedForward] = {
    "gated": FeedForward(leaves=_gated_leaves, run=_run_gated),
}
