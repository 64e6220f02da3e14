"""What serving a model will cost, before anything is loaded: the cache's memory and the programs to compile."""

import os
from pathlib import Path

import jax

from jaxkv import default_model
from jaxkv.cache.budget import Budget, bytes_per_sequence, bytes_per_token, plan_budget
from jaxkv.cache.spec import CacheLayout, LayerSpec, group_layers
from jaxkv.cache.variants import sampling as sampling_spec
from jaxkv.config import MAX_BIAS_ENTRIES, CacheConfig, SamplingParams, as_int
from jaxkv.engine.request import Request
from jaxkv.engine.shapes import Shapes
from jaxkv.models.decoder import Decoder
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model
from jaxkv.models.registry import build_model, load_config

DTYPES = ("auto", "float32", "bfloat16", "float16")


def resolve_dtype(dtype: str, checkpoint: str) -> str:
    """Returns the dtype to compute in; "auto" is the checkpoint's."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return checkpoint if dtype == "auto" else dtype


def resolve_length(max_model_len: int | None, positions: int) -> int:
    """Returns the longest sequence, checked against what the model was made for."""
    if max_model_len is None:
        return positions
    return as_int("max_model_len (the upper bound is the model's own)", max_model_len, 2, positions)


def free_bytes(share: float) -> int:
    """Returns the share of the device's free memory the cache may take.

    On a CPU it is that share of a quarter of the machine's memory, which other programs use too.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(share * (stats["bytes_limit"] - stats["bytes_in_use"]))
    return int(share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4)


def plan_cache(
    model: Model, cache: CacheConfig, *, dtype: str, max_model_len: int, free_bytes: int | None
) -> tuple[CacheLayout, Budget]:
    """Returns the cache's groups and how many pages and states of each to make, the sampling group included.

    Args:
        model: says what each layer remembers.
        cache: the user's wishes.
        dtype: of the parameters, which "auto" takes for the cache.
        max_model_len: longest sequence.
        free_bytes: memory the cache may take if the user named no budget; `None` for as much as
            `max_sequences` sequences of `max_model_len` need.

    Raises:
        ValueError: not even one sequence of `max_model_len` fits; the message has the numbers.
    """
    stored = dtype if cache.dtype == "auto" else cache.dtype
    specs = model.cache_specs(page_size=cache.page_size, dtype=stored)
    choice = sampling_spec(model.vocab_size, penalties=True, bias_entries=MAX_BIAS_ENTRIES)
    layout = group_layers((*specs, LayerSpec(model.num_layers, choice)))
    limits = {"max_sequences": cache.max_sequences, "max_tokens": max_model_len}
    budget = plan_budget(layout, cache.budget_bytes, **limits)
    if cache.budget_bytes is None and free_bytes is not None and budget.bytes > free_bytes:
        budget = plan_budget(layout, free_bytes, **limits)
    if budget.num_sequences < 1:
        one = sum(bytes_per_sequence(group, max_model_len) for group in layout.paged_groups)
        raise ValueError(
            f"the cache has {budget.budget_bytes:,} bytes, but one sequence of {max_model_len:,} tokens needs "
            f"{one:,}; lower max_model_len, or give the cache more memory"
        )
    return layout, budget


def explain_plan(
    directory: str | Path | None,
    *,
    dtype: str,
    max_model_len: int | None,
    cache: CacheConfig,
    free_bytes: int | None,
    holds_weights: bool = True,
    implementation: str | None = None,
) -> str:
    """Returns what `jaxkv plan` prints for a model directory; only its config.json is read.

    Args:
        directory: of the model; `None` is the small one inside the package.
        dtype: to compute in, or "auto".
        max_model_len: longest sequence; `None` is the model's own limit.
        cache: the user's wishes.
        free_bytes: memory that is free before weights are loaded; `None` does not limit the cache.
        holds_weights: the weights will take their bytes from `free_bytes` first, as on a GPU.
        implementation: what is to run the ops; `None` for the best that can.

    Raises:
        ValueError: as for `LLM`, and the weights alone need more than `free_bytes`.
    """
    config = load_config(Path(directory) if directory is not None else default_model.path())
    model = build_model(config, implementation=implementation)
    length = resolve_length(max_model_len, model.max_positions)
    resolved = resolve_dtype(dtype, config.dtype)
    weights = _weight_bytes(model, resolved)
    if free_bytes is not None:
        rest = _beside_weights(free_bytes, weights) if holds_weights else free_bytes
        free_bytes = int(cache.memory_share * rest)
    layout, budget = plan_cache(
        model, cache, dtype=resolved, max_model_len=length, free_bytes=free_bytes
    )
    runs = choose_implementation(model, model.param_shapes(resolved), layout, budget.counts)
    shapes = Shapes(layout, max_tokens=length, max_rows=cache.max_sequences)
    per_token = sum(bytes_per_token(group) for group in layout.paged_groups)
    lines = [
        f"{config.family}: {model.num_layers} layers, {model.vocab_size:,} token ids, in {resolved}; "
        f"{per_token:,} bytes of cache per token",
        f"weights: {weights:,} bytes",
        f"runs as {runs}",
        "",
        budget.explain(),
        "",
        *_programs(shapes, length, cache.max_sequences, whole=model.whole_prompts),
    ]
    return "\n".join(lines)


def _weight_bytes(model: Decoder, dtype: str) -> int:
    leaves = jax.tree.leaves(model.param_shapes(dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _beside_weights(free_bytes: int, weights: int) -> int:
    if weights > free_bytes:
        raise ValueError(
            f"the weights alone need {weights:,} bytes, but only {free_bytes:,} are free; take a smaller dtype or "
            f"model, or a device with more memory"
        )
    return free_bytes - weights


def _programs(shapes: Shapes, length: int, rows: int, *, whole: bool) -> list[str]:
    """Lists the greedy programs of a typical request, which grow with it in powers of two."""
    prompt = max(1, min(1024, length // 2))
    sampling = SamplingParams(temperature=0.0, max_tokens=max(1, min(128, length - prompt)))
    request = Request(prompt=(0,) * prompt, params=sampling, seed=0, stop_ids=())
    lines = [
        f"programs for {rows} prompts of {prompt} tokens and {sampling.max_tokens} new ones, greedy "
        f"(others compile when first needed):"
    ]
    for declared in shapes.declare([request] * rows, whole=whole):
        shape = declared.shape
        lines.append(
            f"  {declared.kind:8s} {shape.rows:4d} rows  {shape.tokens:7d} tokens  "
            f"{max(shape.table_widths, default=0):5d} pages per row"
        )
    return lines
