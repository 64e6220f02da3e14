"""A step's choices as one array, so that one copy brings them to the host, and by name again there."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import Sampled


@dataclass(frozen=True)
class SampledRows:
    """One step's choices as NumPy arrays; see `jaxkv.sampling.sample.Sampled`.

    Attributes:
        tokens: chosen ids per row.
        finite: whether the row's logits were numbers.
        logprob: log-probability of the chosen token; this and the following are empty unless asked for.
        top_ids, top_logprobs: the most likely tokens.
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def pack_sampled(sampled: Sampled) -> Int[Array, "rows columns"]:
    """Lays a step's choices side by side in one int32 array."""
    columns = [sampled.tokens[:, None], sampled.finite.astype(jnp.int32)[:, None]]
    if sampled.logprob is not None:
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        columns.append(lax.bitcast_convert_type(sampled.logprob, jnp.int32)[:, None])
        columns.append(sampled.top_ids)
        columns.append(lax.bitcast_convert_type(sampled.top_logprobs, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def unpack_sampled(packed: np.ndarray, features: Features) -> SampledRows:
    """Names the columns again, on the host."""
    tokens, finite = packed[:, 0], packed[:, 1].astype(bool)
    floats, top = packed.view(np.float32), features.logprobs or 0
    logprob = floats[:, 2] if features.logprobs is not None else floats[:, 2:]
    return SampledRows(tokens, finite, logprob, packed[:, 3 : 3 + top], floats[:, 3 + top :])


def report_logprobs(
    token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, float]:
    """Returns token id -> log-probability, the most likely first, the chosen one included."""
    report = dict(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return report | {token: logprob}
