"""Argument checks that the ops' `api.py` files share. They raise `ValueError`."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from pallas_kernels.arguments.attention import ScoreOptions
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.formats.few_bits import CODES, FewBits

INT32_MAX = 2**31 - 1


def check_ids(name: str, ids: Array | np.ndarray, shape: tuple[int | None, ...]) -> None:
    """Raises `ValueError` for ids, slots or lengths that are not int32, not of `shape`, or negative.

    `None` in `shape` stands for any size. Values are checked for concrete arrays only, not under a trace; the host
    code that builds a table checks its values there. Negative indices are refused because JAX wraps them around to
    live data; padding is one past the end.
    """
    if ids.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {ids.dtype}; cast it where it is built")
    check_shape(name, ids, shape)
    if not isinstance(ids, Tracer) and ids.size and int(np.min(np.asarray(ids))) < 0:
        raise ValueError(
            f"{name} holds a negative number; pad with a value past the end instead of -1"
        )


def check_shape(
    name: str, array: Array | np.ndarray | FewBits, shape: tuple[int | None, ...]
) -> None:
    """Raises `ValueError` if the array's shape is not `shape`, where `None` stands for any size."""
    fits = len(array.shape) == len(shape) and all(
        wanted is None or got == wanted for got, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(array.shape)}")


def check_few_bits(name: str, weight: FewBits) -> None:
    """Raises `ValueError` for a weight in few bits whose parts do not fit each other."""
    if weight.code not in CODES:
        raise ValueError(f"{name}.code must be one of {', '.join(CODES)}, got {weight.code!r}")
    code, (*lead, inner) = CODES[weight.code], weight.shape
    if weight.codes.dtype != code.stored:
        wanted = jnp.dtype(code.stored).name
        raise ValueError(
            f"{name}.codes of {weight.code} must be {wanted}, got {weight.codes.dtype}"
        )
    groups = weight.scales.shape[-1]
    check_shape(f"{name}.scales", weight.scales, (*lead, groups))
    if not groups or inner % groups:
        raise ValueError(
            f"{name}.scales must be those of equally many columns each, got {groups} for {inner} columns"
        )
    if weight.rounds_rows and (weight.code != "float8_e4m3fn" or groups != 1):
        raise ValueError(
            f"{name}.rounds_rows needs codes of float8_e4m3fn with one scale per row, got {weight.code} with {groups}"
        )
    if weight.zeros is not None:
        if weight.code != "int4" or weight.zeros.dtype != jnp.uint8:
            raise ValueError(
                f"{name}.zeros must be uint8 and only with codes of int4, got {weight.zeros.dtype} with {weight.code}"
            )
        check_shape(f"{name}.zeros", weight.zeros, tuple(weight.scales.shape))
    if weight.order is not None and (
        weight.order.dtype != jnp.int32 or weight.order.shape[-1] != inner
    ):
        raise ValueError(
            f"{name}.order must be int32 with {inner} columns, got {weight.order.dtype} {list(weight.order.shape)}"
        )


def check_matrices(
    weight: Array | np.ndarray | FewBits, x: Array | np.ndarray, group_axis: int
) -> None:
    """Raises `ValueError` unless x can be multiplied with a weight of several matrices.

    Args:
        weight: [groups, out, inner], or [out, groups, inner] with `group_axis` 1.
        x: [rows, inner].
        group_axis: axis of the weight that counts its matrices, 0 or 1.
    """
    if group_axis not in (0, 1):
        raise ValueError(
            f"group_axis must be 0 or 1, since the last axis is contracted, got {group_axis}"
        )
    check_shape("x", x, (None, None))
    if isinstance(weight, FewBits):
        check_few_bits("weight", weight)
        if weight.order is not None and weight.order.ndim > 1:
            check_shape("weight.order", weight.order, (weight.shape[group_axis], weight.shape[-1]))
    check_shape("weight", weight, (None, None, x.shape[1]))
    if not jnp.issubdtype(x.dtype, jnp.floating) or (
        not isinstance(weight, FewBits) and weight.dtype != x.dtype
    ):
        found = weight.code if isinstance(weight, FewBits) else weight.dtype
        raise ValueError(
            f"weight and x must share one floating dtype, got {found} and {x.dtype}; cast x to the weight's"
        )


def check_attention(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    sinks: Array | np.ndarray | None,
    k_scales: Array | np.ndarray | None,
    v_scales: Array | np.ndarray | None,
    options: ScoreOptions,
) -> None:
    """Raises `ValueError` for queries, pools and options of paged attention that do not fit each other."""
    check_shape("q", q, (None, None, None))
    heads, head_dim = q.shape[1:]
    check_shape("k_pages", k_pages, (None, None, None, head_dim))
    check_shape("v_pages", v_pages, tuple(k_pages.shape))
    _check_dtypes(q, k_pages, v_pages, {"k_scales": k_scales, "v_scales": v_scales})
    if heads % k_pages.shape[2]:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {heads} heads and {k_pages.shape[2]} kv_heads"
        )
    window, soft_cap = options.window, options.soft_cap
    check_scale(options.scale)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}; `None` attends to everything")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}; `None` caps nothing")
    if sinks is not None:
        check_shape("sinks", sinks, (heads,))


def check_scale(scale: float) -> None:
    """Raises `ValueError` for a factor of attention scores that is not positive."""
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}; usually head_dim ** -0.5")


def _check_dtypes(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    scales: Mapping[str, Array | np.ndarray | None],
) -> None:
    """Raises `ValueError` unless the pages have q's dtype, or 8 bits and scales."""
    given = {name: pool for name, pool in scales.items() if pool is not None}
    if not given:
        if not q.dtype == k_pages.dtype == v_pages.dtype:
            raise ValueError(
                f"q, k_pages and v_pages must share one dtype, got {q.dtype}, {k_pages.dtype} and "
                f"{v_pages.dtype}; cast q to the cache's dtype, or give k_scales and v_scales"
            )
        return
    if len(given) < len(scales):
        raise ValueError(
            f"give both k_scales and v_scales or neither, got only {next(iter(given))}"
        )
    if k_pages.dtype != v_pages.dtype or k_pages.dtype.name not in LARGEST:
        raise ValueError(
            f"k_pages and v_pages with scales must both be one of {', '.join(LARGEST)}, got "
            f"{k_pages.dtype} and {v_pages.dtype}"
        )
    for name, pool in given.items():
        check_shape(name, pool, tuple(k_pages.shape[:3]))
        if pool.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {pool.dtype}; cast it where it is built")
