"""`latent_attention` on Hopper with Mosaic GPU kernels: limits, and the XLA operations before and after the kernel.

There are two kernels: one for one query per row with few heads (mosaic_keys_launch.py), and one for all other calls
(latent_kernel/launch.py). latent_kernel/schedule.py has the schedules of both.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
from pallas_kernels.device import MOST_ON_AN_AXIS, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.latent_attention import mosaic_keys_launch
from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_attention.mosaic_producer import Producer
from pallas_kernels.latent_kernel.kernel import Kernel, Source
from pallas_kernels.latent_kernel.launch import build
from pallas_kernels.latent_kernel.pieces import cut, lse_of_tokens, most_pieces
from pallas_kernels.latent_kernel.results import results
from pallas_kernels.latent_kernel.schedule import Geometry, Schedule
from pallas_kernels.mosaic.softmax import LOG2_E


def why_not(arrays: LatentArrays, options: LatentOptions) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can; reads shapes and dtypes only."""
    return why_not_mosaic() or _refusal(geometry_of(arrays, options), arrays)


def _refusal(geometry: Geometry, arrays: LatentArrays) -> str | None:
    """Returns why the kernel does not support these sizes on any device, or `None` if it does."""
    refusal = geometry.refusal()
    if refusal is not None:
        return refusal
    pieces = pieces_of(geometry, arrays.q.shape[0], arrays.seq_lens.shape[0])
    if pieces > MOST_ON_AN_AXIS:
        return f"at most {MOST_ON_AN_AXIS} pieces of queries in a call, got {pieces}"
    return None


def latent_attention(
    arrays: LatentArrays,
    options: LatentOptions,
    *,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "tokens heads value_dim"]
    | tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]
):
    """Implements `api.latent_attention`.

    Page ids past a row's last page may have any value. With `interpret` the kernel runs in Pallas's interpreter on the
    CPU, slowly; reads out of bounds raise, and races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = geometry_of(arrays, options)
    check_kernel(_refusal(geometry, arrays))
    pieces = pieces_of(geometry, arrays.q.shape[0], arrays.seq_lens.shape[0])
    schedule = Schedule.of(geometry, pieces, arrays.capacity)
    out, lse = attend(
        arrays,
        options=options,
        schedule=schedule.without_clusters(geometry) if interpret else schedule,
        want_lse=return_lse,
        interpret=interpret,
    )
    return out if lse is None else (out, lse)


def geometry_of(arrays: LatentArrays, options: LatentOptions) -> Geometry:
    """Returns the geometry of a call."""
    is_packed = arrays.cu_q_lens is not None
    return Geometry.of(arrays.q, arrays.latent_pages, options.value_dim, packed=is_packed)


def pieces_of(geometry: Geometry, tokens: int, rows: int) -> int:
    """Returns the number of pieces of work of a call."""
    return most_pieces(tokens, rows, geometry.tokens_per_piece) if geometry.packed else rows


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("options", "schedule", "want_lse", "interpret"))
def attend(
    arrays: LatentArrays,
    *,
    options: LatentOptions,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"] | None]:
    """Runs the kernel under a schedule, then combines the parts if there are several."""
    q, latent_pages, page_table, seq_lens, cu_q_lens = arrays
    tokens, heads, width = q.shape
    geometry = geometry_of(arrays, options)
    pieces = pieces_of(geometry, tokens, len(seq_lens))
    # TMA clips the copy of the last rows at the array's end; the interpreter does not, so its array gets more rows.
    more = geometry.tokens_per_piece * interpret
    rows = jnp.pad(q, ((0, more), (0, geometry.heads - heads), (0, 0))).reshape(-1, width)
    lengths = seq_lens
    if cu_q_lens is not None:
        per_piece = geometry.tokens_per_piece
        lengths = cut(seq_lens, cu_q_lens, tokens=tokens, tokens_per_piece=per_piece)
    has_lse = want_lse or schedule.parts > 1
    sizes = (geometry, options.scale, schedule, pieces, has_lse, interpret)
    if geometry.keys_are_left:
        launch = mosaic_keys_launch.build(KeysKernel(*sizes), tokens)
    else:
        launch = build(Kernel(*sizes, _pages(geometry)), tokens)
    outputs = launch(rows, latent_pages, page_table, lengths)
    if cu_q_lens is None:
        if geometry.keys_are_left and schedule.parts > 1:
            outputs[0] = jnp.swapaxes(outputs[0], -1, -2)
        return results(geometry, schedule, outputs, q, want_lse=want_lse)
    out = outputs[0].reshape(tokens, geometry.heads, options.value_dim)[:, :heads]
    if not want_lse:
        return out, None
    lse = lse_of_tokens(outputs[1][:, 0], cu_q_lens, tokens=tokens, heads=geometry.heads)
    return out, lse[:, :heads] / LOG2_E


def _pages(geometry: Geometry) -> Source:
    """Returns the source whose producer copies tiles from the pages of a row."""
    copies = geometry.copies_per_tile
    arrays = ("latent_pages", "page_table", "pieces" if geometry.packed else "seq_lens")
    # With several pages per tile a second held piece of query columns would be spilled.
    held = 2 if copies == 1 else 1
    return Source(arrays, Producer, (copies, 2 * copies), (232, 40), held)
