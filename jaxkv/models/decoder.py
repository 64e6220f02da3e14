"""Runs any pattern of blocks. Knows no family: what differs between them is in `ModelConfig`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.config.model import ModelConfig, Multipliers
from jaxkv.layers.embedding import embed, soft_capped, unembed
from jaxkv.layers.linear import Joining, Normed, joins_norms, scaled
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import Angles, rope_angles
from jaxkv.models.block import Leaf, Step
from jaxkv.models.blocks import BLOCKS
from jaxkv.models.protocol import Params
from jaxkv.wording import listed
from pallas_kernels.dispatch import at
from pallas_kernels.skinny_matmul.xla import Weighed

_INIT_SCALE = 0.02


@dataclass(frozen=True)
class Decoder:
    """A pre-norm decoder: stages of blocks, each of which adds to a residual stream.

    Attributes:
        config: the model as data.
        implementation: which family of implementations every op insists on; `None` takes the best.
        layer_offset: place of its first layer in the cache. Models that share one, such as a model and the layers that
            guess further tokens for it, lie one behind the other; layers with equal specs share tables.
    """

    config: ModelConfig
    implementation: str | None = None
    layer_offset: int = 0

    def __post_init__(self) -> None:
        """Refuses a pattern that names an unknown block."""
        unknown = self.config.blocks - BLOCKS.keys()
        if unknown:
            raise ValueError(
                f"the pattern names {listed([repr(name) for name in sorted(unknown)])}; blocks are {', '.join(BLOCKS)}"
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
        ropes = (self.config.rope, self.config.window_rope)
        return any(rope is not None and rope.kind == "dynamic" for rope in ropes)

    def running(self, implementation: str) -> "Decoder":
        """Returns the same model insisting on an implementation."""
        return replace(self, implementation=implementation)

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns what each layer remembers."""
        return tuple(
            LayerSpec(self.layer_offset + layer, make(self.config, layer, page_size, dtype))
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
        angles = self._angles(batch)
        tables = self._tables(batch)
        next_norms = self._next_norms(params, batch)
        behind_norm = None
        for layer, stages in enumerate(config.pattern):
            place = self.layer_offset + layer
            weights = params["layers"][layer]
            post_norms = weights.get("post_norms", (None,) * len(stages))
            for norm, after, stage in zip(weights["norms"], post_norms, stages, strict=True):
                x = behind_norm
                if x is None:
                    x = rms_norm(norm, hidden.astype(narrow), eps=config.norm_eps)
                joining = Joining(hidden, *next(next_norms)) if next_norms is not None else None
                added = []
                for block in (BLOCKS[name] for name in stage.split("+")):
                    step = Step(
                        batch,
                        layer,
                        tables.get((place, block.unit)),
                        angles[config.windows[layer] is not None],
                        self.implementation,
                        joining,
                    )
                    held = cache.layer(place) if block.unit else {}
                    with at(f"layer {layer}"):
                        updates, y = block.run(config, weights, held, x, step)
                    cache = cache.with_layer(place, updates)
                    added.append(y)
                if joining is not None:
                    (joined,) = added
                    is_weighed = isinstance(joined, Weighed)
                    behind_norm = Normed(joined, config.norm_eps) if is_weighed else None
                    hidden = joined.result if is_weighed else joined
                    continue
                total = scaled(sum(added[1:], added[0]), config.multipliers.residual)
                if after is not None:
                    total = rms_norm(after, total, eps=config.norm_eps)
                hidden = hidden + total.astype(hidden.dtype)
        hidden = hidden.astype(narrow)
        return cache, rms_norm(params["final_norm"], hidden, eps=config.norm_eps)

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Scores every token by the output projection, which is the embedding table if they are tied."""
        table = params["embed" if self.config.tie_embeddings else "lm_head"]
        logits = unembed(table, hidden, implementation=self.implementation)
        logits = scaled(logits, self.config.multipliers.logits)
        return soft_capped(logits, self.config.logit_cap)

    def _next_norms(
        self, params: Params, batch: StepBatch
    ) -> Iterator[tuple[Array | None, int]] | None:
        """Returns the weights of the norm behind each stage where blocks add to the residual stream by themselves.

        They do so in steps of few tokens on our kernels, if each stage is one block that can and nothing else happens
        between it and the next. The last norm is left to whoever reads the hidden states.
        """
        config, layers = self.config, params["layers"]
        plain = replace(config.multipliers, embedding=1.0, gate=1.0, logits=1.0) == Multipliers()
        blocks = {stage: BLOCKS.get(stage) for stages in config.pattern for stage in stages}
        joins = all(block is not None and block.joins for block in blocks.values())
        few = joins_norms(self.implementation, batch.tokens.shape[0])
        if not (few and plain and joins) or config.wide_residual or "post_norms" in layers[0]:
            return None
        norms = [
            (weights["norms"], row)
            for weights, stages in zip(layers, config.pattern, strict=True)
            for row in range(len(stages))
        ]
        return iter([*norms[1:], (None, 0)])

    def _angles(self, batch: StepBatch) -> tuple[Angles, Angles]:
        """Returns the angles of layers that see everything, and of those with a window."""
        visible = visible_lengths(batch)
        angles = rope_angles(self.config.rope, batch.positions, visible)
        if self.config.window_rope is None:
            return angles, angles
        return angles, rope_angles(self.config.window_rope, batch.positions, visible)

    def _tables(self, batch: StepBatch) -> dict[tuple[int, str], PagedTables | StateTables]:
        """Returns the tables of each layer that remembers, by its place in the cache and the unit it remembers in.

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
        return "float32" if self.config.unit_offset or self.config.wide_norms else None

    def _layer_leaves(self, layer: int) -> dict[str, Leaf]:
        stages = len(self.config.pattern[layer])
        shape = (stages, self.config.hidden_size)
        leaves = {"norms": Leaf(shape, is_scale=True, dtype=self._norm_dtype)}
        if self.config.post_norms:
            leaves["post_norms"] = leaves["norms"]
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
