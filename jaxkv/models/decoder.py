"""`Decoder`: a model that runs any pattern of blocks. All differences between families are in `ModelConfig`.

The pattern is a list of layers, and a layer is a list of stages: `("attention", "gated")` is one layer. A stage
normalises the residual stream (with `pre_norms`), runs one or several blocks on it side by side ("mamba2+attention"),
and adds the sum of their outputs to the stream. In "transformer>mamba2" the first block runs on the stream as it is,
and its output is added to the input of the norm, but not to the stream. Blocks are in `jaxkv.models.blocks.BLOCKS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import LayerSpec, PagedSpec, StateSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import QUANTISED, hidden_states, routed_experts
from jaxkv.config.model import ModelConfig, Multipliers, RopeConfig, Stage
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.embedding import embed, soft_capped, unembed
from jaxkv.layers.layer_embedding import add_layer_embedding, layer_embeddings
from jaxkv.layers.linear import Joining, Normed, joins_norms, scaled, weigh_stream
from jaxkv.layers.norm import layer_norm, rms_norm
from jaxkv.layers.recurrence import StateWrite, nowhere, without_last
from jaxkv.layers.rope import Angles, rope_angles
from jaxkv.layers.shards import Shards
from jaxkv.models.as_prompts import as_prompts
from jaxkv.models.block import ARRAYS, BlockInputs, Leaf, Split, required
from jaxkv.models.blocks import BLOCKS
from jaxkv.models.protocol import Params
from jaxkv.models.shared_traces import SharedTraces
from jaxkv.weights.quantised.draw_few_bits import draw_few_bits
from jaxkv.weights.quantised.weight_forms import is_few_bits
from jaxkv.wording import listed
from pallas_kernels.dispatch import at, is_asking
from pallas_kernels.fixed_order import fixed_order, is_fixed
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.skinny_matmul.api import Weighed

_INIT_SCALE = 0.02

StateWrites = dict[int, list[StateWrite]]
"""Layer -> how a step writes its states."""


@dataclass(frozen=True)
class Decoder:
    """A decoder: embedding, layers of stages, final norm and output projection.

    Attributes:
        config: architecture and sizes.
        implementation: family of implementations that every op must use; `None` for the best.
        layer_offset: number of its first layer in the cache. Models that share a cache, such as a model and the layers
            that predict further tokens for it, have consecutive layers; layers with equal specs share tables.
        keeps_experts: whether steps store the experts that each token's routers chose in the cache, in pages of their
            own at the layer after the last one (`jaxkv.cache.variants.routed_experts`).
        keeps_hidden: the hidden states of each token that steps store side by side in the cache, for a `DraftHead`, in
            pages of their own at `hidden_layer`. n stands for the residual stream before layer n, `num_layers` for the
            one before the final norm, and `num_layers + 1` for what the final norm makes of it. Empty for none.
        shards: the devices of which this decoder is one's part, with sizes from `shard_config`; `None` for a whole
            model. Its functions then run under `jax.shard_map`.
        batch_invariant: whether a token's bits depend on its own sequence alone: neither on other rows of its steps,
            nor on how its prompt is divided among steps, nor on whether a step computed it as part of a prompt or
            alone. All sums then have a fixed order (`pallas_kernels.fixed_order`).

    Raises:
        ValueError: the pattern names an unknown block, or there are no experts or no hidden states to keep.
    """

    config: ModelConfig
    implementation: str | None = None
    layer_offset: int = 0
    keeps_experts: bool = False
    keeps_hidden: tuple[int, ...] = ()
    batch_invariant: bool = False
    shards: Shards | None = None

    def __post_init__(self) -> None:
        """Checks the pattern, and that there are experts and hidden states to keep."""
        unknown = self.config.blocks - BLOCKS.keys()
        if unknown:
            raise ValueError(
                f"the pattern names {listed([repr(name) for name in sorted(unknown)])}; blocks are {', '.join(BLOCKS)}"
            )

        for stage in {stage for stages in self.config.pattern for stage in stages}:
            _, blocks = Stage.parse(stage)
            if len(blocks) > 1 and (own := [name for name in blocks if BLOCKS[name].sums]):
                raise ValueError(f"{own[0]!r} must be the only block of its stage, got {stage!r}")
        if self.keeps_experts and not self._expert_layers:
            raise ValueError(
                f"routed_experts need a mixture of experts, and this {self.config.family} has none; turn them off"
            )
        if any(not 0 <= place <= self.num_layers + 1 for place in self.keeps_hidden):
            raise ValueError(
                f"keeps_hidden counts from 0 to {self.num_layers + 1} in a model of {self.num_layers} layers, got "
                f"{self.keeps_hidden}"
            )

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of the pattern, those without cache included."""
        return self.config.num_layers

    @property
    def hidden_layer(self) -> int:
        """Number of the layer of the cache that holds the hidden states of `keeps_hidden`."""
        return self.layer_offset + self.num_layers + 1

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        return self.config.max_positions

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step, because angles depend on the sequence's length.

        That is so with dynamic NTK, and with LongRoPE if sequences may be longer than the original context.
        """
        ropes = (self.config.rope, self.config.window_rope)
        return any(rope is not None and self._varies(rope) for rope in ropes)

    def limited(self, max_positions: int) -> "Decoder":
        """Returns the same model for sequences of at most `max_positions` tokens.

        With LongRoPE, prompts may be cut and share prefixes if no sequence is longer than the original context.
        """
        rope = self.config.rope
        if rope.kind != "longrope" or max_positions >= self.max_positions:
            return self
        return replace(self, config=replace(self.config, max_positions=max_positions))

    def running(self, implementation: str) -> "Decoder":
        """Returns the same model with another family of implementations."""
        return replace(self, implementation=implementation)

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache spec of each layer that has a cache.

        Args:
            page_size: tokens per page.
            dtype: dtype name of keys and values.
        """
        specs = tuple(
            LayerSpec(self.layer_offset + layer, make(self.config, layer, page_size, dtype))
            for layer in range(self.num_layers)
            for name in self.config.blocks_of(layer)
            if (make := BLOCKS[name].spec) is not None
        )
        if self.batch_invariant:
            # The expanded form of MLA has other sums than the one over pages.
            specs = tuple(replace(spec, spec=_unexpanded(spec.spec)) for spec in specs)
        if self.keeps_experts:
            sizes = (len(self._expert_layers), required(self.config.mixture).top_k)
            kept = routed_experts(*sizes, page_size=page_size)
            specs = (*specs, LayerSpec(self.layer_offset + self.num_layers, kept))
        if self.keeps_hidden:
            width = len(self.keeps_hidden) * self.config.hidden_size
            stored = self.config.dtype if dtype in QUANTISED else dtype
            kept = hidden_states(width, dtype=stored, page_size=page_size)
            specs = (*specs, LayerSpec(self.hidden_layer, kept))
        return specs

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns random parameters in `dtype`; norm weights are ones."""
        return self.init_params_like(key, self.param_shapes(dtype))

    def init_params_like(
        self,
        key: PRNGKeyArray,
        types: Params,
        *,
        placed: Callable[[str, Any], Any] = lambda path, leaf: leaf,
    ) -> Params:
        """Returns random parameters of given types, which may be `FewBits` of types, drawn leaf by leaf on the device.

        Args:
            key: seed.
            types: the types, in the tree of `param_shapes`.
            placed: returns what becomes of a leaf, given its dotted path, before the next one is drawn.
        """
        kinds, tree = jax.tree.flatten(types, is_leaf=is_few_bits)
        drawn = []
        for index, (path, leaf) in enumerate(self.leaf_declarations().items()):
            own, kind = jax.random.fold_in(key, index), kinds[index]
            made = (
                draw_few_bits(own, kind, _INIT_SCALE)
                if isinstance(kind, FewBits)
                else _make(own, leaf, kind.dtype)
            )
            drawn.append(placed(path, made))
        return tree.unflatten(drawn)

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of `init_params` as `jax.ShapeDtypeStruct`s, without computing it."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype or dtype)),
            self._leaves(),
            is_leaf=lambda node: isinstance(node, Leaf),
        )

    def adapted_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns dotted path -> shape [out, in] of each parameter that requests may add adapters to."""
        return {path: leaf.shape for path, leaf in self.leaf_declarations().items() if leaf.adapts}

    def few_bits_leaves(self) -> frozenset[str]:
        """Returns the dotted paths of the parameters that may be a `FewBits`."""
        return frozenset(
            path for path, leaf in self.leaf_declarations().items() if leaf.takes_few_bits
        )

    def leaf_declarations(self) -> dict[str, Leaf]:
        """Returns dotted path -> declaration of each parameter."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            self._leaves(), is_leaf=lambda node: isinstance(node, Leaf)
        )
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves
        }

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and their hidden states after the final norm.

        Layers are unrolled: a scan over stacked weights and caches would copy them layer by layer.
        """
        if not self.batch_invariant:
            return self._forward(params, cache, batch)
        with fixed_order():
            return self._forward(params, cache, as_prompts(batch))

    def forward_unsettled(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"], StateWrites]:
        """Returns what `forward` does, with all recurrent states as they were, and how `settled` can write them.

        The step is no decode step.
        """
        unwritten = tuple(
            replace(one, write_states=nowhere(one.write_states)) for one in batch.states
        )
        writes: StateWrites = {}
        with fixed_order(self.batch_invariant):
            batch = replace(batch, states=unwritten)
            cache, hidden = self._forward(params, cache, batch, writes)
        return cache, hidden, writes

    def settled(
        self, cache: Cache, batch: StepBatch, writes: StateWrites, rejected: Int[Array, " rows"]
    ) -> Cache:
        """Returns the cache with the recurrent states after a step without the last tokens of each row.

        Each row's state is read again and advanced by what `forward_unsettled` computed of the tokens, as
        `checkpointing_ssu` of FlashInfer does. So a sequence has one state for any number of drafts.

        Args:
            cache: the cache after `forward_unsettled`.
            batch: the step's metadata, as `forward_unsettled` got it.
            writes: what that returned.
            rejected: how many tokens of each row are left out.
        """
        rest, places = without_last(batch, rejected)
        tables = self._tables(batch)
        with fixed_order(self.batch_invariant):
            for number, several in writes.items():
                layer = self.layer_offset + number
                group, arrays = tables[layer, "state"], cache.layer(layer)
                assert isinstance(group, StateTables)
                new = {
                    role: run(arrays[role], _at(inputs, places), rest, group)
                    for role, inputs, run in several
                }
                cache = cache.with_layer(layer, new)
        return cache

    def _forward(
        self,
        params: Params,
        cache: Cache,
        batch: StepBatch,
        writes: StateWrites | None = None,
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        factor = self.config.multipliers.embedding
        embeddings, of_layers = self._embed(params, batch.tokens, self._peers(cache))
        embeddings = scaled(embeddings, factor)
        kept: dict[int, Array] = {}
        if of_layers is not None:
            own = {name: params[name] for name in ("layer_embed_in", "layer_embed_norm")}
            of_layers = layer_embeddings(own, of_layers, embeddings, eps=self.config.norm_eps)
        cache, hidden = self.run_layers(
            params, cache, batch, embeddings, embeddings, kept, writes, of_layers
        )
        normed = self.normed(params, hidden)
        if self.keeps_hidden:
            kept |= {self.num_layers: hidden, self.num_layers + 1: normed}
            stored = jnp.concatenate([kept[place] for place in self.keeps_hidden], axis=1)
            cache = self._store(cache, self.hidden_layer, "hidden_states", stored, batch)
        return cache, normed

    def normed(
        self, params: Params, hidden: Float[Array, "tokens hidden_size"]
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns the final norm of the residual stream after the last layer."""
        return self._norm(params["final_norm"], hidden)

    def run_layers(
        self,
        params: Params,
        cache: Cache,
        batch: StepBatch,
        hidden: Float[Array, "tokens hidden_size"],
        embeddings: Float[Array, "tokens hidden_size"],
        kept: dict[int, Array] | None = None,
        writes: StateWrites | None = None,
        of_layers: Float[Array, "tokens layers size"] | None = None,
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and the residual stream after the last layer.

        Args:
            params: the parameters.
            cache: the cache before the step.
            batch: the step's metadata.
            hidden: the residual stream before the first layer.
            embeddings: the tokens' embeddings, which some blocks read.
            kept: gets the residual stream before each layer of `keeps_hidden`.
            writes: gets how each layer writes its states.
            of_layers: each layer's embeddings, if the model has them.
        """
        config = self.config
        # The dtype of activations; the residual stream may be wider.
        narrow = hidden.dtype
        hidden = hidden.astype(jnp.float32) if config.wide_residual else hidden
        angles = self._layer_angles(batch)
        tables = self._tables(batch)
        peers = self._peers(cache)
        next_norms = self._next_norms(params, hidden, peers)
        # Every layer answers for itself when ops are asked what they support, and `writes` holds arrays of this trace.
        normed, traces = None, SharedTraces(shares=not is_asking() and writes is None)
        chosen = [] if self.keeps_experts else None
        for layer, stages in enumerate(config.pattern):
            if kept is not None and layer in self.keeps_hidden:
                kept[layer] = hidden.astype(narrow)
            weights = self._weights(params, layer)
            none = (None,) * len(stages)
            norms, post_norms = (weights.get(name, none) for name in ("norms", "post_norms"))
            for norm, after, stage in zip(norms, post_norms, stages, strict=True):
                is_joining = next_norms is not None and _joins(stage)
                joining = Joining(hidden, *(next(next_norms) if next_norms else (None, 0)))
                stream = BlockInputs(
                    config=config,
                    layer=layer,
                    params=weights,
                    x=hidden.astype(narrow),
                    batch=batch,
                    angles=angles[layer],
                    embeddings=embeddings,
                    implementation=self.implementation,
                    # With several devices the sum over them joins the residual stream.
                    joining=joining if is_joining and self.shards is None else None,
                    chosen_experts=chosen,
                    shards=self.shards,
                    state_writes=writes,
                )
                before, blocks = Stage.parse(stage)
                x = normed
                if x is None:
                    x = stream.hidden
                    if before:
                        cache, y = self._run_block(before, cache, stream, tables, traces)
                        x = (hidden + self._summed(y, peers).astype(hidden.dtype)).astype(narrow)
                    x = x if norm is None else traces.call("norm", self._norm, norm, x)
                outputs = []
                for name in blocks:
                    kept_stream = stream.hidden if BLOCKS[name].reads_stream else None
                    inputs = replace(stream, x=x, stream=kept_stream)
                    cache, y = self._run_block(name, cache, inputs, tables, traces)
                    outputs.append(y)
                if not is_joining:
                    is_sum = any(BLOCKS[name].sums for name in blocks)
                    total = self._added(joining, outputs, after, peers, is_sum=is_sum)
                else:
                    (total,) = outputs
                    if self.shards is not None:
                        total = self.shards.joined(total, joining, peers)
                is_weighed = isinstance(total, Weighed)
                normed = Normed(total, config.norm_eps) if is_weighed else None
                hidden = total.result if is_weighed else total
            if of_layers is not None:
                own = {
                    name: weights[name] for name in ("layer_gate", "layer_out", "layer_out_norm")
                }
                add = partial(
                    add_layer_embedding, activation=config.activation, eps=config.norm_eps
                )
                hidden = traces.call("layer_embedding", add, own, hidden, of_layers[:, layer])
            if config.layer_scalars:
                hidden = hidden * weights["layer_scalar"][None].astype(hidden.dtype)
        if chosen is not None:
            layer, experts = self.layer_offset + self.num_layers, jnp.stack(chosen, axis=1)
            cache = self._store(cache, layer, "experts", experts, batch)
        return cache, hidden.astype(narrow)

    def _peers(self, cache: Cache) -> Int[Array, "1 numbers"] | None:
        """Returns this device's row of `Cache.peers` if our kernel may sum over the devices, else `None`."""
        return None if self.implementation == "xla" else cache.peers

    def _summed(
        self, part: Float[Array, "tokens hidden_size"], peers: Int[Array, "1 numbers"] | None
    ) -> Array:
        """Returns the sum of a block's output over the devices that compute parts of it.

        Each of these sums needs the result of the one before, so none runs beside another one.
        """
        return part if self.shards is None else self.shards.summed(part, peers)

    def _added(
        self,
        joining: Joining,
        outputs: list[Array],
        post_norm: Float[Array, " hidden_size"] | None,
        peers: Int[Array, "1 numbers"] | None,
        *,
        is_sum: bool,
    ) -> Any:  # noqa: ANN401 - an array, or a `Weighed` if `joining` has the next norm
        """Returns the residual stream after a stage whose blocks return their outputs alone.

        With `is_sum`, these are sums over the devices already.
        """
        total = sum(outputs[1:], outputs[0])
        total = total if is_sum else self._summed(total, peers)
        total = scaled(total, self.config.multipliers.residual)
        if post_norm is not None:
            total = rms_norm(post_norm, total, eps=self.config.norm_eps)
        hidden = joining.hidden + total.astype(joining.hidden.dtype)
        return hidden if joining.next_norms is None else weigh_stream(hidden, joining)

    def _run_block(
        self,
        name: str,
        cache: Cache,
        inputs: BlockInputs,
        tables: Mapping[tuple[int, str], PagedTables | StateTables],
        traces: SharedTraces,
    ) -> tuple[Cache, Any]:
        """Returns the cache after a block of a layer, and the block's output; `inputs` has no cache and tables yet."""
        block, layer = BLOCKS[name], self.layer_offset + inputs.layer
        if block.unit:
            owner = self.layer_offset + self.config.key_owner(inputs.layer)
            inputs = replace(inputs, cache=cache.layer(owner), tables=tables[owner, block.unit])
        keeps = inputs.chosen_experts is not None

        def run(arrays: dict[str, Any]) -> tuple[Any, list[Array]]:
            chosen: list[Array] = []
            kept = chosen if keeps else None
            return block.run(replace(inputs, **arrays, chosen_experts=kept)), chosen

        arrays = {field: getattr(inputs, field) for field in ARRAYS}
        with at(f"layer {inputs.layer}"):
            # A block depends on the number of its layer by the window alone.
            window = self.config.windows[inputs.layer]
            (updates, y), chosen = traces.call(name, run, arrays, settings=window)
        if inputs.chosen_experts is not None:
            inputs.chosen_experts.extend(chosen)
        return cache.with_layer(layer, updates), y

    def _store(
        self,
        cache: Cache,
        layer: int,
        role: str,
        values: Shaped[Array, "tokens ..."],
        batch: StepBatch,
    ) -> Cache:
        """Returns the cache with a value for each token at its slot in the pages of one layer."""
        pages, group = cache.layer(layer)[role], self._tables(batch)[layer, "page"]
        assert isinstance(group, PagedTables)
        page, place = jnp.divmod(group.write_slots, pages.shape[1])
        stored = pages.at[page, place].set(
            values.astype(pages.dtype), mode="drop", unique_indices=True
        )
        return cache.with_layer(layer, {role: stored})

    def _weights(self, params: Params, layer: int) -> LayerParams:
        """Returns a layer's parameters by name, those that its owner stores included."""
        layers = params["layers"]
        # Layers with the same owner have parameters of the same names, so only shared ones of the owner are left.
        return {**layers[self.config.owner(layer)], **layers[layer]}

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns float32 logits: the output projection of hidden states, by the embedding table if they are tied."""
        logits = self.own_logits(params, hidden)
        if self.shards is None or not self.shards.splits_vocab:
            return logits
        return self.shards.all_logits(logits)

    def own_logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_part"]:
        """Returns the logits of the token ids that this device has: of all, unless devices divide them."""
        table = params["embed" if self.config.tie_embeddings else "lm_head"]
        with fixed_order(self.batch_invariant):
            logits = unembed(table, hidden, implementation=self.implementation)
        logits = scaled(logits, self.config.multipliers.logits)
        return soft_capped(logits, self.config.logit_cap)

    @property
    def _expert_layers(self) -> list[int]:
        """The layers with a mixture of experts."""
        return [
            layer
            for layer in range(self.num_layers)
            if {"mixture", "dense_and_mixture"} & {*self.config.blocks_of(layer)}
        ]

    def _next_norms(
        self, params: Params, hidden: Array, peers: Array | None
    ) -> Iterator[tuple[Array | None, int]] | None:
        """Returns the norm after each stage that is computed with the residual addition, or `None` if none is.

        A stage of a single block with `joins` takes its norm without the division by the root mean square, which its
        projections do. So the last projection of the stage before, or the sum over devices after it, adds its output
        to the residual stream and multiplies by that norm's weight; XLA does so after other stages. Stages do this in
        steps of few tokens on our kernels, if nothing but an addition and a norm is between two of them. Under the
        fixed order of sums, and on several devices, no stage does unless all are of one block with `joins`.

        Returns:
            For each stage the fields `next_norms` and `row` of `Joining`; (`None`, 0) if the next stage takes its norm
            as a whole, and after the last stage, because `forward` computes the final norm.
        """
        config, layers = self.config, params["layers"]
        plain = replace(config.multipliers, embedding=1.0, gate=1.0, logits=1.0) == Multipliers()
        plain = plain and not (config.wide_residual or config.layer_norms or config.post_norms)
        plain = plain and not (config.layer_scalars or config.has_layer_embeddings)
        joins = [_joins(stage) for stages in config.pattern for stage in stages]
        whole = self.shards is not None or is_fixed()
        # The stream times a norm's weights, before the division, may be beyond float16.
        few = joins_norms(self.implementation, hidden.shape[0]) and hidden.dtype != jnp.float16
        part = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
        # XLA's sum over devices cannot do it.
        sums = self.shards is None or self.shards.joins(part, peers)
        if not (few and plain and sums and (all(joins) if whole else any(joins))):
            return None
        if whole and any(one["norms"].dtype != hidden.dtype for one in layers):
            return None
        norms = [
            (weights["norms"], row)
            for weights, stages in zip(layers, config.pattern, strict=True)
            for row in range(len(stages))
        ]
        after = zip(norms[1:], joins[1:], strict=True)
        return iter([*(norm if takes else (None, 0) for norm, takes in after), (None, 0)])

    def _embed(
        self,
        params: Params,
        tokens: Int[Array, " tokens"],
        peers: Int[Array, "1 numbers"] | None,
    ) -> tuple[Float[Array, "tokens hidden_size"], Float[Array, "tokens all_sizes"] | None]:
        """Returns each token's row of the embedding table, and of the table of all layers if the model has one.

        Devices that divide the tables add up both at once, since no sum may run beside another.
        """
        tables = [params[name] for name in ("embed", "layer_embed") if name in params]
        if self.shards is None or not self.shards.splits_vocab:
            rows = [embed(table, tokens) for table in tables]
        else:
            own = self.shards.own_ids(tokens, tables[0].shape[0])
            parts = jnp.concatenate([embed(table, own) for table in tables], axis=1)
            rows = jnp.split(self._summed(parts, peers), (tables[0].shape[1],), axis=1)
        return rows[0], rows[1] if len(tables) > 1 else None

    def _norm(
        self, weight: Float[Array, " hidden_size"], x: Float[Array, "tokens hidden_size"]
    ) -> Float[Array, "tokens hidden_size"]:
        if self.config.layer_norms:
            return layer_norm(weight, None, x, eps=self.config.norm_eps)
        return rms_norm(weight, x, eps=self.config.norm_eps)

    def _varies(self, rope: RopeConfig) -> bool:
        """Whether a token's angles depend on the length of its sequence."""
        if rope.kind == "longrope":
            assert rope.original_max_positions is not None
            return self.max_positions > rope.original_max_positions
        return rope.kind == "dynamic"

    def _layer_angles(self, batch: StepBatch) -> tuple[Angles, ...]:
        """Returns the angles of each layer: `rope`'s, or `window_rope`'s, or zeros in `nope_layers`."""
        config, visible = self.config, visible_lengths(batch)
        full = windowed = rope_angles(config.rope, batch.positions, visible)
        if config.window_rope is not None:
            windowed = rope_angles(config.window_rope, batch.positions, visible)
        layers = [full if window is None else windowed for window in config.windows]
        if config.nope_layers:
            # The kernels rotate in every layer; angles of zero leave queries and keys as they are.
            still = RopeConfig(rotary_dim=config.rope.rotary_dim, kind="none")
            unrotated = rope_angles(still, batch.positions, visible)
            layers = [
                unrotated if layer in config.nope_layers else angles
                for layer, angles in enumerate(layers)
            ]
        return tuple(layers)

    def _tables(self, batch: StepBatch) -> dict[tuple[int, str], PagedTables | StateTables]:
        """Returns (layer of the cache, "page" or "state") -> the layer's tables.

        The grouping of layers and the order of groups depend neither on the page size nor on the dtype.
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
        ids = Split(0, ((config.vocab_size, config.vocab_size),))
        table = Leaf((config.vocab_size, config.hidden_size), split=ids)
        leaves = {
            "embed": table,
            "layers": tuple(self._layer_leaves(layer) for layer in range(config.num_layers)),
            "final_norm": Leaf((config.hidden_size,), is_scale=True, dtype=config.norm_dtype),
        }
        if config.has_layer_embeddings:
            width = config.num_layers * config.layer_embedding_size
            leaves["layer_embed"] = Leaf((config.vocab_size, width), split=ids)
            leaves["layer_embed_in"] = Leaf((width, config.hidden_size))
            leaves["layer_embed_norm"] = Leaf(
                (config.layer_embedding_size,), is_scale=True, dtype=config.norm_dtype
            )
        return leaves if config.tie_embeddings else leaves | {"lm_head": table}

    def _layer_leaves(self, layer: int) -> dict[str, Leaf]:
        stages = len(self.config.pattern[layer])
        shape = (stages, self.config.hidden_size)
        norm = Leaf(shape, is_scale=True, dtype=self.config.norm_dtype)
        leaves = {"norms": norm} if self.config.pre_norms else {}
        if self.config.post_norms:
            leaves["post_norms"] = norm
        if self.config.has_layer_embeddings:
            hidden, size = self.config.hidden_size, self.config.layer_embedding_size
            leaves["layer_gate"] = Leaf((size, hidden))
            leaves["layer_out"] = Leaf((hidden, size))
            leaves["layer_out_norm"] = Leaf((hidden,), is_scale=True, dtype=self.config.norm_dtype)
        if self.config.layer_scalars:
            leaves["layer_scalar"] = Leaf((1,), is_scale=True)
        for name in self.config.blocks_of(layer):
            new = BLOCKS[name].leaves(self.config)
            if leaves.keys() & new.keys():
                raise ValueError(
                    f"layer {layer} has two blocks with parameters of the same name: "
                    f"{', '.join(leaves.keys() & new.keys())}"
                )
            leaves |= new
        owns = self.config.owner(layer) == layer
        return {name: leaf for name, leaf in leaves.items() if owns or not leaf.is_shared}


def _joins(stage: str) -> bool:
    """Returns whether a stage is one block that adds its output to the residual stream itself."""
    return stage in BLOCKS and BLOCKS[stage].joins


def _unexpanded(spec: PagedSpec | StateSpec) -> PagedSpec | StateSpec:
    return replace(spec, expands=0) if isinstance(spec, PagedSpec) else spec


def _make(key: PRNGKeyArray, leaf: Leaf, dtype: jnp.dtype) -> Array:
    return (
        jnp.ones(leaf.shape, dtype) if leaf.is_scale else _draw(key, shape=leaf.shape, dtype=dtype)
    )


@partial(jax.jit, static_argnames=("dtype", "shape"))
def _draw(key: PRNGKeyArray, *, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return (_INIT_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def visible_lengths(batch: StepBatch) -> Int[Array, " tokens"]:
    """Returns for each token the length of its sequence after the step; the values of padding are arbitrary."""
    if batch.decode:
        return batch.seq_lens
    tokens = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(batch.cu_q_lens[1:], tokens, side="right")
    return batch.seq_lens.at[row].get(mode="fill", fill_value=0)


def _at(inputs: tuple[Array, ...], places: Int[Array, " tokens"]) -> tuple[Array, ...]:
    """Returns what was computed of the tokens at some places."""
    return tuple(one.at[places].get(mode="clip") for one in inputs)
