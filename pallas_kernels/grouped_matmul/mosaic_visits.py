"""The table of visits (pairs of window and group) of the `grouped_matmul` kernel, computed on the device.

Windows start at multiples of eight rows, as TMA copies into swizzled memory require; groups start anywhere. So a window
may contain rows of neighbouring groups, which are multiplied and not stored.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.device import ROW_TILE
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule

# Rows of the table; row COUNT holds the number of visits.
GROUP, FIRST, LOW, HIGH, COUNT = range(5)


def table(
    group_sizes: Int[Array, " groups"], geometry: Geometry, schedule: Schedule
) -> Int[Array, "facts visits"]:
    """Returns for each visit its group, the window's first row, the first row to store and one past the last.

    Visits are in the order of groups, then of windows. Their number is at [COUNT, 0]; later columns are unused.
    """
    window, sizes = schedule.window, group_sizes.astype(jnp.int32)
    ends = _running(sizes)
    starts = ends - sizes
    first = starts // ROW_TILE * ROW_TILE
    counts = jnp.where(sizes > 0, -((first - ends) // window), 0)
    last = _running(counts)
    visit = jnp.arange(schedule.visits(geometry), dtype=jnp.int32)
    group = jnp.sum((visit[:, None] >= last[None, :]).astype(jnp.int32), axis=1)
    group = jnp.minimum(group, geometry.groups - 1)
    begin = first[group] + (visit - (last - counts)[group]) * window
    facts = {
        GROUP: group,
        # The last windows are shifted so that they are whole.
        FIRST: jnp.clip(begin, 0, schedule.padded_rows(geometry) - window),
        LOW: jnp.maximum(begin, starts[group]),
        HIGH: jnp.minimum(begin + window, ends[group]),
        COUNT: jnp.broadcast_to(last[-1], visit.shape),
    }
    return jnp.stack([facts[fact] for fact in range(len(facts))])


def _running(sizes: Int[Array, " groups"]) -> Int[Array, " groups"]:
    """Returns the inclusive prefix sum over groups, as one fusion; `jnp.cumsum` would be several kernels."""
    number = jnp.arange(sizes.shape[0])
    return jnp.sum(jnp.where(number[None, :] <= number[:, None], sizes[None, :], 0), axis=1)
