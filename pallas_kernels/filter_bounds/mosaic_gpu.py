"""`filter_bounds` on Hopper with a Mosaic GPU kernel: one block per row bisects for the bounds, without a sort."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.filter_bounds.mosaic_block import CHUNK, Block
from pallas_kernels.filter_bounds.near_best import near_best
from pallas_kernels.mosaic.row_blocks import run_blocks
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.teams import LARGE


def why_not(logits: ArrayOrStruct) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(logits)


def refusal(logits: ArrayOrStruct) -> str | None:
    """Returns why the kernel cannot be built for these logits, or `None` if it can."""
    vocab = logits.shape[1]
    if vocab < CHUNK or vocab % 4:
        return f"the vocabulary must be a multiple of 4 and at least {CHUNK}, got {vocab}"
    return None


def filter_bounds(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    min_p: Float32[Array, " rows"],
    temperature: Float32[Array, " rows"],
    *,
    interpret: bool = False,
) -> Float32[Array, " rows"]:
    """Implements `api.filter_bounds`. With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the kernel does not support the vocabulary.
    """
    check_kernel(refusal(logits))
    best = jnp.max(logits, axis=1)
    factor = jnp.float32(LOG2_E) / temperature
    found = search(logits, top_k, top_p, best, factor, interpret=interpret)
    return jnp.maximum(found, near_best(best, min_p, temperature))


@partial(jax.jit, static_argnames="interpret")
def search(
    logits: Float32[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float32[Array, " rows"],
    best: Float32[Array, " rows"],
    factor: Float32[Array, " rows"],
    *,
    interpret: bool,
) -> Float32[Array, " rows"]:
    """Runs the kernel for top-k and top-p; `factor` is log2(e) / temperature."""
    return run_blocks(
        "filter_bounds",
        lambda refs: Block(refs, team=LARGE, interpret=interpret).run(),
        {"logits": logits, "top_k": top_k, "top_p": top_p, "best": best, "factor": factor},
        jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        team=LARGE,
        interpret=interpret,
    )
