"""Plans the cache's memory and the programs to compile, before weights are loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxkv import default_model
from jaxkv.cache.budget import (
    Budget,
    bytes_per_sequence,
    bytes_per_token,
    checkpoint_bytes,
    checkpoints_in,
    plan_budget,
)
from jaxkv.cache.spec import CacheLayout, LayerSpec, group_layers
from jaxkv.cache.variants import outputs as outputs_spec
from jaxkv.cache.variants import sampling as sampling_spec
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checks import as_int
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import MAX_BIAS_ENTRIES
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.steps.multi_step import choose_steps, declare_multi_steps
from jaxkv.engine.steps.step_sizes import text_drafter_of
from jaxkv.engine.warm_up import cost_identity
from jaxkv.memory import REMEDY, device_bytes, host_bytes
from jaxkv.models.decoder import Decoder
from jaxkv.models.draft_heads.load import head_of
from jaxkv.models.hf_config.generation_json import load_sampling_defaults
from jaxkv.models.hf_config.ignored_keys import describe_ignored
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.models.registry import build_model, expected_params, load_config, resolve_dtype
from jaxkv.models.tensor_parallel import TensorParallel, mailbox_room, over_devices
from jaxkv.offload.programs import declare_swaps
from jaxkv.programs.costs import Cost, cost_name, read_costs
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.runner.buckets import power_of_two_buckets
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.step_shapes import StepShapes, clamp_token_budget, grain_of, may_share_keys
from jaxkv.sampling.features import Features
from jaxkv.sampling.processors import LogitsProcessor
from jaxkv.sampling.register_processors import register_processors
from jaxkv.weights.directory import read_config_json
from jaxkv.weights.load import scheme_of
from jaxkv.weights.quantised.rounding import ROUNDINGS
from jaxkv.weights.quantised.weight_forms import bytes_of_types, has_few_bits, weight_forms
from pallas_kernels.dispatch import Unsupported

_KERNELS = "mosaic_gpu"


def resolve_length(max_model_len: int | None, positions: int) -> int:
    """Returns the longest sequence in tokens: `max_model_len`, or the model's own limit if it is `None`.

    Raises:
        ValueError: `max_model_len` exceeds the model's limit, `positions`.
    """
    if max_model_len is None:
        return positions
    why = f"the model supports at most {positions:,} tokens"
    return as_int("max_model_len", max_model_len, 2, positions, why)


def free_bytes(share: float, *, weights: int = 0) -> int:
    """Returns the bytes that the cache may take: a share of the device's free memory.

    On a CPU it is that share of a quarter of the memory that this process may use, because other programs use it too.

    Args:
        share: in (0, 1].
        weights: bytes of parameters that are still to be loaded to the device.

    Raises:
        ValueError: the weights alone need more than the device has.
    """
    device = None if jax.default_backend() == "cpu" else device_bytes()
    if device is None:
        return int(share * host_bytes() / 4)
    return int(share * _beside_weights(device, weights))


def check_room(weights: int, cache: int) -> None:
    """Raises `ValueError` if the bytes of the weights and the cache together exceed what the device has free."""
    free = device_bytes()
    if free is not None and weights + cache > free:
        raise ValueError(
            f"the weights need {weights:,} bytes and the cache {cache:,}, but only {free:,} are free; {REMEDY}"
        )


def model_for[M: Model](model: M, cache: CacheConfig, engine: EngineConfig) -> M:
    """Returns the model that keeps in its cache what `cache` and drafts need, and is batch invariant if `engine` is.

    Raises:
        ValueError: the model has no experts to keep, or is a module whose sums are not this package's; or it is on
            several devices, and the options need one; or the head that drafts is not one of this model, see `head_of`.
        BadCheckpoint, UnknownConfig: config.json of the head is damaged, or not supported.
    """
    head = head_of(engine.speculation, model)
    if isinstance(model, TensorParallel):
        return replace(model, whole=model_for(model.whole, cache, engine))
    if head is not None:
        assert isinstance(model, Decoder), "others have no head"
        model = replace(model, keeps_hidden=head.reads)
    if engine.batch_invariant:
        if not isinstance(model, Decoder):
            raise ValueError(
                f"batch_invariant needs a Decoder, whose ops have a fixed order of sums, got a {type(model).__name__}; "
                "use EngineConfig(pinned_shapes=True)"
            )
        model = replace(model, batch_invariant=True)
    if not cache.routed_experts:
        return model
    if not isinstance(model, Decoder):
        raise ValueError(
            f"routed_experts need a Decoder with a mixture of experts, got a {type(model).__name__}; turn them off"
        )
    return replace(model, keeps_experts=True)


def plan_cache(
    model: Model,
    cache: CacheConfig,
    *,
    dtype: str,
    max_model_len: int,
    free_bytes: int | None,
    ahead: int | None = None,
    processor_words: int = 0,
    speculation: SpeculationConfig | None = None,
) -> tuple[CacheLayout, Budget]:
    """Returns the cache's groups and the number of pages and states of each, the sampling group included.

    Args:
        model: the model; its `cache_specs` describe the cache of each layer.
        cache: the options of the cache.
        dtype: dtype name of the parameters, which is the cache's for "auto".
        max_model_len: longest sequence, in tokens.
        free_bytes: memory that the cache may take if `cache` has no `budget_bytes`; `None` for as much as
            `max_sequences` sequences of `max_model_len` need.
        ahead: tokens that steps in flight write before pages out of their windows are freed, see `tokens_ahead`;
            `None` if sequences keep all their pages.
        processor_words: `LogitsProcessors.num_words`; unless it is 0, the cache also holds the ids of each sequence.
        speculation: options of drafts, for which it holds them too; `None` for none.

    Raises:
        ValueError: not even one sequence of `max_model_len` fits, or no prefix into `host_bytes`; the message has
            the numbers.
    """
    stored = dtype if cache.dtype == "auto" else cache.dtype
    specs = model.cache_specs(page_size=cache.page_size, dtype=stored)
    choice = sampling_spec(
        model.vocab_size,
        penalties=True,
        bias_entries=MAX_BIAS_ENTRIES,
        history_tokens=max_model_len,
        processor_words=processor_words,
        drafts=0 if speculation is None else speculation.tokens,
    )
    layers = (*specs, LayerSpec(model.num_layers, choice))
    layout = group_layers(layers)
    if cache.full_hits and isinstance(model, Decoder | TensorParallel) and layout.state_groups:
        kept = outputs_spec(model.config.hidden_size, dtype=dtype)
        if _checkpoints(layout, cache, free_bytes):
            layout = group_layers((*layers, LayerSpec(model.num_layers, kept)))
    limits = {"max_sequences": cache.max_sequences, "max_tokens": max_model_len}
    limits["checkpoints"] = _checkpoints(layout, cache, free_bytes)
    budget = plan_budget(layout, cache.budget_bytes, **limits, ahead=ahead)
    if cache.budget_bytes is None and free_bytes is not None and budget.bytes > free_bytes:
        budget = plan_budget(layout, free_bytes, **limits, ahead=ahead)
    if budget.num_sequences < 1:
        each = (bytes_per_sequence(g, max_model_len, budget.ahead) for g in layout.paged_groups)
        one = sum(each)
        states = sum(
            group.bytes_per_unit * budget.counts[group.name]
            for group in layout.groups
            if group.unit == "state"
        )
        raise ValueError(
            f"the cache has {budget.budget_bytes:,} bytes, {states:,} of them for states, but one sequence of "
            f"{max_model_len:,} tokens needs {one:,}; lower max_model_len or max_sequences, or give the cache more "
            "memory"
        )
    _check_host(layout, cache, model.count if isinstance(model, TensorParallel) else 1)
    return layout, budget


def _check_host(layout: CacheLayout, cache: CacheConfig, devices: int) -> None:
    """Raises `ValueError` if a host tier has no room for the shortest prefix, which no request could find then."""
    pages = (group.bytes_per_unit for group in layout.paged_groups)
    each = checkpoint_bytes(layout) + sum(pages)
    # Each device copies its own part of a page or state.
    if cache.host_bytes and cache.host_bytes // devices < each:
        parts = f" on each of {devices} devices" if devices > 1 else ""
        raise ValueError(
            f"host_bytes must be at least {devices * each:,}, since the shortest prefix takes {each:,} bytes{parts}, a "
            f"page of each group of layers and a checkpoint of states, "
            f"got {cache.host_bytes:,}; raise it, or set 0 to keep nothing on the host"
        )


def tokens_ahead(
    model: Model, cache: CacheConfig, engine: EngineConfig, max_model_len: int
) -> int | None:
    """Returns the most tokens that an engine's steps in flight write; `None` if it frees no page before the end."""
    if model.whole_prompts:
        return None
    rows = cache.max_sequences
    budget = clamp_token_budget(engine.token_budget, max_tokens=max_model_len, max_rows=rows)
    return (1 + engine.overlap) * max(budget, rows * (engine.steps_per_launch or 1))


