"""Blocks without cache, which compute each token separately: dense feed-forwards and mixtures of experts."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.config.model import ModelConfig
from jaxkv.layers.feed_forward import gated_feed_forward, plain_feed_forward
from jaxkv.layers.linear import in_few_bits, project, scaled
from jaxkv.layers.mixture import grouped_for, mixture_of_experts, route
from jaxkv.layers.norm import rms_norm
from jaxkv.models.block import ONCE, Block, BlockInputs, BlockOutput, Leaf, Split, required
from pallas_kernels.families import member

_Routing = tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]
"""Each token's experts, and their weights."""


def _gated_leaves(config: ModelConfig, *, width: str = "ffn_size") -> dict[str, Leaf]:
    """Returns the leaves of a feed-forward whose inner width is a field or property of the config."""
    hidden, size = config.hidden_size, getattr(config, width)
    inner = (size, size)
    rows = Split(0, (inner, inner))
    leaves = {
        "gate_up": Leaf((2 * size, hidden), adapts=True, split=rows),
        "down": Leaf((hidden, size), adapts=True, split=Split(1, (inner,))),
    }
    if config.mlp_bias:
        leaves["gate_up_bias"] = Leaf((2 * size,), split=rows)
        leaves["down_bias"] = Leaf((hidden,), split=ONCE)
    return leaves


def _run_gated(inputs: BlockInputs) -> BlockOutput:
    config = inputs.config
    mixed = gated_feed_forward(
        inputs.params,
        inputs.x,
        activation=config.activation,
        gate_multiplier=config.multipliers.gate,
        joining=inputs.joining,
        implementation=inputs.implementation,
    )
    return {}, mixed if inputs.joining is not None else scaled(mixed, config.multipliers.down)


def _plain_leaves(config: ModelConfig) -> dict[str, Leaf]:
    hidden, inner = config.hidden_size, (config.ffn_size, config.ffn_size)
    leaves = {
        "up": Leaf((config.ffn_size, hidden), adapts=True, split=Split(0, (inner,))),
        "down": Leaf((hidden, config.ffn_size), adapts=True, split=Split(1, (inner,))),
    }
    if config.mlp_bias:
        leaves["up_bias"] = Leaf((config.ffn_size,), split=Split(0, (inner,)))
        leaves["down_bias"] = Leaf((hidden,), split=ONCE)
    return leaves


def _run_plain(inputs: BlockInputs) -> BlockOutput:
    return {}, plain_feed_forward(
        inputs.params,
        inputs.hidden,
        activation=inputs.config.activation,
        implementation=inputs.implementation,
    )


def _mixture_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mixture, hidden = required(config.mixture), config.hidden_size
    width, inner = mixture.latent_size or hidden, (mixture.size, mixture.size)
    # Each device has a part of every expert, so all of them choose and run the same ones.
    rows = Split(1, (inner,) * (1 + mixture.gated))
    leaves = {
        "router": Leaf((mixture.experts, hidden), dtype="float32" if mixture.wide_router else None),
        "experts_up": Leaf(
            (mixture.experts, (1 + mixture.gated) * mixture.size, width),
            is_experts=True,
            split=rows,
        ),
        "experts_down": Leaf(
            (width, mixture.experts, mixture.size), is_experts=True, split=Split(2, (inner,))
        ),
    }
    if mixture.biases:
        leaves["router_bias"] = Leaf((mixture.experts,))
        leaves["experts_up_bias"] = Leaf(leaves["experts_up"].shape[:2], split=rows)
        leaves["experts_down_bias"] = Leaf((mixture.experts, width), split=ONCE)
    if mixture.correction:
        leaves["router_correction"] = Leaf((mixture.experts,), dtype="float32")
    if mixture.latent_size is not None:
        leaves["latent_in"] = Leaf((width, hidden))
        leaves["latent_out"] = Leaf((hidden, width))
    return leaves


def _run_mixture(inputs: BlockInputs) -> BlockOutput:
    return {}, _experts(inputs, inputs.hidden, _routing(inputs, inputs.hidden))


def _routing(inputs: BlockInputs, x: Float[Array, "tokens hidden_size"]) -> _Routing:
    """Returns the experts of each token and their weights, and tells the caller which they are."""
    mixture, topk = required(inputs.config.mixture), member(inputs.implementation, "row_topk")
    routing = route(inputs.params, x, mixture=mixture, implementation=topk)
    if inputs.chosen_experts is not None:
        inputs.chosen_experts.append(routing[0])
    return routing


