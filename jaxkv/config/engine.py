"""How the engine serves, as frozen data that is checked once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxkv.config.cache import CacheConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.checks import as_float, as_int, settle
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.vllm_names import ALIASES, accepts_vllm_names, unknown_option


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are served; how many at once is `CacheConfig.max_sequences`.

    Attributes:
        token_budget: most tokens of a step (vLLM: max_num_batched_tokens), but at least one for each sequence that may
            run. A prompt is computed in chunks beside the tokens of those that generate, whose next token takes as
            long as such a step: more lets prompts through faster, less keeps the others even. Its activations take
            memory, and each size up to it is a program to compile.
        prefix_cache: keep the pages of what was computed, for requests that begin alike. It costs the hash of each full
            page, and no memory that a request could use: kept pages make room for whoever needs them.
        pinned_shapes: run every step in one program, the largest and most able. Slow; results are then equal bit for
            bit whatever the neighbours, the chunks, preemptions and prefix hits.
        overlap: send a step before the one before it is read. Off, the device waits for the host between steps, and no
            row is computed once in vain after its stop.
        steps_per_launch: decode steps that are sent as one program while all requests generate and none waits: tokens
            then come so many at a time, and the host has as much longer for its part. `None` chooses: 1, or a few for
            few greedy requests of a small model, with full attention, on a GPU that was seen to wait for the host. Rows
            with `min_tokens`, and models with states of which checkpoints are kept, take one step at a time.
        checkpoints: after which tokens states of recurrent layers are kept for later prompts; how many, says
            `CacheConfig.checkpoint_bytes`.
        most_rebuilds, rebuild_seconds: give up at more lost caches than this in so many seconds; each is replaced, and
            everybody computed again. With 0, `warm_up` has fewer programs to compile.
        idle_checks: check who holds which page and state whenever no request is left, in at most one hundredth of the
            time. `CorruptBooks` is raised if the records contradict each other.

    Raises:
        ValueError: a field is out of range or of the wrong type.
    """

    token_budget: int = 2048
    prefix_cache: bool = True
    pinned_shapes: bool = False
    overlap: bool = True
    steps_per_launch: int | None = None
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    most_rebuilds: int = 3
    rebuild_seconds: float = 300.0
    idle_checks: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot be served, naming the field, the value and the range."""
        settle(self, as_int, 1, 2**20, "token_budget")
        settle(self, as_int, 0, 2**31 - 1, "most_rebuilds")
        if self.steps_per_launch is not None:
            settle(self, as_int, 1, 64, "steps_per_launch")
        settle(self, as_float, 1e-3, 1e9, "rebuild_seconds")
        for name in ("prefix_cache", "pinned_shapes", "overlap", "idle_checks"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.checkpoints, CheckpointPolicy):
            raise ValueError(f"checkpoints must be a CheckpointPolicy, got {self.checkpoints!r}")


def settle_configs(
    cache: CacheConfig | None,
    engine: EngineConfig | None,
    options: Mapping[str, Any],
    beside: Iterable[str],
) -> tuple[CacheConfig, EngineConfig]:
    """Returns the two configurations of an `LLM`, with options under vLLM's names put into them.

    Args:
        cache: what the user gave; `None` for the defaults.
        engine: likewise.
        options: vLLM's name -> value.
        beside: what else the `LLM` takes, for the error about an unknown option.

    Raises:
        ValueError: a configuration is of another type, or an option is unknown or out of range.
    """
    cache, engine = cache or CacheConfig(), engine or EngineConfig()
    for name, given, kind in (("cache", cache, CacheConfig), ("engine", engine, EngineConfig)):
        if not isinstance(given, kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {given!r}")
    theirs = [alias.theirs for alias in ALIASES if alias.owner != "call"]
    for name in options:
        if name not in theirs:
            raise unknown_option("LLM", name, _spellings([*beside, *theirs]))
    return _changed(cache, options), _changed(engine, options)


def _changed[C: (CacheConfig, EngineConfig)](config: C, options: Mapping[str, Any]) -> C:
    """Returns a configuration with those options that are vLLM's names of its fields."""
    ours = {alias.theirs: alias.ours for alias in ALIASES if alias.owner == type(config).__name__}
    return replace(config, **{ours[name]: options[name] for name in options if name in ours})


def _spellings(names: Iterable[str]) -> dict[str, str]:
    """Returns how each option of an `LLM`, and each field of what belongs to it, is written."""
    written = {name: name for name in names if name != "options"}
    for before, kind in (("cache=", CacheConfig), ("engine=", EngineConfig), ("", SamplingParams)):
        for field in fields(kind):
            written.setdefault(field.name, f"{before}{kind.__name__}({field.name}=...)")
    return written
