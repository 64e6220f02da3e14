"""`generate`: a pure function from parameters and prompts to tokens, in one executable, with no scheduler.

It makes a static cache inside the trace (one page per row), so nothing has to be allocated, donated or freed by
the caller, and it can be called inside a trainer's own jitted function on the trainer's own arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import CacheLayout, LayerSpec, StateSpec, group_layers
from jaxkv.cache.state import Cache, init_cache
from jaxkv.cache.variants import sampling as sampling_spec
from jaxkv.config.sampling import SamplingParams
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.models.tensor_parallel import TensorParallel, mesh_of
from jaxkv.padded_prompts import (
    PromptLens,
    Prompts,
    check_range,
    host_array,
    padded_prompts,
    round_up,
)
from jaxkv.row_seeds import Key, Seeds, row_seeds
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features, union
from jaxkv.sampling.fields import (
    FIELDS,
    NO_TOKEN,
    FixedSampling,
    features_for,
    fields_for,
)
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessor, LogitsProcessors
from jaxkv.sampling.register_processors import register_processors
from jaxkv.sampling.sample import admit
from jaxkv.step.loop import ERROR, LENGTH, RUNNING, STOP, Generated, Limits, generate_loop
from jaxkv.text.prompts import one_each
from jaxkv.weights.quantised.weight_forms import plain_leaves

__all__ = ["ERROR", "LENGTH", "RUNNING", "STOP", "Generated", "generate"]

_PAGE_MULTIPLE = 64
"""Static rows are padded to a multiple of this, the key tile of the GPU kernels."""


def generate(
    params: Params,
    model: Model,
    prompts: Prompts,
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    key: Key | None = None,
    seeds: Seeds | None = None,
    prompt_lens: PromptLens | None = None,
    eos_ids: Sequence[int] = (),
    cache_dtype: str | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
) -> Generated:
    """Generates for a fixed batch of prompts in one jitted call, prompt and decode together.

    May be called inside another jitted function: `params`, `prompts`, `prompt_lens`, `key` and `seeds` may be
    tracers, and other values of them compile nothing. The loop ends when every row has stopped.

    Each sample is a row: `n` samples of a prompt are `n` rows, one after the other, and each computes its prompt.
    With `n` for all prompts, `out.tokens.reshape(prompts, n, -1)` separates them.

    The random numbers of a row depend on its 64-bit seed and the position alone. Seeds come from one of:

    - `key`: each row has its own, made of the key and the row's number.
    - `seeds`, or the seed of `SamplingParams`: that of the prompt's first sample; sample `s` adds `s`. This is the rule
      of `LLM.generate`, and the same seed gives the same tokens there. Equal prompts with equal seeds give equal rows.
    - None of them: each row draws a fresh seed, so the next call gives other tokens. Inside a traced function this is
      refused for rows that draw, since the seed would become a constant of the compiled program.

    Args:
        params: the model's parameters, in the dtype to compute in.
        model: the `Decoder` of `load_model`, a `FlaxModel` or anything else that follows `Model` of
            `jaxkv.models.protocol`.
        prompts: token ids, as lists of any lengths or as an integer array [prompts, prompt_len] padded on the right.
            One flat list or array of ids is one prompt.
        sampling: for all prompts or one per prompt; greedy with 16 tokens if not given.
        key: one PRNG key, such as `jax.random.key(0)`.
        seeds: one int per prompt, in [-2**63, 2**64).
        prompt_lens: tokens of each row of a padded array, [prompts] ints; all of it if not given.
        eos_ids: ids that end a row unless its `ignore_eos` is set.
        cache_dtype: dtype name of keys and values; that of the parameters if not given.
        logits_processors: name -> function, as for `LLM`. The functions are a part of the program, so give the same
            objects at each call.

    Returns:
        One row per sample, prompt by prompt.

    Raises:
        ValueError: an argument has the wrong type, shape or range, the prompts are empty or do not fit the model, the
            sampling has `structured_outputs` or `lora`, a logits processor cannot run on the device, or the seeds come
            from more than one source or, inside a traced function, from none.
    """
    check_model(params, model)
    check_eos(eos_ids, model.vocab_size)
    tokens, lens = padded_prompts(prompts, prompt_lens, model.vocab_size)
    greedy = SamplingParams(temperature=0.0)
    return generate_rows(
        params,
        model,
        tokens,
        lens,
        one_each(greedy if sampling is None else sampling, tokens.shape[0]),
        None,
        key=key,
        seeds=seeds,
        eos_ids=eos_ids,
        cache_dtype=cache_dtype,
        logits_processors=logits_processors,
    )


class GivenTokens(NamedTuple):
    """Tokens that the rows of a program take in place of sampled ones.

    Attributes:
        tokens: their ids, padded on the right.
        lens: how many each row has; it ends with the last one.
    """

    tokens: Int[Array, "rows width"] | np.ndarray
    lens: Int[Array, " rows"] | np.ndarray

    def padded(self, width: int) -> Int[Array, "rows max_tokens"]:
        """Returns `width` columns, with `NO_TOKEN` behind each row's tokens."""
        count = self.tokens.shape[1]
        real = jnp.arange(count, dtype=jnp.int32)[None, :] < self.lens[:, None]
        tokens = jnp.where(real, self.tokens, NO_TOKEN)
        return jnp.pad(tokens, ((0, 0), (0, width - count)), constant_values=NO_TOKEN)


