"""Follows donated arrays ("pools") through a compiled program: the output of each, and the copies on the way.

Some instructions pass a pool's memory on: views, tuples, loops, scatters and updates of slices. Others only read it:
gathers, products and reductions. Any other instruction that takes a pool and returns an array of at least its size is
counted as a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.programs.hlo import ArrayType, Instruction, Module

_CALLING = {"async", "call", "conditional", "fusion", "while"}
_FIRST_OPERAND = {
    "add-dependency",
    "async-done",
    "bitcast",
    "dynamic-update-slice",
    "opt-barrier",
    "optimization-barrier",
}
_READERS = {
    "broadcast",
    "convolution",
    "dot",
    "gather",
    "ragged-dot",
    "reduce",
    "reduce-window",
    "rng",
    "rng-bit-generator",
    "scaled-dot",
    "select-and-scatter",
    "sort",
    "topk",
}


@dataclass(frozen=True)
class PoolCopy:
    """A second array of at least a pool's size.

    Attributes:
        pool: number of the followed array.
        exact: whether type and layout are the pool's, as in a copy that XLA inserts. Otherwise the pool was laid out
            anew, converted, or passed through arithmetic.
        line: the instruction's line.
    """

    pool: int
    exact: bool
    line: str


@dataclass(frozen=True)
class _Pool:
    """Memory of a pool, or (`copied`) a computed array inside a fusion that holds all of it."""

    index: int
    copied: bool = False
    exact: bool = True


type _Origin = _Pool | tuple[_Origin, ...] | None


@dataclass(frozen=True)
class _Value:
    origin: _Origin
    results: tuple[ArrayType, ...]


@dataclass(frozen=True)
class PoolFlow:
    """The outputs and copies of the followed arrays.

    Attributes:
        outputs: output leaf -> number of the pool whose memory or value it is, where that is known.
        copies: all copies found.
    """

    outputs: Mapping[int, int]
    copies: tuple[PoolCopy, ...]


def follow_pools(module: Module, pools: Mapping[int, int]) -> PoolFlow:
    """Follows parameters of the entry computation through the module.

    Args:
        module: an optimised HLO module.
        pools: parameter number -> number of its array in the result.
    """
    entry = module.computations[module.entry]
    elements = {
        pools[line.index]: line.results[0].elements
        for line in entry
        if line.opcode == "parameter" and line.index in pools
    }
    walk = _Walk(module, elements)
    arguments = [
        _Pool(pools[number]) if number in pools else None for number in range(module.num_parameters)
    ]
    result = walk.run(module.entry, arguments)
    leaves = result if isinstance(result, tuple) else (result,)
    outputs = {at: leaf.index for at, leaf in enumerate(leaves) if isinstance(leaf, _Pool)}
    return PoolFlow(outputs, tuple(dict.fromkeys(walk.copies)))


class _Walk:
    """One pass over the program. A called computation is walked at each call, with the origins of its arguments.

    One that is given no pool is not walked: it can neither return nor copy one.
    """

    def __init__(self, module: Module, elements: Mapping[int, int]) -> None:
        self.module = module
        self.elements = elements
        self.copies: list[PoolCopy] = []

    def run(
        self, computation: str, arguments: Sequence[_Origin], *, fused: bool = False
    ) -> _Origin:
        """Returns the origin of the computation's root. Within a fusion only the root exists in memory."""
        values: dict[str, _Value] = {}
        root: _Origin = None
        for line in self.module.computations[computation]:
            operands = [values[name] for name in line.operands]
            if line.opcode == "parameter":
                origin = arguments[line.index] if line.index < len(arguments) else None
            elif line.callees and line.opcode in _CALLING:
                given = [operand.origin for operand in operands]
                origin = self._called(line, given) if any(map(_has_pool, given)) else None
            else:
                origin = self._computed(line, operands, fused)
            values[line.name] = _Value(origin, line.results)
            root = origin if line.is_root else root
        return root

    def _called(self, line: Instruction, operands: Sequence[_Origin]) -> _Origin:
        match line.opcode:
            case "while":
                # A part that the body does not return in its own memory is another array after one iteration.
                return _same(operands[0], self.run(line.callees[0], operands))
            case "conditional":
                branches = zip(line.callees, operands[1:], strict=True)
                results = {self.run(callee, [operand]) for callee, operand in branches}
                return results.pop() if len(results) == 1 else None
            case "fusion":
                return self._recorded(line, self.run(line.callees[0], operands, fused=True))
        return self.run(line.callees[0], operands)

    def _computed(self, line: Instruction, values: Sequence[_Value], fused: bool) -> _Origin:
        operands = [value.origin for value in values]
        match line.opcode:
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                return operands[0][line.index] if isinstance(operands[0], tuple) else None
            case "scatter":
                arrays = operands[: (len(operands) - 1) // 2]
                return tuple(arrays) if line.is_tuple else arrays[0]
            case "custom-call":
                aliases = line.operand_aliases
                arrays = [
                    operands[aliases[at]] if at in aliases else None
                    for at in range(len(line.results))
                ]
                return tuple(arrays) if line.is_tuple else arrays[0]
            case "reshape" if fused:
                return operands[0]
        if line.opcode in _FIRST_OPERAND:
            return operands[0]
        return None if line.opcode in _READERS else self._second_array(line, values, fused)

    def _second_array(self, line: Instruction, values: Sequence[_Value], fused: bool) -> _Origin:
        for value in values:
            pool = value.origin
            if isinstance(pool, _Pool) and line.results[0].elements >= self.elements[pool.index]:
                same_type = value.results[:1] == line.results[:1]
                exact = pool.exact and line.opcode == "copy" and same_type
                made = _Pool(pool.index, copied=True, exact=exact)
                return made if fused else self._recorded(line, made)
        return None

    def _recorded(self, line: Instruction, origin: _Origin) -> _Origin:
        """Records copies among an instruction's results, and returns the origin with each replaced by its pool."""
        if isinstance(origin, tuple):
            return tuple(self._recorded(line, part) for part in origin)
        if isinstance(origin, _Pool) and origin.copied:
            self.copies.append(PoolCopy(origin.index, origin.exact, line.line))
            return _Pool(origin.index)
        return origin


def _has_pool(origin: _Origin) -> bool:
    return any(map(_has_pool, origin)) if isinstance(origin, tuple) else origin is not None


def _same(before: _Origin, after: _Origin) -> _Origin:
    """Returns the parts that two origins have in common; `None` for parts that differ."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return tuple(_same(*parts) for parts in zip(before, after, strict=True))
    return before if before == after else None
