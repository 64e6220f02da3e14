"""`AdapterStacks`: the low-rank factors of all loaded adapters on the device, one stack for each weight."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxkv.config.lora import LoraConfig
from jaxkv.layers.adapted import LowRank
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Model
from jaxkv.models.registry import rules_for
from jaxkv.weights.load import DTYPES
from jaxkv.weights.lora_leaves import LeafFactors, LeafSizes, LoraLeaves


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
        self._dtype = DTYPES[dtype]
        self.arrays: Mapping[str, LowRank] = {
            path: LowRank(
                jnp.zeros((config.max_adapters, sizes.rank, sizes.width), dtype),
                jnp.zeros((sizes.out, config.max_adapters, sizes.rank), dtype),
            )
            for path, sizes in self.leaves.sizes.items()
        }

    def write(self, slot: int, factors: Mapping[str, LeafFactors]) -> None:
        """Puts an adapter in the place of another. Programs in flight go on with the arrays that they were given.

        Args:
            slot: 1 + its index in the stack.
            factors: dotted path of a weight -> the adapter's factors; the adapter leaves other weights as they are.
        """
        index = np.int32(slot - 1)
        written = {}
        for path, stack in self.arrays.items():
            inner, outer = factors.get(path) or _zeros(self.leaves.sizes[path], self._dtype)
            written[path] = _write(stack, index, inner, outer)
        self.arrays = written


def leaves_of(model: Model, config: LoraConfig, dtype: str) -> LoraLeaves:
    """Returns the weights of a model that adapters may be added to.

    Raises:
        ValueError: the model is no `Decoder`, or has no such weights.
    """
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
    """Returns the bytes that `AdapterStacks` takes on the device; 0 without a config."""
    if config is None:
        return 0
    sizes = leaves_of(model, config, dtype).sizes.values()
    elements = sum(one.rank * (one.out + one.width) for one in sizes)
    return config.max_adapters * elements * DTYPES[dtype].itemsize


def _zeros(sizes: LeafSizes, dtype: np.dtype) -> LeafFactors:
    return LeafFactors(
        np.zeros((sizes.rank, sizes.width), dtype), np.zeros((sizes.out, sizes.rank), dtype)
    )


@jax.jit
def _write(
    stack: LowRank,
    index: Int[Array | np.generic, ""],
    inner: Shaped[Array | np.ndarray, "rank in"],
    outer: Shaped[Array | np.ndarray, "out rank"],
) -> LowRank:
    return LowRank(stack.inner.at[index].set(inner), stack.outer.at[:, index].set(outer))
