"""Samples the next token of each row from hidden states, on one device or on several."""

from jaxtyping import Array, Float, Int

from jaxkv.models.protocol import Model, Params
from jaxkv.models.tensor_parallel import TensorParallel
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.sample import Sampled, SamplingState, sample
from pallas_kernels.fixed_order import fixed_order


def sample_next(
    model: Model,
    params: Params,
    hidden: Float[Array, "rows hidden_size"],
    sampling: SamplingBatch,
    state: SamplingState | None,
    positions: Int[Array, " rows"],
) -> Sampled:
    """Returns one sampled token per row.

    Args:
        model: the model; static.
        params: its parameters.
        hidden: the hidden state that each row samples from.
        sampling: the sampling inputs, like `state` and `positions` as in `jaxkv.sampling.sample.sample`.
        state: the rows' states.
        positions: position of each sampled token.
    """
    if isinstance(model, TensorParallel):
        return model.sample(params, hidden, sampling, state, positions)
    logits = model.logits(params, hidden)
    with fixed_order(model.batch_invariant):
        return sample(logits, sampling, state, positions)
