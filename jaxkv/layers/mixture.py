"""Mixture of experts: a router chooses a few experts for each token (Shazeer et al., 2017)."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.config.blocks import MixtureConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import linear, project
from pallas_kernels import gathered_matmul, group_rows, grouped_matmul, row_topk
from pallas_kernels.activations import activate, clamped_gate, gate
from pallas_kernels.dispatch import note_fallback
from pallas_kernels.fixed_order import by_row_tiles, is_fixed
from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.gathered_matmul.api import why_not_kernel as why_not_gathered
from pallas_kernels.grouped_matmul.api import why_not_kernel as why_not_grouped

_KERNEL = "mosaic_gpu"
_SORTING_BYTES = 36 * 10**6
"""Bytes that a GPU reads in the 8 us by which sorting rows by expert takes longer (gathered_matmul/NOTES.md)."""
_WIDENING = {8: 0.25, 4: 0.4}
"""Bits -> part by which products of sorted rows with such experts take longer than reading these (likewise)."""
_MOST_SORTED = 2**28
"""Most elements of hidden states, repeated per selected expert, in one block: 512 MiB of bfloat16."""

_NO_EPS = 2.0**-41
"""Largest number that does not change a float32 sum of the best scores of a softmax over `MAX_EXPERTS`."""

_MOST_INNER = 2**26
"""Most elements of all experts' inner activations in one block: 128 MiB of bfloat16."""


def mixture_of_experts(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"],
    *,
    mixture: MixtureConfig,
    activation: str,
    routing: tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]] | None = None,
    grouped: str | None = None,
    gathered: str | None = "xla",
) -> Float[Array, "tokens hidden_size"]:
    """Computes the weighted sum of the outputs of each token's chosen experts.

    A few tokens read the matrices of their own experts (`gathered_matmul`). More tokens are sorted by expert for our
    kernel, which reads each expert once and multiplies it with its own tokens only (`grouped_matmul`). XLA has no such
    product: it runs all experts as two dense products over all tokens, and sets inner activations of experts that a
    token did not choose to zero. `jax.lax.ragged_dot` is not used: on GPUs and CPUs XLA turns it into a dense product
    that repeats that work `top_k` times.

    Under the fixed order of sums (`pallas_kernels.fixed_order`) all numbers of tokens are treated alike.

    A token's result does not depend on other tokens.

    Args:
        params: "router" [experts, hidden_size]; "experts_up" [experts, size or 2 * size, width], gate first if
            experts are gated; "experts_down" [width, experts, size]. If the model has them: "router_correction"
            [experts], "latent_in" [width, hidden_size], "latent_out" [hidden_size, width], and the biases
            "router_bias" [experts], "experts_up_bias" [experts, size or 2 * size] and "experts_down_bias"
            [experts, width].
        x: normalised hidden states.
        mixture: sizes and routing of the experts.
        activation: a name in `pallas_kernels.activations.ACTIVATIONS`.
        routing: the chosen experts, different ones for each token, and their weights; those of `route` if not given.
        grouped: implementation of `grouped_matmul` that the experts run on; `None` not to sort tokens by expert.
        gathered: implementation of `gathered_matmul` that a few tokens run on otherwise; `None` for the best.

    Raises:
        Unsupported: an implementation cannot run on this device or with these sizes; the message gives the reason.
    """
    sorts = None if grouped == _KERNEL else "xla"
    if routing is None:
        routing = route(params, x, mixture=mixture, implementation=sorts)
    chosen, weights = routing
    rows = project(params["latent_in"], x) if "latent_in" in params else x
    if grouped is not None:
        run_experts = partial(_run_sorted, implementation=grouped, sorts=sorts)
    elif chosen.size <= mixture.experts and not is_fixed():
        run_experts = partial(_run_gathered, implementation=gathered)
    else:
        run_experts = _run_all
    options = {"mixture": mixture, "activation": activation}
    out = run_experts(params, rows, chosen, weights, **options)
    return project(params["latent_out"], out) if "latent_out" in params else out


