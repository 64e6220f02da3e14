"""Prompts of `jaxkv.generate` as one padded int32 array and its lengths, checked where their values are known."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Shaped

Prompts = (
    Shaped[Array, "..."]
    | np.ndarray
    | Sequence[Sequence[int] | Shaped[Array, "..."] | np.ndarray]
    | Sequence[int]
)
PromptLens = Shaped[Array, "..."] | np.ndarray | Sequence[int]


def padded_prompts(
    prompts: object, prompt_lens: object, vocab_size: int
) -> tuple[Int[Array, "prompts prompt_len"] | np.ndarray, Int[Array, " prompts"] | np.ndarray]:
    """Returns the token ids padded on the right, and how many of each row are real.

    Args:
        prompts: lists of ids of any lengths, or an integer array [prompts, prompt_len] padded on the right; one flat
            list or array of ids is one prompt.
        prompt_lens: real tokens of each row of an array; all of them if not given.
        vocab_size: ids lie below it.

    Raises:
        ValueError: there is no prompt or an empty one, something is no token id, or the lengths do not fit.
    """
    if not isinstance(prompts, jax.Array | np.ndarray):
        if prompt_lens is not None:
            raise ValueError(
                "prompt_lens describes a padded array; lists of ids have their own lengths"
            )
        return _pad(_listed(prompts), vocab_size)
    tokens = prompts[None, :] if prompts.ndim == 1 else prompts
    if tokens.ndim != 2 or 0 in tokens.shape or not _holds_ints(tokens):
        raise ValueError(
            f"prompts must be ints of shape [prompts, prompt_len], got {prompts.dtype} of shape {prompts.shape}"
        )
    lens = _lens(prompt_lens, *tokens.shape)
    # Only concrete values can be checked.
    if not isinstance(lens, Tracer) and not isinstance(tokens, Tracer):
        real = np.arange(tokens.shape[1]) < np.asarray(lens)[:, None]
        check_range("prompts", np.asarray(tokens)[real], 0, vocab_size)
    return tokens.astype(np.int32), lens.astype(np.int32)


def check_range(name: str, values: np.ndarray, low: int, end: int) -> None:
    """Raises `ValueError` if a value lies outside [low, end)."""
    if values.size and (values.min() < low or values.max() >= end):
        raise ValueError(
            f"{name} must lie in [{low}, {end}), got values outside: {values.min()} to {values.max()}"
        )


def host_array(name: str, values: object) -> np.ndarray:
    """Returns a list of numbers as a NumPy array.

    Raises:
        ValueError: the list holds tracers, or lists of unequal lengths.
    """
    _refuse_listed_tracers(name, values)
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be a list of ints, got {values!r}") from error


def round_up(size: int) -> int:
    """Returns the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _refuse_listed_tracers(name: str, values: object) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        raise ValueError(f"{name} is a list that holds tracers; make one integer array of them")


def _holds_ints(values: Array | np.ndarray) -> bool:
    return jnp.issubdtype(values.dtype, jnp.integer)


def _lens(prompt_lens: object, prompts: int, longest: int) -> Int[Array, " prompts"] | np.ndarray:
    if prompt_lens is None:
        return np.full(prompts, longest, np.int32)
    if not isinstance(prompt_lens, jax.Array | np.ndarray):
        prompt_lens = host_array("prompt_lens", prompt_lens)
    if prompt_lens.shape != (prompts,) or not _holds_ints(prompt_lens):
        raise ValueError(
            f"prompt_lens must be ints of shape {(prompts,)}, "
            f"got {prompt_lens.dtype} of shape {prompt_lens.shape}"
        )
    if not isinstance(prompt_lens, Tracer):
        check_range("prompt_lens", np.asarray(prompt_lens), 1, longest + 1)
    return prompt_lens


def _listed(prompts: object) -> list[object]:
    """Returns the prompts of a sequence, which is one prompt if it holds ids."""
    _refuse_listed_tracers("prompts", prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise ValueError(
            f"prompts must be lists of token ids or an integer array, got {_kind(prompts)}"
        )
    is_flat = bool(prompts) and all(isinstance(item, int | np.integer) for item in prompts)
    return [prompts] if is_flat else list(prompts)


def _pad(prompts: Sequence[object], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes one array of lists; its width is a power of two, so that few programs serve all lengths."""
    rows = [_ids(prompt, place, vocab_size) for place, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("generate needs at least one prompt, got an empty list")
    padded = np.zeros((len(rows), round_up(max(ids.size for ids in rows))), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : ids.size] = ids
    return padded, np.asarray([ids.size for ids in rows], np.int32)


def _ids(prompt: object, place: int, vocab_size: int) -> np.ndarray:
    if not isinstance(prompt, Sequence | np.ndarray | jax.Array) or isinstance(prompt, str | bytes):
        raise ValueError(f"prompt {place} must be a list of token ids, got {_kind(prompt)}")
    ids = host_array(f"prompt {place}", prompt)
    if ids.size == 0:
        raise ValueError(f"each prompt needs at least one token, prompt {place} has none")
    if ids.ndim != 1 or not _holds_ints(ids):
        raise ValueError(
            f"prompt {place} must be a list of token ids (ints), got {ids.dtype} of shape {ids.shape}"
        )
    check_range(f"prompt {place}", ids, 0, vocab_size)
    return ids


def _kind(value: object) -> str:
    if isinstance(value, str | bytes):
        return "a text; encode it first, or use jaxkv.LLM"
    return f"a value of type {type(value).__name__}"
