"""Chooses each row's next token from its logits, and keeps what the choice depends on in the cache's sampling group.

It does not know where logits come from, which rows are real, or when a request ends.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxkv._pytree import pytree
from jaxkv.sampling.batch import SamplingBatch
from pallas_kernels import filter_bounds

# A smaller temperature could be flushed to zero by the device, so it counts as zero.
_SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)


@pytree
class Sampled:
    """One token per row.

    Attributes:
        tokens: the chosen ids; 0 where `finite` is false.
        finite: false where the logits held NaN or +inf, overflowed, or left no token to choose: that
            request has failed and its token means nothing. Logits of -inf are legal.
        logprob: natural log-probability of the chosen token under the raw logits.
        top_ids, top_logprobs: the most likely tokens under the raw logits, ties to the lowest id.
    """

    tokens: Int[Array, " rows"]
    finite: Bool[Array, " rows"]
    logprob: Float[Array, " rows"] | None = None
    top_ids: Int[Array, "rows top"] | None = None
    top_logprobs: Float[Array, "rows top"] | None = None


@pytree
class SamplingState:
    """What the rows' slots remember, gathered.

    Attributes:
        output_counts: how often each token occurs in the output.
        prompt_seen: 1 where a token occurs in the prompt.
        bias_ids, bias_values: added to the logits; padded ids are `vocab_size + column`. `None` if the cache has none.
    """

    output_counts: Int[Array, "rows vocab"]
    prompt_seen: Int[Array, "rows vocab"]
    bias_ids: Int[Array, "rows bias_width"] | None = None
    bias_values: Float[Array, "rows bias_width"] | None = None


def sample(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    state: SamplingState | None,
    positions: Int[Array, " rows"],
) -> Sampled:
    """Chooses one token per row; no row's result depends on another row, on its own place or on the batch's size.

    Order: penalties, bias, blocked stop ids (`adjust`), temperature, top-k, top-p, min-p (`allowed`), and a draw
    by the Gumbel-max trick. Rows of temperature 0 take the largest adjusted logit, the lowest id on ties. Nothing
    is traced for a feature that `sampling.features` lacks.

    Args:
        logits: raw logits of each row's last token.
        sampling: how to choose.
        state: what the rows' slots remember; `None` unless the program has penalties.
        positions: position of the token being chosen: with the seed, all that the random numbers depend on.
    """
    features = sampling.features
    adjusted = adjust(logits, sampling, state)
    best = jnp.max(adjusted, axis=1, keepdims=True)
    # The maximum is -inf if there is nothing to choose, but it need not show a NaN (XLA for CPUs, jax 0.11.2). Blocking
    # a stop id may hide its NaN, so the raw logits are asked.
    are_numbers = jnp.all((logits < jnp.inf) & (adjusted < jnp.inf), axis=1)
    finite = jnp.isfinite(best[:, 0]) & are_numbers
    score = adjusted
    if features.draws:
        noise = gumbel_noise(sampling, positions, logits.shape[1])
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        drawn = (adjusted - best) / _divisor(sampling) + noise
        if features.filters:
            drawn = jnp.where(allowed(adjusted, sampling), drawn, -jnp.inf)
        score = jnp.where(_is_drawn(sampling), drawn, adjusted)
    tokens = jnp.where(finite, lax.argmax(score, 1, jnp.int32), 0)
    if features.logprobs is None:
        return Sampled(tokens=tokens, finite=finite)
    return Sampled(tokens=tokens, finite=finite, **_logprobs(logits, tokens, features.logprobs))


def adjust(
    logits: Float32[Array, "rows vocab"], sampling: SamplingBatch, state: SamplingState | None
) -> Float32[Array, "rows vocab"]:
    """Applies penalties, biases and the block on stop ids.

    - Repetition (Keskar et al., CTRL, 2019, with Hugging Face's sign rule): a token seen in prompt or output
      has its logit divided by the penalty if positive, multiplied if not.
    - Presence and frequency (OpenAI's API reference): `presence * (count > 0) + frequency * count` is
      subtracted, counting the output alone.
    - The bias is added. Blocked stop ids become -inf.
    """
    if sampling.features.penalties:
        if state is None:
            raise ValueError(
                "a program with penalties needs the slots' state; pass what `read_choices` returned"
            )
        logits = _penalise(logits, sampling, state)
        if state.bias_ids is not None:
            bias = logits.at[_rows(logits), state.bias_ids]
            logits = bias.add(state.bias_values, mode="drop")
    if sampling.features.min_tokens:
        # Out of range, and so dropped, in rows that may stop.
        blocks = sampling["block_stop"][:, None] > 0
        blocked = jnp.where(blocks, sampling["stop_ids"], logits.shape[1])
        logits = logits.at[_rows(logits), blocked].set(-jnp.inf, mode="drop")
    return logits


def _penalise(
    logits: Float32[Array, "rows vocab"], sampling: SamplingBatch, state: SamplingState
) -> Float32[Array, "rows vocab"]:
    counts = state.output_counts
    repetition = sampling["repetition"][:, None]
    seen = (counts > 0) | (state.prompt_seen > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    presence = jnp.where(counts > 0, sampling["presence"][:, None], 0.0)
    return logits - presence - sampling["frequency"][:, None] * counts.astype(jnp.float32)


def allowed(
    logits: Float32[Array, "rows vocab"], sampling: SamplingBatch
) -> Bool[Array, "rows vocab"]:
    """Says which tokens the filters leave: each is a lower bound on the logit, so ties at a bound are kept."""
    filters = (sampling["top_k"], sampling["top_p"], sampling["min_p"])
    return logits >= filter_bounds(logits, *filters, _divisor(sampling)[:, 0])[:, None]


def _rows(logits: Float32[Array, "rows vocab"]) -> Int[Array, "rows 1"]:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


def _is_drawn(sampling: SamplingBatch) -> Bool[Array, "rows 1"]:
    return sampling["temperature"][:, None] >= _SMALLEST_TEMPERATURE


def _divisor(sampling: SamplingBatch) -> Float32[Array, "rows 1"]:
    """The temperature, or 1 in greedy rows, whose draws are not used."""
    return jnp.where(_is_drawn(sampling), sampling["temperature"][:, None], 1.0)


def gumbel_noise(
    sampling: SamplingBatch, positions: Int[Array, " rows"], vocab_size: int
) -> Float32[Array, "rows vocab"]:
    """Draws each row's noise from a counter: Threefry keyed by the request's seed, then by the position.

    JAX's ordinary float32 noise cannot exceed 16.6, which would starve tokens of probability below about 1e-7,
    and a large vocabulary's tail is made of them; the "high" mode reaches 32.
    """

    def draw(
        low: Int[Array, ""], high: Int[Array, ""], position: Int[Array, ""]
    ) -> Float32[Array, " vocab"]:
        words = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return jax.vmap(draw)(sampling["seed_low"], sampling["seed_high"], positions)


def _logprobs(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, " rows"], top: int
) -> dict[str, Array]:
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    values, ids = lax.top_k(logits, top)
    return {"logprob": (chosen - total)[:, 0], "top_ids": ids, "top_logprobs": values - total}


def read_choices(choices: Mapping[str, Array], sampling: SamplingBatch) -> SamplingState | None:
    """Gathers what the rows' slots remember; rows whose slot is out of range read zeros.

    Args:
        choices: the arrays of the cache's sampling group by role.
        sampling: names the slots; without the penalties feature nothing is read.
    """
    if not sampling.features.penalties:
        return None
    if "output_counts" not in choices:
        raise ValueError(
            f"a program with penalties needs output_counts in the cache's sampling group, which holds "
            f"{sorted(choices)}; make the cache with penalties"
        )
    roles = ("output_counts", "prompt_seen", "bias_ids", "bias_values")
    gathered = {
        role: choices[role].at[sampling.slots].get(mode="fill", fill_value=0)
        for role in roles
        if role in choices
    }
    return SamplingState(**gathered)


def write_choices(
    choices: Mapping[str, Array], sampling: SamplingBatch, tokens: Int[Array, " rows"]
) -> dict[str, Array]:
    """Remembers the chosen tokens: in place where the cache is donated; rows whose slot is out of range are dropped."""
    slots = sampling.slots
    last = choices["last_token"]
    written = {"last_token": last.at[slots].set(tokens, mode="drop", unique_indices=True)}
    if sampling.features.penalties:
        counts = choices["output_counts"]
        written["output_counts"] = counts.at[slots, tokens].add(1, mode="drop", unique_indices=True)
    return {**choices, **written}


def admit(
    choices: Mapping[str, Array],
    slots: Int[Array, " rows"],
    prompts: Int[Array, "rows prompt_width"],
    outputs: Int[Array, "rows output_width"],
    bias_ids: Int[Array, "rows bias_width"] | None = None,
    bias_values: Float[Array, "rows bias_width"] | None = None,
) -> dict[str, Array]:
    """Gives slots to new requests: whatever their former owners left is overwritten.

    In place where the cache is donated. All padding is out of range and dropped: ids are padded with
    `vocab_size + column`, slots with `num_slots + row`.

    Args:
        choices: the arrays of the cache's sampling group by role.
        slots: distinct slots to fill.
        prompts: tokens of the prompts.
        outputs: tokens generated before, for a request that was preempted and comes back.
        bias_ids: tokens that have a bias, as wide as the cache's own; `None` exactly if it has none.
        bias_values: their biases.
    """
    new = {"last_token": choices["last_token"].at[slots].set(0, mode="drop", unique_indices=True)}
    for role, ids in (("output_counts", outputs), ("prompt_seen", prompts)):
        if role in choices:
            cleared = choices[role].at[slots].set(0, mode="drop", unique_indices=True)
            marks = cleared.at[slots[:, None], ids]
            new[role] = (
                marks.add(1, mode="drop") if role == "output_counts" else marks.set(1, mode="drop")
            )
    for role, values in (("bias_ids", bias_ids), ("bias_values", bias_values)):
        if (role in choices) != (values is not None):
            held = sorted(choices)
            raise ValueError(
                f"{role} must be given exactly if the cache holds them; it holds {held}"
            )
        if values is not None:
            new[role] = choices[role].at[slots].set(values, mode="drop", unique_indices=True)
    return {**choices, **new}
