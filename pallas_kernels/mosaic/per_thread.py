"""Code of single threads, for small work whose threads need one another's numbers; it is emitted or interpreted.

The code is a function of a `Threads`, of references with one axis, and of words. A *word* is 32 bits of each thread of
a block: a `Word` where the code is emitted, an int32 array [128] where it is interpreted. Both have Python's
operators, in two's complement; `//` and `%` take words that are not negative. A *number* is a word with the bits of a
float32, which the methods of `Threads` compute with. Tests run the code in NumPy, where `+=` would change an array that
other names have too, so the code says `x = x + y`. Between two calls of `sync` no thread may read what another one
writes.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    i32,
    inline,
    ir,
    llvm,
    scf,
    utils,
    vector,
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.packed_numbers import (
    AS_NUMBER,
    BITS,
    E2M1_FACTOR,
    OF_NUMBER,
    as_words,
    multiply_tile,
    numbers_of,
    pairs_of,
    pairs_of_word,
    scaled_pairs_of,
    tile_product,
    unpacked,
    word_conversion,
    zero_conversion,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS

LANES = 32
THREADS = WARPS * LANES
"""Threads of a warpgroup. A block has one, unless its launch says otherwise; interpreted code runs on one."""

WORDS = 4
"""Words that a thread loads at once, 16 bytes."""

MOST_PLACES = 2**31 - 1
"""Most elements of a reference, whose places are int32."""

MEMBERS, LINES = 4, LANES // 4
"""Lanes that share a row of `Threads.tile_product`'s left operand, and such groups of lanes."""

# Words of half of a multiprocessor's shared memory, of which each block takes some more.
_MORE_THAN_HALF = SHARED_BYTES // 2 // 4
_ALL_LANES = "0xffffffff"
# Operands: $0 the sum, $1 this lane's number. Lanes that have no lower neighbour at this distance keep theirs.
_ADD_LOWER = """{{
    .reg .pred is_there;
    .reg .b32 other;
    shfl.sync.up.b32 other|is_there, $1, {distance}, 0x0, {lanes};
    mov.b32 $0, $1;
    @is_there add.s32 $0, $0, other;
}}"""

# Operands: $0 the sum of two lanes' numbers, $1 this lane's number.
_ADD_OTHER = """{{
    .reg .b32 other;
    shfl.sync.bfly.b32 other, $1, {distance}, 0x1f, {lanes};
    add.rn.f32 $0, $1, other;
}}"""


def thread_kernel(
    body: Callable[..., None],
    out_type: Any,  # noqa: ANN401 - one type or several
    *,
    name: str,
    blocks: int,
    scratch: Sequence[int] = (),
    warpgroups: int = 1,
    is_alone: bool = False,
    interpret: bool,
) -> Callable[..., Any]:
    """Returns the launch of a kernel whose blocks are those of the axis "block".

    Args:
        body: the kernel's body, such as `partial(run_block, code)`.
        out_type: types of the results.
        name: the kernel's name.
        blocks: number of blocks.
        scratch: sizes of arrays of int32 in shared memory, which follow the results among the body's references.
        warpgroups: of a block; the interpreter runs one.
        is_alone: whether a multiprocessor runs one block at a time, for which each takes more than half of its shared
            memory. Blocks that start while the previous kernel ends are not spread evenly otherwise.
        interpret: whether the interpreter runs the kernel.
    """
    if is_alone and not interpret:
        scratch, body = (*scratch, _MORE_THAN_HALF), partial(_run_without_last, body)
    return mosaic_kernel(
        body,
        out_type=out_type,
        scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in scratch],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name=name,
    )


def _run_without_last(body: Callable[..., None], *refs: Ref) -> None:
    body(*refs[:-1])


def run_block(code: Callable[..., None], *refs: Ref, takes_block: bool, interpret: bool) -> None:
    """Runs `code(threads, *refs)` as the body of a kernel whose blocks are those of its axis "block".

    Args:
        code: as of `run_threads`.
        refs: likewise.
        takes_block: whether the code takes the block's number too.
        interpret: likewise.
    """
    scalars = (lax.axis_index("block"),) if takes_block else ()
    run_threads(code, refs, *scalars, interpret=interpret)


