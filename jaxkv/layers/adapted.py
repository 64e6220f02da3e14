"""`Adapted`: a weight with the low-rank adapters of several fine-tunes beside it, of which each token uses at most one.

The adapters of all tokens are computed in two products over the stack, as in Punica (Chen et al., 2023), and a token's
own is selected between them. So a step takes any mixture of adapters, and no program depends on which they are.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fixed_order import by_row_tiles
from pallas_kernels.formats.few_bits import FewBits

LayerParams = Mapping[str, Any]
"""A layer's parameters by name: arrays, `FewBits` for those of 8 or 4 bits, or in a step with adapters an `Adapted` for
a leaf with `Leaf.adapts`."""


class LowRank(NamedTuple):
    """The low-rank factors of one weight, of all adapters. An adapter of a lower rank has zeros past it.

    Attributes:
        inner: the first factors.
        outer: the second factors, with the scale.
    """

    inner: Float[Array, "adapters rank in"]
    outer: Float[Array, "out adapters rank"]


class Adapted(NamedTuple):
    """One weight in a step with adapters.

    Attributes:
        weight: the model's weight.
        low_rank: the adapters' factors.
        slots: for each token, 1 + its adapter's index in the stack; 0 for none.
    """

    weight: Float[Array, "out in"] | FewBits
    low_rank: LowRank
    slots: Int[Array, " tokens"]

    def added_to(
        self, y: Float[Array, "tokens out"], x: Float[Array, "tokens in"]
    ) -> Float[Array, "tokens out"]:
        """Returns `y` plus each token's low-rank product of `x`; tokens without an adapter keep the bits of `y`."""
        total = y.astype(jnp.float32) + self._product(x)
        return self.chosen(total.astype(y.dtype), y)

    def chosen(
        self, adapted: Float[Array, "tokens width"], plain: Float[Array, "tokens width"]
    ) -> Float[Array, "tokens width"]:
        """Returns the rows of `adapted` for tokens with an adapter, and those of `plain` for the others."""
        return jnp.where(self.slots[:, None] > 0, adapted, plain)

    def _product(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        """Returns each token's low-rank product in float32; rounded to the factors' dtype between the two products."""
        inner, outer = self.low_rank
        adapters, rank, width = inner.shape
        assert x.shape[0] == self.slots.shape[0], "a row of `x` is a token of the step"
        low = _dot(x.astype(inner.dtype), inner.reshape(-1, width)).reshape(-1, adapters, rank)
        # Selected, not multiplied by zero, so that no infinity of another adapter becomes NaN here.
        low = jnp.where(self._own[:, :, None], low, jnp.zeros_like(low))
        return _dot(
            low.reshape(-1, adapters * rank).astype(outer.dtype),
            outer.reshape(-1, adapters * rank),
        )

    @property
    def _own(self) -> Bool[Array, "tokens adapters"]:
        index = jnp.arange(self.low_rank.inner.shape[0], dtype=self.slots.dtype)
        return self.slots[:, None] == 1 + index[None]


def _dot(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"]
) -> Float[Array, "tokens out"]:
    """Returns `x @ weight.T` in float32; exact for float32, as `jaxkv.layers.linear.project`."""

    def multiply(rows: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        return jax.lax.dot_general(
            rows,
            weight,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    return by_row_tiles(multiply, x)


def with_adapters(
    params: Any,  # noqa: ANN401 - a pytree of arrays
    stacks: Mapping[str, LowRank],
    slots: Int[Array, " tokens"],
) -> Any:  # noqa: ANN401 - the same pytree
    """Returns parameters with an `Adapted` in the place of each weight that has a stack.

    Args:
        params: the model's parameters.
        stacks: dotted path of a parameter -> its low-rank factors.
        slots: see `Adapted`.
    """

    def wrapped(
        path: Any,  # noqa: ANN401 - JAX's key path
        leaf: Array | FewBits,
    ) -> Array | FewBits | Adapted:
        stack = stacks.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return leaf if stack is None else Adapted(leaf, stack, slots)

    return jax.tree_util.tree_map_with_path(
        wrapped, params, is_leaf=lambda node: isinstance(node, FewBits)
    )
