"""`paged_attention` on Hopper with a Mosaic GPU kernel: limits, padding before it and the split-K reduction after it.

The kernel's launch is in mosaic_launch.py, its schedule in mosaic_schedule.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import ROW_TILE, WGMMA_ROWS, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.paged_attention.mosaic_launch import Kernel
from pallas_kernels.paged_attention.mosaic_schedule import Geometry, Schedule
from pallas_kernels.paged_attention.mosaic_shared import SharedGeometry, SharedKernel
from pallas_kernels.shared_keys import SharedKeys


def why_not(q: ArrayOrStruct, k_pages: ArrayOrStruct) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or Geometry.of(q, k_pages).refusal()


def paged_attention(
    arrays: AttentionArrays,
    options: ScoreOptions,
    *,
    shared: SharedKeys | None = None,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "rows heads head_dim"]
    | tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]
):
    """Implements `api.paged_attention`.

    Page ids past a row's last page, or before its window, may have any value. With `interpret` the kernel runs in
    Pallas's interpreter on the CPU, slowly; reads out of bounds raise, and races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = Geometry.of(arrays.q, arrays.k_pages)
    check_kernel(geometry.refusal())
    heads, group = geometry.heads, geometry.group
    q, sinks = _fill_groups(arrays.q, group, geometry.filled_group), arrays.sinks
    if sinks is not None:
        sinks = _fill_groups(sinks[None], group, geometry.filled_group)[0]
    geometry = Geometry.of(q, arrays.k_pages)
    schedule = Schedule.of(geometry, q.shape[0], arrays.capacity, options.window)
    out, lse = attend(
        arrays._replace(q=q, sinks=sinks),
        shared,
        options=options,
        schedule=schedule.without_clusters() if interpret else schedule,
        want_lse=return_lse,
        interpret=interpret,
    )
    of_heads = np.arange(heads) // group * geometry.group + np.arange(heads) % group
    if len(of_heads) < q.shape[1]:
        out, lse = out[:, of_heads], None if lse is None else lse[:, of_heads]
    return out if lse is None else (out, lse)


@dataclass(frozen=True)
class DirectLaunch:
    """The kernel's launch without XLA operations around it, for a caller such as the torch bridge.

    Attributes:
        launch: function of `(q, k_pages, v_pages, page_table, seq_lens)`, followed by sinks in float32 if there are
            any, and by `k_scales, v_scales` for 8-bit pages. q and sinks have `padded_heads` heads; those after their
            own are zeros.
        padded_heads: number of heads that `launch` expects.
        columns: `None` if rows are not split; then the launch returns the output. Otherwise it returns the parts'
            outputs, float32 [rows, parts, kv_heads, head_dim, columns], and their log-sum-exps in base 2, float32
            [rows, parts, kv_heads, columns], -inf for a part without keys. `columns`, [heads], is then the index of
            each head in the flattened axes `kv_heads * columns`.
    """

    launch: Callable[..., list[Array]]
    padded_heads: int
    columns: np.ndarray | None


