"""The sampler: samples each row's next token from its logits, and reads and writes the cache's sampling group."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxkv._pytree import pytree
from jaxkv.config.sampling import LOGPROBS_MODES, SMALLEST_TEMPERATURE
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.vocab import ALL_IDS, Vocab


@pytree
class Sampled:
    """One sampled token per row.

    Attributes:
        tokens: the sampled ids; 0 where `finite` is false.
        finite: false where the logits contain NaN or +inf, overflow, or exclude every token. That request has failed
            and its token is invalid. Logits of -inf are valid.
        logprob: natural log-probability of the sampled token under the row's `logprobs_mode`.
        top_ids, top_logprobs: the most likely tokens under it; ties go to the lowest id.
    """

    tokens: Int[Array, " rows"]
    finite: Bool[Array, " rows"]
    logprob: Float[Array, " rows"] | None = None
    top_ids: Int[Array, "rows top"] | None = None
    top_logprobs: Float[Array, "rows top"] | None = None


@pytree
class SamplingState:
    """The rows' states of the sampling group.

    Attributes:
        output_counts: number of occurrences of each token in the output; `None` without penalties.
        prompt_seen: 1 for each token of the prompt; `None` without penalties.
        bias_ids, bias_values: biases of logits; padded ids are `vocab_size + column`. `None` if the cache has none.
        token_history: token ids of prompt and output, and anything behind them; `None` without processors.
        processor_words: words of `LogitsProcessors`; 0 for rows that name no processor. `None` without processors.
    """

    output_counts: Int[Array, "rows vocab"] | None = None
    prompt_seen: Int[Array, "rows vocab"] | None = None
    bias_ids: Int[Array, "rows bias_width"] | None = None
    bias_values: Float[Array, "rows bias_width"] | None = None
    token_history: Int[Array, "rows max_tokens"] | None = None
    processor_words: Int[Array, "rows words"] | None = None


def sample(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    state: SamplingState | None,
    positions: Int[Array, " rows"],
    vocab: Vocab = ALL_IDS,
) -> Sampled:
    """Samples one token per row. A row's result depends neither on other rows nor on its position in the batch.

    Order: penalties, biases, logits processors, the grammar's mask, masked stop ids (`adjust`), temperature, top-k,
    top-p, min-p (`allowed`), and a random sample by the Gumbel-max trick. Rows with temperature 0 take the largest
    adjusted logit, the lowest id on ties. With log-probabilities, a row that is given a token takes that one; all else
    is computed as for a sampled token, so its log-probability has the same bits.
    Operations of features that `sampling.features` lacks are not traced.

    Args:
        logits: raw logits of each row's last token.
        sampling: the sampling inputs.
        state: the rows' states from `read_choices`; `None` unless the program has penalties or processors.
        positions: position of the token to sample, which is the number of tokens so far. The random numbers depend
            only on the seed and this position.
        vocab: the ids of the logits, if the devices of a mesh have a part each. Programs with processors need all ids
            on one device.
    """
    features = sampling.features
    adjusted = adjust(logits, sampling, state, positions, vocab)
    valid = (logits < jnp.inf) & (adjusted < jnp.inf)
    best, are_numbers = vocab.max_of_valid(adjusted, valid)
    # The maximum is -inf if all tokens are excluded, but it may not show a NaN (XLA for CPUs, jax 0.11.2). Masking a
    # stop id may hide its NaN, so the raw logits are checked.
    finite = jnp.isfinite(best[:, 0]) & are_numbers
    score = truncated = adjusted
    if features.draws:
        noise = vocab.own(gumbel_noise(sampling, positions, vocab.parts * logits.shape[1]))
        # The maximum is subtracted first so that the division by a tiny temperature does not overflow.
        truncated = (adjusted - best) / _divisor(sampling)
        drawn = truncated + noise
        if features.filters:
            kept = allowed(adjusted, sampling, best, vocab)
            truncated = jnp.where(kept, truncated, -jnp.inf)
            drawn = jnp.where(kept, drawn, -jnp.inf)
        score = jnp.where(_is_drawn(sampling), drawn, adjusted)
    chosen = vocab.argmax(score, None if features.draws else best)
    tokens = jnp.where(finite, chosen, 0)
    if features.logprobs is None:
        return Sampled(tokens=tokens, finite=finite)
    given = sampling["given"][:, 0]
    tokens = jnp.where(finite & (given < vocab.parts * logits.shape[1]), given, tokens)
    reported = _by_mode(logits, truncated, sampling, vocab) if features.logprobs_modes else logits
    logprobs = _logprobs(reported, tokens, features.logprobs, vocab)
    return Sampled(tokens=tokens, finite=finite, **logprobs)


def _by_mode(
    logits: Float32[Array, "rows vocab"],
    truncated: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    vocab: Vocab,
) -> Float32[Array, "rows vocab"]:
    """Returns the logits of each row's `logprobs_mode`, up to a constant per row.

    Args:
        logits: the raw logits.
        truncated: those that the rows draw from, divided by the temperature; -inf for tokens that filters drop.
        sampling: the sampling inputs.
        vocab: the ids of the logits.
    """
    mode = sampling["logprobs_mode"][:, None]
    scaled = (logits - vocab.max(logits)) / _divisor(sampling)
    reported = jnp.where(mode == LOGPROBS_MODES.index("temperature"), scaled, logits)
    return jnp.where(mode == LOGPROBS_MODES.index("truncated"), truncated, reported)


def adjust(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    state: SamplingState | None,
    positions: Int[Array, " rows"],
    vocab: Vocab = ALL_IDS,
) -> Float32[Array, "rows vocab"]:
    """Applies penalties, biases and processors, and masks stop ids and the tokens that a grammar forbids.

    - Repetition (Keskar et al., CTRL, 2019, with Hugging Face's sign rule): the logit of a token in prompt or output
      is divided by the penalty if positive, and multiplied otherwise.
    - Presence and frequency (OpenAI's API reference): `presence * (count > 0) + frequency * count` is subtracted,
      with counts of the output only.
    - Biases are added. Tokens that a grammar forbids and masked stop ids get -inf.
    - Processors see the logits after penalties and biases.
    """
    if sampling.features.needs_admission and state is None:
        raise ValueError(
            "a program with penalties or processors needs the rows' states, got None; pass the result of "
            "`read_choices`"
        )
    if sampling.features.penalties:
        assert state is not None
        logits = _penalise(logits, sampling, state, vocab)
        if state.bias_ids is not None:
            bias = logits.at[_rows(logits), vocab.columns(state.bias_ids, logits.shape[1])]
            logits = bias.add(state.bias_values, mode="drop")
    if sampling.features.processors:
        assert state is not None
        assert state.token_history is not None
        assert state.processor_words is not None
        logits = sampling.processors.apply(
            logits, state.token_history, positions, state.processor_words
        )
    if sampling.features.grammar:
        allowed_ids = _unmasked(sampling["token_mask"], vocab.parts * logits.shape[1])
        logits = jnp.where(vocab.own(allowed_ids), logits, -jnp.inf)
    if sampling.features.min_tokens:
        # Rows that may stop get ids out of range, which are dropped.
        blocks = sampling["block_stop"][:, None] > 0
        blocked = jnp.where(blocks, sampling["stop_ids"], vocab.parts * logits.shape[1])
        blocked = vocab.columns(blocked, logits.shape[1])
        logits = logits.at[_rows(logits), blocked].set(-jnp.inf, mode="drop")
    return logits


def _unmasked(mask: Int[Array, "rows words"], vocab_size: int) -> Bool[Array, "rows vocab"]:
    """Returns the bits of a `token_mask` as one bool per token."""
    bits = mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :] & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] > 0


def _penalise(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    state: SamplingState,
    vocab: Vocab,
) -> Float32[Array, "rows vocab"]:
    assert state.output_counts is not None
    assert state.prompt_seen is not None
    counts, prompt_seen = vocab.own(state.output_counts), vocab.own(state.prompt_seen)
    repetition = sampling["repetition"][:, None]
    seen = (counts > 0) | (prompt_seen > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    presence = jnp.where(counts > 0, sampling["presence"][:, None], 0.0)
    return logits - presence - sampling["frequency"][:, None] * counts.astype(jnp.float32)


def allowed(
    logits: Float32[Array, "rows vocab"],
    sampling: SamplingBatch,
    best: Float32[Array, "rows 1"],
    vocab: Vocab = ALL_IDS,
) -> Bool[Array, "rows vocab"]:
    """Returns which tokens the filters keep. Each filter is a lower bound of the logit, so ties at a bound are kept."""
    filters = (sampling["top_k"], sampling["top_p"], sampling["min_p"])
    return logits >= vocab.filter_bounds(logits, best, *filters, _divisor(sampling)[:, 0])[:, None]


def _rows(logits: Float32[Array, "rows vocab"]) -> Int[Array, "rows 1"]:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


def _is_drawn(sampling: SamplingBatch) -> Bool[Array, "rows 1"]:
    return sampling["temperature"][:, None] >= SMALLEST_TEMPERATURE


def _divisor(sampling: SamplingBatch) -> Float32[Array, "rows 1"]:
    """Returns the temperature, or 1 for greedy rows, whose random samples are not used."""
    return jnp.where(_is_drawn(sampling), sampling["temperature"][:, None], 1.0)


def gumbel_noise(
    sampling: SamplingBatch, positions: Int[Array, " rows"], vocab_size: int
) -> Float32[Array, "rows vocab"]:
    """Returns each row's Gumbel noise, from Threefry keyed by the request's seed and then by the position.

    JAX's default float32 noise is at most 16.6, so tokens with a probability below about 1e-7, which make up the tail
    of a large vocabulary, would be sampled too rarely. The mode "high" reaches 32.
    """

    def draw(
        low: Int[Array, ""], high: Int[Array, ""], position: Int[Array, ""]
    ) -> Float32[Array, " vocab"]:
        words = lax.bitcast_convert_type(jnp.stack([low, high]), jnp.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return jax.vmap(draw)(sampling["seed_low"], sampling["seed_high"], positions)


def _logprobs(
    logits: Float32[Array, "rows vocab"], tokens: Int[Array, " rows"], top: int, vocab: Vocab
) -> dict[str, Array]:
    total = vocab.log_total(logits)
    chosen = vocab.take(logits, tokens)
    values, ids = vocab.top(logits, top)
    return {"logprob": (chosen - total)[:, 0], "top_ids": ids, "top_logprobs": values - total}


def read_choices(choices: Mapping[str, Array], sampling: SamplingBatch) -> SamplingState | None:
    """Gathers the rows' states of the sampling group; zeros for state ids out of range.

    Args:
        choices: role -> array of the cache's sampling group.
        sampling: the rows' state ids.

    Returns:
        The states; `None` if the program has neither penalties nor processors.

    Raises:
        ValueError: the cache lacks the counts of penalties or the histories of processors.
    """
    features, roles = sampling.features, []
    for needed, feature, its_roles in (
        (features.penalties, "penalties", _PENALTY_ROLES),
        (features.processors, "processors", _PROCESSOR_ROLES),
    ):
        if needed and its_roles[0] not in choices:
            raise ValueError(
                f"a program with {feature} needs {its_roles[0]} in the cache's sampling group, got "
                f"{sorted(choices)}; make the cache with {feature}"
            )
        roles += [role for role in its_roles if needed and role in choices]
    if not roles:
        return None
    gathered = {
        role: choices[role].at[sampling.state_ids].get(mode="fill", fill_value=0) for role in roles
    }
    if features.processors:
        # The entry of a row without processors still has the words of its last owner.
        named = sampling["processed"][:, None] > 0
        gathered["processor_words"] = jnp.where(named, gathered["processor_words"], 0)
    return SamplingState(**gathered)


_PENALTY_ROLES = ("output_counts", "prompt_seen", "bias_ids", "bias_values")
_PROCESSOR_ROLES = ("token_history", "processor_words")
"""Arrays of the sampling group that each feature reads; the first is always there if the cache supports it."""


def write_choices(
    choices: Mapping[str, Array],
    sampling: SamplingBatch,
    tokens: Int[Array, " rows"],
    positions: Int[Array, " rows"],
) -> dict[str, Array]:
    """Returns the sampling group with the sampled tokens written; state ids out of range are dropped.

    The update is in place if the cache is donated.

    Args:
        choices: role -> array of the cache's sampling group.
        sampling: the rows' state ids.
        tokens: the sampled tokens.
        positions: their positions.
    """
    state_ids = sampling.state_ids
    last = choices["last_token"]
    written = {"last_token": last.at[state_ids].set(tokens, mode="drop", unique_indices=True)}
    if sampling.features.penalties:
        counts = choices["output_counts"]
        written["output_counts"] = counts.at[state_ids, tokens].add(
            1, mode="drop", unique_indices=True
        )
    if "token_history" in choices:
        written["token_history"] = (
            choices["token_history"]
            .at[state_ids, positions]
            .set(tokens, mode="drop", unique_indices=True)
        )
    if "text_length" in choices:
        lengths = choices["text_length"].at[state_ids]
        written["text_length"] = lengths.set(positions + 1, mode="drop", unique_indices=True)
    return {**choices, **written}


def admit(
    choices: Mapping[str, Array],
    state_ids: Int[Array, " rows"],
    prompts: Int[Array, "rows prompt_width"],
    outputs: Int[Array, "rows output_width"],
    bias_ids: Int[Array, "rows bias_width"] | None = None,
    bias_values: Float[Array, "rows bias_width"] | None = None,
    processor_words: Int[Array, "rows words"] | None = None,
    prompt_lengths: Int[Array, " rows"] | None = None,
) -> dict[str, Array]:
    """Initialises the sampling states of new requests, and overwrites the values of former owners.

    The update is in place if the cache is donated. Padding is out of range and dropped: token ids are padded with
    `vocab_size + column`, state ids with `num_states + row`.

    Args:
        choices: role -> array of the cache's sampling group.
        state_ids: ids of the states, all different.
        prompts: token ids of the prompts.
        outputs: token ids generated before, for a preempted request that resumes.
        bias_ids: token ids with a bias, of the cache's width; `None` if and only if the cache has none.
        bias_values: their biases.
        processor_words: words of `LogitsProcessors`; `None` if and only if the cache has none.
        prompt_lengths: tokens of the prompts, which a cache with token histories needs.

    Returns:
        role -> updated array.

    Raises:
        ValueError: biases or words are given although the cache has none, or are missing, or the lengths are.
    """
    new = {
        "last_token": choices["last_token"].at[state_ids].set(0, mode="drop", unique_indices=True)
    }
    for role, ids in (("output_counts", outputs), ("prompt_seen", prompts)):
        if role in choices:
            cleared = choices[role].at[state_ids].set(0, mode="drop", unique_indices=True)
            marks = cleared.at[state_ids[:, None], ids]
            new[role] = (
                marks.add(1, mode="drop") if role == "output_counts" else marks.set(1, mode="drop")
            )
    if "token_history" in choices:
        if prompt_lengths is None:
            raise ValueError("a cache with token histories needs prompt_lengths, got None")
        new["token_history"] = _write_history(
            choices["token_history"], state_ids, prompts, outputs, prompt_lengths
        )
    given = {
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "processor_words": processor_words,
    }
    for role, values in given.items():
        if (role in choices) != (values is not None):
            roles = sorted(choices)
            raise ValueError(
                f"{role} must be given if and only if the cache holds them; it holds {roles}"
            )
        if values is not None:
            new[role] = choices[role].at[state_ids].set(values, mode="drop", unique_indices=True)
    return {**choices, **new}


def _write_history(
    history: Int[Array, "states max_tokens"],
    state_ids: Int[Array, " rows"],
    prompts: Int[Array, "rows prompt_width"],
    outputs: Int[Array, "rows output_width"],
    prompt_lengths: Int[Array, " rows"],
) -> Int[Array, "states max_tokens"]:
    """Writes prompts and the outputs behind them; the padding of both is behind the row's last token."""
    entries = state_ids[:, None]
    columns = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None, :]
    history = history.at[entries, columns].set(prompts, mode="drop", unique_indices=True)
    columns = jnp.arange(outputs.shape[1], dtype=jnp.int32)[None, :] + prompt_lengths[:, None]
    return history.at[entries, columns].set(outputs, mode="drop", unique_indices=True)
