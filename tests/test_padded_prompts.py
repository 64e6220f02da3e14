"""Prompts of every integer kind become one padded int32 array; other prompts raise an error with the reason."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.padded_prompts import padded_prompts

VOCAB = 61
ROWS = [[3, 1, 4], [1, 5, 0]]


def check(prompts, lens, wanted_tokens, wanted_lens):
    tokens, lens = padded_prompts(prompts, lens, VOCAB)
    assert (tokens.dtype, lens.dtype) == (np.int32, np.int32)
    np.testing.assert_array_equal(tokens[:, : np.shape(wanted_tokens)[1]], wanted_tokens)
    np.testing.assert_array_equal(lens, wanted_lens)


def test_lists_are_padded_on_the_right():
    check([[3, 1, 4], [1]], None, [[3, 1, 4], [1, 0, 0]], [3, 1])
    check((np.asarray([3, 1]), jnp.asarray([4, 5])), None, [[3, 1], [4, 5]], [2, 2])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "uint8"])
@pytest.mark.parametrize("kind", [np, jnp])
def test_arrays_of_every_integer_dtype_are_accepted(kind, dtype):
    with jax.enable_x64(dtype == "int64"):
        check(kind.asarray(ROWS, dtype), None, ROWS, [3, 3])


@pytest.mark.parametrize(
    "lens", [[3, 2], (3, 2), np.asarray([3, 2]), np.asarray([3, 2], np.uint8), jnp.asarray([3, 2])]
)
def test_lengths_of_every_integer_kind_are_accepted(lens):
    check(np.asarray(ROWS), lens, ROWS, [3, 2])
    check(jnp.asarray(ROWS, jnp.int32), lens, ROWS, [3, 2])


@pytest.mark.parametrize("prompt", [[3, 1, 4], np.asarray([3, 1, 4]), jnp.asarray([3, 1, 4])])
def test_one_flat_prompt_is_a_batch_of_one(prompt):
    check(prompt, None, [[3, 1, 4]], [3])


def test_tracers_are_accepted_as_prompts_and_as_lengths():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(tokens, lens):
        return padded_prompts(tokens, lens, VOCAB)

    for lens in ([3, 2], [1, 3]):
        tokens, kept = run(jnp.asarray(ROWS, jnp.int32), jnp.asarray(lens, jnp.int32))
        assert (tokens.tolist(), kept.tolist()) == (ROWS, lens)


def test_padding_may_hold_anything():
    check(np.asarray([[3, 2**40], [1, 5]]), [1, 2], [[3], [1]], [1, 2])


ARRAY = np.asarray(ROWS)


@pytest.mark.parametrize(
    ("prompts", "lens", "message"),
    [
        ([], None, "at least one prompt, got an empty list"),
        ([[1], []], None, "at least one token, prompt 1 has none"),
        ([[61]], None, r"prompt 0 must lie in \[0, 61\)"),
        ([[-1]], None, "outside"),
        ([[1.0]], None, r"prompt 0 must be a list of token ids \(ints\), got float64"),
        ([[True]], None, "got bool"),
        ([[2**70]], None, "got object"),
        ([[[1]]], None, r"got int64 of shape \(1, 1\)"),
        (ARRAY.astype(np.float32), None, r"got float32 of shape \(2, 3\)"),
        (ARRAY[None], None, r"\[prompts, prompt_len\], got int64 of shape \(1, 2, 3\)"),
        (np.zeros((0, 3), np.int32), None, r"got int32 of shape \(0, 3\)"),
        (ARRAY + 2**32, None, "prompts must lie in"),
        (ARRAY - 2, None, "prompts must lie in"),
        ([[1]], [1], "lists of ids have their own lengths"),
        (ARRAY, [3, 0], r"prompt_lens must lie in \[1, 4\)"),
        (ARRAY, [3, 4], r"prompt_lens must lie in \[1, 4\)"),
        (ARRAY, [3], r"prompt_lens must be ints of shape \(2,\), got int64 of shape \(1,\)"),
        ([[[1], [2, 3]]], None, "prompt 0 must be a list of ints, got"),
        (ARRAY, [[1], [2, 3]], "prompt_lens must be a list of ints, got"),
        (ARRAY, [3.0, 2.0], "prompt_lens must be ints .* got float64"),
    ],
)
def test_what_is_no_batch_of_prompts_is_refused_with_a_reason(prompts, lens, message):
    with pytest.raises(ValueError, match=message):
        padded_prompts(prompts, lens, VOCAB)


def test_lists_of_tracers_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="prompts is a list that holds tracers; make one"):
        jax.jit(lambda row: padded_prompts([row, row], None, VOCAB))(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match="prompt_lens is a list that holds tracers; make one"):
        jax.jit(lambda length: padded_prompts(ARRAY, [length, 1], VOCAB))(2)