def direct_launch(
    q: ArrayOrStruct,
    k_pages: ArrayOrStruct,
    table_width: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> DirectLaunch | None:
    """Returns the launch without XLA operations around it.

    The result is `None` if the kernel cannot run here, and for shapes whose groups of heads XLA would have to pad.

    Args:
        q: the queries, or their `jax.ShapeDtypeStruct`.
        k_pages: the key pool, or its `jax.ShapeDtypeStruct`; the value pool has the same shape and dtype.
        table_width: columns of the page table.
        scale: as in `paged_attention`.
        window: as in `paged_attention`.
        soft_cap: as in `paged_attention`.
        has_sinks: whether sinks are an argument.
    """
    geometry = Geometry.of(q, k_pages)
    if why_not_mosaic() or geometry.refusal():
        return None
    if geometry.filled_group > geometry.group:
        return None
    capacity = table_width * k_pages.shape[1]
    options = ScoreOptions(scale, window, soft_cap).within(capacity)
    schedule = Schedule.of(geometry, q.shape[0], capacity, options.window)
    is_split = schedule.parts > 1
    return DirectLaunch(
        launch=Kernel(geometry, options, schedule, is_split, has_sinks).build(q.shape[0]),
        padded_heads=geometry.padded_heads,
        columns=_columns_of_heads(geometry) if is_split else None,
    )


def _fill_groups(of_heads: Shaped[Array, "rows heads ..."], group: int, filled: int) -> Array:
    """Pads each group of heads with zeros from `group` to `filled` heads."""
    rows, heads, *rest = of_heads.shape
    groups = of_heads.reshape(rows, heads // group, group, *rest)
    missing = [(0, 0), (0, 0), (0, filled - group), *[(0, 0)] * len(rest)]
    return jnp.pad(groups, missing).reshape(rows, heads // group * filled, *rest)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("options", "schedule", "want_lse", "interpret"))
def attend(
    arrays: AttentionArrays,
    shared: SharedKeys | None = None,
    *,
    options: ScoreOptions,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"] | None]:
    """Runs the kernel under a schedule, after that of shared keys, then combines the parts if there are several."""
    q, k_pages, v_pages, page_table, seq_lens, _, sinks, *scales = arrays
    geometry = Geometry.of(q, k_pages)
    missing = geometry.padded_heads - geometry.heads
    operands = [jnp.pad(q, ((0, 0), (0, missing), (0, 0))), k_pages, v_pages, page_table, seq_lens]
    if sinks is not None:
        operands.append(jnp.pad(sinks.astype(jnp.float32), (0, missing)))
    operands += [factors for factors in scales if factors is not None]
    has_lse, has_sinks = want_lse or schedule.parts > 1, sinks is not None
    blocks = None
    if shared is not None and shared.lens.size and options.window is None:
        blocks = SharedGeometry.within(geometry)
    if shared is not None and blocks is not None:
        kernel = SharedKernel(blocks, options, len(shared.rows), has_sinks, interpret)
        division = [shared.lens, kernel.schedule.parts_of(blocks, shared.lens)]
        before = [*operands[:4], shared.rows, *division]
        if has_sinks:
            before.append(_sinks_of_queries(operands[5], blocks))
        operands += [shared.places, *division, *kernel.build()(*before)]
    kernel = Kernel(
        geometry, options, schedule, has_lse, has_sinks, interpret, goes_on=blocks is not None
    )
    outputs = kernel.build(q.shape[0])(*operands)
    if not kernel.has_lse:
        return outputs[0], None
    lse = _heads_of_columns(outputs[1], geometry)
    if schedule.parts == 1:
        out, lse = outputs[0], lse[:, 0]
    else:
        out, lse = _join_parts(outputs[0], lse, geometry)
    return out.astype(q.dtype), lse / LOG2_E if want_lse else None


def _sinks_of_queries(
    sinks: Float[Array, " heads"], blocks: SharedGeometry
) -> Float[Array, "kv_heads queries"]:
    """Returns the sink of each query of a block of several rows, for each key head."""
    first = np.arange(blocks.kv_heads) * blocks.group // ROW_TILE * ROW_TILE
    column = np.arange(WGMMA_ROWS) % blocks.columns
    return sinks[first[:, None] + column]


def _heads_of_columns(
    stats: Float[Array, "rows parts kv_heads columns"], geometry: Geometry
) -> Float[Array, "rows parts heads"]:
    """Selects the heads' columns and drops the padding columns around each group."""
    rows, parts = stats.shape[:2]
    return stats.reshape(rows, parts, -1)[:, :, _columns_of_heads(geometry)]


def _columns_of_heads(geometry: Geometry) -> np.ndarray:
    head = np.arange(geometry.heads)
    first = head // geometry.group * geometry.group
    return head // geometry.group * geometry.columns + first % ROW_TILE + head - first


def _join_parts(
    out: Float[Array, "rows parts kv_heads head_dim columns"],
    lse: Float[Array, "rows parts heads"],
    geometry: Geometry,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]:
    """Combines the parts of each row in float32; a part without keys has -inf in `lse` (base 2) and weight 0."""
    rows, parts = out.shape[:2]
    by_column = out.swapaxes(3, 4).reshape(rows, parts, -1, geometry.head_dim)
    by_head = by_column[:, :, _columns_of_heads(geometry)]
    top = jnp.max(lse, axis=1)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp2(lse - top[:, None])
    total = jnp.sum(weight, axis=1)
    joined = jnp.sum(by_head * weight[..., None], axis=1)
    return joined / jnp.where(total > 0, total, 1.0)[..., None], top + jnp.log2(total)
