"""A mixture of experts: each token asks the few that its router names. Knows no family."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.block_config import MixtureConfig
from jaxkv.layers.feed_forward import activate, clamped_gate, gate
from jaxkv.layers.linear import linear, project
from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import note_fallback
from pallas_kernels.grouped_matmul import mosaic_gpu

_KERNEL = "mosaic_gpu"
_FEW_BYTES = 128 * 2**20
"""Of the experts that few tokens ask. Less is read sooner than rows are sorted (grouped_matmul's NOTES.md)."""
_MOST_SORTED = 2**28
"""Numbers of tokens, repeated for each expert that they ask, that may exist at once: 512 MiB of bfloat16."""

_MOST_INNER = 2**26
"""Numbers between the two maps of all experts that may exist at once: 128 MiB of bfloat16."""


def mixture_of_experts(
    params: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    *,
    mixture: MixtureConfig,
    activation: str,
    grouped: str | None = None,
) -> Float[Array, "tokens hidden_size"]:
    """Lets each token's experts work on it and adds what they say, each by its weight.

    Few tokens read the matrices of their own experts alone. Many ask nearly every expert, and then all experts are two
    products as wide as all of them, whose inner columns are cleared where a token did not ask. `jax.lax.ragged_dot`
    would do the latter `top_k` times over on GPUs and CPUs, where XLA makes one dense product of it.

    On our kernels `grouped_matmul` does both: tokens are sorted by their experts, each of which is read once and
    multiplied with its own tokens alone.

    A token's result does not depend on the others'.

    Args:
        params: "router" [experts, hidden_size]; "experts_up" [experts, size or 2 * size, width], gate first where there
            is one; "experts_down" [width, experts, size]; "router_correction" [experts], "latent_in"
            [width, hidden_size] and "latent_out" [hidden_size, width] where the model has them; and the biases
            "router_bias" [experts], "experts_up_bias" [experts, size or 2 * size] and "experts_down_bias"
            [experts, width].
        x: normalised hidden states.
        mixture: sizes, and how experts are chosen.
        activation: a name in `ACTIVATIONS`.
        grouped: which implementation of `grouped_matmul` the experts run on; `None` for the two ways of plain XLA.

    Raises:
        Unsupported: `grouped` cannot run here, or not these sizes; the message says why.
    """
    logits = project(params["router"], x, result=jnp.float32)
    if "router_bias" in params:
        logits = logits + params["router_bias"].astype(jnp.float32)[None]
    chosen, weights = choose_experts(logits, params.get("router_correction"), mixture=mixture)
    given = linear(params["latent_in"], x) if "latent_in" in params else x
    bend = partial(gate if mixture.gated else activate, activation=activation)
    if mixture.clamp is not None:
        bend = partial(clamped_gate, limit=mixture.clamp)
    if grouped is not None:
        ask = partial(_ask_in_order, implementation=grouped)
    else:
        ask = _ask_some if chosen.size <= mixture.experts else _ask_all
    said = ask(params, given, chosen, weights, bend)
    return linear(params["latent_out"], said) if "latent_out" in params else said


def grouped_for(
    params: Mapping[str, Array | jax.ShapeDtypeStruct],
    tokens: int,
    *,
    mixture: MixtureConfig,
    implementation: str | None,
) -> str | None:
    """Returns what `mixture_of_experts` is to run on in a family of implementations, as its `grouped`.

    That is our kernel if the family is ours and the kernel takes these sizes; where it does not, a fallback is noted.
    Few tokens that ask for little are the plain way's.
    """
    if implementation != _KERNEL:
        return None
    rows, up, down = tokens * mixture.top_k, params["experts_up"], params["experts_down"]
    per_expert = (up.size + down.size) * up.dtype.itemsize // mixture.experts
    if rows <= mixture.experts and rows * per_expert < _FEW_BYTES:
        return None
    for weight, axis in ((up, 0), (down, 1)):
        x = jax.ShapeDtypeStruct((rows, weight.shape[2]), weight.dtype)
        refusal = mosaic_gpu.why_not(weight, x, group_axis=axis)
        if refusal is not None:
            note_fallback("grouped_matmul", _KERNEL, refusal, "plain products")
            return None
    return _KERNEL


def choose_experts(
    logits: Float[Array, "tokens experts"],
    correction: Float[Array, " experts"] | None,
    *,
    mixture: MixtureConfig,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Returns each token's experts, best first, and their weights, in float32."""
    scores = jax.nn.sigmoid(logits) if mixture.scoring == "sigmoid" else jax.nn.softmax(logits)
    # The correction (Wang et al., Auxiliary-Loss-Free Load Balancing) decides who is asked, not what the answer weighs.
    ranked = scores if correction is None else scores + correction[None]
    _, chosen = jax.lax.top_k(_within_best_groups(ranked, mixture), mixture.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if mixture.renormalise:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return chosen, weights * mixture.scale


def _within_best_groups(
    scores: Float[Array, "tokens experts"], mixture: MixtureConfig
) -> Float[Array, "tokens experts"]:
    """Rules out experts of all but the groups whose best one or two score highest together (DeepSeek-V2 and -V3)."""
    if mixture.groups == mixture.top_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], mixture.groups, -1)
    votes, _ = jax.lax.top_k(grouped, mixture.group_votes)
    _, best = jax.lax.top_k(jnp.sum(votes, axis=-1), mixture.top_groups)
    allowed = jnp.any(best[:, :, None] == jnp.arange(mixture.groups)[None, None, :], axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _ask_in_order(
    params: Mapping[str, Array],
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    bend: Callable[[Float[Array, "asked inner"]], Float[Array, "asked size"]],
    *,
    implementation: str,
) -> Float[Array, "tokens width"]:
    """Gives each expert its own tokens, and adds up each token's answers in the order in which it asked.

    The (token, expert) pairs of a block of tokens at a time are sorted by expert.
    """
    up, top_k = params["experts_up"], chosen.shape[1]
    experts = jnp.arange(up.shape[0])

    def run(
        x: Float[Array, "block width"],
        chosen: Int[Array, "block top_k"],
        weights: Float[Array, "block top_k"],
    ) -> Float[Array, "block width"]:
        asked = chosen.reshape(-1)
        order = jnp.argsort(asked, stable=True)
        sizes = jnp.sum((asked[None, :] == experts[:, None]).astype(jnp.int32), axis=1)
        multiply = partial(grouped_matmul, group_sizes=sizes, implementation=implementation)

        def with_bias(said: Float[Array, "asked out"], name: str) -> Float[Array, "asked out"]:
            if name not in params:
                return said
            return said.astype(jnp.float32) + params[name][asked[order]].astype(jnp.float32)

        inner = with_bias(multiply(up, x[order // top_k]), "experts_up_bias")
        inner = bend(inner).astype(x.dtype)
        said = multiply(params["experts_down"], inner, group_axis=1)
        said = with_bias(said, "experts_down_bias")
        places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
        said = said[places].astype(jnp.float32).reshape(*chosen.shape, -1)
        return jnp.sum(said * weights[:, :, None], axis=1).astype(x.dtype)

    return _in_blocks(run, max(1, _MOST_SORTED // (top_k * max(up.shape[1:]))), x, chosen, weights)


def _ask_some(
    params: Mapping[str, Array],
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    bend: Callable[[Float[Array, "asked inner"]], Float[Array, "asked size"]],
) -> Float[Array, "tokens width"]:
    """Gives each (token, expert) pair a product of its own, which reads that expert's matrices where they lie."""
    up, down = params["experts_up"], params["experts_down"]
    tokens, top_k = chosen.shape
    asked = chosen.reshape(-1)
    times = partial(
        jax.lax.dot_general,
        precision=jax.lax.Precision.HIGHEST if up.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    inner = times(up[asked], jnp.repeat(x, top_k, axis=0), (((2,), (1,)), ((0,), (0,))))
    if "experts_up_bias" in params:
        inner = inner + params["experts_up_bias"][asked].astype(jnp.float32)
    inner = bend(inner).astype(x.dtype)
    said = times(down[:, asked], inner, (((2,), (1,)), ((1,), (0,))))
    if "experts_down_bias" in params:
        said = said + params["experts_down_bias"][asked].astype(jnp.float32)
    said = said.reshape(tokens, top_k, -1)
    return jnp.sum(said * weights[:, :, None], axis=1).astype(x.dtype)


def _ask_all(
    params: Mapping[str, Array],
    x: Float[Array, "tokens width"],
    chosen: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    bend: Callable[[Float[Array, "asked inner"]], Float[Array, "asked size"]],
) -> Float[Array, "tokens width"]:
    """Lets all experts work on all tokens, a block of tokens at a time, and takes nothing from those not asked."""
    up, down = params["experts_up"], params["experts_down"]
    up_bias, down_bias = params.get("experts_up_bias"), params.get("experts_down_bias")
    up_bias = None if up_bias is None else up_bias.reshape(-1)
    experts, inner_size, width = up.shape
    every = jnp.arange(experts)[None, None, :] == chosen[:, :, None]
    asked = jnp.any(every, axis=1)
    share = jnp.sum(jnp.where(every, weights[:, :, None], 0.0), axis=1)

    def run(
        x: Float[Array, "block width"],
        asked: Bool[Array, "block experts"],
        share: Float[Array, "block experts"],
    ) -> Float[Array, "block width"]:
        inner = linear(up.reshape(-1, width), x, up_bias).reshape(-1, inner_size)
        inner = bend(inner).astype(jnp.float32).reshape(len(x), experts, -1)
        # Clearing, not multiplying by zero: what an expert makes of a token that is not its own may be no number.
        inner = jnp.where(asked[:, :, None], inner * share[:, :, None], 0.0).astype(x.dtype)
        said = linear(down.reshape(width, -1), inner.reshape(len(x), -1))
        if down_bias is None:
            return said
        return said + project(down_bias.T, share.astype(down_bias.dtype)).astype(said.dtype)

    return _in_blocks(run, max(1, _MOST_INNER // (experts * inner_size)), x, asked, share)


def _in_blocks(
    run: Callable[..., Float[Array, "block width"]], block: int, *parts: Array
) -> Float[Array, "tokens width"]:
    """Runs over blocks of so many tokens in turn; what the last one lacks is zeros."""
    tokens = len(parts[0])
    if tokens <= block:
        return run(*parts)
    padding = ((0, -tokens % block), (0, 0))
    blocks = [jnp.pad(part, padding).reshape(-1, block, part.shape[1]) for part in parts]
    said = jax.lax.map(lambda parts: run(*parts), tuple(blocks))
    return said.reshape(-1, said.shape[2])[:tokens]
