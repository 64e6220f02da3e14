"""Generates from a user's own `flax.nnx` module, made of attention layers, as from a built-in family."""

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
    """What a module is given to attend with, once per layer and call."""

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
        """Remembers keys and values of the new tokens and attends, causally, to all of each token's own sequence.

        Args:
            layer: the layer's number in `cache_specs`.
            q: queries, already rotated if the module rotates.
            k: keys, likewise; `heads` is a multiple of `kv_heads`.
            v: values.
            scale: what scores are multiplied by, usually `head_dim ** -0.5`.
            window: tokens each token sees, itself included; `None` is what the layer's spec says.
        """
        ...


@runtime_checkable
class CausalModule(Protocol):
    """What an `nnx.Module` must offer. Tokens of several sequences lie one after the other, without a batch axis."""

    vocab_size: int
    max_positions: int

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns what each layer remembers: `place([gqa(...), window(...), ...])` of `jaxkv.cache.variants`."""
        ...

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], attend: Attend
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns each token's hidden state, ready for `logits`.

        Everything but `attend` must treat tokens one by one; `positions` are those in their own sequences.
        """
        ...

    def logits(self, hidden: Float[Array, "rows hidden_size"]) -> Float[Array, "rows vocab_size"]:
        """Returns the float32 score of every token."""
        ...


@dataclass(frozen=True)
class FlaxModel:
    """The computation of a module in evaluation mode, without its arrays: hashable and static to the compiler.

    Make it once. Its arrays are passed to each call as `params`, a plain nested dict: `model.params_of(module)`, which
    may be taken again whenever training has changed them.

    The module's graph is split here and merged again while a step is traced. Evaluation mode is that of
    `nnx.Module.eval`: `deterministic=True` and `use_running_average=True` in every part of a copy; the module itself
    keeps its mode. A call that draws random numbers or changes batch statistics all the same is refused while it is
    traced. Other values that a call assigns to the module's variables are dropped.

    Examples:
        >>> model = FlaxModel(module)
        >>> jaxkv.generate(model.params_of(module), model, [[1, 2, 3]])

    Attributes:
        graph: the module in evaluation mode, without its arrays.
        implementation: which family of implementations every op insists on; `None` takes the best.
        vocab_size: width of the logits.
        max_positions: longest sequence the model is meant for.
        num_layers: layers that remember something.
        whole_prompts: always false, since a module sees tokens and positions, not lengths.
    """

    graph: nnx.GraphDef
    implementation: str | None
    vocab_size: int
    max_positions: int
    num_layers: int
    whole_prompts: bool
    _shapes: tuple[jax.ShapeDtypeStruct, ...] = field(repr=False)
    _structure: Any = field(repr=False)

    def __init__(self, module: nnx.Module, *, implementation: str | None = None) -> None:
        if not isinstance(module, CausalModule):
            wanted = ("vocab_size", "max_positions", "cache_specs", "__call__", "logits")
            missing = ", ".join(name for name in wanted if not hasattr(module, name))
            raise ValueError(f"{type(module).__name__} lacks {missing}; see CausalModule")
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
            "_shapes": tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves),
            "_structure": structure,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def params_of(self, module: nnx.Module) -> Params:
        """Returns the arrays of the module this was made of, or of another one of the same shape, uncopied.

        Raises:
            ValueError: the module has other parameters than the one this was made of.
        """
        params = nnx.to_pure_dict(nnx.state(module))
        leaves, structure = jax.tree.flatten(params)
        shapes = [leaf.shape for leaf in leaves]
        if structure != self._structure or shapes != [shape.shape for shape in self._shapes]:
            raise ValueError(
                f"this {type(module).__name__} has other parameters than the module FlaxModel was made of"
            )
        return params

    def running(self, implementation: str) -> "FlaxModel":
        """Returns the same model insisting on an implementation."""
        model = copy(self)
        object.__setattr__(model, "implementation", implementation)
        return model

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns what each layer remembers."""
        shapes = jax.tree.unflatten(self._structure, self._shapes)
        return nnx.merge(self.graph, shapes).cache_specs(page_size=page_size, dtype=dtype)

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of `init_params` as shapes and dtypes, without drawing anything."""
        return jax.eval_shape(lambda: self.init_params(jax.random.key(0), dtype))

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Draws random parameters; vectors become ones, and what is no floating-point number zeros."""
        drawn = [
            _draw(jax.random.fold_in(key, index), shape, jnp.dtype(dtype))
            for index, shape in enumerate(self._shapes)
        ]
        return jax.tree.unflatten(self._structure, drawn)

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Runs the module once over the packed tokens, remembering on the way."""
        recorder = _Recorder(self, cache, batch)
        hidden = self._run(params, lambda module: module(batch.tokens, batch.positions, recorder))
        recorder.check_all_attended()
        return recorder.cache, hidden

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Scores every token by the module's own `logits`."""
        logits = self._run(params, lambda module: module.logits(hidden))
        wanted = (hidden.shape[0], self.vocab_size)
        if logits.shape != wanted or logits.dtype != jnp.float32:
            raise ValueError(
                f"the module's logits are {logits.dtype}{list(logits.shape)}, wanted float32{list(wanted)}"
            )
        return logits

    def _run(self, params: Params, call: Callable[[Any], Array]) -> Array:
        """Calls the module with its parameters put in; raises if the call is one of training."""
        if isinstance(params, nnx.Module):
            raise ValueError(
                f"params is the nnx module {type(params).__name__}; pass model.params_of(module)"
            )
        if isinstance(params, nnx.State):
            params = nnx.to_pure_dict(params)
        if jax.tree.structure(params) != self._structure:
            raise ValueError(
                "params has other entries than the module FlaxModel was made of; pass model.params_of(module)"
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
                "statistics although it is in evaluation mode; make both depend on the attributes `deterministic` "
                "and `use_running_average`, which `nnx.Module.eval` sets"
            )
        return result


