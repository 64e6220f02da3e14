"""`EngineConfig`: options of the scheduler and the engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxkv.config.cache import CacheConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.checks import as_float, as_int, check_fields
from jaxkv.config.lora import LoraConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.speculation import SpeculationConfig, speculation_of
from jaxkv.config.vllm_names import ALIASES, accepts_vllm_names, unknown_option

MOST_WARMED = 2**20
"""Most requests at once for which a warm-up compiles the programs."""


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine, checked on construction. `CacheConfig.max_sequences` limits the requests in flight.

    Attributes:
        token_budget: most tokens of a step (vLLM: max_num_batched_tokens), but at least one per running sequence.
            Prompts are computed in chunks in the same steps as decode tokens. A larger budget finishes prompts sooner;
            a smaller one makes the intervals between decode tokens more even. It also bounds the memory of activations
            and the number of programs to compile.
        prefix_cache: cache the full pages of computed tokens for later requests with the same prefix. This costs a
            hash per page. It takes no memory from requests, because cached pages are evicted when needed.
        pinned_shapes: run every step in the same two programs, those with the largest shapes and all features. Slow,
            but the results are bit for bit independent of other requests, chunks, preemptions and prefix hits; with
            recurrent layers of other rows alone, since chunks, preemptions and hits divide their sums otherwise.
        batch_invariant: give every sum a fixed order. A request's tokens and log-probabilities are then the same bits
            alone and among other requests, in any chunks, after preemptions, and with or without prefix hits.
        overlap: dispatch a step before the previous one is collected. Without it, the device is idle between two steps,
            but no token is computed after a sequence's stop.
        steps_per_launch: decode steps per launched program while all requests are decoding and none waits. Tokens then
            arrive in groups of this size, and the host has more time per launch. `None` chooses 1, or 4 on GPUs that
            were measured to wait for the host, for models without MLA: on one GPU for up to 16 requests if a step of
            one request reads at most 4 GiB of weights (of experts those that a token uses), and for up to 64 if it
            reads at most 2 GiB; and for more on several GPUs, without windows and recurrent layers. Without a warm-up
            a thread compiles that program after 128 steps that waited.
            Requests with `min_tokens` or `structured_outputs` run one step per launch. With several, and a model with
            recurrent layers, a request that stops before its limit mostly keeps no checkpoint of its end
            (`CheckpointPolicy.end_of_generation`), so its next turn begins at that of its prompt. Computing a reply of
            a few hundred tokens again, as part of a prompt, takes tens of milliseconds; the launches save some
            milliseconds for each of its tokens. 1 keeps the ends.
        speculation: drafts of the next tokens, which decode steps verify; no token changes. `None` for none. Not for
            models with whole prompts, nor for recurrent layers on several devices, nor with `pinned_shapes`.
        checkpoints: the lengths at which sequences make checkpoints of recurrent states;
            `CacheConfig.checkpoint_bytes` limits their number.
        most_rebuilds, rebuild_seconds: the engine rebuilds a lost cache and recomputes all requests, up to
            `most_rebuilds` times within `rebuild_seconds` seconds; then it raises. With 0, `warm_up` compiles fewer
            programs.
        idle_checks: check the records of pages and states whenever no request is left, in at most a hundredth of the
            time. `CorruptBooks` is raised if they contradict each other.

    Raises:
        ValueError: a field is out of range or of the wrong type.
    """

    token_budget: int = 2048
    prefix_cache: bool = True
    pinned_shapes: bool = False
    batch_invariant: bool = False
    overlap: bool = True
    steps_per_launch: int | None = None
    speculation: SpeculationConfig | None = None
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    most_rebuilds: int = 3
    rebuild_seconds: float = 300.0
    idle_checks: bool = True

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or of the wrong type."""
        check_fields(self, as_int, 1, 2**20, "token_budget")
        check_fields(self, as_int, 0, 2**31 - 1, "most_rebuilds")
        if self.steps_per_launch is not None:
            check_fields(self, as_int, 1, 64, "steps_per_launch")
        check_fields(self, as_float, 1e-3, 1e9, "rebuild_seconds")
        for name in (
            "prefix_cache",
            "pinned_shapes",
            "batch_invariant",
            "overlap",
            "idle_checks",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        object.__setattr__(self, "speculation", speculation_of(self.speculation))
        if self.speculation is not None and self.pinned_shapes:
            raise ValueError(
                "pinned_shapes and speculation exclude one another, because steps that verify drafts are programs of "
                "their own; use batch_invariant"
            )
        if not isinstance(self.checkpoints, CheckpointPolicy):
            raise ValueError(f"checkpoints must be a CheckpointPolicy, got {self.checkpoints!r}")


def merge_configs(
    cache: CacheConfig | None,
    engine: EngineConfig | None,
    options: Mapping[str, Any],
    beside: Iterable[str],
    *,
    speculation: object = None,
) -> tuple[CacheConfig, EngineConfig]:
    """Returns the two configurations of an `LLM`, with options under vLLM's names merged into them.

    Args:
        cache: the user's configuration; `None` for the defaults.
        engine: the user's configuration; `None` for the defaults.
        options: vLLM's option name -> value.
        beside: other options of `LLM`, for the message about an unknown option.
        speculation: the option of this name, which is a field of `engine`; `None` if not given.

    Raises:
        ValueError: a configuration is of another type, an option is unknown or out of range, or speculation is given
            twice.
    """
    cache, engine = cache or CacheConfig(), engine or EngineConfig()
    for name, given, kind in (("cache", cache, CacheConfig), ("engine", engine, EngineConfig)):
        if not isinstance(given, kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {given!r}")
    theirs = [alias.theirs for alias in ALIASES if alias.owner not in ("call", "SpeculationConfig")]
    for name in options:
        if name not in theirs:
            raise unknown_option("LLM", name, _spellings([*beside, *theirs]))
    for given in (speculation, options.get("speculative_config")):
        if given is None:
            continue
        if engine.speculation is not None:
            raise ValueError("speculation is given twice; give it once, to LLM or to EngineConfig")
        engine = replace(engine, speculation=speculation_of(given))
    return _changed(cache, options), _changed(engine, options)


def _changed[C: (CacheConfig, EngineConfig)](config: C, options: Mapping[str, Any]) -> C:
    """Returns a configuration with the options that are vLLM names of its fields."""
    ours = {alias.theirs: alias.ours for alias in ALIASES if alias.owner == type(config).__name__}
    return replace(config, **{ours[name]: options[name] for name in options if name in ours})


def _spellings(names: Iterable[str]) -> dict[str, str]:
    """Returns option or field name -> how a user writes it, for `LLM` and its configurations."""
    written = {name: name for name in names if name != "options"}
    kinds = (
        ("cache=", CacheConfig),
        ("engine=", EngineConfig),
        ("lora=", LoraConfig),
        ("speculation=", SpeculationConfig),
        ("", SamplingParams),
    )
    for before, kind in kinds:
        for field in fields(kind):
            written.setdefault(field.name, f"{before}{kind.__name__}({field.name}=...)")
    return written
