"""`generate`: a pure function from parameters and prompts to tokens, in one executable, with no scheduler.

It makes a static cache inside the trace (one page per row), so nothing has to be allocated, donated or freed by
the caller, and it can be called inside a trainer's own jitted function on the trainer's own arrays.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.batch import Features, PagedTables, SamplingBatch, StateTables, StepBatch
from jaxkv.cache.spec import CacheLayout, LayerSpec, group_layers
from jaxkv.cache.state import init_cache
from jaxkv.cache.variants import sampling as sampling_spec
from jaxkv.config import SamplingParams
from jaxkv.engine.rows import STOP_WIDTH, Row, features_of, split_seed
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.step.loop import ERROR, LENGTH, RUNNING, STOP, Generated, Limits, generate_loop
from jaxkv.step.sample import admit

__all__ = ["ERROR", "LENGTH", "RUNNING", "STOP", "Generated", "generate"]

Prompts = Int[Array, "rows prompt_len"] | np.ndarray | Sequence[Sequence[int]]

_PAGE_MULTIPLE = 64
"""Static rows are padded to a multiple of this, the key tile of the GPU kernels."""


def generate(
    params: Params,
    model: Model,
    prompts: Prompts,
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    prompt_lens: Int[Array, " lens"] | None = None,
    eos_ids: Sequence[int] = (),
    cache_dtype: str | None = None,
) -> Generated:
    """Generates for a fixed batch of prompts in one jitted call, prompt and decode together.

    May be called inside another jitted function: `params`, `prompts` and `prompt_lens` may be tracers. The
    loop ends when every row has stopped.

    Args:
        params: the model's parameters, in the dtype to compute in.
        model: a `Decoder`, a `FlaxModel` or anything else that follows `jaxkv.models.protocol.Model`.
        prompts: token ids, as lists of any lengths or as an int32 array padded on the right.
        sampling: for all rows or one per row (`n` must be 1); greedy with 16 tokens if not given. A missing
            seed means 0 here, so that the function is pure.
        prompt_lens: tokens of each row of a padded array; all of it if not given.
        eos_ids: ids that end a row unless its `ignore_eos` is set.
        cache_dtype: dtype name of keys and values; that of the parameters if not given.

    Raises:
        ValueError: prompts are empty or ragged in a way that `prompt_lens` does not explain, ids or limits do not
            fit the model.
    """
    tokens, lens = _prompt_arrays(prompts, prompt_lens, model.vocab_size)
    wishes = _per_row(sampling, tokens.shape[0])
    _check_range("eos_ids", np.asarray(eos_ids, np.int64), 0, model.vocab_size)
    for wish in wishes:
        wish.check_vocab(model.vocab_size)
        if wish.n != 1:
            raise ValueError(
                f"generate returns one sample per row, got n={wish.n}; repeat the prompt"
            )
    width = max(wish.max_tokens for wish in wishes)
    # Tracers may be as long as their array.
    known = [tokens.shape[1]] * len(wishes) if isinstance(lens, Tracer) else np.asarray(lens)
    for row, (length, wish) in enumerate(zip(known, wishes, strict=True)):
        if length + wish.max_tokens > model.max_positions:
            raise ValueError(
                f"row {row} has {length} tokens and wants {wish.max_tokens} new ones, more than the model's "
                f"{model.max_positions} positions; shorten the prompt or lower max_tokens"
            )
    features = features_of([Row(0, (), 0, wish) for wish in wishes])
    host = _choices(wishes, eos_ids, model.vocab_size)
    stored = cache_dtype or params_dtype(params)
    out = _generate(model, features, _round_up(width), stored, params, tokens, lens, host)
    return _trim(out, width, max((wish.logprobs or 0 for wish in wishes), default=0))


def _trim(out: Generated, width: int, top: int) -> Generated:
    """Cuts off what only rounded sizes brought."""
    cut = {"tokens": out.tokens[:, :width]}
    if out.logprobs is not None and out.top_ids is not None and out.top_logprobs is not None:
        cut["logprobs"] = out.logprobs[:, :width]
        cut["top_ids"] = out.top_ids[:, :width, :top]
        cut["top_logprobs"] = out.top_logprobs[:, :width, :top]
    return replace(out, **cut)


def params_dtype(params: Params) -> str:
    """Returns the dtype name that most numbers among the parameters have."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(params):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size
    return max(sizes, key=lambda name: sizes[name])


