"""The interface of a decoder's blocks: parameters, cache spec and computation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import PagedSpec, StateSpec
from jaxkv.config.model import ModelConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import Joining, Normed
from jaxkv.layers.recurrence import StateWrite
from jaxkv.layers.rope import Angles
from jaxkv.layers.shards import Shards

BlockOutput = tuple[dict[str, Array], Any]
"""The result of a block: role -> the layer's updated cache arrays, and the output `[tokens, hidden_size]`.

The output is added to the residual stream by the decoder. If `BlockInputs.joining` is given, the block adds it
itself and returns the sum instead, as a `Weighed` if a norm follows.
"""


class Split(NamedTuple):
    """The division of a parameter along one axis among the devices of a tensor-parallel model.

    Attributes:
        axis: the axis.
        parts: the size of each consecutive part of the axis, and the number of units in it that stay whole, such as
            heads. A device has its share of the units of every part, part after part. Devices share a unit if a part
            has fewer units than there are devices; a part of one unit is on all of them. Empty for the bias of a sum
            over the devices: the first device has it, and the others have zeros.
    """

    axis: int = 0
    parts: tuple[tuple[int, int], ...] = ()


ONCE = Split()
"""The split of the bias of a sum over the devices."""


class Leaf(NamedTuple):
    """The declaration of one parameter.

    Attributes:
        shape: its shape.
        is_scale: whether it is the weight of a norm or the like, which is initialised to ones; others are random.
        dtype: its dtype name; `None` for the model's dtype.
        is_shared: whether layers use the array of their owner (`ModelConfig.owners`); otherwise each has its own.
        adapts: whether requests may add low-rank adapters to it (`jaxkv.layers.adapted`): a matrix [out, in] that the
            block uses in `linear` or `matmul` of `jaxkv.layers.linear` alone, with a row of `x` for each token.
        is_experts: whether it is the weights of all experts, which `mixture_of_experts` alone uses.
        split: how the devices of a tensor-parallel model divide it; `None` if each has all of it.
    """

    shape: tuple[int, ...]
    is_scale: bool = False
    dtype: str | None = None
    is_shared: bool = False
    adapts: bool = False
    is_experts: bool = False
    split: Split | None = None

    @property
    def takes_few_bits(self) -> bool:
        """Whether it may be a `FewBits`, since all that uses it takes one."""
        return self.adapts or self.is_experts


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """Everything that one block of one layer is computed from.

    Attributes:
        config: config of the model.
        layer: number of the layer. Layers with equal windows share a trace: a block may make nothing else depend on it.
        params: the layer's parameters by name.
        x: normalised hidden states; before a ">" in the pattern, the residual stream.
        batch: the step's metadata.
        angles: rotary angles of the tokens.
        embeddings: the tokens' embeddings, with which the residual stream begins.
        implementation: family of implementations that every op must use; `None` for the best.
        stream: the residual stream before the norm that made `x`, for a block with `Block.reads_stream`.
        joining: the residual stream, for a block that adds its output to it; otherwise `None`.
        cache: the layer's cache arrays by role; empty for a block without cache.
        tables: page or state tables of the layer's group; `None` for a block without cache.
        chosen_experts: a mixture of experts appends the experts that each token's router chose; `None` if they are not
            kept.
        shards: the devices of which the block computes one's part; `None` for a whole block.
        state_writes: a block with states adds, by layer, how it writes them; `None` if they are not written again.
    """

    config: ModelConfig
    layer: int
    params: LayerParams
    x: Float[Array, "tokens hidden_size"] | Normed
    batch: StepBatch
    angles: Angles
    embeddings: Float[Array, "tokens hidden_size"]
    implementation: str | None
    stream: Float[Array, "tokens hidden_size"] | None = None
    joining: Joining | None = None
    cache: Mapping[str, Array] = field(default_factory=dict)
    tables: PagedTables | StateTables | None = None
    chosen_experts: list[Int[Array, "tokens top_k"]] | None = None
    shards: Shards | None = None
    state_writes: dict[int, list[StateWrite]] | None = None

    @property
    def layer_writes(self) -> list[StateWrite] | None:
        """The entry of `state_writes` for this layer."""
        return None if self.state_writes is None else self.state_writes.setdefault(self.layer, [])

    @property
    def hidden(self) -> Float[Array, "tokens hidden_size"]:
        """`x` of a block without `Block.joins`, which is never `Normed`."""
        assert not isinstance(self.x, Normed)
        return self.x

    @property
    def pages(self) -> PagedTables:
        """`tables` of a block whose cache is paged."""
        assert isinstance(self.tables, PagedTables)
        return self.tables

    @property
    def states(self) -> StateTables:
        """`tables` of a block whose cache is a state."""
        assert isinstance(self.tables, StateTables)
        return self.tables


ARRAYS = ("params", "x", "batch", "angles", "embeddings", "stream", "joining", "cache", "tables")
"""Fields of `BlockInputs` that hold arrays."""


class Block(NamedTuple):
    """One kind of block.

    Attributes:
        leaves: returns name -> declaration of its parameters; names are unique within a layer.
        run: computes the block.
        unit: unit of its cache, "page" or "state"; empty for a block without cache. A layer has at most one block of
            each.
        spec: returns its cache spec, given config, layer, page size in tokens and dtype name.
        joins: whether it accepts `BlockInputs.joining` and `Normed` hidden states.
        reads_stream: whether it gets `BlockInputs.stream`.
        sums: whether its output is summed over the devices already, as it needs the sum itself; it is then the only
            block of its stage.
    """

    leaves: Callable[[ModelConfig], dict[str, Leaf]]
    run: Callable[[BlockInputs], BlockOutput]
    unit: str = ""
    spec: Callable[[ModelConfig, int, int, str], PagedSpec | StateSpec] | None = None
    joins: bool = False
    reads_stream: bool = False
    sums: bool = False


def required[T](part: T | None) -> T:
    """Returns the sizes that a block needs from a config, which was checked when it was made."""
    assert part is not None, "the config was checked when it was made"
    return part
