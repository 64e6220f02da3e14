"""`LeafPlan`: which tensors a parameter leaf is made of, and how; `StoredLeaf` reads them from a checkpoint."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Shaped

from jaxkv.weights.rules import Combine, HeadPairs, Regrouped

CPU_ALIGNMENT = 64
"""Alignment of memory that JAX's CPU device takes over without a copy."""


@runtime_checkable
class Tensor(Protocol):
    """A named tensor that leaves are made of, in a checkpoint or in memory."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        ...

    @property
    def path(self) -> object:
        """Its place, such as a file, for error messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether its last two axes are exchanged; see `QuantisedTensor`."""
        ...

    def equals(self, other: object) -> bool:
        """Whether both hold the same numbers."""
        ...


@runtime_checkable
class Readable(Tensor, Protocol):
    """A tensor in a checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...

    def read(self, target: Shaped[np.ndarray, " elements"], first: int = 0) -> None:
        """Fills `target` with its elements from `first` on in row order, cast to the target's dtype."""
        ...


class Arrangement(NamedTuple):
    """The moves of stored numbers from a file to their places in a leaf; none is changed.

    Attributes:
        shape: shape of the leaf.
        rows: rows of the first source, which are those that `regroup` reorders.
        combine: the operation (see `Rule`).
        regroup: reordering of the first source's rows; `None` for none.
        pairs: rows with interleaved rotary pairs; `None` for none.
    """

    shape: tuple[int, ...]
    rows: int
    combine: Combine
    regroup: Regrouped | None = None
    pairs: HeadPairs | None = None

    @property
    def moves_nothing(self) -> bool:
        """Whether the leaf has the stored numbers in their order."""
        return (
            self.regroup is None
            and self.pairs is None
            and self.combine not in (*_AXES, *_TRANSPOSING)
        )

    def apply(self, stored: Any, arrays: Any) -> Any:  # noqa: ANN401 - of NumPy or of JAX
        """Returns the leaf.

        Args:
            stored: the sources' numbers, in the files' order and `StoredLeaf.stored_shape`.
            arrays: the module whose array `stored` is: `numpy` or `jax.numpy`.
        """
        order = self._order(stored.shape[0])
        if order is not None:
            stored = arrays.take(stored, order, axis=0)
        if self.combine in _AXES:
            return _AXES[self.combine](stored, arrays)
        if self.combine in _TRANSPOSING:
            return stored.swapaxes(0, 1)
        return stored.reshape(self.shape)

    def _order(self, total: int) -> Int[np.ndarray, " rows"] | None:
        """Returns the numbers of the stored rows in the leaf's order; `None` if it is theirs."""
        if self.regroup is None and self.pairs is None:
            return None
        order = np.arange(total, dtype=np.int32)
        if self.regroup is not None:
            groups, sections, wanted = self.regroup
            bounds = np.cumsum((0, *sections))
            assert self.rows == groups * bounds[-1], self
            grouped = order[: self.rows].reshape(groups, -1)
            chosen = [grouped[:, bounds[at] : bounds[at + 1]].reshape(-1) for at in wanted]
            order = np.concatenate((*chosen, order[self.rows :]))
        if self.pairs is not None:
            heads = order[: self.pairs.rows].reshape(-1, self.pairs.head_dim)
            rotated = heads[:, : self.pairs.rotary_dim]
            rotated[...] = np.concatenate((rotated[:, ::2], rotated[:, 1::2]), axis=1)
        return order


_TRANSPOSING = ("taps", "transpose", "stack_transpose")


def _deinterleave(stored: Any, arrays: Any) -> Any:  # noqa: ANN401 - of NumPy or of JAX
    """Puts the even positions of the last axis before the odd ones."""
    return arrays.concatenate((stored[..., ::2], stored[..., 1::2]), axis=-1)


