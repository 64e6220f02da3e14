"""Public entry point of `filter_bounds`: the logit threshold of top-k, top-p and min-p filtering."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped

from pallas_kernels.arguments.checks import check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.filter_bounds import mosaic_gpu, xla


def filter_bounds(
    logits: Shaped[Array | np.ndarray, "rows vocab"],
    top_k: Shaped[Array | np.ndarray, " rows"],
    top_p: Shaped[Array | np.ndarray, " rows"],
    min_p: Shaped[Array | np.ndarray, " rows"],
    temperature: Shaped[Array | np.ndarray, " rows"],
    *,
    implementation: str | None = None,
) -> Float32[Array, " rows"]:
    """Returns each row's threshold: the filters allow a token if its logit is >= the threshold, ties included.

    - Top-k: the k-th largest logit.
    - Top-p (Holtzman et al., The Curious Case of Neural Text Degeneration, 2020): the smallest set of most likely
      tokens whose probability, renormalised over what top-k left, reaches p; the token that crosses p is kept.
    - Min-p (Nguyen et al., Turning Up the Heat, 2024): tokens at least min_p times as likely as the most likely one.

    Where the sum of probabilities equals p up to float32 rounding, implementations may differ in the token that crosses
    p.

    Args:
        logits: float32. Tokens with -inf are never allowed. The threshold is undefined for a row that holds NaN or
            +inf, or only -inf.
        top_k: int32; 0, or at least the size of the vocabulary, for no filter.
        top_p: float32; 1 for no filter.
        min_p: float32; 0 for no filter.
        temperature: float32, positive and normal; probabilities are the softmax of logits / temperature.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The thresholds, float32 [rows].

    Raises:
        ValueError: shapes or dtypes do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    check_shape("logits", logits, (None, None))
    check_ids("top_k", top_k, (logits.shape[0],))
    floats = {"top_p": top_p, "min_p": min_p, "temperature": temperature}
    for name, array in floats.items():
        check_shape(name, array, (logits.shape[0],))
    for name, array in {"logits": logits, **floats}.items():
        if array.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32, got {array.dtype}; cast it where it is built"
            )
    arrays = tuple(map(jnp.asarray, (logits, top_k, top_p, min_p, temperature)))
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(arrays[0]), "xla": lambda: None}
    chosen = choose("filter_bounds", reasons, implementation)
    if not logits.shape[0]:
        return jnp.zeros(0, jnp.float32)
    function = mosaic_gpu.filter_bounds if chosen == "mosaic_gpu" else xla.filter_bounds
    return function(*arrays)
