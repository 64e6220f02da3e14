"""Statistics of an engine: pools, programs, queues and caches, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.backend import get_default_device

from jaxkv.cache.kept_pages.stats import PrefixStats
from jaxkv.cache.spec import Group
from jaxkv.engine.engine import Engine
from jaxkv.engine.speculation.speculation import SpeculationStats
from jaxkv.offload.entries import HostStats
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.weights.quantised.weight_forms import weight_forms
from pallas_kernels.dispatch import fallbacks


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """The pool of one group of layers.

    Attributes:
        name: such as "gqa", "window-2" or "sampling".
        unit: "page" or "state".
        total: units of the pool, without the reserved zero state of a group of states.
        free: unused units.
        used: units that a sequence holds.
        kept: units that only the prefix cache holds; it evicts them when a sequence needs them.
        num_bytes: memory of all units, free or used, over all layers.
    """

    name: str
    unit: str
    total: int
    free: int
    used: int
    kept: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of an engine.

    Attributes:
        implementation: implementation of the ops of all layers: "mosaic_gpu", "xla" or "cudnn".
        implementation_reasons: why a faster implementation is not used; empty if there is none or the user chose.
        batch_invariant: whether all sums have a fixed order, see `EngineConfig`.
        weights: form -> bytes of the parameters in it on each device, such as "bfloat16" or "int4 in groups of 128";
            empty while `sleep` has dropped them.
        device: name of the device that holds the cache.
        cache: statistics of each group's pool.
        cache_bytes: memory of all pools.
        programs: number of compiled programs.
        programs_pending: number of programs that a thread has still to compile.
        compile_seconds: wall time of compilation, including loads from the compilation cache.
        compiled_late: number of programs that were compiled after the warm-up.
        running, waiting: number of requests in each queue.
        steps: number of dispatched steps.
        wait_seconds: time that steps have waited for the device; the rest of a busy engine's time is the host's.
        recoveries: number of lost caches that were replaced.
        prefix: hits and evictions of the prefix cache; `None` if it is off.
        speculation: drafted and accepted tokens by position; `None` without speculation.
        host_cache: memory of the host tier: "pinned_host", "pageable" (slower), "off", or "disabled: " and the reason.
        host: entries and transfers of the host tier; `None` if it is off.
        fallbacks: (op, implementation, reason) -> how often this process traced the op with another implementation for
            that reason, over all models.
    """

    implementation: str
    implementation_reasons: tuple[str, ...]
    batch_invariant: bool
    weights: Mapping[str, int]
    device: str
    cache: tuple[GroupStats, ...]
    cache_bytes: int
    programs: int
    programs_pending: int
    compile_seconds: float
    compiled_late: int
    running: int
    waiting: int
    steps: int
    wait_seconds: float
    recoveries: int
    prefix: PrefixStats | None
    speculation: SpeculationStats | None
    host_cache: str
    host: HostStats | None
    fallbacks: Mapping[tuple[str, str, str], int]


def collect_stats(engine: Engine) -> Stats:
    """Returns the current statistics."""
    runner = engine.runner
    programs = runner.programs.manifest()
    groups = tuple(_group(engine.sequence_runner, group) for group in runner.layout.groups)
    return Stats(
        implementation=runner.implementation.name,
        implementation_reasons=runner.implementation.reasons,
        batch_invariant=runner.model.batch_invariant,
        weights=weight_forms(runner.params),
        device=get_default_device().device_kind,
        cache=groups,
        cache_bytes=sum(group.num_bytes for group in groups),
        programs=len(programs),
        programs_pending=runner.programs.pending,
        compile_seconds=runner.programs.compile_seconds,
        compiled_late=runner.programs.compiled_late,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        steps=engine.steps,
        wait_seconds=engine.wait_seconds,
        recoveries=engine.recoveries,
        prefix=None if engine.prefix is None else engine.prefix.stats,
        speculation=None if engine.speculation is None else engine.speculation.stats,
        host_cache=engine.prefix_reuse.why_no_host if engine.host is None else engine.host.kind,
        host=None if engine.host is None else engine.host.stats,
        fallbacks=fallbacks(),
    )


def _group(sequence_runner: SequenceRunner, group: Group) -> GroupStats:
    count, free = (
        sequence_runner.runner.owner.counts[group.name],
        sequence_runner.allocator.num_free(group.name),
    )
    total = count - (group.unit == "state")
    kept = sequence_runner.allocator.num_reclaimable(group.name)
    return GroupStats(
        name=group.name,
        unit=group.unit,
        total=total,
        free=free,
        used=total - free - kept,
        kept=kept,
        num_bytes=count * group.bytes_per_unit,
    )
