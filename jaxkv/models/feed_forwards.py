"""Blocks without cache, which compute each token separately: dense feed-forwards and mixtures of experts."""

import jax
import jax.numpy as jnp

from jaxkv.config.model import ModelConfig
from jaxkv.layers.feed_forward import gated_feed_forward, plain_feed_forward
from jaxkv.layers.linear import in_few_bits, project, scaled
from jaxkv.layers.mixture import grouped_for, mixture_of_experts, route
from jaxkv.models.block import ONCE, Block, BlockInputs, BlockOutput, Leaf, Split, required
from pallas_kernels.families import member


def _gated_leaves(config: ModelConfig) -> dict[str, Leaf]:
    hidden, inner = config.hidden_size, (config.ffn_size, config.ffn_size)
    rows = Split(0, (inner, inner))
    leaves = {
        "gate_up": Leaf((2 * config.ffn_size, hidden), adapts=True, split=rows),
        "down": Leaf((hidden, config.ffn_size), adapts=True, split=Split(1, (inner,))),
    }
    if config.mlp_bias:
        leaves["gate_up_bias"] = Leaf((2 * config.ffn_size,), split=rows)
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
        "router": Leaf((mixture.experts, hidden)),
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
    mixture, params, x = required(inputs.config.mixture), inputs.params, inputs.hidden
    grouped = grouped_for(params, len(x), mixture=mixture, implementation=inputs.implementation)
    topk = member(inputs.implementation, "row_topk")
    routing = route(params, x, mixture=mixture, implementation=topk)
    if inputs.chosen_experts is not None:
        inputs.chosen_experts.append(routing[0])
    return {}, mixture_of_experts(
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


GATED = Block(_gated_leaves, _run_gated, joins=True)
PLAIN = Block(_plain_leaves, _run_plain)
MIXTURE = Block(_mixture_leaves, _run_mixture)
SHARED = Block(_shared_leaves, _run_shared)
