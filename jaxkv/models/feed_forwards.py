"""Blocks without cache, which compute each token separately: dense feed-forwards and mixtures of experts."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.config.blocks import MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.layers.feed_forward import gated_feed_forward, plain_feed_forward
from jaxkv.layers.linear import Normed, project, scaled
from jaxkv.layers.mixture import grouped_for, mixture_of_experts
from jaxkv.models.block import Block, BlockContext, BlockOutput, Leaf


def _block(
    leaves: Callable[[ModelConfig], dict[str, Leaf]],
    compute: Callable[
        [ModelConfig, Mapping[str, Array], Float[Array, "tokens hidden_size"], str | None],
        Float[Array, "tokens hidden_size"],
    ],
) -> Block:
    """Wraps a stateless function of tokens as a `Block`."""

    def run(
        config: ModelConfig,
        params: Mapping[str, Array],
        layer_cache: Mapping[str, Array],
        x: Float[Array, "tokens hidden_size"],
        context: BlockContext,
    ) -> BlockOutput:
        del layer_cache
        return {}, compute(config, params, x, context.implementation)

    return Block(leaves, run)


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
    config: ModelConfig,
    params: Mapping[str, Array],
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"] | Normed,
    context: BlockContext,
) -> BlockOutput:
    del layer_cache
    mixed = gated_feed_forward(
        params,
        x,
        activation=config.activation,
        gate_multiplier=config.multipliers.gate,
        joining=context.joining,
        implementation=context.implementation,
    )
    return {}, mixed if context.joining is not None else scaled(mixed, config.multipliers.down)


def _plain_leaves(config: ModelConfig) -> dict[str, Leaf]:
    leaves = {
        "up": Leaf((config.ffn_size, config.hidden_size)),
        "down": Leaf((config.hidden_size, config.ffn_size)),
    }
    if config.mlp_bias:
        leaves["up_bias"] = Leaf((config.ffn_size,))
        leaves["down_bias"] = Leaf((config.hidden_size,))
    return leaves


def _run_plain(
    config: ModelConfig,
    params: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    implementation: str | None,
) -> Float[Array, "tokens hidden_size"]:
    del implementation
    return plain_feed_forward(params, x, activation=config.activation)


def _mixture(config: ModelConfig) -> MixtureConfig:
    assert config.mixture is not None, "the config was checked when it was made"
    return config.mixture


def _mixture_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mixture, hidden = _mixture(config), config.hidden_size
    width = mixture.latent_size or hidden
    leaves = {
        "router": Leaf((mixture.experts, hidden)),
        "experts_up": Leaf((mixture.experts, (1 + mixture.gated) * mixture.size, width)),
        "experts_down": Leaf((width, mixture.experts, mixture.size)),
    }
    if mixture.biases:
        leaves["router_bias"] = Leaf((mixture.experts,))
        leaves["experts_up_bias"] = Leaf(leaves["experts_up"].shape[:2])
        leaves["experts_down_bias"] = Leaf((mixture.experts, width))
    if mixture.correction:
        leaves["router_correction"] = Leaf((mixture.experts,), dtype="float32")
    if mixture.latent_size is not None:
        leaves["latent_in"] = Leaf((width, hidden))
        leaves["latent_out"] = Leaf((hidden, width))
    return leaves


def _run_mixture(
    config: ModelConfig,
    params: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    implementation: str | None,
) -> Float[Array, "tokens hidden_size"]:
    mixture = _mixture(config)
    return mixture_of_experts(
        params,
        x,
        mixture=mixture,
        activation=config.activation,
        grouped=grouped_for(params, len(x), mixture=mixture, implementation=implementation),
    )


def _shared_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mixture, hidden = _mixture(config), config.hidden_size
    leaves = {
        "shared_up": Leaf(((1 + mixture.gated) * mixture.shared_size, hidden)),
        "shared_down": Leaf((hidden, mixture.shared_size)),
    }
    return leaves | {"shared_gate": Leaf((1, hidden))} if mixture.shared_gate else leaves


def _run_shared(
    config: ModelConfig,
    params: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    implementation: str | None,
) -> Float[Array, "tokens hidden_size"]:
    del implementation
    up, down = params["shared_up"], params["shared_down"]
    if _mixture(config).gated:
        out = gated_feed_forward({"gate_up": up, "down": down}, x, activation=config.activation)
    else:
        out = plain_feed_forward({"up": up, "down": down}, x, activation=config.activation)
    if "shared_gate" not in params:
        return out
    gate = jax.nn.sigmoid(project(params["shared_gate"], x, result=jnp.float32))
    return (out.astype(jnp.float32) * gate).astype(out.dtype)


GATED = Block(_gated_leaves, _run_gated, joins=True)
PLAIN = _block(_plain_leaves, _run_plain)
MIXTURE = _block(_mixture_leaves, _run_mixture)
SHARED = _block(_shared_leaves, _run_shared)
