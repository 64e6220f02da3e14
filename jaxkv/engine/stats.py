"""What an engine holds and has done so far, as plain numbers. Reads, and changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.backend import get_default_device

from jaxkv.cache.prefix.report import PrefixStats
from jaxkv.cache.spec import Group
from jaxkv.engine.engine import Engine
from jaxkv.offload.entries import HostStats
from jaxkv.runner.sequence_runner import SequenceRunner
from pallas_kernels.dispatch import fallbacks


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """The pool of one group of layers.

    Attributes:
        name: such as "gqa", "window-2" or "sampling".
        unit: what the pool hands out: "page" or "state".
        total: units; the zero state of a group of states, which nobody gets, is not counted.
        free: of these, those that hold nothing.
        used: those that a sequence holds.
        kept: those that the prefix cache alone holds, and gives up for whoever needs them.
        num_bytes: memory of all units, free or not, over all layers.
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
    """What runs, where, and what it takes.

    Attributes:
        implementation: what runs the ops of all layers: "mosaic_gpu", "xla" or "cudnn".
        implementation_reasons: why nothing better does; empty for the best, or if it was asked for.
        device: the name of the device that holds the cache.
        cache: each group's pool.
        cache_bytes: memory of all of them.
        programs: compiled so far.
        compile_seconds: wall time that compiling took, loading from the compilation cache included.
        compiled_late: how many of them were compiled after the warm-up.
        running, waiting: sequences in service, and in the queue.
        steps: dispatched so far.
        recoveries: caches that were lost in the middle of serving, and replaced.
        prefix: what the prefix cache has found and evicted; `None` if it is off.
        host_cache: where evicted prefixes go: "pinned_host", "pageable" (slower), "off", or "disabled: " and why.
        host: what lies there and has moved; `None` if it is off.
        fallbacks: (op, implementation, reason) -> how often this process, whichever the model, traced an op that passed
            over an implementation for another one.
    """

    implementation: str
    implementation_reasons: tuple[str, ...]
    device: str
    cache: tuple[GroupStats, ...]
    cache_bytes: int
    programs: int
    compile_seconds: float
    compiled_late: int
    running: int
    waiting: int
    steps: int
    recoveries: int
    prefix: PrefixStats | None
    host_cache: str
    host: HostStats | None
    fallbacks: Mapping[tuple[str, str, str], int]


def collect_stats(engine: Engine) -> Stats:
    """Returns the numbers of this moment."""
    runner = engine.runner
    programs = runner.programs.manifest()
    groups = tuple(_group(engine.sequence_runner, group) for group in runner.layout.groups)
    return Stats(
        implementation=runner.implementation.name,
        implementation_reasons=runner.implementation.reasons,
        device=get_default_device().device_kind,
        cache=groups,
        cache_bytes=sum(group.num_bytes for group in groups),
        programs=len(programs),
        compile_seconds=runner.programs.compile_seconds,
        compiled_late=runner.programs.compiled_late,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        steps=engine.steps,
        recoveries=engine.recoveries,
        prefix=None if engine.prefix is None else engine.prefix.stats,
        host_cache=engine.why_no_host if engine.host is None else engine.host.kind,
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
