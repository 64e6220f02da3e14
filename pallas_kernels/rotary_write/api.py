"""Public entry point of `rotary_write`: QK norm, rotary embedding, quantisation and cache write, fused."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import INT32_MAX, check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.rotary_write import mosaic_gpu, xla
from pallas_kernels.rotary_write.arguments import RotaryArrays


def rotary_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    qkv: Shaped[Array | np.ndarray, "tokens all_heads head_dim"],
    cos: Shaped[Array | np.ndarray, "tokens half"],
    sin: Shaped[Array | np.ndarray, "tokens half"],
    slots: Shaped[Array | np.ndarray, " tokens"],
    *,
    norm: Shaped[Array | np.ndarray, "2 head_dim"] | None = None,
    norm_eps: float = 1e-6,
    value_norm: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], tuple[Shaped[Array, "pages page_size ..."], ...]]:
    """Normalises (RMSNorm) and rotates (RoPE) queries and keys, and writes keys and values at their tokens' slots.

    The rotation (Su et al., RoFormer, arXiv:2104.09864) pairs component i of a head with component i + half, in
    float32. Components from 2 * half on are not rotated. Keys are rounded to qkv's dtype before they are written or
    quantised.

    Args:
        pages: the pools of keys and of values, [pages, page_size, kv_heads, head_dim]. For float8_e4m3fn and int8
            they are followed by the two pools of scales, float32 [pages, page_size, kv_heads]. Donate them for a write
            in place.
        qkv: each token's query heads, then key heads, then value heads; the pools determine the number of key heads.
        cos: float32 cosines of each token's angles, one per pair.
        sin: float32 sines of the same angles.
        slots: int32 `page * page_size + offset` of each token, all distinct. Slots >= `num_slots` (pages * page_size)
            write nothing; give padding token r the slot `num_slots + r`.
        norm: weights of the norms of queries and of keys, in qkv's dtype; `None` for no norm.
        norm_eps: epsilon that a norm adds to the mean square.
        value_norm: whether values are normalised too, without weights.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The queries in qkv's dtype, those of padding tokens included, and the updated pools.

    Raises:
        ValueError: shapes or dtypes do not fit, or a concrete slot is negative.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    _check(pages, qkv, cos, sin, slots, norm)
    # `None` is an empty pytree, so absent weights stay `None`.
    arrays = RotaryArrays(pages, *jax.tree.map(jnp.asarray, (qkv, cos, sin, slots, norm)))
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(arrays), "xla": lambda: None}
    chosen = choose("rotary_write", reasons, implementation)
    function = mosaic_gpu.rotary_write if chosen == "mosaic_gpu" else xla.rotary_write
    return function(arrays, norm_eps=norm_eps, value_norm=value_norm)


def _check(
    pages: tuple[Array, ...],
    qkv: Array | np.ndarray,
    cos: Array | np.ndarray,
    sin: Array | np.ndarray,
    slots: Array | np.ndarray,
    norm: Array | np.ndarray | None,
) -> None:
    """Raises `ValueError` for arrays that do not fit each other."""
    _check_pages(pages)
    num_pages, page_size, kv_heads, head_dim = pages[0].shape
    check_shape("qkv", qkv, (None, None, head_dim))
    tokens, all_heads, _ = qkv.shape
    if all_heads <= 2 * kv_heads or (all_heads - 2 * kv_heads) % kv_heads:
        raise ValueError(
            f"qkv must hold query heads, a multiple of {kv_heads}, then {kv_heads} key heads and {kv_heads} "
            f"value heads, got {all_heads} heads in total"
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
    """Raises `ValueError` unless the pools are keys and values, with scales if and only if these have 8 bits."""
    if len(pages) not in (2, 4):
        raise ValueError(
            f"pages must be 2 pools (keys, values) or 4 (keys, values and their scales), got {len(pages)}"
        )
    check_shape("pages[0]", pages[0], (None, None, None, None))
    check_shape("pages[1]", pages[1], tuple(pages[0].shape))
    dtypes = [pool.dtype.name for pool in pages]
    quantised = dtypes[0] in LARGEST
    wanted = [dtypes[0]] * 2 + ["float32"] * 2 * quantised
    if dtypes != wanted:
        raise ValueError(
            f"pages must have dtypes {', '.join(wanted)}, got {', '.join(dtypes)}; give scales with pools of "
            f"{' and '.join(LARGEST)} only"
        )
    for index in range(2, len(pages)):
        check_shape(f"pages[{index}]", pages[index], tuple(pages[0].shape[:3]))
