"""Arranges an adapter's factors as the model stores the weights that they are added to: fused and reordered.

A leaf of several tensors, such as the projections of query, key and value, gets one pair of factors for all of them:
the first factors one below the other, and the second ones as blocks on a diagonal. What moves rows of the weight moves
rows of the second factor alike, so the rules of the weights are used as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped

from jaxkv.config.model import ModelConfig
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.load import DTYPES
from jaxkv.weights.lora import Adapter
from jaxkv.weights.rules import Recipe, RuleSet, expand
from jaxkv.weights.stored_leaf import Arrangement
from jaxkv.wording import clip, listed

_MOVES_ROWS = ("copy", "concat", "select")
"""Operations of rules that leave the inputs of a weight as they are."""


@runtime_checkable
class Adaptable(Protocol):
    """The members of a model with leaves that adapters may be added to."""

    @property
    def config(self) -> ModelConfig:
        """Architecture and sizes of the model."""
        ...

    def adapted_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns dotted path -> shape [out, in] of these leaves."""
        ...


class LeafFactors(NamedTuple):
    """The factors of one leaf.

    Attributes:
        inner: the first factor.
        outer: the second factor, with the scale.
    """

    inner: Shaped[np.ndarray, "rank in"]
    outer: Shaped[np.ndarray, "out rank"]


class LeafSizes(NamedTuple):
    """The sizes of the factors of one leaf, of every adapter.

    Attributes:
        out: rows of the leaf.
        rank: the highest rank of an adapter, for each of the leaf's tensors.
        width: columns of the leaf.
    """

    out: int
    rank: int
    width: int


class LoraLeaves:
    """The leaves of a model that adapters may be added to.

    Args:
        model: the model.
        rules: which tensors make up which parameter.
        max_rank: highest rank of an adapter.
        dtype: dtype name of the factors.

    Attributes:
        sizes: dotted path of a leaf -> the sizes of its factors.
    """

    def __init__(self, model: Adaptable, rules: RuleSet, max_rank: int, dtype: str) -> None:
        self._rules, self._config = rules, model.config
        self._max_rank, self._dtype = max_rank, DTYPES[dtype]
        self._shapes = model.adapted_shapes()
        recipes = expand(rules, model.config)
        self._recipes = {path: recipes[path] for path in self._shapes}
        for recipe in self._recipes.values():
            assert recipe.combine in _MOVES_ROWS, recipe
            assert not recipe.offset, recipe
        self.sizes = {
            path: LeafSizes(shape[0], len(self._recipes[path].sources) * max_rank, shape[1])
            for path, shape in self._shapes.items()
        }

    def factors(self, adapters: Mapping[str, Adapter], where: Path) -> dict[str, LeafFactors]:
        """Returns dotted path of a leaf -> its factors, for the leaves that an adapter changes.

        Args:
            adapters: name of a weight in the checkpoint -> its factors.
            where: the adapter's folder, for error messages.

        Raises:
            BadCheckpoint: it changes something else, has another shape or a higher rank, or is not finite in `dtype`.
        """
        named = {self._rules.name_of(name, self._config): one for name, one in adapters.items()}
        known = {name for recipe in self._recipes.values() for name in recipe.sources}
        # An adapter may have factors of weights that the model ignores in a checkpoint too.
        unknown = named.keys() - known
        if strange := sorted(
            name for name in unknown if not self._rules.ignores(name, self._config)
        ):
            raise BadCheckpoint(
                f"{where} adapts {clip(listed(strange[:3]))}, to which requests cannot add adapters: they add them to "
                f"projections of attention, feed-forwards and recurrent mixers of this {self._config.family} model; "
                "LLM.load_lora merges an adapter into any weight, for all requests"
            )
        made = {}
        for path, recipe in self._recipes.items():
            if any(name in named for name in recipe.sources):
                made[path] = self._leaf(path, recipe, named, where)
        return made

    def _leaf(
        self, path: str, recipe: Recipe, named: Mapping[str, Adapter], where: Path
    ) -> LeafFactors:
        out, rank, width = self.sizes[path]
        shapes = recipe.source_shapes(self._shapes[path])
        inner = np.zeros((rank, width), np.float32)
        outer = np.zeros((sum(rows for rows, _ in shapes), rank), np.float32)
        first_row = 0
        for at, (name, shape) in enumerate(zip(recipe.sources, shapes, strict=True)):
            if (low := named.get(name)) is not None:
                self._check(name, low, shape, where)
                begin = at * self._max_rank
                end = begin + len(low.inner)
                inner[begin:end] = low.inner
                with np.errstate(over="ignore", invalid="ignore"):  # `_rounded` refuses infinities.
                    scaled = np.float32(low.scale) * low.outer
                outer[first_row : first_row + shape[0], begin:end] = scaled
            first_row += shape[0]
        arrangement = Arrangement(
            (out, rank), shapes[0][0], recipe.combine, recipe.regroup, recipe.pairs
        )
        return LeafFactors(
            self._rounded(inner, path, where),
            self._rounded(np.ascontiguousarray(arrangement.apply(outer, np)), path, where),
        )

    def _check(self, name: str, low: Adapter, shape: tuple[int, ...], where: Path) -> None:
        rank, got = len(low.inner), (low.outer.shape[0], low.inner.shape[1])
        if got != shape:
            raise BadCheckpoint(
                f"{where} is for a {name} of shape {list(got)}, the model's has {list(shape)}"
            )
        if rank > self._max_rank:
            raise BadCheckpoint(
                f"{where} has rank {rank} for {name}, and there is room for {self._max_rank}; give "
                f"LoraConfig(max_rank={rank}), or max_lora_rank={rank}"
            )

    def _rounded(
        self, values: Float[np.ndarray, "rows columns"], path: str, where: Path
    ) -> Shaped[np.ndarray, "rows columns"]:
        with np.errstate(over="ignore"):
            rounded = values.astype(self._dtype)
        # An infinity would become NaN in the products of requests with other adapters.
        if not np.isfinite(rounded.astype(np.float32)).all():
            raise BadCheckpoint(f"{where}: a factor of {path} is not finite in {self._dtype}")
        return rounded
