"""Runs any pattern of (mixer, feed-forward) blocks. Knows no family: what differs between them is in `ModelConfig`."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.config import ModelConfig
from jaxkv.layers.embedding import embed, unembed
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import rope_angles
from jaxkv.models.blocks import FEED_FORWARDS, MIXERS, Leaf, Step
from jaxkv.models.protocol import Params
from pallas_kernels.dispatch import at

_INIT_SCALE = 0.02


@dataclass(frozen=True)
class Decoder:
    """A pre-norm decoder with a residual stream in the parameters' dtype.

    Attributes:
        config: the model as data.
        implementation: which family of implementations every op insists on; `None` takes the best.
    """

    config: ModelConfig
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Refuses a pattern that names an unknown block."""
        for mixer, feed_forward in set(self.config.pattern):
            if mixer not in MIXERS or feed_forward not in FEED_FORWARDS:
                raise ValueError(
                    f"pattern names ({mixer!r}, {feed_forward!r}); mixers are {', '.join(MIXERS)} and "
                    f"feed-forwards {', '.join(FEED_FORWARDS)}"
                )

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Blocks in the pattern."""
        return self.config.num_layers

    @property
    def max_positions(self) -> int:
        """Longest sequence the model is meant for."""
        return self.config.max_positions

    @property
    def whole_prompts(self) -> bool:
        """Dynamic NTK stretches the angles of all tokens of a step by how many there are so far."""
        return self.config.rope.kind == "dynamic"

    def running(self, implementation: str) -> "Decoder":
        """Returns the same model insisting on an implementation."""
        return replace(self, implementation=implementation)

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns what each layer remembers."""
        return tuple(
            LayerSpec(layer, MIXERS[mixer].spec(self.config, layer, page_size, dtype))
            for layer, (mixer, _) in enumerate(self.config.pattern)
        )

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Draws random parameters leaf by leaf, on the device; norms start as ones."""
        leaves, tree = jax.tree.flatten(self._leaves(), is_leaf=lambda node: isinstance(node, Leaf))
        drawn = [
            jnp.ones(leaf.shape, dtype)
            if leaf.is_scale
            else _draw(jax.random.fold_in(key, index), shape=leaf.shape, dtype=jnp.dtype(dtype))
            for index, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, drawn)

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of `init_params` as shapes and dtypes, without drawing anything."""
        return jax.eval_shape(lambda: self.init_params(jax.random.key(0), dtype))

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Runs all layers, unrolled: stacked weights and caches would be copied layer by layer."""
        config = self.config
        hidden = embed(params["embed"], batch.tokens)
        angles = rope_angles(config.rope, batch.positions, visible_lengths(batch))
        ranks = self._table_ranks()
        for layer, (mixer, feed_forward) in enumerate(config.pattern):
            weights = params["layers"][layer]
            step = Step(batch, batch.paged[ranks[layer]], angles, self.implementation)
            x = rms_norm(weights["norms"][0], hidden, eps=config.norm_eps)
            with at(f"layer {layer}"):
                held = cache.layer(layer)
                layer_cache, y = MIXERS[mixer].run(config, layer, weights, held, x, step)
            cache = cache.with_layer(layer, layer_cache)
            hidden = hidden + y
            x = rms_norm(weights["norms"][1], hidden, eps=config.norm_eps)
            hidden = hidden + FEED_FORWARDS[feed_forward].run(config, weights, x)
        return cache, rms_norm(params["final_norm"], hidden, eps=config.norm_eps)

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Scores every token by the output projection, which is the embedding table if they are tied."""
        return unembed(params["embed" if self.config.tie_embeddings else "lm_head"], hidden)

    def _leaves(self) -> dict:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        leaves = {
            "embed": Leaf(table),
            "layers": tuple(
                {"norms": Leaf((2, config.hidden_size), is_scale=True)}
                | MIXERS[mixer].leaves(config)
                | FEED_FORWARDS[feed_forward].leaves(config)
                for mixer, feed_forward in config.pattern
            ),
            "final_norm": Leaf((config.hidden_size,), is_scale=True),
        }
        return leaves if config.tie_embeddings else leaves | {"lm_head": Leaf(table)}

    def _table_ranks(self) -> dict[int, int]:
        """Returns where in `StepBatch.paged` each layer's tables are.

        Which layers have equal specs, and their order, depends neither on the page size nor on the dtype.
        """
        layout = group_layers(self.cache_specs(page_size=1, dtype="float32"))
        return {layer: group.rank for group in layout.groups for layer in group.layers}


@partial(jax.jit, static_argnames=("dtype", "shape"))
def _draw(key: PRNGKeyArray, *, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return (_INIT_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def visible_lengths(batch: StepBatch) -> Int[Array, " tokens"]:
    """Returns for each token how many tokens of its own row are visible after the step; any number for padding."""
    if batch.decode:
        return batch.seq_lens
    tokens = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(batch.cu_q_lens[1:], tokens, side="right")
    return batch.seq_lens.at[row].get(mode="fill", fill_value=0)
