"""Logits processors for tests, each with a twin in NumPy that shares no code with it."""

import jax.numpy as jnp
import numpy as np

from jaxkv.sampling.register_processors import register_processors

NOWHERE = 2**30
TWO = np.full(2, NOWHERE)


def no_repeat_ngram(logits, history, *, size=0):
    """Forbids each token that would end an n-gram of this size, at most 5, for a second time; 0 forbids nothing."""
    ids, length = history.ids, history.length
    starts = jnp.arange(ids.shape[0])
    repeats = (starts + size <= length) & (size > 0)
    # A loop whose number of turns depends on `size` would split the step into several CUDA graphs.
    for offset in range(4):
        here = ids.at[starts + offset].get(mode="fill", fill_value=NOWHERE)
        last = ids.at[length - size + 1 + offset].get(mode="fill", fill_value=NOWHERE)
        repeats &= (here == last) | (offset >= size - 1)
    following = ids.at[starts + size - 1].get(mode="fill", fill_value=NOWHERE)
    return logits.at[jnp.where(repeats, following, NOWHERE)].set(-jnp.inf, mode="drop")


def min_new_tokens(logits, history, *, least=0, stops=TWO):
    """Forbids ids before so many tokens are generated."""
    is_early = history.length - history.prompt_length < least
    return logits.at[jnp.where(is_early, stops, NOWHERE)].set(-jnp.inf, mode="drop")


def allowed_range(logits, history, *, low=0, high=NOWHERE):
    """Forbids all ids but those in [low, high)."""
    ids = jnp.arange(logits.shape[0])
    return jnp.where((ids >= low) & (ids < high), logits, -jnp.inf)


def scaled(logits, history, *, scale=1.0, negative=False):
    """Multiplies the logits."""
    return logits * jnp.where(negative, -scale, scale)


def digest(logits, history, *, factor=7):
    """Makes one token the most likely by far: a number that depends on every token, their order and both lengths."""
    places = jnp.arange(1, history.ids.shape[0] + 1)
    known = jnp.where(places <= history.length, history.ids, 0)
    number = jnp.sum(known * (places % 11 + 1)) + factor * history.length + history.prompt_length
    return logits.at[number % logits.shape[0]].add(100.0)


def np_no_repeat_ngram(logits, tokens, prompt_length, *, size=0):
    prefix = list(tokens[len(tokens) - size + 1 :]) if size > 1 else []
    for start in range(len(tokens) - size + 1):
        if size and list(tokens[start : start + size - 1]) == prefix:
            logits[tokens[start + size - 1]] = -np.inf
    return logits


def np_min_new_tokens(logits, tokens, prompt_length, *, least=0, stops=()):
    if len(tokens) - prompt_length < least:
        logits[[token for token in stops if token < logits.size]] = -np.inf
    return logits


def np_allowed_range(logits, tokens, prompt_length, *, low=0, high=NOWHERE):
    logits[:low] = -np.inf
    logits[high:] = -np.inf
    return logits


def np_scaled(logits, tokens, prompt_length, *, scale=1.0, negative=False):
    return logits * (-scale if negative else scale)


def np_digest(logits, tokens, prompt_length, *, factor=7):
    number = sum(token * ((at + 1) % 11 + 1) for at, token in enumerate(tokens))
    logits[(number + factor * len(tokens) + prompt_length) % logits.size] += 100.0
    return logits


FUNCTIONS = {
    "scaled": scaled,
    "digest": digest,
    "no_repeat_ngram": no_repeat_ngram,
    "min_new_tokens": min_new_tokens,
    "allowed_range": allowed_range,
}
TWINS = {
    "scaled": np_scaled,
    "digest": np_digest,
    "no_repeat_ngram": np_no_repeat_ngram,
    "min_new_tokens": np_min_new_tokens,
    "allowed_range": np_allowed_range,
}


def registered(vocab_size, max_tokens):
    return register_processors(FUNCTIONS, vocab_size=vocab_size, max_tokens=max_tokens)


def processed(logits, calls, tokens, prompt_length):
    """Applies the twins of the processors that a request names to one row, in the order of registration."""
    values = np.array(logits, np.float64)
    for name, twin in TWINS.items():
        if name in calls:
            values = twin(values, tokens, prompt_length, **calls[name])
    return values