def run_threads(
    code: Callable[..., None], refs: Sequence[Ref], *scalars: Array, interpret: bool
) -> None:
    """Runs `code(threads, *refs, *scalars)` on the threads of a block.

    Args:
        code: the code of a thread.
        refs: references of one axis, in global or shared memory, to int32 or float32, whose bits are loaded and stored.
            Those that `load_words`, and loads and stores of numbers and bytes, use may have other dtypes.
        scalars: int32 numbers, words that are equal for all threads.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        code(_Interpreted(), *refs, *(jnp.broadcast_to(scalar, THREADS) for scalar in scalars))
        return
    splat = plgpu.Layout.WG_SPLAT(())

    @inline(arg_types=(*(plgpu.RefType() for _ in refs), *(splat for _ in scalars)))
    def run(_: Value, *given: Value) -> None:
        words = [Word(scalar.registers.item()) for scalar in given[len(refs) :]]
        code(_Emitted(), *given[: len(refs)], *words)

    run(*refs, *scalars)


def paired(words: Sequence[Any]) -> list[Any]:
    """Returns four words of 16-bit numbers as the pairs of numbers i and i + 4 that `Threads.pairs` makes of codes."""
    pairs = []
    for one, other in ((words[0], words[2]), (words[1], words[3])):
        # A word may be negative, so its sign is in the bits that are left out.
        pairs += [
            (one & 0xFFFF) + other * 2**16,
            ((one // 2**16) & 0xFFFF) + (other & -(2**16)),
        ]
    return pairs


class Threads(ABC):
    """What the code of a thread can do besides arithmetic.

    Attributes:
        number: the thread's number.
        lane: its number in its warp.
        warp: its warp's number.
    """

    number: Any
    lane: Any
    warp: Any

    @abstractmethod
    def select(self, condition: Any, one: Any, other: Any) -> Any:  # noqa: ANN401 - words or numbers
        """Returns `one` where the condition holds, and `other` elsewhere."""

    @abstractmethod
    def load(self, ref: Ref, place: Any) -> Any:  # noqa: ANN401 - a word
        """Returns the bits at a place, which must be in bounds."""

    @abstractmethod
    def store(self, ref: Ref, place: Any, word: Any, *, where: Any = None) -> None:  # noqa: ANN401 - words
        """Stores bits at a place; where the condition does not hold, nothing happens at any place."""

    @abstractmethod
    def load_words(self, ref: Ref, place: Any) -> list[Any]:  # noqa: ANN401 - a word
        """Returns `WORDS` adjacent words of a reference to any dtype, from a multiple of `WORDS` words on."""

    @abstractmethod
    def store_words(
        self,
        ref: Ref,
        place: Any,  # noqa: ANN401 - a word
        words: Sequence[Any],
        *,
        where: Any = None,  # noqa: ANN401 - a condition
    ) -> None:
        """Stores `WORDS` adjacent words as `store` does, from a multiple of `WORDS` words on."""

    @abstractmethod
    def load_byte(self, ref: Ref, place: Any) -> Any:  # noqa: ANN401 - a word
        """Returns the element at a place, a uint8."""

    @abstractmethod
    def load_number(self, ref: Ref, place: Any) -> Any:  # noqa: ANN401 - a word
        """Returns as a number the element at a place: a float of 32 or 16 bits, an e8m0 or a uint8."""

    @abstractmethod
    def load_two_numbers(self, ref: Ref, place: Any) -> list[Any]:  # noqa: ANN401 - a word
        """Returns as numbers the elements at an even place and behind it, as `load_number` does, with one load."""

    @abstractmethod
    def store_number(self, ref: Ref, place: Any, number: Any, *, where: Any = None) -> None:  # noqa: ANN401 - words
        """Stores a number as `store` does, rounded to the dtype of the reference: a float of 32 or 16 bits."""

    @abstractmethod
    def numbers(self, word: Any, kind: str) -> list[Any]:  # noqa: ANN401 - a word
        """Returns the numbers that a word holds, of a kind in `BITS` of at least 8 bits."""

    @abstractmethod
    def dot(self, total: Any, word: Any, others: Sequence[Any], kind: str) -> Any:  # noqa: ANN401 - words
        """Returns the number `total` and the products of the numbers of a word with others, added in their order."""

    @abstractmethod
    def pairs(self, word: Any, kind: str, dtype: str, zero: Any = None) -> list[Any]:  # noqa: ANN401 - words
        """Returns the numbers of a word of 4-bit codes as words of two 16-bit numbers: of codes i and i + 4.

        Args:
            word: the codes.
            kind: a kind in `BITS` of 4 bits.
            dtype: dtype of the numbers, bfloat16 or float16.
            zero: a number, the zero point of int4 codes, 0 to 127; `None` for 8.
        """

    @abstractmethod
    def scaled_pairs(self, word: Any, exponent: Any) -> list[Any]:  # noqa: ANN401 - words
        """Returns the numbers of a word of e2m1 codes times a scale as `pairs` does, in bfloat16.

        Args:
            word: the codes.
            exponent: the scale's e8m0 code, whose number is multiplied by `E2M1_RATE`. The numbers are exact for scales
                of 2**-93 to 2**33, and NaN for larger ones.
        """

    @abstractmethod
    def tile_product(
        self, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any], dtype: str
    ) -> list[Any]:
        """Returns sums with the product of the warp's 16 x 16 and 16 x 8 numbers added, on tensor cores.

        Lane 4 * line + member has numbers of these rows and columns, as `mma.sync.m16n8k16` wants them.

        Args:
            sums: four numbers, of row `line` and of columns 2 * member and 2 * member + 1, then of row line + 8.
            left: words of two numbers: of row `line` and of columns 2 * member and 2 * member + 1, then of row
                line + 8, and both again of columns 8 further.
            right: words of two numbers: of rows 2 * member and 2 * member + 1 and of column `line`, then of rows 8
                further.
            dtype: dtype of the numbers of left and right, bfloat16 or float16.
        """

    @abstractmethod
    def multiply_add(self, one: Any, other: Any, total: Any) -> Any:  # noqa: ANN401 - numbers
        """Returns the number `one * other + total`, rounded once where it is emitted."""

    @abstractmethod
    def quotient(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers
        """Returns the number `one / other`."""

    @abstractmethod
    def power_of_two(self, number: Any) -> Any:  # noqa: ANN401 - a number
        """Returns 2 to the power of a number, with an error of some 2**-22 where it is emitted."""

    @abstractmethod
    def smaller(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers
        """Returns the smaller of two numbers, NaN if one is."""

    @abstractmethod
    def larger(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers
        """Returns the larger of two numbers, NaN if one is."""

    @abstractmethod
    def total_of_lanes(self, number: Any, count: int) -> Any:  # noqa: ANN401 - a number
        """Returns the sum of the numbers of `count` adjacent lanes, a power of two, the same bits in each of them."""

    @abstractmethod
    def add(self, ref: Ref, place: Any, amount: int) -> None:  # noqa: ANN401 - a word
        """Adds to a word in shared memory at once, also beside other threads that add there."""

    @abstractmethod
    def most_of_warp(self, word: Any) -> Any:  # noqa: ANN401 - a word
        """Returns the largest number of the warp's threads."""

    @abstractmethod
    def least_of_warp(self, word: Any) -> Any:  # noqa: ANN401 - a word
        """Returns the smallest number of the warp's threads."""

    @abstractmethod
    def sum_in_warp(self, word: Any) -> Any:  # noqa: ANN401 - a word
        """Returns the sum of the numbers of this thread and of those before it in its warp."""

    @abstractmethod
    def repeat(self, count: Any, body: Callable[[Any, Any], None]) -> None:  # noqa: ANN401 - a word
        """Calls `body(turn, where)` for each turn below `count`, a word; `where` is a condition for its stores."""

    @abstractmethod
    def fold(
        self, count: int, start: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Returns the words `body(turn, words)` after `count` turns, each of which takes those of the turn before."""

    @abstractmethod
    def sync(self) -> None:
        """Waits for all threads, whose earlier stores are then visible."""

    def word_product(
        self,
        sums: Sequence[Any],
        low: Sequence[Any],
        high: Sequence[Any],
        right: Sequence[Any],
        dtype: str,
    ) -> list[Any]:
        """Returns the sums of `tile_product` with the products of a word of codes of each lane added.

        Args:
            sums: as of `tile_product`.
            low: the pairs of a word of codes of row `line`.
            high: those of row line + 8.
            right: the pairs of numbers that they meet, of column `line`.
            dtype: as of `tile_product`.
        """
        found = list(sums)
        for at in (0, 2):
            left = [low[at], high[at], low[at + 1], high[at + 1]]
            found = self.tile_product(found, left, right[at : at + 2], dtype)
        return found

    def constant(self, value: float) -> Any:  # noqa: ANN401 - a number
        """Returns a number that is the same in all threads."""
        return self.lane * 0 + struct.unpack("<i", struct.pack("<f", value))[0]

    def product(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers
        """Returns the number `one * other`."""
        return self.multiply_add(one, other, self.lane * 0)

    def least(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - words
        """Returns the smaller of two words."""
        return self.select(one < other, one, other)

    def most(self, one: Any, other: Any) -> Any:  # noqa: ANN401 - words
        """Returns the larger of two words."""
        return self.select(one > other, one, other)

    def running_sum(self, word: Any, table: Ref) -> Any:  # noqa: ANN401 - a word
        """Returns the sum of the numbers of this thread and of all before it.

        Args:
            word: the thread's number.
            table: int32 in shared memory, an element per warp; free again when the threads have synchronised.
        """
        within = self.sum_in_warp(word)
        self.store(table, self.warp, within, where=self.lane == LANES - 1)
        self.sync()
        for warp in range(WARPS - 1):
            within = within + self.select(
                self.warp > warp, self.load(table, self.number * 0 + warp), 0
            )
        self.sync()
        return within


class Word:
    """32 bits of a thread, or a condition, in emitted code."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __add__(self, other: "Word | int") -> "Word":
        return Word(arith.addi(self.value, _value(other)))

    def __sub__(self, other: "Word | int") -> "Word":
        return Word(arith.subi(self.value, _value(other)))

    def __mul__(self, other: "Word | int") -> "Word":
        return Word(arith.muli(self.value, _value(other)))

    def __floordiv__(self, other: "Word | int") -> "Word":
        return Word(arith.divui(self.value, _value(other)))

    def __mod__(self, other: "Word | int") -> "Word":
        return Word(arith.remui(self.value, _value(other)))

    def __and__(self, other: "Word | int") -> "Word":
        return Word(arith.andi(self.value, _value(other)))

    def __xor__(self, other: "Word | int") -> "Word":
        return Word(arith.xori(self.value, _value(other)))

    def __rlshift__(self, other: int) -> "Word":
        return Word(arith.shli(_value(other), self.value))

    def __lt__(self, other: "Word | int") -> "Word":
        return self._compared(arith.CmpIPredicate.slt, other)

    def __gt__(self, other: "Word | int") -> "Word":
        return self._compared(arith.CmpIPredicate.sgt, other)

    def __eq__(self, other: object) -> "Word":  # pyright: ignore[reportIncompatibleMethodOverride]
        assert isinstance(other, Word | int), "words are compared with words and numbers"
        return self._compared(arith.CmpIPredicate.eq, other)

    def _compared(self, how: Any, other: "Word | int") -> "Word":  # noqa: ANN401 - private to MLIR
        return Word(arith.cmpi(how, self.value, _value(other)))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _value(word: Word | int) -> Value:
    return constant(word) if isinstance(word, int) else word.value


class _Emitted(Threads):
    """Emits MLIR and PTX."""

    def __init__(self) -> None:
        self.number = Word(utils.thread_idx())
        self.lane, self.warp = self.number % LANES, self.number // LANES

    def select(self, condition: Word, one: Word | int, other: Word | int) -> Word:
        return Word(arith.select(condition.value, _value(one), _value(other)))

    def load(self, ref: Value, place: Word) -> Word:
        return Word(llvm.load(i32(), _address(ref, place)))

    def store(
        self, ref: Value, place: Word, word: Word | int, *, where: Word | None = None
    ) -> None:
        _store(_value(word), _address(ref, place), where)

    def load_words(self, ref: Value, place: Word) -> list[Word]:
        words = llvm.load(ir.VectorType.get((WORDS,), i32()), _address(ref, place))
        return [Word(vector.extract(words, [], [part])) for part in range(WORDS)]

    def store_words(
        self, ref: Value, place: Word, words: Sequence[Word], *, where: Word | None = None
    ) -> None:
        kind = ir.VectorType.get((WORDS,), i32())
        whole = vector.from_elements(kind, [word.value for word in words])
        _store(whole, _address(ref, place), where)

    def load_byte(self, ref: Value, place: Word) -> Word:
        octet = ir.IntegerType.get_signless(8)
        address = utils.getelementptr(utils.memref_ptr(ref), [place.value], octet)
        return Word(arith.extui(i32(), llvm.load(octet, address)))

    def load_number(self, ref: Value, place: Word) -> Word:
        return _loaded(ref, place, 1)[0]

    def load_two_numbers(self, ref: Value, place: Word) -> list[Word]:
        return _loaded(ref, place, 2)

    def store_number(
        self, ref: Value, place: Word, number: Word, *, where: Word | None = None
    ) -> None:
        element = ir.MemRefType(ref.type).element_type
        bits = ir.IntegerType.get_signless(utils.bitwidth(element))
        address = utils.getelementptr(utils.memref_ptr(ref), [place.value], bits)
        value = llvm.inline_asm(i32(), [number.value], OF_NUMBER[str(element)], "=r,r")
        if utils.bitwidth(element) < 32:
            value = arith.trunci(bits, value)
        _store(value, address, where)

    def numbers(self, word: Word, kind: str) -> list[Word]:
        count = 32 // BITS[kind]
        moves = "".join(f"mov.b32 ${at}, n{at}; " for at in range(count))
        return _of_word([word.value], f"{{ {unpacked(f'${count}', kind)} {moves} }}", count)

    def dot(self, total: Word, word: Word, others: Sequence[Word], kind: str) -> Word:
        adds = [f"fma.rn.f32 sum, n{at}, ${at + 3}, sum;" for at in range(32 // BITS[kind])]
        text = f"{{ .reg .f32 sum; mov.b32 sum, $1; {unpacked('$2', kind)} {' '.join(adds)} "
        operands = [total.value, word.value, *(other.value for other in others)]
        constraints = ",".join(["=r"] + ["r"] * len(operands))
        return Word(llvm.inline_asm(i32(), operands, text + "mov.b32 $0, sum; }", constraints))

    def pairs(self, word: Word, kind: str, dtype: str, zero: Word | None = None) -> list[Word]:
        given = [word.value]
        if kind == "int4":
            text = zero_conversion(dtype)
            base = self.constant(8.0) if zero is None else zero
            given.append(llvm.inline_asm(i32(), [base.value], text, "=r,r"))
        return _of_word(given, word_conversion(kind, dtype), pairs_of_word(kind))

    def scaled_pairs(self, word: Word, exponent: Word) -> list[Word]:
        factor = llvm.inline_asm(i32(), [exponent.value], E2M1_FACTOR, "=r,r")
        text = word_conversion("float4_e2m1fn", "bfloat16", takes_factor=True)
        return _of_word([word.value, factor], text, pairs_of_word("float4_e2m1fn"))

    def tile_product(
        self, sums: Sequence[Word], left: Sequence[Word], right: Sequence[Word], dtype: str
    ) -> list[Word]:
        f32 = ir.F32Type.get()
        given = [word.value for word in (*left, *right)]
        added = [arith.bitcast(f32, word.value) for word in sums]
        found = multiply_tile(given, added, dtype)
        return [Word(arith.bitcast(i32(), number)) for number in found]

    def multiply_add(self, one: Word, other: Word, total: Word) -> Word:
        operands = [one.value, other.value, total.value]
        return Word(llvm.inline_asm(i32(), operands, "fma.rn.f32 $0, $1, $2, $3;", "=r,r,r,r"))

    def quotient(self, one: Word, other: Word) -> Word:
        return _of_two("div.rn.f32 $0, $1, $2;", one, other)

    def power_of_two(self, number: Word) -> Word:
        return Word(llvm.inline_asm(i32(), [number.value], "ex2.approx.f32 $0, $1;", "=r,r"))

    def smaller(self, one: Word, other: Word) -> Word:
        return _of_two("min.NaN.f32 $0, $1, $2;", one, other)

    def larger(self, one: Word, other: Word) -> Word:
        return _of_two("max.NaN.f32 $0, $1, $2;", one, other)

    def total_of_lanes(self, number: Word, count: int) -> Word:
        for distance in _halves_of(count):
            number = _assembled(_ADD_OTHER.format(distance=distance, lanes=_ALL_LANES), number)
        return number

    def add(self, ref: Value, place: Word, amount: int) -> None:
        address = llvm.ptrtoint(i32(), _address(ref, place))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [address, constant(amount)],
            "red.shared.add.u32 [$0], $1;",
            "r,r,~{memory}",
            has_side_effects=True,
        )

    def most_of_warp(self, word: Word) -> Word:
        return _assembled(f"redux.sync.max.s32 $0, $1, {_ALL_LANES};", word)

    def least_of_warp(self, word: Word) -> Word:
        return _assembled(f"redux.sync.min.s32 $0, $1, {_ALL_LANES};", word)

    def sum_in_warp(self, word: Word) -> Word:
        for distance in (1, 2, 4, 8, 16):
            word = _assembled(_ADD_LOWER.format(distance=distance, lanes=_ALL_LANES), word)
        return word

    def repeat(self, count: Word, body: Callable[[Word, Word], None]) -> None:
        loop = scf.ForOp(constant(0), count.value, constant(1))
        with ir.InsertionPoint(loop.body):
            turn = Word(loop.induction_variable)
            body(turn, turn < count)
            scf.yield_([])

    def fold(
        self, count: int, start: Sequence[Word], body: Callable[[Word, list[Word]], list[Word]]
    ) -> list[Word]:
        loop = scf.ForOp(constant(0), constant(count), constant(1), [word.value for word in start])
        with ir.InsertionPoint(loop.body):
            found = body(Word(loop.induction_variable), [Word(arg) for arg in loop.inner_iter_args])
            scf.yield_([word.value for word in found])
        return [Word(result) for result in loop.results]

    def sync(self) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], "bar.sync 0;", "~{memory}", has_side_effects=True
        )


