"""Parses the text of an optimised HLO module into computations and instructions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import jax
from jaxlib._hlo import HloPrintOptions

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|branch_computations|\w+_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_OPERAND_ALIAS = re.compile(r"output_to_operand_aliasing=\{(.*?\)) ?\}")
_ASYNC = re.compile(
    r"(async|call|copy|custom-call|dynamic-slice|dynamic-update-slice|fusion|gather|scatter|slice)-(start|done)"
)


@dataclass(frozen=True)
class ArrayType:
    """One array of an instruction's result: element type, sizes, and layout as XLA writes it."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, each of at least one byte."""
        bits = re.search(r"\d+", self.dtype)
        return self.elements * max(1, int(bits.group()) // 8 if bits else 1)


_CONTEXT = ArrayType("u32", (), "")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. The start of an asynchronous operation counts as the operation itself.

    Attributes:
        name: name within its computation.
        opcode: HLO opcode; "async-done" for the end of an asynchronous operation.
        results: types of the result's arrays; several for a tuple.
        operands: names of instructions of the same computation.
        callees: names of the computations it calls, but for a loop's condition.
        attributes: the text after the operands, without metadata.
        line: the line without attributes, for messages.
        is_tuple: whether the result is a tuple.
        is_root: whether the result is that of the computation.
    """

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    callees: tuple[str, ...]
    attributes: str
    line: str
    is_tuple: bool
    is_root: bool

    @property
    def index(self) -> int:
        """Number of the parameter, or of the tuple's element, that the instruction reads."""
        if self.opcode == "parameter":
            found = re.search(r" parameter\((\d+)\)", self.line)
        else:
            found = re.search(r"\bindex=(\d+)", self.attributes)
        assert found is not None, self.line
        return int(found.group(1))

    @property
    def operand_aliases(self) -> Mapping[int, int]:
        """Index of a custom call's result -> index of the operand that it shares memory with."""
        found = _OPERAND_ALIAS.search(self.attributes)
        pairs = _ALIAS.findall(found.group(1)) if found else ()
        return {_first(result): int(operand) for result, operand, _ in pairs}


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Attributes:
        aliases: output leaf -> number of the entry parameter that it shares memory with.
        computations: name -> instructions, with operands before their users. They are parsed when they are asked for.
        entry: name of the entry computation.
    """

    aliases: Mapping[int, int]
    computations: Mapping[str, tuple[Instruction, ...]] = field(repr=False)
    entry: str

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the entry computation."""
        return sum(line.opcode == "parameter" for line in self.computations[self.entry])


class _Computations(Mapping[str, tuple[Instruction, ...]]):
    """The computations of a module, each of which is parsed once it is asked for: few of thousands are.

    Args:
        lines: name -> lines.
    """

    def __init__(self, lines: Mapping[str, list[str]]) -> None:
        self._lines = lines
        self._parsed: dict[str, tuple[Instruction, ...]] = {}

    def __getitem__(self, name: str) -> tuple[Instruction, ...]:
        if name not in self._parsed:
            found = map(_INSTRUCTION.match, self._lines[name])
            self._parsed[name] = tuple(
                _instruction(line.group(2), line.group(3), bool(line.group(1)))
                for line in found
                if line is not None
            )
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def text_of(compiled: jax.stages.Compiled) -> str:
    """Returns `compiled.as_text()` without the settings of custom calls, which hold the code of our kernels.

    The code is there once for each call: 22 MB for a prompt step of 28 layers, which take 0.3 s to print.
    """
    options = HloPrintOptions()
    options.print_backend_config = False
    executable = compiled.runtime_executable()
    assert executable is not None, "every backend we compile for has one"
    return "\n\n".join(module.to_string(options) for module in executable.hlo_modules())


def parse_module(text: str) -> Module:
    """Parses the result of `Compiled.as_text()` or `text_of`; lines that are no instruction are skipped.

    Raises:
        ValueError: there is no entry computation, so this is no HLO module.
    """
    computations: dict[str, list[str]] = {}
    current: list[str] = []
    entry = None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        else:
            current.append(line)
    if entry is None:
        raise ValueError("this text holds no ENTRY computation, so it is not an HLO module")
    return Module(MappingProxyType(_aliases(text)), _Computations(computations), entry)


def find_instructions(text: str, opcode: str) -> list[Instruction]:
    """Returns the instructions of an opcode in all computations of a module's text, of which no others are parsed."""
    lines = (line for line in text.splitlines() if f" {opcode}(" in line)
    found = [
        _instruction(line[2], line[3], bool(line[1]))
        for line in map(_INSTRUCTION.match, lines)
        if line is not None
    ]
    return [one for one in found if one.opcode == opcode]


def _aliases(text: str) -> dict[int, int]:
    header = text.partition("\n")[0]
    start = header.find("input_output_alias={")
    if start < 0:
        return {}
    listed = _balanced(header, start + len("input_output_alias="))
    return {_first(output): int(parameter) for output, parameter, _ in _ALIAS.findall(listed)}


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    """Parses `type opcode(operands), attributes`; the type may contain parentheses, of a tuple or a layout."""
    type_end = len(_balanced(rest, 0)) if rest.startswith("(") else rest.index(" ")
    written, _, tail = rest[type_end + 1 :].partition("(")
    listed = _balanced("(" + tail, 0)
    operands = tuple(_NAME.findall(listed))
    attributes = tail[len(listed) - 1 :].partition(", metadata={")[0]
    opcode, results, is_tuple = _synchronous(written, rest[:type_end], len(operands))
    callees = [name for group in _CALLEES.findall(attributes) for name in _NAME.findall(group)]
    return Instruction(
        name=name,
        opcode=opcode,
        results=results,
        operands=operands,
        callees=tuple(callees),
        attributes=attributes,
        line=f"%{name} = {rest[:type_end]} {written}{listed}",
        is_tuple=is_tuple,
        is_root=is_root,
    )


def _synchronous(
    opcode: str, result_type: str, num_operands: int
) -> tuple[str, tuple[ArrayType, ...], bool]:
    """Returns opcode, result types and whether the result is a tuple, with a start replaced by the whole operation.

    A start returns (operands, results, context), but for a copy (result, operand, context).
    """
    results = tuple(
        ArrayType(dtype, tuple(int(size) for size in sizes.split(",") if size), layout)
        for dtype, sizes, layout in _ARRAY.findall(result_type)
    )
    split = _ASYNC.fullmatch(opcode)
    if split is None:
        return opcode, results, result_type.startswith("(")
    if split.group(2) == "done":
        return "async-done", results, result_type.startswith("(")
    if split.group(1) == "copy":
        return "copy", results[:1], False
    results = tuple(result for result in results[num_operands:] if result != _CONTEXT)
    return split.group(1), results, len(results) > 1


def _balanced(text: str, start: int) -> str:
    """Returns the text from the bracket at `start` to its closing bracket."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "({":
            depth += 1
        elif text[position] in ")}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return text[start:]


def _first(index: str) -> int:
    """Returns the index of an output in a flat tuple; a single output has the empty index."""
    return int(index.split(",")[0]) if index.strip() else 0