def _prompt_arrays(
    prompts: Prompts, prompt_lens: Array | None, vocab_size: int
) -> tuple[Int[Array, "rows prompt_len"], Int[Array, " rows"]]:
    if not isinstance(prompts, jax.Array | np.ndarray):
        if prompt_lens is not None:
            raise ValueError(
                "prompt_lens describes a padded array; lists of ids have their own lengths"
            )
        return _pad(prompts, vocab_size)
    if prompts.ndim != 2 or 0 in prompts.shape or prompts.dtype != np.int32:
        raise ValueError(
            f"prompts must be int32 of shape [rows, prompt_len], got {prompts.dtype} of {prompts.shape}"
        )
    rows, longest = prompts.shape
    if prompt_lens is None:
        prompt_lens = jnp.full(rows, longest, jnp.int32)
    if prompt_lens.shape != (rows,) or prompt_lens.dtype != np.int32:
        raise ValueError(
            f"prompt_lens must be int32 of shape {(rows,)}, got {prompt_lens.dtype} of {prompt_lens.shape}"
        )
    # Only concrete values can be checked; a trainer's own tracers are trusted.
    if not isinstance(prompt_lens, Tracer):
        _check_range("prompt_lens", np.asarray(prompt_lens), 1, longest + 1)
        if not isinstance(prompts, Tracer):
            real = np.arange(longest) < np.asarray(prompt_lens)[:, None]
            _check_range("prompts", np.asarray(prompts)[real], 0, vocab_size)
    return jnp.asarray(prompts), jnp.asarray(prompt_lens)


def _pad(
    prompts: Sequence[Sequence[int]], vocab_size: int
) -> tuple[Int[Array, "rows prompt_len"], Int[Array, " rows"]]:
    """Makes one array of lists; its width is a power of two, so that few programs serve all lengths."""
    lens = [len(prompt) for prompt in prompts]
    if not lens or min(lens) == 0:
        raise ValueError("generate needs at least one prompt, and each needs at least one token")
    padded = np.zeros((len(lens), _round_up(max(lens))), np.int32)
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt {row} must hold token ids (ints), got {ids.dtype}")
        _check_range(f"prompt {row}", ids, 0, vocab_size)
        padded[row, : len(ids)] = ids
    return jnp.asarray(padded), jnp.asarray(lens, jnp.int32)


def _round_up(size: int) -> int:
    """Returns the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _check_range(name: str, values: np.ndarray, low: int, end: int) -> None:
    if values.size and (values.min() < low or values.max() >= end):
        raise ValueError(
            f"{name} must lie in [{low}, {end}), got values outside: {values.min()} to {values.max()}"
        )


def _per_row(
    sampling: SamplingParams | Sequence[SamplingParams] | None, rows: int
) -> list[SamplingParams]:
    if sampling is None:
        sampling = SamplingParams(temperature=0.0)
    if isinstance(sampling, SamplingParams):
        return [sampling] * rows
    if len(sampling) != rows:
        raise ValueError(
            f"got {len(sampling)} SamplingParams for {rows} prompts; give one, or one each"
        )
    return list(sampling)


def _choices(
    wishes: list[SamplingParams], eos_ids: Sequence[int], vocab_size: int
) -> dict[str, np.ndarray]:
    """Lays the rows' wishes out as arrays, whether or not the program will read them all."""
    seeds = [split_seed(wish.seed or 0) for wish in wishes]
    entries = _round_up(max(len(wish.logit_bias) for wish in wishes))
    stop_ids = np.full((len(wishes), STOP_WIDTH), vocab_size, np.int32)
    bias_ids = np.full((len(wishes), entries), vocab_size, np.int32)
    bias_values = np.zeros((len(wishes), entries), np.float32)
    for row, wish in enumerate(wishes):
        stops = (*wish.stop_token_ids, *(() if wish.ignore_eos else eos_ids))
        if len(stops) > STOP_WIDTH:
            raise ValueError(f"row {row} has {len(stops)} stop ids, at most {STOP_WIDTH} fit")
        stop_ids[row, : len(stops)] = stops
        bias_ids[row, : len(wish.logit_bias)] = list(wish.logit_bias.keys())
        bias_values[row, : len(wish.logit_bias)] = list(wish.logit_bias.values())

    def ints(values: Sequence[int]) -> np.ndarray:
        return np.asarray(values, np.int32)

    def floats(values: Sequence[float]) -> np.ndarray:
        return np.asarray(values, np.float32)

    return {
        "seed_low": ints([low for low, _ in seeds]),
        "seed_high": ints([high for _, high in seeds]),
        "temperature": floats([wish.temperature for wish in wishes]),
        "top_k": ints([wish.top_k for wish in wishes]),
        "top_p": floats([wish.top_p for wish in wishes]),
        "min_p": floats([wish.min_p for wish in wishes]),
        "repetition": floats([wish.repetition_penalty for wish in wishes]),
        "presence": floats([wish.presence_penalty for wish in wishes]),
        "frequency": floats([wish.frequency_penalty for wish in wishes]),
        "max_tokens": ints([wish.max_tokens for wish in wishes]),
        "min_tokens": ints([wish.min_tokens for wish in wishes]),
        "stop_ids": stop_ids,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
    }