def grouped_for(
    params: Mapping[str, Any],
    x: Float[Array, "tokens hidden_size"] | jax.ShapeDtypeStruct,
    *,
    mixture: MixtureConfig,
    implementation: str | None,
) -> str | None:
    """Returns the `grouped` argument of `mixture_of_experts` for a family of implementations.

    The result is our kernel if the family is ours and the kernel supports these sizes; if it does not, a fallback is
    recorded. The result is `None` for a few tokens, for which `gathered_matmul` is faster, unless the order of sums is
    fixed.

    Args:
        params: "experts_up" and "experts_down" of `mixture_of_experts`, or their shapes.
        x: its hidden states, or their shape and dtype.
        mixture: sizes and routing of the experts.
        implementation: a family of implementations; `None` for XLA.
    """
    if implementation != _KERNEL:
        return None
    experts = params["experts_up"], params["experts_down"]
    tokens = x.shape[0]
    rows = tokens * mixture.top_k
    inputs = [jax.ShapeDtypeStruct((rows, weight.shape[2]), x.dtype) for weight in experts]
    may_gather = rows <= mixture.experts and not is_fixed()
    if may_gather and _reads_apart_are_few(tokens, mixture, experts):
        chosen = jax.ShapeDtypeStruct((tokens, mixture.top_k), jnp.int32)
        # The first product takes a row for each token.
        tokens_in, sums_in = inputs
        tokens_in = jax.ShapeDtypeStruct((tokens, tokens_in.shape[1]), tokens_in.dtype)
        refusals = [
            why_not_gathered(weight, taken, chosen, group_axis=axis)
            for axis, (weight, taken) in enumerate(zip(experts, (tokens_in, sums_in), strict=True))
        ]
        if not any(refusals):
            return None
    for axis, (weight, taken) in enumerate(zip(experts, inputs, strict=True)):
        refusal = why_not_grouped(weight, taken, group_axis=axis)
        if refusal is not None:
            otherwise = "gathered_matmul" if may_gather else "plain products"
            note_fallback("grouped_matmul", _KERNEL, refusal, otherwise)
            return None
    return _KERNEL


def _reads_apart_are_few(tokens: int, mixture: MixtureConfig, experts: Any) -> bool:  # noqa: ANN401 - weights
    """Whether reading an expert for each token that asks for it takes less time than sorting tokens by expert."""
    num_bytes = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(experts)
    )
    per_expert = num_bytes / mixture.experts
    # As many as tokens that choose at random ask for; one token asks for no expert twice.
    asked = mixture.experts * (1 - (1 - mixture.top_k / mixture.experts) ** tokens)
    repeated = tokens * mixture.top_k - asked
    widening = _WIDENING[CODES[experts[0].code].bits] if isinstance(experts[0], FewBits) else 0.0
    return repeated * per_expert <= _SORTING_BYTES + widening * asked * per_expert


