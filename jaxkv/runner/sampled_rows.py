"""The sampled tokens of a step, packed on the device into one array for a single copy, and unpacked on the host."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import Sampled
from jaxkv.step.verify import Verified


@dataclass(frozen=True)
class SampledRows:
    """The sampled tokens of one step as NumPy arrays; see `jaxkv.sampling.sample.Sampled`.

    Attributes:
        tokens: sampled id per row.
        finite: whether the row's logits were finite.
        logprob: log-probability of the sampled token; empty unless requested.
        top_ids, top_logprobs: the most likely tokens and their log-probabilities; empty unless requested.
        accepted: number of accepted drafts per row; empty unless the step verifies drafts.
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    accepted: np.ndarray


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


def pack_verified(verified: Verified) -> Int[Array, "positions rows columns"]:
    """Packs the tokens of each position as `pack_sampled` does, with the accepted drafts as one column more."""
    packed = jax.vmap(pack_sampled)(verified.sampled)
    accepted = jnp.broadcast_to(verified.accepted[None, :, None], (*packed.shape[:2], 1))
    return jnp.concatenate([packed, accepted], axis=2)


def unpack_sampled(packed: np.ndarray, features: Features) -> SampledRows:
    """Returns the columns that `pack_sampled` packed, or `pack_verified` for one position, on the host."""
    tokens, finite = packed[:, 0], packed[:, 1].astype(bool)
    if features.logprobs is None:
        nothing = np.zeros((len(packed), 0), np.float32)
        return SampledRows(tokens, finite, nothing, nothing, nothing, packed[:, 2:].reshape(-1))
    floats, stop = packed.view(np.float32), 3 + features.logprobs
    return SampledRows(
        tokens,
        finite,
        floats[:, 2],
        packed[:, 3:stop],
        floats[:, stop : stop + features.logprobs],
        packed[:, stop + features.logprobs :].reshape(-1),
    )


def report_logprobs(
    token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> dict[int, float]:
    """Returns token id -> log-probability of the most likely tokens, in order, and of the sampled token."""
    report = dict(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True))
    return report | {token: logprob}
