"""The 64-bit seed of each row of `jaxkv.generate`, as two int32 words that its program takes as data."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, PRNGKeyArray, Shaped

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import sample_seed
from jaxkv.padded_prompts import host_array
from jaxkv.sampling.fields import split_seed
from jaxkv.wording import shown

Key = PRNGKeyArray | Shaped[Array, "..."] | np.ndarray
Seeds = Shaped[Array, "..."] | np.ndarray | Sequence[int]
SeedWords = tuple[Int[Array, " rows"] | np.ndarray, Int[Array, " rows"] | np.ndarray]


def row_seeds(
    sampling: Sequence[SamplingParams], *, key: object, seeds: object, traced: bool
) -> SeedWords:
    """Returns the low and the high word of each row's seed; sample `s` of a prompt is its `s`-th row.

    A seed, of `SamplingParams` or of `seeds`, is that of the prompt's first sample; sample `s` adds `s` to it, as in
    the engine. A key is folded with the row's number. Without any of these, each row draws a fresh seed.

    Args:
        sampling: one per prompt.
        key: one PRNG key, typed or raw, or `None`; may be a tracer. Anything else is refused.
        seeds: one int per prompt, or `None`; may be a tracer. Anything else is refused.
        traced: whether the caller is being traced, so that a fresh seed would become a constant of its program.

    Raises:
        ValueError: more than one source of seeds is given, the given one has a wrong shape or dtype, or a row
            that draws has no seed while the caller is being traced.
    """
    _check_one_source(sampling, key, seeds)
    if key is not None:
        return _words_of_key(_checked_key(key), sum(params.n for params in sampling))
    if isinstance(seeds, jax.Array):
        _check_seeds(seeds, len(sampling))
        owners = np.repeat(
            np.arange(len(sampling), dtype=np.int32), [params.n for params in sampling]
        )
        samples = np.concatenate([np.arange(params.n, dtype=np.uint32) for params in sampling])
        return _words_of_seeds(seeds, owners, samples)
    numbers = _host_seeds(sampling, seeds, traced)
    low, high = zip(*(split_seed(number) for number in numbers), strict=True)
    return np.asarray(low, np.int32), np.asarray(high, np.int32)


def _check_one_source(sampling: Sequence[SamplingParams], key: object, seeds: object) -> None:
    given = [name for name, value in (("key", key), ("seeds", seeds)) if value is not None]
    if len(given) == 2:
        raise ValueError("got both key and seeds; pass one of them")
    for prompt, params in enumerate(sampling):
        if given and params.seed is not None:
            raise ValueError(
                f"got {given[0]} and SamplingParams(seed={params.seed}) for prompt {prompt}; pass one of them"
            )


def _checked_key(key: object) -> Key:
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
            return key
        raw = jax.eval_shape(jax.random.PRNGKey, 0)
        if (key.dtype, key.shape) == (raw.dtype, raw.shape):
            return key
        got = f"{key.dtype} of shape {key.shape}"
    else:
        got = shown(key)
    raise ValueError(
        f"key must be one PRNG key, such as jax.random.key(0), got {got}; "
        "for a seed of each prompt pass seeds"
    )


def _check_seeds(seeds: Array, prompts: int) -> None:
    if seeds.shape != (prompts,) or not jnp.issubdtype(seeds.dtype, jnp.integer):
        raise ValueError(
            f"seeds must be ints of shape {(prompts,)}, one per prompt, got {seeds.dtype} of shape {seeds.shape}"
        )


def _host_seeds(sampling: Sequence[SamplingParams], seeds: object, traced: bool) -> list[int]:
    """Returns the seed of each row from Python's and NumPy's ints, or fresh ones; 0 for greedy rows without one."""
    if seeds is not None:
        is_list = isinstance(seeds, Sequence | np.ndarray)
        if not is_list or host_array("seeds", seeds).shape != (len(sampling),):
            raise ValueError(f"seeds must be {len(sampling)} ints, one per prompt, got {seeds!r}")
        firsts = [as_int("seeds", seed, -(2**63), 2**64 - 1) for seed in seeds]
        return [
            first + sample
            for first, params in zip(firsts, sampling, strict=True)
            for sample in range(params.n)
        ]
    for prompt, params in enumerate(sampling):
        if traced and params.seed is None and params.temperature > 0:
            raise ValueError(
                f"prompt {prompt} draws tokens (temperature {params.temperature}) and has no seed, but generate is "
                "called inside a traced function, where a fresh seed would become a constant; "
                "pass key= (a JAX PRNG key) or seeds= (one int per prompt), as arguments of that function"
            )
    return [
        sample_seed(params, sample) if params.temperature > 0 else 0
        for params in sampling
        for sample in range(params.n)
    ]


@partial(jax.jit, static_argnums=1)
def _words_of_key(key: Key, rows: int) -> SeedWords:
    # Bits of the key, not the key itself: a caller that folds its own row numbers in draws other numbers. Threefry
    # also gives a row the same words in batches of any size, which other generators do not under `vmap`.
    root = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")
    numbers = jnp.arange(rows, dtype=jnp.uint32)
    folded = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(root, row)))(numbers)
    words = jax.lax.bitcast_convert_type(folded, jnp.int32)
    return words[:, 0], words[:, 1]


@jax.jit
def _words_of_seeds(
    seeds: Integer[Array, " prompts"],
    owners: Integer[Array, " rows"] | np.ndarray,
    samples: Integer[Array, " rows"] | np.ndarray,
) -> SeedWords:
    """Adds each row's sample number to the seed of its prompt, in 64 bits without a 64-bit type."""
    if seeds.dtype.itemsize == 8:
        low, high = seeds.astype(jnp.uint32), (seeds >> 32).astype(jnp.uint32)
    else:
        low = seeds.astype(jnp.uint32)
        high = jnp.where(seeds < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    first = low[owners]
    total = first + samples
    carried = high[owners] + (total < first).astype(jnp.uint32)
    as_int32 = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    return as_int32(total), as_int32(carried)
