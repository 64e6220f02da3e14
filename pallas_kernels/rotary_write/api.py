"""The door to `rotary_write`: all that lies between the projection of queries, keys and values, and attention."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import INT32_MAX, check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.rotary_write import mosaic_gpu, xla


def rotary_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    qkv: Shaped[Array | np.ndarray, "tokens all_heads head_dim"],
    cos: Shaped[Array | np.ndarray, "tokens half"],
    sin: Shaped[Array | np.ndarray, "tokens half"],
    slots: Shaped[Array | np.ndarray, " tokens"],
    *,
    norm: Shaped[Array | np.ndarray, "2 head_dim"] | None = None,
    norm_eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Normalises and rotates queries and keys, and writes keys and values at their tokens' slots.

    Component i of a head is turned with component i + half, in float32; components from 2 * half on stay as they
    are. The written keys are those that were rounded to qkv's dtype.

    Args:
        pages: the pools of keys and of values, [pages, page_size, kv_heads, head_dim]. Those of float8_e4m3fn or
            int8 are followed by the pools of their scales, float32 [pages, page_size, kv_heads] each.
        qkv: each token's heads of queries, then of keys, then of values; the pools say how many are keys.
        cos: float32 cosines of each token's angle for each pair.
        sin: float32 sines of the same angles.
        slots: int32 `page * page_size + offset` of each token, all distinct. Padding token r has
            `num_slots + r`, and any slot from `num_slots` on writes nothing.
        norm: weights of the norms on queries and on keys, in qkv's dtype; `None` for no norm.
        norm_eps: what a norm adds to the mean square.
        implementation: "mosaic_gpu", "xla", or `None` for the best that can run.

    Returns:
        The queries in qkv's dtype (those of padding tokens hold whatever their input gives) and the pools.

    Raises:
        ValueError: shapes or dtypes do not fit, or a slot known outside a trace is negative.
        Unsupported: the implementation asked for, or every one, cannot run; the message carries each reason.
    """
    _check(pages, qkv, cos, sin, slots, norm)
    arrays = tuple(jnp.asarray(array) for array in (qkv, cos, sin, slots))
    weights = None if norm is None else jnp.asarray(norm)
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(pages, *arrays, norm=weights),
        "xla": lambda: None,
    }
    chosen = choose("rotary_write", reasons, implementation)
    function = mosaic_gpu.rotary_write if chosen == "mosaic_gpu" else xla.rotary_write
    return function(pages, *arrays, norm=weights, norm_eps=norm_eps)


def _check(
    pages: tuple[Array, ...],
    qkv: Array | np.ndarray,
    cos: Array | np.ndarray,
    sin: Array | np.ndarray,
    slots: Array | np.ndarray,
    norm: Array | np.ndarray | None,
) -> None:
    """Refuses arrays that do not fit one another."""
    _check_pages(pages)
    num_pages, page_size, kv_heads, head_dim = pages[0].shape
    check_shape("qkv", qkv, (None, None, head_dim))
    tokens, all_heads, _ = qkv.shape
    if all_heads <= 2 * kv_heads or (all_heads - 2 * kv_heads) % kv_heads:
        raise ValueError(
            f"qkv must hold the {kv_heads} heads of keys and of values after a multiple of as many "
            f"heads of queries, got {all_heads} heads in all"
        )
    check_shape("cos", cos, (tokens, None))
    check_shape("sin", sin, tuple(cos.shape))
    if not cos.dtype == sin.dtype == jnp.float32:
        raise ValueError(f"cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos and sin must have 1 to {head_dim // 2} columns for heads of {head_dim}, "
            f"got {cos.shape[1]}"
        )
    if norm is not None:
        check_shape("norm", norm, (2, head_dim))
        if norm.dtype != qkv.dtype:
            raise ValueError(f"norm must have qkv's dtype, {qkv.dtype}, got {norm.dtype}")
    check_ids("slots", slots, (tokens,))
    if num_pages * page_size + tokens > INT32_MAX:
        raise ValueError(
            f"{num_pages} pages of {page_size} leave no int32 numbers for padding slots; "
            "use fewer or larger pools"
        )


def _check_pages(pages: tuple[Array, ...]) -> None:
    """Refuses pools that are not those of keys, values and, where they are quantised, scales."""
    if len(pages) not in (2, 4):
        raise ValueError(
            f"pages must be keys and values, or those and their two scales, got {len(pages)}"
        )
    check_shape("pages[0]", pages[0], (None, None, None, None))
    check_shape("pages[1]", pages[1], tuple(pages[0].shape))
    dtypes = [pool.dtype.name for pool in pages]
    quantised = dtypes[0] in LARGEST
    wanted = [dtypes[0]] * 2 + ["float32"] * 2 * quantised
    if dtypes != wanted:
        raise ValueError(
            f"pages must have dtypes {', '.join(wanted)}, got {', '.join(dtypes)}; pools of "
            f"{' and '.join(LARGEST)} have scales, and no others do"
        )
    for index in range(2, len(pages)):
        check_shape(f"pages[{index}]", pages[index], tuple(pages[0].shape[:3]))
