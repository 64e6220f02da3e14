"""Follows donated arrays through a compiled program: where each one ends up, and where it is copied on the way.

A program that updates a pool in place hands the same memory from one instruction to the next: views, tuples,
loops, scatters and updates of slices. Any other instruction that takes a pool and yields an array at least as
large makes a second one. Gathers, products and reductions only read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.programs.hlo import ArrayType, Instruction, Module

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
    """A second array the size of a pool.

    Attributes:
        pool: which of the followed arrays.
        exact: same type and layout, which only a copy that XLA had to insert has; otherwise the
            pool was laid out anew, converted, or passed through arithmetic.
        line: the instruction.
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
    """What became of the followed arrays.

    Attributes:
        outputs: output leaf -> the pool whose memory or value it is, where that is known.
        copies: every second array found.
    """

    outputs: Mapping[int, int]
    copies: tuple[PoolCopy, ...]


def follow_pools(module: Module, pools: Mapping[int, int]) -> PoolFlow:
    """Follows entry parameters through the module.

    Args:
        module: an optimised module.
        pools: entry parameter -> the number to call its array by.
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
    """One pass over the program; callees are walked where they are called, with what they are given."""

    def __init__(self, module: Module, elements: Mapping[int, int]) -> None:
        self.module = module
        self.elements = elements
        self.copies: list[PoolCopy] = []

    def run(
        self, computation: str, arguments: Sequence[_Origin], *, fused: bool = False
    ) -> _Origin:
        """Returns what the computation's root holds; of a fusion only the root exists in memory."""
        values: dict[str, _Value] = {}
        root: _Origin = None
        for line in self.module.computations[computation]:
            operands = [values[name] for name in line.operands]
            if line.opcode == "parameter":
                origin = arguments[line.index] if line.index < len(arguments) else None
            elif line.callees and line.opcode in (
                "async",
                "call",
                "conditional",
                "fusion",
                "while",
            ):
                origin = self._called(line, [operand.origin for operand in operands])
            else:
                origin = self._computed(line, operands, fused)
            values[line.name] = _Value(origin, line.results)
            root = origin if line.is_root else root
        return root

    def _called(self, line: Instruction, operands: Sequence[_Origin]) -> _Origin:
        match line.opcode:
            case "while":
                # What the body does not hand back as it got it is another array after one turn.
                return _same(operands[0], self.run(line.callees[0], operands))
            case "conditional":
                branches = zip(line.callees, operands[1:], strict=True)
                results = {self.run(callee, [operand]) for callee, operand in branches}
                return results.pop() if len(results) == 1 else None
            case "fusion":
                return self._settled(line, self.run(line.callees[0], operands, fused=True))
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
                return made if fused else self._settled(line, made)
        return None

    def _settled(self, line: Instruction, origin: _Origin) -> _Origin:
        """Notes the copies among the results of an instruction; from here on they stand for their pools."""
        if isinstance(origin, tuple):
            return tuple(self._settled(line, part) for part in origin)
        if isinstance(origin, _Pool) and origin.copied:
            self.copies.append(PoolCopy(origin.index, origin.exact, line.line))
            return _Pool(origin.index)
        return origin


def _same(before: _Origin, after: _Origin) -> _Origin:
    """Returns what two values agree on, part by part."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return tuple(_same(*parts) for parts in zip(before, after, strict=True))
    return before if before == after else None