_AXES: Mapping[str, Callable[[Any, Any], Any]] = {
    "deinterleave": _deinterleave,
    "deinterleave_rows": lambda stored, arrays: arrays.concatenate(
        (stored[:, ::2], stored[:, 1::2]), axis=1
    ),
    "deinterleave_transpose": lambda stored, arrays: _deinterleave(stored, arrays).swapaxes(1, 2),
    "swap_last": lambda stored, arrays: arrays.swapaxes(stored, 1, 2),
    "last_axis_first": lambda stored, arrays: arrays.moveaxis(stored, 2, 0),
}


@dataclass(frozen=True)
class LeafPlan[S: Tensor]:
    """The tensors and operations that make one parameter leaf (see `Rule`).

    Attributes:
        target: dotted path of the leaf.
        dtype: dtype of the leaf.
        sources: its tensors, in order.
        arrangement: the moves of their numbers.
        offset: number that is added to every element.
    """

    target: str
    dtype: np.dtype
    sources: tuple[S, ...]
    arrangement: Arrangement
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return self.arrangement.shape

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the sources' numbers before they are arranged."""
        combine, shape = self.arrangement.combine, self.arrangement.shape
        if combine == "select" or combine in _AXES:
            return self.sources[0].shape
        if combine in _TRANSPOSING:
            return (shape[1], shape[0], *shape[2:])
        return shape


@dataclass(frozen=True)
class StoredLeaf(LeafPlan[Readable]):
    """One parameter leaf whose tensors are in a checkpoint."""

    @classmethod
    def of[S: Readable](cls, plan: LeafPlan[S]) -> "StoredLeaf":
        """Returns the leaf of a plan."""
        return cls(plan.target, plan.dtype, plan.sources, plan.arrangement, plan.offset)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes in the files."""
        return sum(source.nbytes for source in self.sources)

    @cached_property
    def host_bytes(self) -> int:
        """Bytes that `read` takes on the host; arranging needs a second buffer, or two."""
        combine = self.arrangement.combine
        copies = 2 if combine in _AXES else int(not self.arrangement.moves_nothing)
        return (math.prod(self.stored_shape) + copies * math.prod(self.shape)) * self.dtype.itemsize

    @property
    def row_elements(self) -> int:
        """Elements of a stored row: of the last axis."""
        return self.stored_shape[-1] if self.stored_shape else 1

    @property
    def num_rows(self) -> int:
        """Number of stored rows: of all axes but the last."""
        return math.prod(self.stored_shape[:-1])

    def read(self) -> Shaped[np.ndarray, "..."]:
        """Returns the whole leaf in an array of its own.

        Raises:
            BadCheckpoint: a file has become shorter, or a number is not finite in the leaf's dtype.
        """
        stored = aligned(self.stored_shape, self.dtype, CPU_ALIGNMENT)
        self.read_rows(stored.reshape(-1), 0)
        if self.offset:
            stored += np.asarray(self.offset, self.dtype)
        return np.ascontiguousarray(self.arrangement.apply(stored, np))

    def read_rows(self, target: Shaped[np.ndarray, " elements"], first: int) -> None:
        """Fills `target` with stored rows from row `first` on, rounded to its dtype, without `offset`.

        Raises:
            BadCheckpoint: as `read`.
        """
        begin, filled = first * self.row_elements, 0
        for source in self.sources:
            size = math.prod(source.shape)
            if begin < size and filled < target.size:
                count = min(size - begin, target.size - filled)
                source.read(target[filled : filled + count], begin)
                filled += count
            begin = max(0, begin - size)
        assert filled == target.size, (self.target, first, filled, target.size)


def aligned(shape: tuple[int, ...], dtype: np.dtype, to: int) -> Shaped[np.ndarray, "..."]:
    """Returns an array of undefined numbers whose address is a multiple of `to`."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + to, np.uint8)
    begin = -memory.ctypes.data % to
    return memory[begin : begin + size].view(dtype).reshape(shape)
