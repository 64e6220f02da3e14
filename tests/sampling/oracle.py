"""Sampling of one row at a time in NumPy float64, written from the definitions.

Every filter is defined per token ("how much probability is strictly above it?"), without sorting, so the oracle shares
no code or method with the implementation.
"""

import numpy as np

# Distance from a filter's bound, as a probability or a logit, within which float32 and float64 may disagree.
DOUBT = 1e-5


def adjusted(logits, params, *, prompt=(), output=(), blocked=()):
    """Penalties, biases and blocked ids on one row of raw logits."""
    values = np.array(logits, np.float64)
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in output:
        values[token] -= params.frequency_penalty
    for token in set(output):
        values[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in blocked:
        values[token] = -np.inf
    return values


def probabilities(logits, temperature=1.0):
    scaled = np.array(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def keep(logits, params):
    """Returns which tokens the filters keep, and which lie too close to a bound to decide in float32."""
    logits = np.array(logits, np.float64)
    above = np.array([[other > own for other in logits] for own in logits])
    kept = np.ones(logits.size, bool)
    doubtful = np.zeros(logits.size, bool)
    if params.top_k:
        kept &= above.sum(1) < params.top_k
    if params.top_p < 1:
        left = np.where(kept, probabilities(logits, params.temperature), 0.0)
        mass_above = (above * left / left.sum()).sum(1)
        doubtful |= kept & (abs(mass_above - params.top_p) < DOUBT)
        kept &= mass_above < params.top_p
    if params.min_p > 0:
        share = np.exp((logits - logits.max()) / params.temperature)
        bound = logits.max() + params.temperature * np.log(params.min_p)
        doubtful |= abs(logits - bound) < DOUBT
        kept &= share >= params.min_p
    return kept, doubtful


def choose(logits, params, noise):
    """The Gumbel-max draw with given noise, or the first of the largest adjusted logits."""
    if params.temperature == 0:
        return int(np.argmax(logits))
    kept, _ = keep(logits, params)
    return int(np.argmax(np.where(kept, logits / params.temperature + noise, -np.inf)))


def log_probabilities(logits):
    values = np.array(logits, np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


def reported(logits, params, *, output=()):
    """Log-probabilities of one row under the distribution that `logprobs_mode` names."""
    if params.logprobs_mode == "raw":
        return log_probabilities(logits)
    if params.logprobs_mode == "temperature":
        return log_probabilities(np.array(logits, np.float64) / params.temperature)
    drawn_from = adjusted(logits, params, output=output)
    kept, doubtful = keep(drawn_from, params)
    assert not doubtful.any()
    return log_probabilities(np.where(kept, drawn_from / params.temperature, -np.inf))