def _loaded(ref: Value, place: Word, count: int) -> list[Word]:
    """Returns adjacent elements as numbers; their place is a multiple of their count."""
    element = ir.MemRefType(ref.type).element_type
    width = utils.bitwidth(element)
    bits, whole = (ir.IntegerType.get_signless(size) for size in (width, count * width))
    value = llvm.load(whole, utils.getelementptr(utils.memref_ptr(ref), [place.value], bits))
    found = []
    for at in range(count):
        part = arith.shrui(value, utils.c(at * width, whole)) if at else value
        if count > 1:
            part = arith.trunci(bits, part)
        if width < 32:
            part = arith.extui(i32(), part)
        found.append(Word(llvm.inline_asm(i32(), [part], AS_NUMBER[str(element)], "=r,r")))
    return found


def _store(value: Value, address: Value, where: Word | None) -> None:
    if where is None:
        llvm.store(value, address)
        return
    branch = scf.IfOp(where.value)
    with ir.InsertionPoint(branch.then_block):
        llvm.store(value, address)
        scf.yield_([])


def _of_word(given: list[Value], text: str, count: int) -> list[Word]:
    """Returns the `count` words that PTX makes of its operands."""
    pieces = llvm.StructType.get_literal([i32()] * count)
    kinds = ",".join(["=r"] * count + ["r"] * len(given))
    found = llvm.inline_asm(pieces, given, text, kinds)
    return [Word(llvm.extractvalue(i32(), found, [at])) for at in range(count)]


