"""`FewBitsLeaf`: a parameter that becomes a `FewBits`; its arrays are read like those of other leaves, row by row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxkv.weights.quantised.quantised_tensor import STORED, QuantisedTensor
from jaxkv.weights.rules import Combine
from jaxkv.weights.staging import Placed
from jaxkv.weights.stored_leaf import Arrangement, LeafPlan, StoredLeaf
from pallas_kernels.formats.few_bits import CODES, FewBits

_LEAST_GROUP = 32
"""Fewest columns of a group, unless it is a whole row. Weights with smaller ones are widened."""

MOST_AT_ONCE = 2**24
"""Most weights whose codes a reader makes at once; in float32, which rounding takes, 64 MB."""

_MOVING_ROWS = ("copy", "concat", "stack", "select", "stack_transpose", "deinterleave_rows")


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of one of the arrays that a quantised tensor becomes, in the place of a checkpoint's tensor."""

    tensor: QuantisedTensor
    kind: str
    width: int
    repeats: int = 1

    @property
    def name(self) -> str:
        return f"{self.tensor.name}.{self.kind}"

    @property
    def path(self) -> object:
        return self.tensor.path

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tensor.shape[:-1], self.width)

    @property
    def transposed(self) -> bool:
        return self.tensor.transposed

    @property
    def nbytes(self) -> int:
        # The bytes of the file count once, with the codes.
        return self.tensor.nbytes if self.kind == "codes" else 0

    def equals(self, other: object) -> bool:
        return isinstance(other, _Part) and self.tensor.equals(other.tensor)

    def read(self, target: Shaped[np.ndarray, " elements"], first: int = 0) -> None:
        """Fills `target` with whole rows, some of them at a time, since each takes more memory while it is made."""
        filled = target.reshape(-1, self.width)
        step = max(1, MOST_AT_ONCE // self.tensor.shape[-1])
        for begin in range(0, len(filled), step):
            some = filled[begin : begin + step]
            read = self._rows(first // self.width + begin, len(some))
            some[...] = np.repeat(read, self.repeats, axis=1).astype(some.dtype, copy=False)

    def _rows(self, first: int, count: int) -> Shaped[np.ndarray, "rows width"]:
        if self.kind == "codes":
            return self.tensor.stored_codes(first, count)
        if self.kind == "scales":
            return self.tensor.stored_scales(first, count)
        return self.tensor.stored_zeros(first, count)


@dataclass(frozen=True)
class FewBitsLeaf:
    """The arrays of one parameter.

    Attributes:
        code: see `FewBits`.
        codes, scales, zeros: how they are read; no `zeros` without zero points.
        order, rounds_rows: see `FewBits`.
    """

    code: str
    codes: StoredLeaf
    scales: StoredLeaf
    zeros: StoredLeaf | None
    order: Shaped[np.ndarray, " inner"] | None
    rounds_rows: bool

    @property
    def leaves(self) -> list[StoredLeaf]:
        """The arrays to be read."""
        return [leaf for leaf in (self.codes, self.scales, self.zeros) if leaf is not None]

    def joined(self, arrays: Sequence[jax.Array], placed: Placed | None = None) -> FewBits:
        """Returns the parameter of the arrays of `leaves`, which `fill_leaves` has placed."""
        codes, scales, *zeros = arrays
        order: Any = self.order
        if order is not None:
            path = f"{self.codes.target.removesuffix('codes')}order"
            order = jnp.asarray(order)
            order = placed(path, order) if placed else jax.device_put(order, codes.sharding)
        points = zeros[0] if zeros else None
        return FewBits(codes, scales, points, order, self.code, self.rounds_rows)


def suits_group(group: int, inner: int) -> bool:
    """Whether weights with a scale for each `group` of `inner` columns stay in few bits."""
    return group == inner or group % _LEAST_GROUP == 0


def may_round_rows(shape: Sequence[int], group: int) -> bool:
    """Whether products with a weight may round activations: a matrix with one scale per row, so no experts."""
    return len(shape) == 2 and group == shape[-1]


def moves_rows(combine: Combine, axes: int) -> bool:
    """Whether an operation of a rule leaves the columns of its sources as they are."""
    return combine in _MOVING_ROWS or (combine == "transpose" and axes > 2)


def few_bits_leaf(plan: LeafPlan[Any]) -> FewBitsLeaf | str:
    """Returns the leaf of a plan as it is read without widening it, or why its weights must be widened.

    Args:
        plan: the leaf, of which one source or all are quantised.
    """
    sources: list[QuantisedTensor] = [
        source for source in plan.sources if isinstance(source, QuantisedTensor)
    ]
    if len(sources) < len(plan.sources):
        return "some of its weights are quantised and others are not"
    codes = {source.code for source in sources}
    if len(codes) > 1:
        return f"its weights are {' and '.join(sorted(codes))}"
    code = codes.pop()
    if code not in CODES:
        return f"its weights are {code}"
    inner = plan.shape[-1]
    group = math.gcd(*(source.columns.group for source in sources))
    if not suits_group(group, inner):
        return f"its scales are of {group} columns"
    if CODES[code].bits == 4 and inner % 2:
        return f"its width {inner} is odd"
    has_zeros = any(source.has_zeros for source in sources)
    if has_zeros and code != "int4":
        return f"its zero points are of {code}"
    orders = [source.columns.order for source in sources]
    if any(order is not None for order in orders):
        first = orders[0]
        same = first is not None and all(
            order is not None and np.array_equal(order, first) for order in orders
        )
        if not same or len(plan.shape) != 2:
            return "the columns of its weights are in different orders"
    arrangement = plan.arrangement
    if not moves_rows(arrangement.combine, len(plan.shape)) or plan.offset:
        return "its columns are moved"

    def part(kind: str, dtype: np.dtype) -> StoredLeaf:
        width = inner // group if kind != "codes" else inner * CODES[code].bits // 8
        parts = tuple(
            _Part(one, kind, width, 1 if kind == "codes" else one.columns.group // group)
            for one in sources
        )
        moved = Arrangement(
            (*plan.shape[:-1], width),
            arrangement.rows,
            arrangement.combine,
            arrangement.regroup,
            arrangement.pairs,
        )
        return StoredLeaf(f"{plan.target}.{kind}", dtype, parts, moved)

    dtypes = {source.rows.scale_dtype for source in sources}
    scale_dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
    return FewBitsLeaf(
        code,
        part("codes", STORED[code]),
        part("scales", scale_dtype),
        part("zeros", np.dtype(np.uint8)) if has_zeros else None,
        orders[0],
        may_round_rows(plan.shape, group) and all(source.rounds_rows for source in sources),
    )
