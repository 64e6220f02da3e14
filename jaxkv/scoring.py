"""`score`: log-probabilities of given tokens as a pure function, for a trainer's own jitted function."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32, Int, Shaped

from jaxkv.cache.variants import sampling as sampling_spec
from jaxkv.config.sampling import SamplingParams
from jaxkv.generation import (
    GivenTokens,
    check_eos,
    check_model,
    generate_rows,
    pack_on_device,
    params_dtype,
    row_length,
    static_cache,
)
from jaxkv.models.protocol import Model, Params
from jaxkv.padded_prompts import PromptLens, Prompts, check_range, padded_prompts
from jaxkv.sampling.features import Features
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessor
from jaxkv.step.score import score_tokens
from jaxkv.text.prompts import one_each


def score(
    params: Params,
    model: Model,
    prompts: Prompts,
    outputs: Shaped[Array, "..."] | np.ndarray | None = None,
    *,
    prompt_lens: PromptLens | None = None,
    output_lens: Shaped[Array, "..."] | np.ndarray | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    eos_ids: Sequence[int] = (),
    cache_dtype: str | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
) -> Float32[Array, "rows width"]:
    """Returns the log-probabilities of given tokens, computed in one of two ways.

    Without `outputs` it computes each text of `prompts` in one step, as a prompt. That is the cheapest way. The same
    tokens in decode steps have other shapes, so their log-probabilities differ from these by rounding, unless the model
    has `batch_invariant`.

    With `outputs` it runs the program of `jaxkv.generate`: a step over the prompts, then a decode step for each column
    of `outputs`, whose tokens it takes in place of sampled ones. With `generate`'s own arguments and its
    `Generated.tokens` and `lengths`, the result equals `Generated.logprobs` bit for bit. It costs as much as
    `generate`.

    May be called inside another jitted function: `params`, `prompts`, `outputs` and both lengths may be tracers, and
    other values of them compile nothing. On XLA's implementation `jax.grad` passes through the first way.

    Args:
        params: the model's parameters, in the dtype to compute in.
        model: as for `generate`.
        prompts: whole texts, or the prompts before `outputs`; as for `generate`.
        outputs: ids that follow each prompt, [rows, output_len] ints padded on the right, one row per sample, prompt by
            prompt.
        prompt_lens: tokens of each row of `prompts`.
        output_lens: tokens of each row of `outputs`, [rows] ints; all of it if not given.
        sampling: with `outputs` alone: what `generate` was given, whose `logprobs_mode` names the distribution;
            greedy, with one sample per prompt, if not given. Seeds have no effect.
        eos_ids: likewise; with `min_tokens`, the mode "truncated" excludes them.
        cache_dtype: dtype name of keys and values; that of the parameters if not given.
        logits_processors: as for `generate`, with `outputs` alone.

    Returns:
        Natural log-probability of each token of `prompts`, 0 for the first one of a row; or of each token of `outputs`,
        NaN from the first logits on that are not finite. 0 for padding.

    Raises:
        ValueError: an argument has the wrong type, shape or range, or needs `outputs` and there are none.
    """
    check_model(params, model)
    check_eos(eos_ids, model.vocab_size)
    tokens, lens = padded_prompts(prompts, prompt_lens, model.vocab_size)
    if outputs is None:
        named = {
            "output_lens": output_lens is not None,
            "sampling": sampling is not None,
            "eos_ids": len(eos_ids) > 0,
            "logits_processors": logits_processors is not None,
        }
        _refuse_without_outputs([name for name, is_given in named.items() if is_given])
        _check_positions(lens, tokens.shape[1], model.max_positions)
        return _score_texts(model, cache_dtype or params_dtype(params), params, tokens, lens)
    per_prompt = _sampling_of(sampling, tokens.shape[0], outputs)
    given = _given(outputs, output_lens, per_prompt, model.vocab_size)
    out = generate_rows(
        params,
        model,
        tokens,
        lens,
        per_prompt,
        given,
        key=None,
        seeds=np.zeros(len(per_prompt), np.int32),
        eos_ids=eos_ids,
        cache_dtype=cache_dtype,
        logits_processors=logits_processors,
    )
    assert out.logprobs is not None, "the program reports log-probabilities"
    columns = jnp.arange(given.tokens.shape[1], dtype=jnp.int32)[None, :]
    broken = (columns >= out.lengths[:, None]) & (columns < given.lens[:, None])
    return jnp.where(broken, jnp.nan, out.logprobs[:, : columns.shape[1]])


def _refuse_without_outputs(named: Sequence[str]) -> None:
    if named:
        raise ValueError(
            f"{', '.join(named)} describe decode steps, and whole texts are scored in one step under the model's own "
            "distribution; give outputs, or leave them out"
        )


def _check_positions(
    lens: Int[Array, " rows"] | np.ndarray, width: int, max_positions: int
) -> None:
    # Tracers may be as long as their array.
    longest = width if isinstance(lens, Tracer) else int(np.asarray(lens).max())
    if longest > max_positions:
        raise ValueError(
            f"a text of {longest} tokens exceeds the model's {max_positions} positions; shorten it"
        )


def _sampling_of(
    sampling: SamplingParams | Sequence[SamplingParams] | None, prompts: int, outputs: object
) -> list[SamplingParams]:
    """Returns the sampling of each prompt with log-probabilities and without a seed."""
    if sampling is None:
        shape = getattr(outputs, "shape", ())
        sampling = SamplingParams(temperature=0.0, max_tokens=max((1, *shape[-1:])))
    return [
        replace(one, seed=None, logprobs=one.logprobs or 0) for one in one_each(sampling, prompts)
    ]


def _given(
    outputs: object, output_lens: object, per_prompt: Sequence[SamplingParams], vocab_size: int
) -> GivenTokens:
    """Returns the outputs as int32; raises `ValueError` if they do not fit the sampling."""
    rows = sum(one.n for one in per_prompt)
    most = max(one.max_tokens or 0 for one in per_prompt)
    tokens = _ints("outputs", outputs, (rows, None))
    width = tokens.shape[1]
    if not 0 < width <= most:
        raise ValueError(
            f"outputs has {width} columns, and the largest max_tokens of sampling is {most}; give 1 to {most} columns, "
            "or raise max_tokens"
        )
    lens = np.full(rows, width, np.int32)
    if output_lens is not None:
        lens = _ints("output_lens", output_lens, (rows,))
    if not isinstance(lens, Tracer):
        check_range("output_lens", np.asarray(lens), 0, width + 1)
        if not isinstance(tokens, Tracer):
            real = np.arange(width) < np.asarray(lens)[:, None]
            check_range("outputs", np.asarray(tokens)[real], 0, vocab_size)
    return GivenTokens(tokens.astype(np.int32), lens.astype(np.int32))


def _ints(name: str, values: object, shape: tuple[int | None, ...]) -> Array | np.ndarray:
    """Returns an integer array of this shape, in which `None` is any size; raises `ValueError` for anything else."""
    wanted = f"ints of shape {list(shape)}".replace("None", "output_len")
    if not isinstance(values, jax.Array | np.ndarray):
        raise ValueError(f"{name} must be an array of {wanted}, got {type(values).__name__}")
    fits = values.ndim == len(shape) and all(
        size is None or size == got for got, size in zip(values.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be {wanted}, one row per sample, got {values.dtype} of shape {values.shape}"
        )
    return values


@partial(jax.jit, static_argnums=(0, 1))
def _score_texts(
    model: Model,
    cache_dtype: str,
    params: Params,
    tokens: Int[Array, "rows width"],
    lens: Int[Array, " rows"],
) -> Float32[Array, "rows width"]:
    """Scores padded texts in one step."""
    rows, width = tokens.shape
    model, layout, cache = static_cache(
        model,
        params,
        sampling_spec(model.vocab_size, penalties=False),
        rows=rows,
        length=row_length(width, 0),
        dtype=cache_dtype,
    )
    batch = pack_on_device(layout, Features(), NO_PROCESSORS, tokens, lens, {})
    _, scores = score_tokens(model, params, cache, batch, 0)
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    before = batch.cu_q_lens[:-1, None] + columns - 1
    told = (columns > 0) & (columns < lens[:, None])
    return jnp.where(told, scores.following[jnp.where(told, before, 0)], 0.0)
