"""Which windows of rows the `grouped_matmul` kernel visits for which groups, found on the device from their sizes.

Windows begin at multiples of eight rows, as copies want them, and groups do not: a window may hold rows of neighbours,
which are multiplied and not stored.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.device import ROW_TILE
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule

# Rows of the table, and the place where it says how many visits there are.
GROUP, FIRST, LOW, HIGH, COUNT = range(5)


def table(
    group_sizes: Int[Array, " groups"], geometry: Geometry, schedule: Schedule
) -> Int[Array, "facts visits"]:
    """Returns of each visit its group, the window's first row, the first row to store and the one after the last.

    Groups come in their order, and windows of a group in theirs. How many visits there are stands at [COUNT, 0]; what
    is said of the others is for nobody.
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
        # The last windows begin early, so that they are whole.
        FIRST: jnp.clip(begin, 0, schedule.padded_rows(geometry) - window),
        LOW: jnp.maximum(begin, starts[group]),
        HIGH: jnp.minimum(begin + window, ends[group]),
        COUNT: jnp.broadcast_to(last[-1], visit.shape),
    }
    return jnp.stack([facts[fact] for fact in range(len(facts))])


def _running(sizes: Int[Array, " groups"]) -> Int[Array, " groups"]:
    """Returns each group's sum with all before it: one fusion, where a scan over few numbers is several."""
    number = jnp.arange(sizes.shape[0])
    return jnp.sum(jnp.where(number[None, :] <= number[:, None], sizes[None, :], 0), axis=1)