def generate_rows(
    params: Params,
    model: Model,
    tokens: Int[Array, "prompts prompt_len"] | np.ndarray,
    lens: Int[Array, " prompts"] | np.ndarray,
    per_prompt: Sequence[SamplingParams],
    given: GivenTokens | None,
    *,
    key: object,
    seeds: object,
    eos_ids: Sequence[int],
    cache_dtype: str | None,
    logits_processors: Mapping[str, LogitsProcessor] | None,
) -> Generated:
    """Runs the program of `generate`, with sampled or with given tokens.

    Args:
        params: as for `generate`, like all that is not listed.
        model: the model, checked.
        tokens: the prompts.
        lens: tokens of each prompt.
        per_prompt: sampling of each prompt; with given tokens, it asks for log-probabilities.
        given: tokens of each row, of at most the largest `max_tokens`; `None` to sample them.
        key: a key, or `None`; anything else is refused.
        seeds: seeds, or `None`; anything else is refused.
        eos_ids: ids that end a row that samples, checked.
        cache_dtype: dtype name of keys and values, or `None`.
        logits_processors: name -> function.
    """
    _refuse_host_sampling(per_prompt)
    _check_lengths(lens, tokens.shape[1], per_prompt, model)
    width = max(_most_tokens(one) for one in per_prompt)
    processors = register_processors(
        logits_processors,
        vocab_size=model.vocab_size,
        max_tokens=row_length(tokens.shape[1], round_up(width)),
    )
    low, high = row_seeds(
        per_prompt, key=key, seeds=seeds, traced=_is_traced((params, tokens, lens))
    )
    per_row = [one for one in per_prompt for _ in range(one.n)]
    if len(per_row) > len(per_prompt):
        counts = [one.n for one in per_prompt]
        owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        tokens, lens = tokens[owners], lens[owners]
    features = union([features_for(one) for one in per_row])
    host = _choices(per_row, eos_ids, model.vocab_size) | {"seed_low": low, "seed_high": high}
    limit = round_up(width)
    if given is not None:
        host |= {"given": given.padded(limit), "max_tokens": given.lens}
    elif features.logprobs is not None:
        host["given"] = np.full((len(per_row), limit), NO_TOKEN, np.int32)
    words = [processors.words(one.logits_processors) for one in per_row]
    used = NO_PROCESSORS
    if features.processors:
        used, host["processor_words"] = processors, np.stack(words)
    stored = cache_dtype or params_dtype(params)
    out = _generate(model, features, used, limit, stored, params, tokens, lens, host)
    return _trim(out, width, max(one.logprobs or 0 for one in per_row))


def check_model(params: Params, model: object) -> None:
    """Raises `ValueError` if these are no parameters or no model, with what to do."""
    if not isinstance(model, Model) or isinstance(model, type):
        # Only the error message needs this import.
        from flax import nnx

        name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        if isinstance(params, Model):
            raise ValueError("params and model are swapped; call generate(params, model, prompts)")
        if isinstance(model, nnx.Module):
            raise ValueError(
                f"model is the nnx module {name}; make `model = jaxkv.FlaxModel(module)` once and call "
                "generate(model.params_of(module), model, prompts)"
            )
        raise ValueError(
            f"model must be a Decoder (see jaxkv.load_model), a FlaxModel or another Model, got {name}"
        )
    leaves = jax.tree.leaves(params)
    strange = next((leaf for leaf in leaves if not isinstance(leaf, jax.Array | np.ndarray)), None)
    if not leaves or strange is not None:
        got = f"{type(strange).__name__} in it" if leaves else "none"
        raise ValueError(f"params must be a pytree of the model's arrays, got {got}")
    if isinstance(model, TensorParallel):
        model.refuse_undivided(params)