def _halves_of(count: int) -> list[int]:
    """Returns count / 2, count / 4, ..., 1 for a power of two."""
    return [count >> step for step in range(1, count.bit_length())]


def _of_two(text: str, one: Word, other: Word) -> Word:
    return Word(llvm.inline_asm(i32(), [one.value, other.value], text, "=r,r,r"))


def _assembled(text: str, word: Word) -> Word:
    return Word(llvm.inline_asm(i32(), [word.value], text, "=&r,r", has_side_effects=True))


def _address(ref: Value, place: Word) -> Value:
    return utils.getelementptr(utils.memref_ptr(ref), [place.value], i32())


class _Interpreted(Threads):
    """Runs all threads at once on arrays."""

    def __init__(self) -> None:
        self.number = jnp.arange(THREADS, dtype=jnp.int32)
        self.lane, self.warp = self.number % LANES, self.number // LANES

    def select(self, condition: Array, one: Array | int, other: Array | int) -> Array:
        return jnp.where(condition, jnp.asarray(one, jnp.int32), jnp.asarray(other, jnp.int32))

    def load(self, ref: Ref, place: Array) -> Array:
        return lax.bitcast_convert_type(ref[...][place], jnp.int32)

    def store(
        self, ref: Ref, place: Array, word: Array | int, *, where: Array | None = None
    ) -> None:
        word = jnp.broadcast_to(jnp.asarray(word, jnp.int32), THREADS)
        _store_each(ref, place, lax.bitcast_convert_type(word, ref.dtype), where)

    def load_words(self, ref: Ref, place: Array) -> list[Array]:
        words = as_words(ref[...])
        return [words[place + part] for part in range(WORDS)]

    def store_words(
        self, ref: Ref, place: Array, words: Sequence[Array], *, where: Array | None = None
    ) -> None:
        for part, word in enumerate(words):
            self.store(ref, place + part, word, where=where)

    def load_byte(self, ref: Ref, place: Array) -> Array:
        return ref[...][place].astype(jnp.int32)

    def load_number(self, ref: Ref, place: Array) -> Array:
        return _bits(ref[...][place].astype(jnp.float32))

    def load_two_numbers(self, ref: Ref, place: Array) -> list[Array]:
        return [self.load_number(ref, place + at) for at in (0, 1)]

    def store_number(
        self, ref: Ref, place: Array, number: Array, *, where: Array | None = None
    ) -> None:
        _store_each(ref, place, _float(number).astype(ref.dtype), where)

    def numbers(self, word: Array, kind: str) -> list[Array]:
        return [_bits(number) for number in numbers_of(word, kind)]

    def dot(self, total: Array, word: Array, others: Sequence[Array], kind: str) -> Array:
        for number, other in zip(self.numbers(word, kind), others, strict=True):
            total = self.multiply_add(number, other, total)
        return total

    def pairs(self, word: Array, kind: str, dtype: str, zero: Array | None = None) -> list[Array]:
        return pairs_of(word, kind, dtype, None if zero is None else _float(zero))

    def scaled_pairs(self, word: Array, exponent: Array) -> list[Array]:
        return scaled_pairs_of(word, exponent)

    def tile_product(
        self, sums: Sequence[Array], left: Sequence[Array], right: Sequence[Array], dtype: str
    ) -> list[Array]:
        found = tile_product(list(left), list(right), dtype)
        return [_bits(_float(total) + number) for total, number in zip(sums, found, strict=True)]

    def multiply_add(self, one: Array, other: Array, total: Array) -> Array:
        return _bits(_float(one) * _float(other) + _float(total))

    def quotient(self, one: Array, other: Array) -> Array:
        return _bits(_float(one) / _float(other))

    def power_of_two(self, number: Array) -> Array:
        return _bits(jnp.exp2(_float(number)))

    def smaller(self, one: Array, other: Array) -> Array:
        return _bits(jnp.minimum(_float(one), _float(other)))

    def larger(self, one: Array, other: Array) -> Array:
        return _bits(jnp.maximum(_float(one), _float(other)))

    def total_of_lanes(self, number: Array, count: int) -> Array:
        totals = jnp.sum(_float(number).reshape(-1, count), axis=1)
        return _bits(jnp.repeat(totals, count))

    def add(self, ref: Ref, place: Array, amount: int) -> None:
        def add_one(thread: Array, carry: None) -> None:
            assign(ref, place[thread], ref[place[thread]] + amount)
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(THREADS), add_one, None)

    def most_of_warp(self, word: Array) -> Array:
        return jnp.repeat(jnp.max(word.reshape(WARPS, LANES), axis=1), LANES)

    def least_of_warp(self, word: Array) -> Array:
        return jnp.repeat(jnp.min(word.reshape(WARPS, LANES), axis=1), LANES)

    def sum_in_warp(self, word: Array) -> Array:
        return jnp.cumsum(word.reshape(WARPS, LANES), axis=1, dtype=jnp.int32).reshape(-1)

    def repeat(self, count: Array, body: Callable[[Array, Array], None]) -> None:
        def run(turn: Array, carry: None) -> None:
            every = jnp.broadcast_to(turn, THREADS)
            body(every, every < count)
            return carry

        lax.fori_loop(jnp.int32(0), jnp.max(count), run, None)

    def fold(
        self, count: int, start: Sequence[Array], body: Callable[[Array, list[Array]], list[Array]]
    ) -> list[Array]:
        words = list(start)
        for turn in range(count):
            words = body(jnp.full(THREADS, turn, jnp.int32), words)
        return words

    def sync(self) -> None:
        pass


def _store_each(ref: Ref, place: Array, numbers: Array, where: Array | None) -> None:
    """Stores one element after the other, so that a block touches none that is another block's."""
    wanted = jnp.ones(THREADS, bool) if where is None else where

    def store_one(thread: Array, carry: None) -> None:
        @pl.when(wanted[thread])
        def _() -> None:
            assign(ref, place[thread], numbers[thread])

        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(THREADS), store_one, None)


def _float(word: Array) -> Array:
    return lax.bitcast_convert_type(word, jnp.float32)


def _bits(number: Array) -> Array:
    return lax.bitcast_convert_type(number, jnp.int32)
