"""The tuning search space: candidate schedules for a call of each op that has tuned schedules."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

from pallas_kernels.device import NUM_MULTIPROCESSORS
from pallas_kernels.latent_attention import mosaic_gpu as latent_launch
from pallas_kernels.latent_kernel import schedule as latent
from pallas_kernels.paged_attention import mosaic_schedule as decode
from pallas_kernels.ragged_attention import mosaic_schedule as ragged

Fields = Mapping[str, int]


@dataclass(frozen=True)
class Space:
    """The candidates for one call.

    Attributes:
        shape_class: the call's shape class.
        candidates: schedules to time; the first is that of the op's rules, which runs without tuning.
    """

    shape_class: str
    candidates: tuple[Fields, ...]


def decode_candidates(
    geometry: decode.Geometry, rows: int, capacity: int, window: int | None
) -> list[decode.Schedule]:
    """Returns the candidate schedules of `paged_attention` for these shapes, that of the rules first."""
    tiles, pairs = decode.tiles_of(capacity, window), rows * geometry.kv_heads
    found = [decode.Schedule.by_rule(geometry, rows, capacity, window)]
    for cluster in (1, 2, 3, 4, 8):
        for parts in (1, 2, 3, 4, 8, 16):
            blocks = pairs * cluster * parts
            if blocks > 8 * NUM_MULTIPROCESSORS and cluster * parts > 1:
                continue
            # `parts` > 1 costs a second launch, which pays only if SMs would be idle otherwise.
            if parts > 1 and (blocks > 4 * NUM_MULTIPROCESSORS or cluster in (3, 4)):
                continue
            for stages in (2, 3, 4, 6):
                schedule = decode.Schedule(cluster, parts, stages)
                deep = stages > ceil(tiles / (cluster * parts))
                if schedule.is_possible(geometry, tiles) and not deep and schedule not in found:
                    found.append(schedule)
    return found


def prefill_candidates(
    geometry: ragged.Geometry, tokens: int, rows: int, window: int | None
) -> list[ragged.Schedule]:
    """Returns the candidate schedules of `ragged_attention` for these shapes, that of the rules first."""
    del tokens, rows
    found = [ragged.Schedule.by_rule(geometry, window)]
    for keys, stages in ((128, 2), (128, 3), (64, 2), (64, 3), (64, 4)):
        for query_slots in (1, 2):
            for blocks in (NUM_MULTIPROCESSORS, ragged.ONE_BLOCK_EACH):
                schedule = ragged.Schedule(keys, stages, query_slots, blocks)
                if schedule.is_possible(geometry, window) and schedule not in found:
                    found.append(schedule)
    return found


def latent_candidates(
    geometry: latent.Geometry, pieces: int, capacity: int
) -> list[latent.Schedule]:
    """Returns the candidate schedules of `latent_attention` for these shapes, that of the rules first."""
    found = [latent.Schedule.by_rule(geometry, pieces, capacity)]
    shares = [(cluster, 1) for cluster in latent.CLUSTERS]
    shares += [(1, parts) for parts in (2, 3, 4, 6, 8, 12, 16, 32)]
    for schedule in (latent.Schedule(*both) for both in shares):
        crowded = pieces * geometry.blocks * schedule.shares > 4 * NUM_MULTIPROCESSORS
        if crowded and schedule.shares > 1:
            continue
        if schedule.is_possible(geometry, capacity) and schedule not in found:
            found.append(schedule)
    return found


def decode_arguments(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of `decode_candidates` for a call."""
    geometry = decode.Geometry.of(inputs["q"], inputs["k_pages"])
    capacity = inputs["page_table"].shape[1] * inputs["k_pages"].shape[1]
    return geometry, inputs["q"].shape[0], capacity, inputs["window"]


def prefill_arguments(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of `prefill_candidates` for a call."""
    geometry = ragged.Geometry.of(inputs["q"], inputs["k_pages"])
    return geometry, inputs["q"].shape[0], inputs["seq_lens"].shape[0], inputs["window"]


def latent_arguments(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of `latent_candidates` for a call."""
    q, pages, table = (inputs[name] for name in ("q", "latent_pages", "page_table"))
    geometry = latent.Geometry.of(q, pages, inputs["value_dim"], packed="cu_q_lens" in inputs)
    pieces = latent_launch.pieces_of(geometry, q.shape[0], table.shape[0])
    return geometry, pieces, table.shape[1] * pages.shape[1]


class _Op(NamedTuple):
    """An op's functions; `shape_class` and `candidates` take the tuple that `arguments` returns."""

    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    shape_class: Callable[..., str]
    candidates: Callable[..., list[Any]]


_OPS = {
    "paged_attention": _Op(decode_arguments, decode.shape_class, decode_candidates),
    "ragged_attention": _Op(prefill_arguments, ragged.shape_class, prefill_candidates),
    "latent_attention": _Op(latent_arguments, latent.shape_class, latent_candidates),
}
TUNED_OPS = tuple(_OPS)
"""The ops with tuned schedules."""


def find_space(op: str, inputs: Mapping[str, Any]) -> Space:
    """Returns the search space of a call with these inputs, whose arrays are JAX arrays."""
    found = _OPS[op]
    arguments = found.arguments(inputs)
    candidates = found.candidates(*arguments)
    return Space(found.shape_class(*arguments), tuple(map(asdict, candidates)))
