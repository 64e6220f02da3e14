"""What a block of a decoder is: its parameters, its memory and its computation. Knows no kind of block."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import PagedSpec, StateSpec
from jaxkv.config.model import ModelConfig
from jaxkv.layers.linear import Joining
from jaxkv.layers.rope import Angles

Said = tuple[dict[str, Array], Any]
"""The arrays of a block's memory after the step, by role, and what it adds to the residual stream.

Of a block that adds to it by itself the sum, in a `Weighed` if a norm comes next.
"""


class Leaf(NamedTuple):
    """One parameter before it exists; a scale starts as ones, anything else is drawn.

    Attributes:
        shape: its shape.
        is_scale: whether it multiplies.
        dtype: its dtype's name, if that is not the model's.
    """

    shape: tuple[int, ...]
    is_scale: bool = False
    dtype: str | None = None


@dataclass(frozen=True)
class Step:
    """What a block is told of one step.

    Attributes:
        batch: the step's metadata.
        layer: the block's layer.
        tables: where it reads and writes what it remembers; `None` if it remembers nothing.
        angles: the tokens' rotary angles.
        implementation: of the ops; `None` takes the best.
        joining: the residual stream, for a block that adds to it by itself.
    """

    batch: StepBatch
    layer: int
    tables: PagedTables | StateTables | None
    angles: Angles
    implementation: str | None
    joining: Joining | None = None


class Block(NamedTuple):
    """One kind of block.

    Attributes:
        leaves: its parameters by name; no two blocks of a layer may share a name.
        run: called with config, the layer's parameters, the layer's arrays in the cache, normalised hidden states and
            the step; returns those arrays that it changed.
        unit: what its memory comes in, "page" or "state"; empty if it remembers nothing. A layer has one block of each.
        spec: what it remembers, given the layer, the page size and the dtype's name.
        joins: it may be given `Step.joining`, and `Normed` hidden states; then it returns the sum.
    """

    leaves: Callable[[ModelConfig], dict[str, Leaf]]
    run: Callable[
        [
            ModelConfig,
            Mapping[str, Array],
            Mapping[str, Array],
            Any,
            Step,
        ],
        Said,
    ]
    unit: str = ""
    spec: Callable[[ModelConfig, int, int, str], PagedSpec | StateSpec] | None = None
    joins: bool = False