def _experts(
    inputs: BlockInputs, x: Float[Array, "tokens hidden_size"], routing: _Routing
) -> Float[Array, "tokens hidden_size"]:
    mixture, params = required(inputs.config.mixture), inputs.params
    grouped = grouped_for(params, x, mixture=mixture, implementation=inputs.implementation)
    return mixture_of_experts(
        params,
        x,
        mixture=mixture,
        activation=inputs.config.activation,
        routing=routing,
        grouped=grouped,
        gathered=member(inputs.implementation, "gathered_matmul"),
    )


def _shared_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mixture, hidden = required(config.mixture), config.hidden_size
    inner, halves = (mixture.shared_size, mixture.shared_size), 1 + mixture.gated
    rows, columns = Split(0, (inner,) * halves), Split(1, (inner,))
    leaves = {
        "shared_up": Leaf((halves * mixture.shared_size, hidden), adapts=True, split=rows),
        "shared_down": Leaf((hidden, mixture.shared_size), adapts=True, split=columns),
    }
    return leaves | {"shared_gate": Leaf((1, hidden))} if mixture.shared_gate else leaves


def _run_shared(inputs: BlockInputs) -> BlockOutput:
    params, x, activation = inputs.params, inputs.hidden, inputs.config.activation
    up, down = params["shared_up"], params["shared_down"]
    if required(inputs.config.mixture).gated:
        # XLA multiplies the plain weights of a shared expert.
        few = in_few_bits(up) or in_few_bits(down)
        family = inputs.implementation if few else "xla"
        out = gated_feed_forward(
            {"gate_up": up, "down": down}, x, activation=activation, implementation=family
        )
    else:
        out = plain_feed_forward(
            {"up": up, "down": down},
            x,
            activation=activation,
            implementation=inputs.implementation,
        )
    if "shared_gate" not in params:
        return {}, out
    gate = jax.nn.sigmoid(project(params["shared_gate"], x, result=jnp.float32))
    return {}, (out.astype(jnp.float32) * gate).astype(out.dtype)


def _dense_and_mixture_leaves(config: ModelConfig) -> dict[str, Leaf]:
    norm = Leaf((config.hidden_size,), is_scale=True, dtype=config.norm_dtype)
    own = {
        "dense_post_norm": norm,
        "experts_norm": norm,
        "experts_post_norm": norm,
        "router_norm": Leaf((config.hidden_size,), is_scale=True),
        "expert_scales": Leaf((required(config.mixture).experts,), is_scale=True, dtype="float32"),
    }
    return _gated_leaves(config) | _mixture_leaves(config) | own


def _run_dense_and_mixture(inputs: BlockInputs) -> BlockOutput:
    """Runs both on the residual stream, each between norms of its own; the router has one too (Gemma 4)."""
    config, params, shards = inputs.config, inputs.params, inputs.shards
    assert inputs.stream is not None, "the block reads it"
    stream, norm = inputs.stream, partial(rms_norm, eps=config.norm_eps)
    _, dense = _run_gated(inputs)
    chosen, weights = _routing(
        inputs, norm(params["router_norm"], stream) * config.hidden_size**-0.5
    )
    routing = chosen, weights * params["expert_scales"][chosen]
    experts = _experts(inputs, norm(params["experts_norm"], stream), routing)
    if shards is not None:
        both = shards.summed(jnp.concatenate((dense, experts), axis=1))
        dense, experts = jnp.split(both, 2, axis=1)
    return {}, norm(params["dense_post_norm"], dense) + norm(params["experts_post_norm"], experts)


GATED = Block(_gated_leaves, _run_gated, joins=True)
DOUBLE_GATED = Block(partial(_gated_leaves, width="double_ffn_size"), _run_gated, joins=True)
PLAIN = Block(_plain_leaves, _run_plain)
MIXTURE = Block(_mixture_leaves, _run_mixture)
SHARED = Block(_shared_leaves, _run_shared)
DENSE_AND_MIXTURE = Block(
    _dense_and_mixture_leaves, _run_dense_and_mixture, reads_stream=True, sums=True
)
