"""`AdapterStacks`: the low-rank factors of all loaded adapters on the device, one stack for each weight."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.config.lora import LoraConfig
from jaxkv.layers.adapted import LowRank
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Model
from jaxkv.models.registry import rules_for
from jaxkv.models.tensor_parallel import TensorParallel
from jaxkv.weights.load import DTYPES
from jaxkv.weights.lora_leaves import LeafFactors, LeafSizes, LoraLeaves
from jaxkv.weights.quantised.weight_forms import bytes_of_types


class AdapterStacks:
    """The factors on the device. Programs take them as an argument, so a change compiles nothing.

    Args:
        model: the model.
        config: how many adapters of which rank.
        dtype: dtype name of the model's parameters, which is that of the factors.

    Attributes:
        config: how many adapters of which rank.
        leaves: the weights that adapters may be added to.
        arrays: dotted path of a weight -> its factors; zeros where no adapter was loaded.

    Raises:
        ValueError: the model is no `Decoder`, or has no such weights.
    """

    def __init__(self, model: Model, config: LoraConfig, dtype: str) -> None:
        self.config = config
        self.leaves = leaves_of(model, config, dtype)
        self._model = model
        self._dtype = DTYPES[dtype]
        self.arrays: Mapping[str, LowRank] = jax.tree.map(
            lambda kind: jnp.zeros(kind.shape, kind.dtype, device=kind.sharding),
            _types(model, self.leaves, config, dtype),
        )

    def write(self, slot: int, factors: Mapping[str, LeafFactors]) -> None:
        """Puts an adapter in the place of another. Programs in flight go on with the arrays that they were given.

        Args:
            slot: 1 + its index in the stack.
            factors: dotted path of a weight -> the adapter's factors; the adapter leaves other weights as they are.
        """
        index = np.int32(slot - 1)
        # The adapter as stacks of one.
        own = {
            path: LowRank(jnp.asarray(inner[None]), jnp.asarray(outer[:, None]))
            for path, sizes in self.leaves.sizes.items()
            for inner, outer in [factors.get(path) or _zeros(sizes, self._dtype)]
        }
        if isinstance(self._model, TensorParallel):
            own = self._model.divided(own)
        written = {
            path: jax.device_put(
                _write(stack, index, own[path]), jax.tree.map(lambda array: array.sharding, stack)
            )
            for path, stack in self.arrays.items()
        }
        # They are part of a step's parameters, which are complete before it is launched.
        self.arrays = jax.block_until_ready(written)


def leaves_of(model: Model, config: LoraConfig, dtype: str) -> LoraLeaves:
    """Returns the weights of a model that adapters may be added to.

    Raises:
        ValueError: the model is no `Decoder`, or has no such weights.
    """
    if isinstance(model, TensorParallel):
        model = model.whole
    if not isinstance(model, Decoder):
        raise ValueError(
            f"requests add adapters to a Decoder alone, got a {type(model).__name__}; turn lora off"
        )
    leaves = LoraLeaves(model, rules_for(model.config), config.max_rank, dtype)
    if not leaves.sizes:
        raise ValueError(
            f"this {model.config.family} has no weights that requests could add adapters to; turn lora off"
        )
    return leaves


def stack_bytes(model: Model, config: LoraConfig | None, dtype: str) -> int:
    """Returns the bytes that `AdapterStacks` takes on each device; 0 without a config."""
    if config is None:
        return 0
    return bytes_of_types(_types(model, leaves_of(model, config, dtype), config, dtype))


def _types(model: Model, leaves: LoraLeaves, config: LoraConfig, dtype: str) -> dict[str, LowRank]:
    """Returns the types of the stacks, with shardings if several devices divide them."""

    def kind(*shape: int) -> Any:  # noqa: ANN401 - stands for an array
        return jax.ShapeDtypeStruct(shape, DTYPES[dtype])

    count = config.max_adapters
    types: Any = {
        path: LowRank(kind(count, sizes.rank, sizes.width), kind(sizes.out, count, sizes.rank))
        for path, sizes in leaves.sizes.items()
    }
    return model.divided_types(types) if isinstance(model, TensorParallel) else types


def _zeros(sizes: LeafSizes, dtype: np.dtype) -> LeafFactors:
    return LeafFactors(
        np.zeros((sizes.rank, sizes.width), dtype), np.zeros((sizes.out, sizes.rank), dtype)
    )


@jax.jit
def _write(
    stack: LowRank,
    index: Int[Array | np.generic, ""],
    one: LowRank,
) -> LowRank:
    return LowRank(
        stack.inner.at[index].set(one.inner[0]), stack.outer.at[:, index].set(one.outer[:, 0])
    )
