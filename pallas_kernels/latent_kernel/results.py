"""XLA operations after the MLA kernel: combination of parts, and outputs in the shape of the op's results."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.latent_kernel.schedule import Geometry, Schedule
from pallas_kernels.mosaic.softmax import LOG2_E


def results(
    geometry: Geometry,
    schedule: Schedule,
    outputs: list[Array],
    q: Float[Array, "tokens heads latent_and_rope"],
    *,
    want_lse: bool,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"] | None]:
    """Returns output and log-sum-exp of a kernel with one query per piece; combines the parts if there are several.

    Args:
        geometry: the kernel's geometry.
        schedule: the kernel's schedule.
        outputs: the kernel's outputs: [tokens * heads, value_dim]; or, for several parts, float32
            [tokens, parts, blocks, rows, value_dim] and the log-sum-exps in base 2, [tokens, parts, blocks, rows].
        q: the queries, before heads were padded.
        want_lse: whether to return the log-sum-exp.
    """
    tokens, heads, _ = q.shape
    if schedule.parts > 1:
        joined, lse = _join_parts(*outputs)
        out = joined.reshape(tokens, -1, joined.shape[-1]).astype(q.dtype)
    else:
        out = outputs[0].reshape(tokens, geometry.heads, -1)
        lse = outputs[1][:, 0] if want_lse else None
    if lse is not None:
        lse = lse.reshape(tokens, -1)[:, :heads] / LOG2_E
    return out[:, :heads], lse if want_lse else None


def _join_parts(
    out: Float[Array, "rows parts blocks height value_dim"],
    lse: Float[Array, "rows parts blocks height"],
) -> tuple[Float[Array, "rows blocks height value_dim"], Float[Array, "rows blocks height"]]:
    """Combines the parts of each row in float32; a part without keys has -inf in `lse` (base 2) and weight 0."""
    top = jnp.max(lse, axis=1)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp2(lse - top[:, None])
    total = jnp.sum(weight, axis=1)
    joined = jnp.sum(out * weight[..., None], axis=1)
    return joined / jnp.where(total > 0, total, 1.0)[..., None], top + jnp.log2(total)