class _Recorder:
    """The `attend` of one traced call: holds the cache as it goes from layer to layer."""

    def __init__(self, model: FlaxModel, cache: Cache, batch: StepBatch) -> None:
        # Which layers have equal specs depends neither on the page size nor on the dtype.
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
                "attended twice in one call" if layer in self._attended else "is not in cache_specs"
            )
            raise ValueError(f"layer {layer} {why}")
        self._attended.add(layer)
        group = self._groups[layer]
        held = self.cache.layer(layer)
        for name, value in (("key", k), ("value", v)):
            if value.shape[1:] != held[name].shape[2:]:
                raise ValueError(
                    f"layer {layer} {name} has [kv_heads, head_dim] {list(value.shape[1:])}, "
                    f"its spec {list(held[name].shape[2:])}"
                )
        with at(f"layer {layer}"):
            new, mixed = write_and_attend(
                held,
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
        """Raises if a layer was left out: its cache would hold nothing for these tokens."""
        missing = sorted(self._groups.keys() - self._attended)
        if missing:
            raise ValueError(f"the module did not attend in layers {missing} of its cache_specs")


def _in_evaluation_mode(module: nnx.Module) -> nnx.Module:
    """Returns a copy in evaluation mode; its variables are those of the module."""
    copied = nnx.view(module)
    copied.eval()
    return copied


def _training_state(module: nnx.Module) -> dict[str, Array]:
    """Returns the states of random numbers and the batch statistics of a module by path."""
    state = nnx.to_pure_dict(nnx.state(module, nnx.Any(nnx.RngState, nnx.BatchStat)))
    paths = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _narrower(layer: int, spec: PagedSpec | StateSpec, window: int | None) -> int | None:
    assert isinstance(spec, PagedSpec), spec
    if window is None or spec.window is None:
        return spec.window if window is None else window
    if window > spec.window:
        raise ValueError(f"layer {layer} attends to {window} tokens but remembers {spec.window}")
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
                "a FlaxModel's layers are plain gqa(...) or window(...)"
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