_FEATURE_FIELDS = {
    "draws": ("seed_low", "seed_high", "temperature"),
    "filters": ("top_k", "top_p", "min_p"),
    "penalties": ("repetition", "presence", "frequency"),
}


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    model: Model,
    features: Features,
    max_tokens: int,
    cache_dtype: str,
    params: Params,
    tokens: Int[Array, "rows prompt_len"],
    lens: Int[Array, " rows"],
    host: dict[str, Array],
) -> Generated:
    rows, longest = tokens.shape
    length = -(-(longest + max_tokens) // _PAGE_MULTIPLE) * _PAGE_MULTIPLE
    specs = model.cache_specs(page_size=length, dtype=cache_dtype)
    entries = host["bias_ids"].shape[1] if features.penalties else 0
    choice = sampling_spec(model.vocab_size, penalties=features.penalties, bias_entries=entries)
    layout = group_layers((*specs, LayerSpec(model.num_layers, choice)))
    counts = {g.name: rows if g.unit == "page" else rows + 1 for g in layout.groups}
    model = model.running(choose_implementation(model, params, layout, counts).name)
    cache = init_cache(layout, counts)
    prompt = _pack_on_device(layout, features, tokens, lens, host)
    if features.penalties:
        columns = jnp.arange(longest, dtype=jnp.int32)[None, :]
        choices = admit(
            cache.layer(model.num_layers),
            prompt.sampling.slots,
            jnp.where(columns < lens[:, None], tokens, model.vocab_size + columns),
            jnp.zeros((rows, 0), jnp.int32),
            host["bias_ids"],
            host["bias_values"],
        )
        cache = cache.with_layer(model.num_layers, choices)
    limits = Limits(**{name: host[name] for name in ("max_tokens", "min_tokens", "stop_ids")})
    page_sizes = tuple(group.page_size for group in layout.paged_groups)
    _, out = generate_loop(
        model, params, cache, prompt, limits, page_sizes=page_sizes, max_tokens=max_tokens
    )
    return out


def _pack_on_device(
    layout: CacheLayout, features: Features, tokens: Array, lens: Array, host: dict[str, Array]
) -> StepBatch:
    """Packs padded prompts one after the other; what is left over at the end is padding."""
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
    chosen = {
        name: host[name]
        for feature, names in _FEATURE_FIELDS.items()
        if getattr(features, feature)
        for name in names
    }
    return StepBatch(
        tokens=jnp.where(real, tokens[row, jnp.where(real, position, 0)], 0),
        positions=jnp.where(real, position, 0),
        cu_q_lens=bounds,
        seq_lens=lens,
        num_tokens=bounds[-1],
        num_rows=jnp.int32(rows),
        paged=tuple(paged),
        states=tuple(states),
        sampling=SamplingBatch(
            slots=numbers + 1, carry=jnp.zeros_like(numbers), **chosen, features=features
        ),
        fresh=True,
    )
