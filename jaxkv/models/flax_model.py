"""`FlaxModel`: a user's own `flax.nnx` module with attention layers, as a model of this package."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec, PagedSpec, StateSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.layers.attention import attend as write_and_attend
from jaxkv.models.protocol import Params
from pallas_kernels.dispatch import at

_INIT_SCALE = 0.02


@runtime_checkable
class Attend(Protocol):
    """The attention function that a module is given; the module calls it once per layer and call."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        scale: float,
        window: int | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Writes keys and values of the new tokens to the cache, and attends causally within each token's sequence.

        Args:
            layer: number of the layer in `cache_specs`.
            q: queries, after the rotation if the module has one.
            k: keys, likewise; `heads` must be a multiple of `kv_heads`.
            v: values.
            scale: factor of attention scores, usually `head_dim ** -0.5`.
            window: tokens that each token sees, its own included; `None` for the window of the layer's spec.
        """
        ...


@runtime_checkable
class CausalModule(Protocol):
    """The interface of an `nnx.Module`. Tokens of several sequences are packed on one axis, without a batch axis."""

    vocab_size: int
    max_positions: int

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache spec of each layer: `place([gqa(...), window(...), ...])` of `jaxkv.cache.variants`."""
        ...

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], attend: Attend
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns each token's hidden state, the input of `logits`.

        All operations but `attend` must treat each token separately. `positions` are positions in the token's sequence.
        """
        ...

    def logits(self, hidden: Float[Array, "rows hidden_size"]) -> Float[Array, "rows vocab_size"]:
        """Returns float32 logits."""
        ...


@dataclass(frozen=True)
class FlaxModel:
    """The computation of a module in evaluation mode, without its arrays: hashable, and static under `jax.jit`.

    Make it once per module. The arrays are passed to each call as `params`, a plain nested dict:
    `model.params_of(module)`. Call that again after training has changed them.

    The module's graph is split here and merged again while a step is traced. Evaluation mode is that of
    `nnx.Module.eval`: `deterministic=True` and `use_running_average=True` in every part of a copy; the module keeps its
    mode. If a call still draws random numbers or changes batch statistics, tracing it raises. Other assignments to the
    module's variables are dropped.

    Examples:
        >>> model = FlaxModel(module)
        >>> jaxkv.generate(model.params_of(module), model, [[1, 2, 3]])

    Attributes:
        graph: the module in evaluation mode, without its arrays.
        implementation: family of implementations that every op must use; `None` for the best.
        vocab_size: width of the logits.
        max_positions: longest sequence that the model supports, in tokens.
        num_layers: layers with a cache.
        whole_prompts: always False: a module gets tokens and positions, but no lengths.
        batch_invariant: always False: the order of sums in a module is XLA's choice.

    Raises:
        ValueError: the module lacks a member of `CausalModule`, or its cache specs are not plain attention layers
            numbered from 0.
    """

    graph: nnx.GraphDef
    implementation: str | None
    vocab_size: int
    max_positions: int
    num_layers: int
    whole_prompts: bool
    batch_invariant: bool
    _shapes: tuple[jax.ShapeDtypeStruct, ...] = field(repr=False)
    _structure: Any = field(repr=False)

    def __init__(self, module: nnx.Module, *, implementation: str | None = None) -> None:
        if not isinstance(module, CausalModule):
            wanted = ("vocab_size", "max_positions", "cache_specs", "__call__", "logits")
            missing = ", ".join(name for name in wanted if not hasattr(module, name))
            raise ValueError(
                f"{type(module).__name__} lacks {missing}; add these members, see CausalModule"
            )
        graph, state = nnx.split(_in_evaluation_mode(module))
        leaves, structure = jax.tree.flatten(nnx.to_pure_dict(state))
        specs = module.cache_specs(page_size=1, dtype="float32")
        values = {
            "graph": graph,
            "implementation": implementation,
            "vocab_size": module.vocab_size,
            "max_positions": module.max_positions,
            "num_layers": _count_layers(specs),
            "whole_prompts": False,
            "batch_invariant": False,
            "_shapes": tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            "_structure": structure,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def params_of(self, module: nnx.Module) -> Params:
        """Returns the arrays, not copied, of the module this was made from, or of one with equal structure and shapes.

        Raises:
            ValueError: the module's parameters differ in structure or shapes.
        """
        params = nnx.to_pure_dict(nnx.state(module))
        leaves, structure = jax.tree.flatten(params)
        shapes = [leaf.shape for leaf in leaves]
        if structure != self._structure or shapes != [shape.shape for shape in self._shapes]:
            raise ValueError(
                f"the parameters of this {type(module).__name__} differ in structure or shapes from the module that "
                f"FlaxModel was made from; make a FlaxModel of this module"
            )
        return params

    def running(self, implementation: str) -> "FlaxModel":
        """Returns the same model with another family of implementations."""
        model = copy(self)
        object.__setattr__(model, "implementation", implementation)
        return model

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the module's cache specs."""
        shapes = jax.tree.unflatten(self._structure, self._shapes)
        return nnx.merge(self.graph, shapes).cache_specs(page_size=page_size, dtype=dtype)

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of `init_params` as `jax.ShapeDtypeStruct`s, without computing it."""
        return jax.eval_shape(lambda: self.init_params(jax.random.key(0), dtype))

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns random parameters in `dtype`; vectors and scalars are ones, and non-floating-point arrays zeros."""
        drawn = [
            _draw(jax.random.fold_in(key, index), shape, jnp.dtype(dtype))
            for index, shape in enumerate(self._shapes)
        ]
        return jax.tree.unflatten(self._structure, drawn)

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and their hidden states; runs the module once."""
        attend = _CachedAttend(self, cache, batch)
        hidden = self._run(params, lambda module: module(batch.tokens, batch.positions, attend))
        attend.check_all_attended()
        return attend.cache, hidden

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns the module's logits; raises `ValueError` unless they are float32 `[rows, vocab_size]`."""
        logits = self._run(params, lambda module: module.logits(hidden))
        wanted = (hidden.shape[0], self.vocab_size)
        if logits.shape != wanted or logits.dtype != jnp.float32:
            raise ValueError(
                f"the module's logits are {logits.dtype}{list(logits.shape)}, wanted float32{list(wanted)}"
            )
        return logits

    def _run(self, params: Params, call: Callable[[Any], Array]) -> Array:
        """Calls the module with these parameters; raises `ValueError` if the call changes training state."""
        if isinstance(params, nnx.Module):
            raise ValueError(
                f"params is the nnx module {type(params).__name__}; pass model.params_of(module)"
            )
        if isinstance(params, nnx.State):
            params = nnx.to_pure_dict(params)
        if jax.tree.structure(params) != self._structure:
            raise ValueError(
                "params differs in structure from the module that FlaxModel was made from; pass "
                "model.params_of(module)"
            )
        module = nnx.merge(self.graph, params)
        before = _training_state(module)
        result = call(module)
        changed = [
            name for name, leaf in _training_state(module).items() if before.get(name) is not leaf
        ]
        if changed:
            raise ValueError(
                f"the module changes {', '.join(changed)} while it generates: it draws random numbers or updates batch "
                "statistics in evaluation mode; make both depend on the attributes `deterministic` and "
                "`use_running_average`, which `nnx.Module.eval` sets"
            )
        return result


