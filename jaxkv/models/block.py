"""The interface of a decoder's blocks: parameters, cache spec and computation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import PagedSpec, StateSpec
from jaxkv.config.model import ModelConfig
from jaxkv.layers.linear import Joining
from jaxkv.layers.rope import Angles

BlockOutput = tuple[dict[str, Array], Any]
"""The result of a block: role -> the layer's updated cache arrays, and the output `[tokens, hidden_size]`.

The output is added to the residual stream by the decoder. If `BlockContext.joining` is given, the block adds it
itself and returns the sum instead, as a `Weighed` if a norm follows.
"""


class Leaf(NamedTuple):
    """The declaration of one parameter.

    Attributes:
        shape: its shape.
        is_scale: whether it is the weight of a norm or the like, which is initialised to ones; others are random.
        dtype: its dtype name; `None` for the model's dtype.
        is_shared: whether layers use the array of their owner (`ModelConfig.owners`); otherwise each has its own.
    """

    shape: tuple[int, ...]
    is_scale: bool = False
    dtype: str | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class BlockContext:
    """The inputs of a block beside hidden states, parameters and cache.

    Attributes:
        batch: the step's metadata.
        layer: number of the layer.
        tables: page or state tables of the layer's group; `None` for a block without cache.
        angles: rotary angles of the tokens.
        embeddings: the tokens' embeddings, with which the residual stream begins.
        implementation: family of implementations that every op must use; `None` for the best.
        joining: the residual stream, for a block that adds its output to it; otherwise `None`.
    """

    batch: StepBatch
    layer: int
    tables: PagedTables | StateTables | None
    angles: Angles
    embeddings: Float[Array, "tokens hidden_size"]
    implementation: str | None
    joining: Joining | None = None


class Block(NamedTuple):
    """One kind of block.

    Attributes:
        leaves: returns name -> declaration of its parameters; names are unique within a layer.
        run: computes the block, given config, the layer's parameters by name, the layer's cache arrays by role,
            normalised hidden states `[tokens, hidden_size]` (before a ">" in the pattern, the residual stream) and the
            context; returns a `BlockOutput`.
        unit: unit of its cache, "page" or "state"; empty for a block without cache. A layer has at most one block of
            each.
        spec: returns its cache spec, given config, layer, page size in tokens and dtype name.
        joins: whether it accepts `BlockContext.joining` and `Normed` hidden states.
    """

    leaves: Callable[[ModelConfig], dict[str, Leaf]]
    run: Callable[
        [
            ModelConfig,
            Mapping[str, Array],
            Mapping[str, Array],
            Any,
            BlockContext,
        ],
        BlockOutput,
    ]
    unit: str = ""
    spec: Callable[[ModelConfig, int, int, str], PagedSpec | StateSpec] | None = None
    joins: bool = False