def _refuse_host_sampling(sampling: Sequence[SamplingParams]) -> None:
    if any(one.lora is not None for one in sampling):
        raise ValueError(
            "lora names an adapter of an LLM, and jaxkv.generate takes the parameters alone; use LLM.generate, or give "
            "parameters with the adapter's sums"
        )
    if any(one.structured_outputs is not None for one in sampling):
        raise ValueError(
            "structured_outputs needs the host between two tokens, and jaxkv.generate is one program; use LLM.generate"
        )


def check_eos(eos_ids: object, vocab_size: int) -> None:
    """Raises `ValueError` unless these are token ids."""
    ids = host_array("eos_ids", eos_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"eos_ids must be a sequence of token ids, got {eos_ids!r}")
    check_range("eos_ids", ids, 0, vocab_size)


def _check_lengths(
    lens: Int[Array, " prompts"] | np.ndarray,
    longest: int,
    sampling: Sequence[SamplingParams],
    model: Model,
) -> None:
    # Tracers may be as long as their array.
    known = [longest] * len(sampling) if isinstance(lens, Tracer) else np.asarray(lens)
    for prompt, (length, one) in enumerate(zip(known, sampling, strict=True)):
        if one.stop or one.bad_words:
            raise ValueError(
                "stop and bad_words are texts, and jaxkv.generate has no tokenizer; use stop_token_ids and logit_bias"
            )
        if one.prompt_logprobs is not None:
            raise ValueError(
                "jaxkv.generate reports no prompt_logprobs; use LLM.generate or LLM.score"
            )
        one.check_vocab(model.vocab_size)
        if length + _most_tokens(one) > model.max_positions:
            raise ValueError(
                f"prompt {prompt} has {length} tokens and max_tokens is {one.max_tokens}, more than the model's "
                f"{model.max_positions} positions; shorten the prompt or lower max_tokens"
            )


def _is_traced(arguments: object) -> bool:
    """Returns whether an argument is a tracer, or the caller is being traced, so that new arrays are tracers."""
    leaves = (*jax.tree.leaves(arguments), jnp.zeros((), jnp.int32))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _most_tokens(sampling: SamplingParams) -> int:
    """Returns the most tokens of a row, which the width of the output array must be known from."""
    if sampling.max_tokens is None:
        raise ValueError(
            "max_tokens must be a number for jaxkv.generate, whose output has that many columns, got None"
        )
    return sampling.max_tokens


def _trim(out: Generated, width: int, top: int) -> Generated:
    """Returns the output without the columns that rounding up `max_tokens` and `logprobs` has added."""
    cut = {"tokens": out.tokens[:, :width]}
    if out.logprobs is not None and out.top_ids is not None and out.top_logprobs is not None:
        cut["logprobs"] = out.logprobs[:, :width]
        cut["top_ids"] = out.top_ids[:, :width, :top]
        cut["top_logprobs"] = out.top_logprobs[:, :width, :top]
    return replace(out, **cut)


def params_dtype(params: Params) -> str:
    """Returns the dtype name with the most elements among the parameters, those in 8 or 4 bits not counted."""
    sizes: dict[str, int] = {}
    for leaf in plain_leaves(params):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _choices(
    per_row: list[SamplingParams], eos_ids: Sequence[int], vocab_size: int
) -> dict[str, np.ndarray]:
    """Returns all sampling fields and limits of the rows as arrays, by name; all seeds are 0.

    Raises:
        ValueError: a row has more stop ids than fit.
    """
    entries = round_up(max(len(one.logit_bias) for one in per_row))
    bias_ids = np.full((len(per_row), entries), vocab_size, np.int32)
    bias_values = np.zeros((len(per_row), entries), np.float32)
    requests = []
    for row, one in enumerate(per_row):
        stops = (*one.stop_token_ids, *(() if one.ignore_eos else eos_ids))
        requests.append(FixedSampling(one, stop_ids=stops))
        bias_ids[row, : len(one.logit_bias)] = list(one.logit_bias.keys())
        bias_values[row, : len(one.logit_bias)] = list(one.logit_bias.values())
    limits = {
        name: np.asarray([getattr(one, name) for one in per_row], np.int32)
        for name in ("max_tokens", "min_tokens")
    }
    columns = {field.name: field.column(requests) for field in FIELDS}
    return columns | limits | {"bias_ids": bias_ids, "bias_values": bias_values}


