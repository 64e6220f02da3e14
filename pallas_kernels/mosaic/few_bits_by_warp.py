"""Products of weights in 8 and 4 bits with few rows of x, in which each of four warps multiplies rows of its own.

A warp widens codes in registers and multiplies with `mma.sync`. Unlike wgmma it needs neither fence nor wait, so loads,
conversions and products of one warp overlap, and each 16 rows of the weight are multiplied with the rows of x of their
fold alone. Both operands are in registers, and any columns may make up a product's contraction if they are the same on
both sides. So a thread loads 16 adjacent columns of each of its rows. A word of codes becomes pairs without moving
bytes between its halves: codes i and i + half of them are a pair, in x too.

Tiles lie in shared memory as (rows / 8, bytes / 128, 8, 128) with the usual XOR swizzle of 16-byte pieces.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.mosaic.dialects import (
    Value,
    add,
    arith,
    constant,
    divide,
    i32,
    inline,
    ir,
    llvm,
    times,
    utils,
    vector,
)
from pallas_kernels.mosaic.few_bits import KINDS
from pallas_kernels.mosaic.few_bits_turn import Packing
from pallas_kernels.mosaic.packed_numbers import (
    multiply_tile,
    pairs_of_word,
    power_conversion,
    word_conversion,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.products import in_layout
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, swizzled
from pallas_kernels.mosaic.warps import WARPS

_fragments: Any = fragmented_array

HEIGHT = WGMMA_ROWS // WARPS
"""Rows of the weight in one product of a warp."""

# Threads that share a row, columns of a thread at most, bytes of a swizzled piece and of a row of x in a tile.
_MEMBERS, _MOST_COLUMNS, _PIECE, _SWIZZLE = 4, 16, 16, 128


def add_warp_products(
    sums: list[Array],
    codes: Ref,
    x: Ref,
    factors: list[list[Array]],
    packing: Packing,
    *,
    folds: int,
    interpret: bool,
) -> list[Array]:
    """Returns the sums and the scaled products of one turn.

    Args:
        sums: float32 [64, rows], one array per 64 rows of the weight.
        codes: [64 * len(sums), bytes] in shared memory, swizzled by 128 bytes; a fold has a multiple of 16 rows.
        x: bfloat16 or float16 [folds * rows, chunk] in shared memory, likewise.
        factors: of each 64 rows of the weight, as `load_factors` returns them.
        packing: form of the weight.
        folds: equal parts of the codes' rows; each is multiplied with the rows of x in the same place.
        interpret: whether the interpreter runs this.
    """
    width, chunk = sums[0].shape[1], x.shape[1]
    if interpret:
        multiply = partial(_interpreted, codes, x, packing=packing, folds=folds)
        return [total + multiply(factors[tile], tile) for tile, total in enumerate(sums)]
    result = plgpu.ShapeDtypeStruct((WGMMA_ROWS, width), jnp.dtype(jnp.float32), layout=WGMMA)
    types = (
        plgpu.RefType(swizzled(codes.shape[1], codes.dtype)),
        plgpu.RefType(swizzled(chunk, x.dtype)),
    )
    count = len(factors[0])
    words = [word for found in factors for word in found]

    @inline(
        arg_types=(*types, *(WGMMA for _ in sums), *(PER_ROW for _ in words)),
        return_type=(result,) * len(sums),
    )
    def run(_: Value, codes_ref: Value, x_ref: Value, *arrays: Value) -> tuple[Value, ...]:
        totals = [_numbers(array) for array in arrays[: len(sums)]]
        given = [_words(array) for array in arrays[len(sums) :]]
        product = _Product(codes_ref, x_ref, codes.shape, x.dtype, width, chunk, packing, folds)
        own = [given[tile * count : (tile + 1) * count] for tile in range(len(sums))]
        return tuple(in_layout(found, width) for found in product.added(totals, own))

    return list(run(codes, x, *sums, *words))


def load_factors(
    arrays: dict[str, Ref],
    rows: Array,
    first: Array,
    chunk: int,
    packing: Packing,
    *,
    interpret: bool,
) -> list[Array]:
    """Returns the scales, and the zero points if there are any, of 64 rows in a turn.

    Args:
        arrays: "scales" and "zeros" [rows, groups] in global memory.
        rows: int32 [64], rows of these arrays, in the layout `PER_ROW`; not checked.
        first: int32 [64], the first column of each row's turn, likewise; past the end the last groups are loaded.
        chunk: columns of a turn, which `fits` accepts.
        packing: form of the weight.
        interpret: whether the interpreter runs this.

    Returns:
        int32 words [64] of the scales' bits, then of the zero points'; under the interpreter their values [64, groups].
    """
    count = _groups(packing, chunk)
    groups = jnp.minimum(lax.div(first, jnp.int32(packing.group)), packing.groups - count)
    found = []
    for name in packing.names:
        ref = arrays[name]
        if interpret:
            columns = groups[:, None] + jnp.arange(count)[None]
            found.append(ref[...].astype(jnp.float32)[rows[:, None], columns])
        else:
            found += _load_words(ref, rows, groups, count, packing.groups)
    return found


def fits(packing: Packing, chunk: int) -> bool:
    """Returns whether turns of `chunk` columns have 128 bytes of codes or more, and whole groups or parts of one."""
    is_whole = packing.groups == 1 or max(chunk, packing.group) % min(chunk, packing.group) == 0
    # Adjacent scales are loaded as words, so their number is a power of two too.
    return is_whole and chunk & (chunk - 1) == 0 and chunk * packing.bits // 8 % _SWIZZLE == 0


class _Product:
    """One turn of a block; all methods emit code."""

    def __init__(
        self,
        codes: Value,
        x: Value,
        shape: tuple[int, int],
        dtype: DTypeLike,
        width: int,
        chunk: int,
        packing: Packing,
        folds: int,
    ) -> None:
        height, self.octets = shape
        self.width, self.chunk, self.packing, self.folds = width, chunk, packing, folds
        self.dtype = jnp.dtype(dtype).name
        self.text = word_conversion(packing.code, dtype)
        self.span = packing.span(chunk)
        # Columns of a thread, and its bytes of codes, in one unit; the four threads of a row share it.
        self.own = min(_MOST_COLUMNS, self.span // _MEMBERS)
        self.own_bytes = self.own * packing.bits // 8
        warp = divide(divide(utils.thread_idx(), 32)[0], WARPS)[1]
        group, member = divide(divide(utils.thread_idx(), 32)[1], _MEMBERS)
        self.codes, self.x = utils.memref_ptr(codes), utils.memref_ptr(x)
        row = times(group, _SWIZZLE)
        self.codes_row = add(times(warp, HEIGHT * self.octets), row)
        self.codes_own = times(member, self.own_bytes)
        # Of each 64 rows of the weight, those of their fold.
        of_fold = height // HEIGHT // folds
        each = [divide(add(warp, first), of_fold)[0] for first in range(0, height // HEIGHT, WARPS)]
        self.x_rows = [add(times(fold, width * chunk * 2), row) for fold in each]
        self.mask = times(group, _PIECE)
        self.x_own = times(member, 2 * self.own)

    def added(
        self, totals: list[list[Value]], factors: list[list[list[Value]]]
    ) -> list[list[Value]]:
        """Returns the accumulators with the scaled products added.

        Args:
            totals: for each 64 rows of the weight the accumulators of all rows of x.
            factors: for each 64 rows of the weight its words, for both halves of a thread's rows.
        """
        totals = [list(found) for found in totals]
        unit = self.own * _MEMBERS
        each, rights = [self.factors(words) for words in factors], []
        for first in range(0, self.chunk, self.span):
            for tile, (scales, bases) in enumerate(map(next, each)):
                if tile == 0 or self.folds > 1:
                    rights = [self.right(tile, first + at) for at in range(0, self.span, unit)]
                sums: list[list[Value]] = [[] for _ in range(self.width // ROW_TILE)]
                for number, at in enumerate(range(0, self.span, unit)):
                    left = self.left(tile, first + at, bases)
                    for block, right in enumerate(rights[number]):
                        sums[block] = self.multiplied(sums[block], left, right)
                found = [number for block in sums for number in block]
                for register, number in enumerate(found):
                    scale = scales[register // 2 % 2]
                    totals[tile][register] = _multiply_add(number, scale, totals[tile][register])
        return totals

    def left(self, tile: int, first: int, bases: list[Value]) -> list[list[Value]]:
        """Loads and widens the codes of 16 rows in a unit: for both halves of a thread's rows its registers."""
        start = first * self.packing.bits // 8
        return [
            [
                register
                for word in self.words(tile, half, start)
                for register in self.widened(word, bases[half])
            ]
            for half in (0, 1)
        ]

    def words(self, tile: int, half: int, start: int) -> list[Value]:
        """Loads the words of codes of one row of a thread."""
        swizzled_tile, inside = divmod(start, _SWIZZLE)
        turned = arith.xori(add(self.codes_own, inside), self.mask)
        fixed = (WGMMA_ROWS * tile + ROW_TILE * half) * self.octets
        fixed += swizzled_tile * ROW_TILE * _SWIZZLE
        return _load(self.codes, add(add(self.codes_row, turned), fixed), self.own_bytes)

    def widened(self, word: Value, base: Value | None) -> list[Value]:
        """Returns the registers of a word of codes."""
        given = [word] if base is None else [word, base]
        count = pairs_of_word(self.packing.code)
        kinds = ",".join(["=r"] * count + ["r"] * len(given))
        struct = llvm.StructType.get_literal([i32()] * count)
        found = llvm.inline_asm(struct, given, self.text, kinds)
        return [llvm.extractvalue(i32(), found, [place]) for place in range(count)]

    def right(self, tile: int, first: int) -> list[list[Value]]:
        """Loads x of a tile's fold in a unit: for each eight rows the registers, paired as the codes are."""
        swizzled_tile, inside = divmod(2 * first, _SWIZZLE)
        found = []
        for block in range(self.width // ROW_TILE):
            fixed = block * ROW_TILE * self.chunk * 2 + swizzled_tile * ROW_TILE * _SWIZZLE
            words = []
            for piece in range(0, 2 * self.own, _PIECE):
                turned = arith.xori(add(self.x_own, inside + piece), self.mask)
                words += _load(self.x, add(add(self.x_rows[tile], turned), fixed), _PIECE)
            found.append(self.paired(words))
        return found

    def paired(self, words: list[Value]) -> list[Value]:
        """Returns registers of the columns i and i + half of those whose codes share a word."""
        count = pairs_of_word(self.packing.code)
        found = []
        for start in range(0, len(words), count):
            own, half = words[start : start + count], count // 2
            for place in range(count):
                low, high = own[place // 2], own[place // 2 + half]
                found.append(_permuted(low, high, 0x7632 if place % 2 else 0x5410))
        return found

    def multiplied(
        self, sums: list[Value], left: list[list[Value]], right: list[Value]
    ) -> list[Value]:
        """Returns the accumulators of a unit's products, added to `sums` unless they are empty."""
        sums = sums or [arith.constant(ir.F32Type.get(), 0.0)] * 4
        low, high = left
        for step in range(0, len(right), 2):
            given = [low[step], high[step], low[step + 1], high[step + 1], *right[step : step + 2]]
            sums = multiply_tile(given, sums, self.dtype)
        return sums

    def factors(self, words: list[list[Value]]) -> Iterator[tuple[list[Value], list[Value]]]:
        """Yields for each span the scales of a thread's two rows, and what is subtracted from their int4 codes."""
        size, groups = jnp.dtype(self.packing.scales).itemsize, _groups(self.packing, self.chunk)
        count = -(-size * groups // 4)
        scales: list[list[Value]] = []
        for place in range(groups):
            if place * size % 4 == 0:
                scales = [
                    _scales(words[place * size // 4][half], self.packing.scales) for half in (0, 1)
                ]
            bases = self.bases(words[count:], place)
            for _ in range(self.chunk // groups // self.span):
                yield [found[place % len(found)] for found in scales], bases

    def bases(self, words: list[list[Value]], place: int) -> list[Value]:
        """Returns the zero points of int4 codes in a group as magic numbers, for both halves of a thread's rows."""
        if self.packing.code != "int4":
            return [None, None]
        if not self.packing.has_zeros:
            return [constant(KINDS[self.dtype].magic | 0x00080008)] * 2
        magic = constant(KINDS[self.dtype].magic)
        zeros = [_part(words[place // 4][half], place % 4, 1) for half in (0, 1)]
        return [arith.ori(times(zero, 0x00010001), magic) for zero in zeros]


def _groups(packing: Packing, chunk: int) -> int:
    """Returns the groups of a row in a turn."""
    return max(1, chunk // packing.group)


def _interpreted(
    codes: Ref, x: Ref, factors: list[Array], tile: int, *, packing: Packing, folds: int
) -> Array:
    (height, _), chunk = codes.shape, x.shape[1]
    own = slice(tile * WGMMA_ROWS, (tile + 1) * WGMMA_ROWS)
    ones = jnp.ones((height, 1), jnp.float32)
    numbers = FewBits(codes[...], ones, None, None, packing.code).numbers()[own]
    scales, *zeros = (jnp.repeat(found, chunk // found.shape[1], axis=1) for found in factors)
    if zeros:
        numbers += 8 - zeros[0]
    wide = x[...].astype(jnp.float32).reshape(folds, -1, chunk)
    of_row = wide[jnp.arange(height)[own] // (height // folds)]
    return jnp.einsum("rk,rnk->rn", numbers * scales, of_row, precision=lax.Precision.HIGHEST)


def _load_words(ref: Ref, rows: Array, groups: Array, count: int, stride: int) -> list[Array]:
    """Loads adjacent elements of each row, as words of their bits; fewer bytes than a word become its lowest."""
    size = jnp.dtype(ref.dtype).itemsize
    words = -(-count * size // 4)
    result = plgpu.ShapeDtypeStruct(rows.shape, jnp.dtype(jnp.int32), layout=PER_ROW)

    @inline(arg_types=(plgpu.RefType(), PER_ROW, PER_ROW), return_type=(result,) * words)
    def run(_: Value, source: Value, *places: Value) -> tuple[Value, ...]:
        start, found = utils.memref_ptr(source), []
        i64 = ir.IntegerType.get_signless(64)
        for row, group in zip(*(_words(place) for place in places), strict=True):
            wide = arith.muli(arith.extui(i64, row), utils.c(stride * size, i64))
            at = arith.addi(wide, arith.extui(i64, times(group, size)))
            found.append(_load(start, at, count * size))
        return tuple(_per_row([own[word] for own in found]) for word in range(words))

    return list(run(ref, rows, groups))


def _load(start: Value, offset: Value, size: int) -> list[Value]:
    """Loads `size` adjacent bytes, aligned to their number or to 16, as words."""
    octet = ir.IntegerType.get_signless(8)
    if size < 4:
        number = llvm.load(
            ir.IntegerType.get_signless(8 * size), utils.getelementptr(start, [offset], octet)
        )
        return [arith.extui(i32(), number)]
    found = []
    for piece in range(0, size, _PIECE):
        count = min(size - piece, _PIECE) // 4
        place = arith.addi(offset, utils.c(piece, offset.type)) if piece else offset
        at = utils.getelementptr(start, [place], octet)
        words = llvm.load(ir.VectorType.get((count,), i32()), at)
        found += [vector.extract(words, [], [word]) for word in range(count)]
    return found


def _part(word: Value, place: int, size: int) -> Value:
    """Returns element `place` of `size` bytes of a word, in the lowest bits of a word."""
    if size == 4:
        return word
    found = arith.shrui(word, constant(8 * place * size)) if place else word
    return found if (place + 1) * size == 4 else arith.andi(found, constant((1 << 8 * size) - 1))


def _scales(word: Value, dtype: str) -> list[Value]:
    """Returns the float32 numbers of a word's scales."""
    f32 = ir.F32Type.get()
    if dtype == "float8_e8m0fnu":
        struct = llvm.StructType.get_literal([i32()] * 2)
        pairs = [
            llvm.inline_asm(struct, [word], power_conversion(half), "=r,=r,r") for half in (0, 1)
        ]
        bits = [llvm.extractvalue(i32(), pair, [place]) for pair in pairs for place in (0, 1)]
        return [arith.bitcast(f32, number) for number in bits]
    size = jnp.dtype(dtype).itemsize
    parts = [_part(word, place, size) for place in range(4 // size)]
    if dtype == "float16":
        halves = [arith.trunci(ir.IntegerType.get_signless(16), part) for part in parts]
        return [arith.extf(f32, arith.bitcast(ir.F16Type.get(), half)) for half in halves]
    if dtype == "bfloat16":
        parts = [arith.shli(part, constant(16)) for part in parts]
    return [arith.bitcast(f32, part) for part in parts]


def _multiply_add(number: Value, factor: Value, other: Value) -> Value:
    return llvm.intr_fma(number, factor, other)


def _permuted(low: Value, high: Value, selector: int) -> Value:
    return llvm.inline_asm(i32(), [low, high], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r")


def _words(array: Value) -> list[Value]:
    """Returns the elements of a thread's rows, the lower row first."""
    return [vector.extract(register, [], [0]) for register in array.registers.flat]


def _per_row(words: list[Value]) -> Value:
    """Returns an int32 array of one word per row."""
    layout = PER_ROW.to_mgpu()
    kind = ir.VectorType.get((1,), i32())
    registers = np.array([vector.broadcast(kind, word) for word in words], dtype=object)
    registers = registers.reshape(layout.registers_shape((WGMMA_ROWS,)))
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _numbers(array: Value) -> list[Value]:
    """Returns the accumulators of an array in the order of the product's registers."""
    found = array.to_layout(_fragments.WGMMA_LAYOUT_ACC_32BIT)
    return _words(found)
