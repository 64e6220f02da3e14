"""The table of visits (pairs of window and group) of the `grouped_matmul` kernel, listed on the device by one block.

Windows start at multiples of eight rows, as TMA copies into swizzled memory require; groups start anywhere. So a window
may contain rows of neighbouring groups, which are multiplied and not stored.
"""

from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.device import ROW_TILE
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule
from pallas_kernels.mosaic.per_thread import THREADS, Threads, run_block, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS

# Rows of the table; row COUNT holds the number of visits.
GROUP, FIRST, LOW, HIGH, COUNT = range(5)
_FACTS = 5


def table(
    group_sizes: Int[Array, " groups"],
    geometry: Geometry,
    schedule: Schedule,
    *,
    interpret: bool = False,
) -> Int[Array, "facts visits"]:
    """Returns for each visit its group, the window's first row, the first row to store and one past the last.

    Visits are in the order of groups, then of windows. Their number is at [COUNT, 0]; the rest of that row, and columns
    of visits that there are not, hold any values.
    """
    groups, visits = geometry.groups, schedule.visits(geometry)
    code = partial(
        _list_visits,
        groups=groups,
        visits=visits,
        window=schedule.window,
        last_start=schedule.padded_rows(geometry) - schedule.window,
    )

    found = thread_kernel(
        partial(run_block, code, takes_block=False, interpret=interpret),
        jax.ShapeDtypeStruct((_FACTS * visits,), jnp.int32),
        name="grouped_matmul_visits",
        blocks=1,
        scratch=(WARPS,),
        interpret=interpret,
    )(group_sizes.astype(jnp.int32))
    return found.reshape(_FACTS, visits)


def _list_visits(
    threads: Threads,
    sizes: Ref,
    facts: Ref,
    sums: Ref,
    *,
    groups: int,
    visits: int,
    window: int,
    last_start: int,
) -> None:
    """Writes the table; each thread lists the visits of adjacent groups.

    Args:
        threads: the block's threads.
        sizes: rows of each group.
        facts: the table, row after row.
        sums: a number per warp, in shared memory.
        groups: number of groups.
        visits: columns of the table.
        window: rows of a window.
        last_start: the last row that a window may start at, so that it is whole.
    """
    each = ceil(groups / THREADS)
    own, rows = [], threads.number * 0
    for part in range(each):
        group = threads.number * each + part
        size = threads.load(sizes, threads.least(group, groups - 1))
        own.append((group, threads.select(group < groups, size, 0)))
        rows = rows + own[-1][1]
    start = threads.running_sum(rows, sums) - rows
    listed, number = [], threads.number * 0
    for group, size in own:
        first = start // ROW_TILE * ROW_TILE
        count = threads.select(size > 0, (start + size - first + (window - 1)) // window, 0)
        listed.append((group, start, start + size, first, count))
        start = start + size
        number = number + count
    last = threads.running_sum(number, sums)
    threads.store(
        facts, threads.number * 0 + COUNT * visits, last, where=threads.number == THREADS - 1
    )
    visit = last - number
    for group, start, end, first, count in listed:
        listing = partial(
            _store_visit,
            threads,
            facts,
            visits,
            (group, start, end, first, visit),
            window,
            last_start,
        )
        threads.repeat(count, listing)
        visit = visit + count


def _store_visit(
    threads: Threads,
    facts: Ref,
    visits: int,
    of_group: tuple[Any, ...],
    window: int,
    last_start: int,
    turn: Any,  # noqa: ANN401 - a word
    where: Any,  # noqa: ANN401 - a condition
) -> None:
    """Writes the column of a group's visit number `turn`.

    Args:
        threads: the block's threads.
        facts: as in `_list_visits`, like the sizes that follow.
        visits: likewise.
        of_group: the group, its first row, one past its last, the first row of its first window, its first visit.
        window: likewise.
        last_start: likewise.
        turn: number of the window.
        where: whether the group has such a visit.
    """
    group, start, end, first, visit = of_group
    begin, column = first + turn * window, visit + turn
    # Sizes that add up to more than the rows have more visits than the table.
    where = where & (column < visits)
    values = {
        GROUP: group,
        FIRST: threads.least(begin, last_start),
        LOW: threads.most(begin, start),
        HIGH: threads.least(begin + window, end),
    }
    for fact, value in values.items():
        threads.store(facts, column + fact * visits, value, where=where)