class _CachedAttend:
    """The `attend` of one traced call, with the current cache."""

    def __init__(self, model: FlaxModel, cache: Cache, batch: StepBatch) -> None:
        # The grouping of layers depends neither on the page size nor on the dtype.
        layout = group_layers(model.cache_specs(page_size=1, dtype="float32"))
        self.cache = cache
        self._groups = {layer: group for group in layout.groups for layer in group.layers}
        self._batch = batch
        self._implementation = model.implementation
        self._attended: set[int] = set()

    def __call__(
        self,
        layer: int,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        scale: float,
        window: int | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        if layer not in self._groups or layer in self._attended:
            why = (
                "attended twice in one call; each layer attends once"
                if layer in self._attended
                else f"is not in cache_specs, which has layers {sorted(self._groups)}"
            )
            raise ValueError(f"layer {layer} {why}")
        self._attended.add(layer)
        group = self._groups[layer]
        layer_cache = self.cache.layer(layer)
        for name, value in (("key", k), ("value", v)):
            if value.shape[1:] != layer_cache[name].shape[2:]:
                raise ValueError(
                    f"layer {layer} {name} has [kv_heads, head_dim] {list(value.shape[1:])}, "
                    f"its spec {list(layer_cache[name].shape[2:])}"
                )
        with at(f"layer {layer}"):
            new, mixed = write_and_attend(
                layer_cache,
                q,
                k,
                v,
                self._batch,
                self._batch.paged[group.rank],
                scale=scale,
                window=_narrower(layer, group.spec, window),
                implementation=self._implementation,
            )
        self.cache = self.cache.with_layer(layer, new)
        return mixed

    def check_all_attended(self) -> None:
        """Raises `ValueError` if a layer did not attend, because its cache would lack these tokens."""
        missing = sorted(self._groups.keys() - self._attended)
        if missing:
            raise ValueError(f"the module did not attend in layers {missing} of its cache_specs")


def _in_evaluation_mode(module: nnx.Module) -> nnx.Module:
    """Returns a copy in evaluation mode that shares the module's variables."""
    copied = nnx.view(module)
    copied.eval()
    return copied


def _training_state(module: nnx.Module) -> dict[str, Array]:
    """Returns path -> array of a module's random-number states and batch statistics."""
    state = nnx.to_pure_dict(nnx.state(module, nnx.Any(nnx.RngState, nnx.BatchStat)))
    paths = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _narrower(layer: int, spec: PagedSpec | StateSpec, window: int | None) -> int | None:
    assert isinstance(spec, PagedSpec), spec
    if window is None or spec.window is None:
        return spec.window if window is None else window
    if window > spec.window:
        raise ValueError(
            f"layer {layer} attends to {window} tokens, but its spec keeps only {spec.window}"
        )
    return window


def _count_layers(specs: tuple[LayerSpec, ...]) -> int:
    layers = [entry.layer for entry in specs]
    if sorted(layers) != list(range(len(specs))) or not specs:
        raise ValueError(f"cache_specs must name layers 0, 1, 2, ... once each, got {layers}")
    for entry in specs:
        roles = [array.role for array in entry.spec.arrays]
        if not isinstance(entry.spec, PagedSpec) or roles != ["key", "value"]:
            raise ValueError(
                f"layer {entry.layer} is of kind {entry.spec.kind!r}; "
                "the layers of a FlaxModel must be gqa(...) or window(...) without quantisation"
            )
    return len(specs)


def _draw(key: PRNGKeyArray, shape: jax.ShapeDtypeStruct, dtype: jnp.dtype) -> Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, shape.shape)
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.zeros(shape.shape, shape.dtype)
    if len(shape.shape) < 2:
        return jnp.ones(shape.shape, dtype)
    return (_INIT_SCALE * jax.random.normal(key, shape.shape, jnp.float32)).astype(dtype)
