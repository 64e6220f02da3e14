"""`GivenLogits`: a model whose logits were computed elsewhere, so that the engine's step programs only sample."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Params

LOGITS = "logits"
"""Name of the one parameter: float32 [max_rows, vocab_size], of which a step reads the first rows."""


@dataclass(frozen=True)
class GivenLogits:
    """A `jaxkv.models.protocol.Model` without layers; its parameter is the logits of a decode step.

    Attributes:
        vocab_size: width of the logits.
        max_rows: rows of the parameter.
    """

    vocab_size: int
    max_rows: int
    num_layers: int = 0
    max_positions: int = 2**31 - 1
    whole_prompts: bool = False
    batch_invariant: bool = False
    implementation: str | None = "xla"

    def running(self, implementation: str) -> "GivenLogits":
        """Returns itself: it has no ops."""
        del implementation
        return self

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns no specs."""
        del page_size, dtype
        return ()

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns zeros, of the shape that the parameter has."""
        del key, dtype
        return {LOGITS: jnp.zeros((self.max_rows, self.vocab_size), jnp.float32)}

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache as it is, and the given logits in the place of hidden states."""
        return cache, params[LOGITS][: batch.tokens.shape[0]]

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns the logits, which `forward` has passed on."""
        del params
        return hidden