def _checkpoints(layout: CacheLayout, cache: CacheConfig, free_bytes: int | None) -> int:
    """Returns the number of state checkpoints to make room for, beside the states of running sequences."""
    if cache.checkpoint_bytes != "auto":
        return checkpoints_in(layout, cache.checkpoint_bytes)
    wanted, each = 4 * cache.max_sequences, checkpoint_bytes(layout)
    limit = free_bytes if cache.budget_bytes is None else cache.budget_bytes
    return min(wanted, limit // 10 // each) if limit is not None and each else wanted


def _keeps_states(
    layout: CacheLayout, model: Model, cache: CacheConfig, engine: EngineConfig
) -> bool:
    reuses = engine.prefix_cache and not model.whole_prompts and bool(layout.state_groups)
    return reuses and _checkpoints(layout, cache, None) > 0


def explain_plan(
    directory: str | Path | None,
    *,
    dtype: str,
    max_model_len: int | None,
    cache: CacheConfig,
    free_bytes: int | None,
    holds_weights: bool = True,
    implementation: str | None = None,
    engine: EngineConfig | None = None,
    ignore_config_keys: Sequence[str] = (),
    quantization: str | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    tensor_parallel_size: int = 1,
) -> str:
    """Returns the text of `jaxkv plan` for a model directory, of which only config files are read.

    Args:
        directory: a model directory; `None` for the small model inside the package.
        dtype: dtype name to compute in, or "auto".
        max_model_len: longest sequence, in tokens; `None` for the model's own limit.
        cache: the options of the cache.
        free_bytes: free bytes before weights are loaded; `None` does not limit the cache.
        holds_weights: whether the weights take their bytes from `free_bytes` first, as on a GPU.
        implementation: family of implementations of the ops; `None` for the best.
        engine: the options of the engine; `None` for the defaults.
        ignore_config_keys: keys of config.json to ignore, see `LLM`.
        quantization: form that plain weights are rounded to, see `LLM`.
        logits_processors: see `LLM`; the cache then holds the token ids of each sequence too.
        tensor_parallel_size: devices that compute the model together, see `LLM`; all bytes are then those of each.

    Raises:
        ValueError: as for `LLM`, except that an fp8 cache is planned even where it would be refused; and the weights
            alone need more than `free_bytes`.
    """
    engine = engine or EngineConfig()
    directory = Path(directory) if directory is not None else default_model.path()
    config = load_config(directory, ignore_config_keys=ignore_config_keys)
    whole = build_model(config, implementation=implementation)
    length = resolve_length(max_model_len, whole.max_positions)
    whole = whole.limited(length)
    resolved = resolve_dtype(dtype, config.dtype)
    params = expected_params(directory, whole, dtype=resolved, quantization=quantization)
    divided = over_devices(whole, tensor_parallel_size, params, planned=True)
    model = model_for(divided or whole, cache, engine)
    if divided is not None:
        params = divided.divided_types(params)
    weights = bytes_of_types(params) if holds_weights else 0
    free_bytes = _for_cache(free_bytes, weights + mailbox_room(model), cache.memory_share)
    processors = register_processors(
        logits_processors, vocab_size=model.vocab_size, max_tokens=length
    )
    layout, budget = plan_cache(
        model,
        cache,
        dtype=resolved,
        max_model_len=length,
        free_bytes=free_bytes,
        ahead=tokens_ahead(model, cache, engine, length),
        processor_words=processors.num_words,
        speculation=engine.speculation,
    )
    runs, implementation = _runs_as(model, params, layout, budget, cache)
    per_token = sum(bytes_per_token(group) for group in layout.paged_groups)
    lines = [
        f"{config.family}: {model.num_layers} layers, {model.vocab_size:,} token ids, in {resolved}; "
        f"{per_token:,} bytes of cache per token",
        *_weights(directory, divided or whole, params, resolved),
        *_devices(tensor_parallel_size),
        runs,
        *_invariance(engine),
        *_draft_model(engine),
        *_sampling(directory),
        *_ignored(directory, ignore_config_keys),
        *_ends(config),
        "",
        budget.explain(),
        *_host(layout, cache, per_token, tensor_parallel_size),
        "",
        *_programs(model.running(implementation), params, layout, length, cache, engine),
    ]
    return "\n".join(lines)


def _devices(count: int) -> list[str]:
    """Returns the line on the devices that divide the model; none for one device."""
    line = f"{count} devices compute the model together; bytes are those of each of them"
    return [line] * (count > 1)


def _invariance(engine: EngineConfig) -> list[str]:
    """Returns the line on what results depend on with `batch_invariant`; none without it."""
    line = (
        "batch invariant: a request's bits depend on its own tokens and options, and still on the kind of device, the "
        "versions of JAX and jaxkv, the dtypes and the page size"
    )
    return [line] * engine.batch_invariant


def _draft_model(engine: EngineConfig) -> list[str]:
    """Returns the line on the model or head that drafts, which is not planned; none without one."""
    if engine.speculation is None or engine.speculation.method == "ngram":
        return []
    drafter = engine.speculation.model or "the layer that predicts further tokens"
    return [
        f"{drafter} drafts: its weights, and the tenth of the free memory that its cache may take, are not counted here"
    ]


def _sampling(directory: Path) -> list[str]:
    """Returns the line with the model's sampling defaults for `jaxkv chat`; none if the model has no defaults."""
    defaults = load_sampling_defaults(directory)
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return [f"generation_config.json: chat samples with {listed} by default"] * bool(listed)


def _ignored(directory: Path, keys: Sequence[str]) -> list[str]:
    """Returns the line on keys of config.json that are ignored; none if there are none."""
    if not keys:
        return []
    return [
        f"config.json: ignored on request: {describe_ignored(read_config_json(directory), keys)}"
    ]


def _ends(config: ModelConfig) -> list[str]:
    """Returns the line on the token ids that end a text; none if the model has none."""
    ids = ", ".join(str(token) for token in config.eos_ids)
    where = "the tokenizer's end token, or if it has none, at " if config.assumed_eos else ""
    return [f"texts end at {where}token id {ids}"] * bool(ids)


def _host(layout: CacheLayout, cache: CacheConfig, per_token: int, devices: int) -> list[str]:
    """Returns the line with the capacity of the host tier; none if there is no host tier."""
    if not cache.host_bytes:
        return []
    # Each device copies its own part of a page or state.
    own, each = cache.host_bytes // devices, checkpoint_bytes(layout)
    capacities = [f"{own // per_token:,} tokens"] if per_token else []
    if each:
        capacities.append(f"{own // each:,} checkpoints of {each:,} bytes")
    return [
        f"host: {cache.host_bytes:,} bytes for what the cache gives up, at most {' or '.join(capacities)}"
    ]


def _weights(
    directory: Path, model: Decoder | TensorParallel, params: Params, dtype: str
) -> list[str]:
    """Returns the lines on what the weights take on each device, as they are and rounded to fewer bits."""
    lines = [f"weights: {bytes_of_types(params):,} bytes"]
    if has_few_bits(params):
        forms = ", ".join(f"{form} {size:,} bytes" for form, size in weight_forms(params).items())
        return [*lines, f"  expected by config.json: {forms}"]
    if scheme_of(directory) is not None:
        return lines
    whole = model.whole if isinstance(model, TensorParallel) else model
    sizes = []
    for name in ROUNDINGS:
        types = expected_params(directory, whole, dtype=dtype, quantization=name)
        if isinstance(model, TensorParallel):
            types = model.divided_types(types)
        sizes.append(f"{name} {bytes_of_types(types):,} bytes")
    return [*lines, f"  with --quantization: {', '.join(sizes)}"]


def _for_cache(free_bytes: int | None, weights: int, share: float) -> int | None:
    """Returns the share of the memory beside the weights; `None` if the memory is not limited."""
    return None if free_bytes is None else int(share * _beside_weights(free_bytes, weights))


def _beside_weights(free_bytes: int, weights: int) -> int:
    if weights > free_bytes:
        raise ValueError(
            f"the weights alone need {weights:,} bytes, but only {free_bytes:,} are free; use a narrower dtype, a "
            f"smaller model, or a device with more memory"
        )
    return free_bytes - weights


def _runs_as(
    model: Model, params: Params, layout: CacheLayout, budget: Budget, cache: CacheConfig
) -> tuple[str, str]:
    """Returns the line with the model's implementation, and its name; plans fp8 even where it would be refused."""
    try:
        choice = choose_implementation(model, params, layout, budget.counts)
    except Unsupported as error:
        if cache.dtype != "fp8" or model.implementation is not None:
            raise
        return f"would be refused on this machine: {error}", _KERNELS
    line = f"runs as {choice}"
    if cache.dtype == "fp8":
        line += " (a machine without our kernels would refuse this fp8 cache)"
    return line, choice.name


def _programs(
    model: Model,
    params: Params,
    layout: CacheLayout,
    length: int,
    cache: CacheConfig,
    engine: EngineConfig,
) -> list[str]:
    """Returns lines with the programs for greedy requests of any length, and their recorded compile times."""
    assert model.implementation is not None, "what runs it was chosen"
    sizes = {"max_tokens": length, "max_rows": cache.max_sequences}
    shapes = StepShapes(
        layout,
        **sizes,
        token_budget=clamp_token_budget(engine.token_budget, **sizes),
        whole_prompts=model.whole_prompts,
        pinned=engine.pinned_shapes,
        grain=grain_of(layout, model.implementation),
        checkpoints=_keeps_states(layout, model, cache, engine),
        lora=False,
        drafts=0 if engine.speculation is None else engine.speculation.tokens,
        drafter=text_drafter_of(engine.speculation, layout),
        shares=may_share_keys(layout, model.implementation, batch_invariant=model.batch_invariant),
    )
    singles = shapes.declare_all(Features())
    steps = 1 if engine.pinned_shapes else engine.steps_per_launch
    multi_steps = declare_multi_steps(singles, choose_steps(steps, model, params, layout))
    swaps = declare_swaps(layout) if cache.host_bytes and engine.prefix_cache else []
    widths = power_of_two_buckets(16, length) if layout.kept_drafts else ()
    admissions = [AdmitSpec(1, width, returning=back) for back in (False, True) for width in widths]
    specs = (*singles, *multi_steps, CopySpec(), *admissions, *swaps)
    enable_compile_cache()
    known = read_costs(cost_identity(model, params))
    costs = {spec: known[cost_name(spec)] for spec in specs if cost_name(spec) in known}
    lines = [
        f"{len(specs)} programs serve greedy requests (as many again for each other way to choose tokens); "
        f"{_budget(len(specs), list(costs.values()))}:"
    ]
    for spec in specs:
        cost = costs.get(spec)
        measured = f"{cost.seconds:7.1f} s {cost.temp_bytes / 2**20:9,.1f} MiB" if cost else ""
        sizes = ""
        if isinstance(spec, StepSpec):
            pages = max(spec.table_widths, default=0)
            sizes = f"{spec.rows:5d} rows {spec.tokens:6d} tokens {pages:5d} pages per row"
        lines.append(f"  {spec.name:26s} {sizes:45s}  {measured}".rstrip())
    return lines


def _budget(count: int, costs: Sequence[Cost]) -> str:
    """Returns the total of the recorded compile times on this machine, and the largest temporary memory."""
    if not costs:
        return "what compiling them takes is known once they were compiled on this machine"
    seconds = sum(cost.seconds for cost in costs)
    most = max(cost.temp_bytes for cost in costs)
    return (
        f"{len(costs)} of {count} were compiled on this machine before, in {seconds:.1f} s of work over all "
        f"threads, and use up to {most:,} bytes of temporary memory"
    )
