"""Builds the inputs of the sampler's tests: rows of options, texts and logits."""

import jax.numpy as jnp
import numpy as np

from jaxkv.config.sampling import LOGPROBS_MODES, SamplingParams
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import SamplingState

VOCAB = 17
ROWS = 4
DRAWS = Features(draws=True)
FILTERS = Features(draws=True, filters=True)
PENALTIES = Features(penalties=True)
BLOCKS = Features(min_tokens=True)
ALL = Features(
    draws=True, filters=True, penalties=True, min_tokens=True, logprobs=3, logprobs_modes=True
)
GREEDY = SamplingParams(temperature=0.0)


def batch_of(params, features, *, state_ids=None, stop_ids=None, block=None, given=None):
    """The sampling batch of these rows, with the fields that the features need."""

    def column(name, dtype=np.float32):
        return jnp.asarray([getattr(row, name) for row in params], dtype)

    seeds = np.array([(row.seed or 0) % 2**64 for row in params], np.uint64)
    fields = {}
    if features.draws:
        fields |= {
            "temperature": column("temperature"),
            "seed_low": jnp.asarray((seeds & 0xFFFFFFFF).astype(np.uint32).view(np.int32)),
            "seed_high": jnp.asarray((seeds >> 32).astype(np.uint32).view(np.int32)),
        }
    if features.filters:
        fields |= {"top_p": column("top_p"), "min_p": column("min_p")}
        fields["top_k"] = column("top_k", np.int32)
    if features.logprobs_modes:
        modes = [LOGPROBS_MODES.index(row.logprobs_mode) for row in params]
        fields["logprobs_mode"] = jnp.asarray(modes, jnp.int32)
    if features.penalties:
        for name in ("repetition", "presence", "frequency"):
            fields[name] = column(f"{name}_penalty")
    if features.min_tokens:
        fields["stop_ids"] = jnp.asarray(stop_ids, jnp.int32)
        fields["block_stop"] = jnp.asarray(block, jnp.int32)
    if features.logprobs is not None:
        tokens = [NO_TOKEN] * len(params) if given is None else given
        fields["given"] = jnp.asarray(tokens, jnp.int32)[:, None]
    state_ids = jnp.asarray(range(len(params)) if state_ids is None else state_ids, jnp.int32)
    carry = jnp.zeros_like(state_ids)
    return SamplingBatch(state_ids=state_ids, carry=carry, features=features, values=fields)


def state_of(prompts, outputs, biases=None, vocab=VOCAB, width=3):
    """The gathered state of rows with these prompts, outputs and biases."""
    counts = np.zeros((len(prompts), vocab), np.int32)
    seen = np.zeros((len(prompts), vocab), np.uint8)
    ids = vocab + np.tile(np.arange(width, dtype=np.int32), (len(prompts), 1))
    values = np.zeros(ids.shape, np.float32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        np.add.at(counts[row], list(output), 1)
        seen[row, list(prompt)] = 1
        for column, (token, bias) in enumerate((biases or [{}] * len(prompts))[row].items()):
            ids[row, column], values[row, column] = token, bias
    return SamplingState(
        output_counts=jnp.asarray(counts),
        prompt_seen=jnp.asarray(seen),
        bias_ids=None if biases is None else jnp.asarray(ids),
        bias_values=None if biases is None else jnp.asarray(values),
    )


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, vocab)) * scale, jnp.float32)


def at(*positions):
    return jnp.asarray(positions, jnp.int32)
