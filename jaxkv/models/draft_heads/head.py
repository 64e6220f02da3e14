"""`DraftHead`: one decoder layer that drafts from the hidden states of the model that verifies its drafts."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec
from jaxkv.cache.state import Cache
from jaxkv.config.model import ModelConfig
from jaxkv.layers.embedding import embed
from jaxkv.layers.linear import matmul
from jaxkv.layers.norm import rms_norm
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Params

AHEAD = 1
"""How many tokens the token of a position of a head is ahead of that position."""

_NEVER = -1e30
"""Logit of a token that the head cannot draft; finite, so that no sampling filter makes NaN of it."""


@dataclass(frozen=True)
class DraftHead:
    """A head that drafts: `Model` over the hidden states in `StepBatch.hidden`.

    Position t of a head has the verifying model's hidden state of position t and the token after it, and its logits are
    those of the token behind both. Where the verifying model has no hidden state yet, behind the first draft of a
    chain, it has the head's own of the position before. Keys and values of the head are in a cache of its own.

    An EAGLE-3 head (Li et al., 2025) projects hidden states of three layers to one, on which its layer runs; the layer
    attends from that one and the token's embedding side by side. An MTP layer (DeepSeek-AI, DeepSeek-V3) runs on the
    projection of the normed embedding and the normed hidden state side by side, and hands on what its final norm makes
    of the result.

    Attributes:
        decoder: the layer, the embedding, the final norm and the output projection.
        reads: the hidden states that it reads, see `Decoder.keeps_hidden`.
        read_size: components of all of them together.
        is_mtp: whether it is an MTP layer; otherwise it is an EAGLE-3 head.
        draft_vocab: token ids that it drafts, if these are not all; a parameter says which. `None` for all.
        shared: names of parameters that are those of the verifying model.
    """

    decoder: Decoder
    reads: tuple[int, ...]
    read_size: int
    is_mtp: bool
    draft_vocab: int | None = None
    shared: tuple[str, ...] = ()

    @property
    def config(self) -> ModelConfig:
        """Architecture and sizes of its layer."""
        return self.decoder.config

    @property
    def vocab_size(self) -> int:
        """Width of the logits, that of the verifying model."""
        return self.decoder.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of its own: one."""
        return self.decoder.num_layers

    @property
    def max_positions(self) -> int:
        """Longest sequence that it supports, in tokens."""
        return self.decoder.max_positions

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step."""
        return self.decoder.whole_prompts

    @property
    def batch_invariant(self) -> bool:
        """Always False: drafts change no token."""
        return self.decoder.batch_invariant

    @property
    def implementation(self) -> str | None:
        """The family that every op must use."""
        return self.decoder.implementation

    def running(self, implementation: str) -> "DraftHead":
        """Returns the same head with another family of implementations."""
        return replace(self, decoder=self.decoder.running(implementation))

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache spec of its layer."""
        return self.decoder.cache_specs(page_size=page_size, dtype=dtype)

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns random parameters in `dtype`; norm weights are ones, and the ids that it drafts are the first."""
        leaves, tree = jax.tree.flatten(self.param_shapes(dtype))
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten(map(_made, keys, leaves))

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of its parameters as `jax.ShapeDtypeStruct`s, those of the verifying model included."""
        config, hidden = self.config, self.config.hidden_size

        def matrix(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        types = dict(self.decoder.param_shapes(dtype))
        if self.is_mtp:
            norm = jax.ShapeDtypeStruct((hidden,), jnp.dtype(config.norm_dtype or dtype))
            types |= {"embedding_norm": norm, "hidden_norm": norm}
            types["join"] = matrix(hidden, 2 * hidden)
        else:
            types["project"] = matrix(hidden, self.read_size)
        if self.draft_vocab is not None:
            types["lm_head"] = matrix(self.draft_vocab, hidden)
            # Per id of the verifying model its place among those of the head; past their end for one that it lacks.
            types["draft_places"] = jax.ShapeDtypeStruct((self.vocab_size,), jnp.dtype(jnp.int32))
        return types

    def few_bits_leaves(self) -> frozenset[str]:
        """Returns the dotted paths of the parameters that may be a `FewBits`."""
        return self.decoder.few_bits_leaves()

    def projected(
        self, params: Params, kept: Float[Array, "tokens read_size"]
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns `StepBatch.hidden` of what the verifying model has kept of some tokens."""
        own = params["join" if self.is_mtp else "project"]
        kept = kept.astype(own.dtype)
        return kept if self.is_mtp else self._linear(own, kept)

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and hidden states, also for the next draft of a chain.

        A batch without hidden states has zeros.
        """
        own = params["join" if self.is_mtp else "project"]
        embeddings = embed(params["embed"], batch.tokens).astype(own.dtype)
        eps = self.config.norm_eps
        stream = jnp.zeros_like(embeddings) if batch.hidden is None else batch.hidden
        if self.is_mtp:
            sides = (
                rms_norm(params["embedding_norm"], embeddings, eps=eps),
                rms_norm(params["hidden_norm"], stream, eps=eps),
            )
            stream = self._linear(own, jnp.concatenate(sides, axis=1))
        cache, hidden = self.decoder.run_layers(params, cache, batch, stream, embeddings)
        return cache, self.decoder.normed(params, hidden) if self.is_mtp else hidden

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns float32 logits over the ids of the verifying model; one that it cannot draft has -1e30."""
        normed = hidden if self.is_mtp else self.decoder.normed(params, hidden)
        logits = self.decoder.logits(params, normed)
        if self.draft_vocab is None:
            return logits
        # The rows of a gather are contiguous, unlike those of a scatter to the ids.
        places = logits.at[:, params["draft_places"]]
        return places.get(mode="fill", fill_value=_NEVER, wrap_negative_indices=False)

    def _linear(self, weight: Any, x: Float[Array, "tokens in"]) -> Array:  # noqa: ANN401 - an array
        return matmul(weight, x, implementation=self.implementation)


def _made(key: PRNGKeyArray, leaf: jax.ShapeDtypeStruct) -> Array:
    """Returns a random parameter: a matrix, the weight of a norm, or places of ids."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.arange(leaf.size, dtype=leaf.dtype)
    if len(leaf.shape) == 1:
        return jnp.ones(leaf.shape, leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype) * 0.02