def row_length(longest: int, max_tokens: int) -> int:
    """Returns the tokens that a row has room for."""
    return -(-(longest + max_tokens) // _PAGE_MULTIPLE) * _PAGE_MULTIPLE


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(
    model: Model,
    features: Features,
    processors: LogitsProcessors,
    max_tokens: int,
    cache_dtype: str,
    params: Params,
    tokens: Int[Array, "rows prompt_len"],
    lens: Int[Array, " rows"],
    host: dict[str, Array],
) -> Generated:
    rows, longest = tokens.shape
    length = row_length(longest, max_tokens)
    choice = sampling_spec(
        model.vocab_size,
        penalties=features.penalties,
        bias_entries=host["bias_ids"].shape[1] if features.penalties else 0,
        history_tokens=length,
        processor_words=processors.num_words,
    )
    model, layout, cache = static_cache(
        model, params, choice, rows=rows, length=length, dtype=cache_dtype
    )
    prompt = pack_on_device(layout, features, processors, tokens, lens, host)
    if features.needs_admission:
        columns = jnp.arange(longest, dtype=jnp.int32)[None, :]
        choices = admit(
            cache.layer(model.num_layers),
            prompt.sampling.state_ids,
            jnp.where(columns < lens[:, None], tokens, model.vocab_size + columns),
            jnp.zeros((rows, 0), jnp.int32),
            host["bias_ids"] if features.penalties else None,
            host["bias_values"] if features.penalties else None,
            host["processor_words"].at[:, 0].set(lens) if features.processors else None,
            lens,
        )
        cache = cache.with_layer(model.num_layers, choices)
    limits = Limits(**{name: host[name] for name in ("max_tokens", "min_tokens", "stop_ids")})
    page_sizes = tuple(group.page_size for group in layout.paged_groups)
    _, out = generate_loop(
        model,
        params,
        cache,
        prompt,
        limits,
        page_sizes=page_sizes,
        max_tokens=max_tokens,
        given=host.get("given"),
    )
    return out


def static_cache(
    model: Model, params: Params, choice: StateSpec, *, rows: int, length: int, dtype: str
) -> tuple[Model, CacheLayout, Cache]:
    """Returns an empty cache with one page of `length` tokens per row, its layout, and the model that can run on it.

    Args:
        model: the model.
        params: its parameters.
        choice: spec of the sampling group.
        rows: number of rows.
        length: tokens per row.
        dtype: dtype name of keys and values.
    """
    specs = model.cache_specs(page_size=length, dtype=dtype)
    layout = group_layers((*specs, LayerSpec(model.num_layers, choice)))
    counts = {g.name: rows if g.unit == "page" else rows + 1 for g in layout.groups}
    model = model.running(choose_implementation(model, params, layout, counts).name)
    return model, layout, init_cache(layout, counts, device=mesh_of(model))


def pack_on_device(
    layout: CacheLayout,
    features: Features,
    processors: LogitsProcessors,
    tokens: Array,
    lens: Array,
    host: dict[str, Array],
) -> StepBatch:
    """Returns the batch of the prompts' tokens, packed one row after the other, with padding at the end."""
    rows, longest = tokens.shape
    total = rows * longest
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    place = jnp.arange(total, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(bounds, place, side="right").astype(jnp.int32) - 1, rows - 1)
    position = place - bounds[row]
    real = place < bounds[-1]
    numbers = jnp.arange(rows, dtype=jnp.int32)
    paged = []
    for group in layout.paged_groups:
        page_size = group.page_size
        slots = jnp.where(real, row * page_size + position, rows * page_size + place)
        paged.append(PagedTables(page_table=numbers[:, None], write_slots=slots))
    # State 0 is the zero state that fresh sequences read.
    states = [
        StateTables(read_states=jnp.zeros_like(numbers), write_states=numbers + 1)
        for _ in layout.state_groups
    ]
    return StepBatch(
        tokens=jnp.where(real, tokens[row, jnp.where(real, position, 0)], 0),
        positions=jnp.where(real, position, 0),
        cu_q_lens=bounds,
        seq_lens=lens,
        paged=tuple(paged),
        states=tuple(states),
        sampling=SamplingBatch(
            state_ids=numbers + 1,
            carry=jnp.zeros_like(numbers),
            values={field.name: host[field.name] for field in fields_for(features)},
            features=features,
            processors=processors,
        ),
        fresh=True,
    )
