"""Runs any pattern of blocks. Knows no family: what differs between them is in `ModelConfig`."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.layers.embedding import embed, unembed
from jaxkv.layers.linear import scaled
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import rope_angles
from jaxkv.model_config import ModelConfig
from jaxkv.models.block import Leaf, Step
from jaxkv.models.blocks import BLOCKS
from jaxkv.models.protocol import Params
from pallas_kernels.dispatch import at

_INIT_SCALE = 0.02


@dataclass(frozen=True)
class Decoder:
    """A pre-norm decoder: stages of blocks, each of which adds to a residual stream.

    Attributes:
        config: the model as data.
        implementation: which family of implementations every op insists on; `None` takes the best.
    """

    config: ModelConfig
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Refuses a pattern that names an unknown block."""
        unknown = self.config.blocks - BLOCKS.keys()
        if unknown:
            raise ValueError(
                f"the pattern names {', '.join(map(repr, sorted(unknown)))}; blocks are {', '.join(BLOCKS)}"
            )

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of the pattern; those without memory are counted too."""
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
            LayerSpec(layer, make(self.config, layer, page_size, dtype))
            for layer in range(self.num_layers)
            for name in self.config.blocks_of(layer)
            if (make := BLOCKS[name].spec) is not None
        )

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Draws random parameters leaf by leaf, on the device; norms start as ones."""
        leaves, tree = jax.tree.flatten(self._leaves(), is_leaf=lambda node: isinstance(node, Leaf))
        drawn = [
            _make(jax.random.fold_in(key, index), leaf, jnp.dtype(leaf.dtype or dtype))
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
        hidden = scaled(embed(params["embed"], batch.tokens), config.multipliers.embedding)
        narrow = hidden.dtype
        hidden = hidden.astype(jnp.float32) if config.wide_residual else hidden
        angles = rope_angles(config.rope, batch.positions, visible_lengths(batch))
        tables = self._tables(batch)
        for layer, stages in enumerate(config.pattern):
            weights = params["layers"][layer]
            for norm, stage in zip(weights["norms"], stages, strict=True):
                x = rms_norm(norm, hidden.astype(narrow), eps=config.norm_eps)
                added = []
                for block in (BLOCKS[name] for name in stage.split("+")):
                    step = Step(
                        batch, layer, tables.get((layer, block.unit)), angles, self.implementation
                    )
                    held = cache.layer(layer) if block.unit else {}
                    with at(f"layer {layer}"):
                        updates, y = block.run(config, weights, held, x, step)
                    cache = cache.with_layer(layer, updates)
                    added.append(y)
                total = scaled(sum(added[1:], added[0]), config.multipliers.residual)
                hidden = hidden + total.astype(hidden.dtype)
        hidden = hidden.astype(narrow)
        return cache, rms_norm(params["final_norm"], hidden, eps=config.norm_eps)

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Scores every token by the output projection, which is the embedding table if they are tied."""
        table = params["embed" if self.config.tie_embeddings else "lm_head"]
        return scaled(unembed(table, hidden), self.config.multipliers.logits)

    def _tables(self, batch: StepBatch) -> dict[tuple[int, str], PagedTables | StateTables]:
        """Returns the tables of each layer that remembers, by the unit it remembers in.

        Which layers have equal specs, and their order, depends neither on the page size nor on the dtype.
        """
        layout = group_layers(self.cache_specs(page_size=1, dtype="float32"))
        tables = {"page": batch.paged, "state": batch.states}
        return {
            (layer, group.unit): tables[group.unit][group.rank]
            for group in layout.groups
            for layer in group.layers
        }

    def _leaves(self) -> dict:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        leaves = {
            "embed": Leaf(table),
            "layers": tuple(self._layer_leaves(layer) for layer in range(config.num_layers)),
            "final_norm": Leaf((config.hidden_size,), is_scale=True, dtype=self._norm_dtype),
        }
        return leaves if config.tie_embeddings else leaves | {"lm_head": Leaf(table)}

    @property
    def _norm_dtype(self) -> str | None:
        return "float32" if self.config.unit_offset else None

    def _layer_leaves(self, layer: int) -> dict[str, Leaf]:
        stages = len(self.config.pattern[layer])
        shape = (stages, self.config.hidden_size)
        leaves = {"norms": Leaf(shape, is_scale=True, dtype=self._norm_dtype)}
        for name in self.config.blocks_of(layer):
            new = BLOCKS[name].leaves(self.config)
            if leaves.keys() & new.keys():
                raise ValueError(
                    f"layer {layer} has two blocks with parameters named {', '.join(leaves.keys() & new.keys())}"
                )
            leaves |= new
        return leaves


def _make(key: PRNGKeyArray, leaf: Leaf, dtype: jnp.dtype) -> Array:
    return (
        jnp.ones(leaf.shape, dtype) if leaf.is_scale else _draw(key, shape=leaf.shape, dtype=dtype)
    )


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
