"""The sampled tokens of a step, packed on the device into one array for a single copy, and unpacked on the host."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import Sampled


@dataclass(frozen=True)
class SampledRows:
    """The sampled tokens of one step as NumPy arrays; see `jaxkv.sampling.sample.Sampled`.

    Attributes:
        tokens: sampled id per row.
        finite: whether the row's logits were finite.
        logprob: log-probability of the sampled token; empty unless requested.
        top_ids, top_logprobs: the most likely tokens and their log-probabilities; empty unless requested.
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def pack_sampled(sampled: Sampled) -> Int[Array, "rows columns"]:
    """Packs the sampled tokens of a step as columns of one int32 array; floats keep their bits."""
    columns = [sampled.tokens[:, None], sampled.finite.astype(jnp.int32)[:, None]]
    if sampled.logprob is not None:
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        columns.append(lax.bitcast_convert_type(sampled.logprob, jnp.int32)[:, None])
        columns.append(sampled.top_ids)
        columns.append(lax.bitcast_convert_type(sampled.top_logprobs, jnp.int32))
    return jnp.concatenate(columns, axis=1)


def unpack_sampled(packed: np.ndarray, features: Features) -> SampledRows:
    """Returns the columns that `pack_sampled` packed, on the host."""
    tokens, finite = packed[:, 0], packed[:, 1].astype(bool)
    floats, top = packed.view(np.float32), features.logprobs or 0
    logprob = floats[:, 2] if features.logprobs is not None else floats[:, 2:]
    return SampledRows(tokens, finite, logprob, packed[:, 3 : 3 + top], floats[:, 3 + top :])


def report_logprobs(
    token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, float]:
    """Returns token id -> log-probability of the most likely tokens, in order, and of the sampled token."""
    report = dict(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return report | {token: logprob}