def route(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"],
    *,
    mixture: MixtureConfig,
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Returns the experts that each token's router chooses, best first, and their weights.

    The arguments are those of `mixture_of_experts`, and the implementation of `row_topk`; `None` for the best.
    """
    rows = x.astype(jnp.float32) if mixture.wide_router else x
    logits = project(params["router"], rows, result=jnp.float32)
    if "router_bias" in params:
        logits = logits + params["router_bias"].astype(jnp.float32)[None]
    choose = partial(
        choose_experts,
        correction=params.get("router_correction"),
        mixture=mixture,
        implementation=implementation,
    )
    return by_row_tiles(choose, logits)


def choose_experts(
    logits: Float[Array, "tokens experts"],
    correction: Float[Array, " experts"] | None,
    *,
    mixture: MixtureConfig,
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Returns each token's experts, best first, and their weights, in float32."""
    topk = partial(row_topk, implementation=implementation)
    if correction is None and _is_softmax_of_chosen(mixture):
        weights, chosen = topk(logits, mixture.top_k, softmax=True)
        return chosen, weights * mixture.scale
    scores = jax.nn.sigmoid(logits) if mixture.scoring == "sigmoid" else jax.nn.softmax(logits)
    # The correction (Wang et al., Auxiliary-Loss-Free Load Balancing) changes the choice of experts, not their weights.
    ranked = scores if correction is None else scores + correction[None]
    taken, chosen = topk(_within_best_groups(ranked, mixture, topk), mixture.top_k)
    weights = taken if correction is None else jnp.take_along_axis(scores, chosen, axis=1)
    if mixture.renormalise:
        # As additions, which join the kernel that uses the weights; a reduction would be one of its own.
        first, *others = (weights[:, place, None] for place in range(mixture.top_k))
        weights = weights / (sum(others, first) + mixture.sum_eps)
    return chosen, weights * mixture.scale


def _is_softmax_of_chosen(mixture: MixtureConfig) -> bool:
    """Whether weights are a softmax over the chosen experts' logits, which needs no scores of the others.

    A softmax over all experts that is renormalised over the chosen ones is one, if nothing else changes the choice.
    """
    is_softmax = mixture.scoring == "softmax" and mixture.renormalise
    return is_softmax and mixture.groups == mixture.top_groups and mixture.sum_eps <= _NO_EPS


def _within_best_groups(
    scores: Float[Array, "tokens experts"],
    mixture: MixtureConfig,
    topk: Callable[..., tuple[Array, Array]],
) -> Float[Array, "tokens experts"]:
    """Masks experts outside the groups with the highest sum of their best one or two scores (DeepSeek-V2 and -V3)."""
    if mixture.groups == mixture.top_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], mixture.groups, -1)
    votes, _ = topk(grouped.reshape(-1, grouped.shape[2]), mixture.group_votes)
    votes = votes.reshape(*grouped.shape[:2], -1)
    _, best = topk(jnp.sum(votes, axis=-1), mixture.top_groups)
    allowed = jnp.any(best[:, :, None] == jnp.arange(mixture.groups)[None, None, :], axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _run_sorted(
    params: LayerParams,
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    mixture: MixtureConfig,
    activation: str,
    implementation: str,
    sorts: str | None,
) -> Float[Array, "tokens width"]:
    """Runs the experts with `grouped_matmul` on (token, expert) pairs sorted by expert, a block of tokens at a time.

    The outputs of a token are added in the order of `chosen`. `sorts` is the implementation of `group_rows`.
    """
    up, top_k = params["experts_up"], chosen.shape[1]

    def run(
        x: Float[Array, "block width"],
        chosen: Int[Array, "block top_k"],
        weights: Float[Array, "block top_k"],
    ) -> Float[Array, "block width"]:
        rows, row_experts, places, sizes = group_rows(x, chosen, up.shape[0], implementation=sorts)
        multiply = partial(grouped_matmul, group_sizes=sizes, implementation=implementation)

        def with_bias(out: Float[Array, "picked out"], name: str) -> Float[Array, "picked out"]:
            if name not in params:
                return out
            return out.astype(jnp.float32) + params[name][row_experts].astype(jnp.float32)

        inner = with_bias(multiply(up, rows), "experts_up_bias")
        inner = _activated(inner, mixture, activation).astype(x.dtype)
        out = multiply(params["experts_down"], inner, group_axis=1)
        out = with_bias(out, "experts_down_bias")
        return _weighted(out[places].astype(jnp.float32), weights).astype(x.dtype)

    return _in_blocks(run, max(1, _MOST_SORTED // (top_k * max(up.shape[1:]))), x, chosen, weights)


def _run_gathered(
    params: LayerParams,
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    mixture: MixtureConfig,
    activation: str,
    implementation: str | None,
) -> Float[Array, "tokens width"]:
    """Runs the experts with `gathered_matmul`: each token reads the matrices of its own experts."""
    multiply = partial(gathered_matmul, result=x.dtype, implementation=implementation)
    inner = multiply(
        params["experts_up"],
        x,
        chosen,
        bias=params.get("experts_up_bias"),
        activation=None if mixture.clamp is not None else activation,
        gated=mixture.gated,
        clamp=mixture.clamp,
    )
    return multiply(
        params["experts_down"],
        inner.reshape(chosen.size, -1),
        chosen,
        weights=weights,
        bias=params.get("experts_down_bias"),
        group_axis=1,
    )


def _activated(
    inner: Float[Array, "rows inner"], mixture: MixtureConfig, activation: str
) -> Float[Array, "rows size"]:
    """Returns what an expert's second product takes of the sums of its first."""
    if mixture.clamp is not None:
        return clamped_gate(inner, limit=mixture.clamp)
    return (gate if mixture.gated else activate)(inner, activation=activation)


def _weighted(
    out: Float[Array, "tokens top_k width"], weights: Float[Array, "tokens top_k"]
) -> Float[Array, "tokens width"]:
    """Returns the weighted sum of each token's outputs, in the order of its experts."""
    # As additions, which XLA joins; a reduction would be a kernel of its own.
    first, *others = (out[:, place] * weights[:, place, None] for place in range(out.shape[1]))
    return sum(others, first)


def _run_all(
    params: LayerParams,
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    *,
    mixture: MixtureConfig,
    activation: str,
) -> Float[Array, "tokens width"]:
    """Runs all experts on all tokens, a block of tokens at a time, and drops the outputs of experts not chosen."""
    up, down = params["experts_up"], params["experts_down"]
    up_bias, down_bias = params.get("experts_up_bias"), params.get("experts_down_bias")
    up_bias = None if up_bias is None else up_bias.reshape(-1)
    experts, inner_size, width = up.shape
    every = jnp.arange(experts)[None, None, :] == chosen[:, :, None]
    picked = jnp.any(every, axis=1)
    share = jnp.sum(jnp.where(every, weights[:, :, None], 0.0), axis=1)

    def run(
        x: Float[Array, "block width"],
        picked: Bool[Array, "block experts"],
        share: Float[Array, "block experts"],
    ) -> Float[Array, "block width"]:
        inner = linear(_rows(up, -1), x, up_bias, implementation="xla").reshape(-1, inner_size)
        inner = _activated(inner, mixture, activation).astype(jnp.float32)
        inner = inner.reshape(len(x), experts, -1)
        # Selected, not multiplied by zero: the output of an expert that was not chosen may be inf or NaN.
        inner = jnp.where(picked[:, :, None], inner * share[:, :, None], 0.0).astype(x.dtype)
        out = linear(_rows(down, width), inner.reshape(len(x), -1), implementation="xla")
        if down_bias is None:
            return out
        return out + project(down_bias.T, share.astype(down_bias.dtype)).astype(out.dtype)

    return _in_blocks(run, max(1, _MOST_INNER // (experts * inner_size)), x, picked, share)


def _rows(weight: Float[Array, "a b inner"] | FewBits, rows: int) -> Any:  # noqa: ANN401 - of the same type
    """Returns a weight of three axes as a matrix of `rows` rows; -1 for those of the first two axes."""

    def matrix(part: Array) -> Array:
        return part.reshape(rows if rows > 0 else part.shape[0] * part.shape[1], -1)

    return jax.tree.map(matrix, weight)


def _in_blocks(
    run: Callable[..., Float[Array, "block width"]], block: int, *parts: Array
) -> Float[Array, "tokens width"]:
    """Runs a function over blocks of `block` tokens sequentially; the last block is padded with its last token.

    A padding token chooses different experts then, as `group_rows` wants of each token.
    """
    tokens = len(parts[0])
    if tokens <= block:
        return run(*parts)
    padding = ((0, -tokens % block), (0, 0))
    blocks = [
        jnp.pad(part, padding, mode="edge").reshape(-1, block, part.shape[1]) for part in parts
    ]
    out = jax.lax.map(lambda parts: run(*parts), tuple(blocks))
    return out.reshape(-1, out.shape[2])[:tokens]
