"""Lists of values with their positions, and one mark byte per position of a row, in shared memory (inline PTX, Hopper).

Each warp appends values and positions to its own list, so the lists are not in the order of positions. Marks restore
that order. The interpreter does not support inline PTX; only `append_placed` has a version for it.
"""

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    elements,
    i32,
    inline,
    llvm,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.warps import WARPS, own_warp

_SCALAR = plgpu.Layout.WG_SPLAT(())

# Operands: $0 count after, $1 value, $2 bound, $3 position, $4 and $5 addresses of both lists, $6 count before,
# $7 capacity.
_APPEND = """{
    .reg .pred is_kept, has_room;
    .reg .b32 kept, place, at, lanes;
    setp.ge.f32 is_kept, $1, $2;
    vote.sync.ballot.b32 kept, is_kept, 0xffffffff;
    mov.u32 lanes, %lanemask_lt;
    and.b32 place, kept, lanes;
    popc.b32 place, place;
    add.u32 place, place, $6;
    setp.lt.and.u32 has_room, place, $7, is_kept;
    mad.lo.u32 at, place, 4, $4;
    @has_room st.shared.f32 [at], $1;
    mad.lo.u32 at, place, 4, $5;
    @has_room st.shared.b32 [at], $3;
    popc.b32 kept, kept;
    add.u32 $0, $6, kept;
}"""

# Operands: $0 address of the marks, $1 value, $2 position, $3 bound of ties, $4 bound of values above the ties.
_MARK = """{
    .reg .pred is_above, is_chosen;
    .reg .b32 mark, at;
    setp.ge.f32 is_above, $1, $4;
    setp.ge.f32 is_chosen, $1, $3;
    selp.b32 mark, 1, 16, is_above;
    add.u32 at, $0, $2;
    @is_chosen st.shared.u8 [at], mark;
}"""

# Operands: $0 sum over lower lanes, $1 sum over the warp, $2 this lane's addend.
_SCAN = """{
    .reg .pred has;
    .reg .b32 total, got, every;
    mov.b32 total, $2;
    shfl.sync.up.b32 got|has, total, 1, 0, 0xffffffff;
    @has add.u32 total, total, got;
    shfl.sync.up.b32 got|has, total, 2, 0, 0xffffffff;
    @has add.u32 total, total, got;
    shfl.sync.up.b32 got|has, total, 4, 0, 0xffffffff;
    @has add.u32 total, total, got;
    shfl.sync.up.b32 got|has, total, 8, 0, 0xffffffff;
    @has add.u32 total, total, got;
    shfl.sync.up.b32 got|has, total, 16, 0, 0xffffffff;
    @has add.u32 total, total, got;
    shfl.sync.idx.b32 every, total, 31, 31, 0xffffffff;
    sub.u32 total, total, $2;
    mov.b32 $0, total;
    mov.b32 $1, every;
}"""

# Operands: $0 and $1 numbers of marks above and equal after, $2 and $3 the same before, $4 four marks, $5 position of
# the first mark, $6 ties to select, $7 address of the output.
_PLACE = """{
    .reg .pred is_done, is_equal, is_chosen;
    .reg .b32 left, bit, at, kind, above, equal;
    mov.b32 left, $4;
    mov.b32 above, $2;
    mov.b32 equal, $3;
NEXT:
    setp.eq.b32 is_done, left, 0;
    @is_done bra END;
    brev.b32 bit, left;
    clz.b32 bit, bit;
    sub.u32 at, left, 1;
    and.b32 left, left, at;
    min.u32 at, equal, $6;
    add.u32 at, at, above;
    mad.lo.u32 at, at, 4, $7;
    and.b32 kind, bit, 4;
    setp.ne.b32 is_equal, kind, 0;
    shr.u32 bit, bit, 3;
    add.u32 bit, bit, $5;
    setp.lt.or.u32 is_chosen, equal, $6, !is_equal;
    @is_chosen st.shared.b32 [at], bit;
    @is_equal add.u32 equal, equal, 1;
    @!is_equal add.u32 above, above, 1;
    bra NEXT;
END:
    mov.b32 $0, above;
    mov.b32 $1, equal;
}"""


def append_placed(
    lists: tuple[Ref, Ref],
    first: Array,
    counts: Array,
    numbers: Array,
    positions: Array,
    low: Array,
    *,
    room: int,
    layout: Layout,
    interpret: bool,
) -> Array:
    """Appends each warp's values >= `low`, with their positions, to the warp's list; returns the new counts.

    Args:
        lists: float32 values and int32 positions in shared memory. The list of the warpgroup's warp w is
            `[first + w * room:][:room]`. Values beyond its capacity are counted and dropped.
        first: index of the first warp's list.
        counts: int32, same shape as `numbers`; every element of a warp holds the length of the warp's list.
        numbers: the values, float32; NaN is not appended.
        positions: int32, same shape.
        low: float32.
        room: capacity of each warp's list.
        layout: register layout of these arrays.
        interpret: whether the interpreter runs this; it keeps one list per warpgroup.
    """
    if interpret:
        numbers, positions = numbers.reshape(-1), positions.reshape(-1)
        is_kept = numbers >= low
        place = counts.reshape(-1)[0] + jnp.cumsum(is_kept, dtype=jnp.int32) - 1
        place = jnp.where(is_kept, place, WARPS * room)
        own = pl.ds(first, WARPS * room)
        for found, array in zip(lists, (numbers, positions), strict=True):
            found[own] = found[own].at[place].set(array, mode="drop")
        return counts + jnp.sum(is_kept, dtype=jnp.int32)
    types = (plgpu.RefType(), plgpu.RefType(), _SCALAR, layout, layout, layout, _SCALAR)
    result = plgpu.ShapeDtypeStruct(counts.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=types, return_type=result)
    def run(_: Value, found: Value, where: Value, first: Value, *arrays: Value) -> Value:
        counts, numbers, positions, low = arrays
        begin = arith.addi(first.registers.item(), arith.muli(own_warp(), constant(room)))
        starts = [
            arith.addi(_address(ref), arith.muli(begin, constant(4))) for ref in (found, where)
        ]
        count = elements(counts)[0]
        for number, position in zip(elements(numbers), elements(positions), strict=True):
            given = [number, low.registers.item(), position, *starts, count, constant(room)]
            count = llvm.inline_asm(
                i32(), given, _APPEND, "=r,f,f,r,r,r,r,r,~{memory}", has_side_effects=True
            )
        return _filled(counts, count)

    return run(*lists, first, counts, numbers, positions, low)


def mark(
    marks: Ref,
    numbers: Array,
    positions: Array,
    low: Array,
    high: Array,
    *,
    layout: Layout,
) -> None:
    """Writes mark 1 at the positions of values >= `high`, and mark 16 at those of values in [low, high)."""

    @inline(arg_types=(plgpu.RefType(), layout, layout, _SCALAR, _SCALAR))
    def run(_: Value, marks: Value, numbers: Value, positions: Value, *bounds: Value) -> None:
        start, bounds_ = _address(marks), [bound.registers.item() for bound in bounds]
        for number, position in zip(elements(numbers), elements(positions), strict=True):
            given = [start, number, position, *bounds_]
            llvm.inline_asm(None, given, _MARK, "r,f,r,f,f,~{memory}", has_side_effects=True)

    run(marks, numbers, positions, low, high)


def count_marks(words: Array, *, layout: Layout) -> Array:
    """Returns for each word of four marks the number of 1s plus 65536 times the number of 16s."""
    result = plgpu.ShapeDtypeStruct(words.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=(layout,), return_type=result)
    def run(_: Value, words: Value) -> Value:
        registers = words.registers.copy()
        for place, register in enumerate(words.registers.flat):
            size = register.type.shape[0]
            numbers = [vector.extract(register, [], [element]) for element in range(size)]
            registers.flat[place] = vector.from_elements(register.type, [_both(n) for n in numbers])
        return mosaic.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=True)

    return run(words)


def place_marked(
    places: Ref,
    words: Array,
    position: Array,
    ties: Array,
    before: Array,
    *,
    layout: Layout,
) -> Array:
    """Compacts the positions of all marks of 1 and of the first `ties` marks of 16, in order.

    Args:
        places: the output, int32 in shared memory; the i-th selected position goes to `places[i]`.
        words: int32, four marks each; each warp holds one row, four adjacent words per thread.
        position: int32, same shape: the position of each word's first mark.
        ties: number of marks of 16 to select.
        before: int32, same shape, uniform in a warp: the marks before the warp's row, in the form of `count_marks`.
        layout: register layout of these arrays.

    Returns:
        `before` for the words that follow.
    """
    types = (plgpu.RefType(), layout, layout, _SCALAR, layout)
    result = plgpu.ShapeDtypeStruct(words.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=types, return_type=result)
    def run(_: Value, places: Value, words: Value, position: Value, *rest: Value) -> Value:
        ties, before = rest
        words_, start = elements(words), _address(places)
        own = constant(0)
        for word in words_:
            own = arith.addi(own, _both(word))
        pair = llvm.StructType.get_literal([i32(), i32()])
        scanned = llvm.inline_asm(pair, [own], _SCAN, "=r,=r,r", has_side_effects=True)
        count = elements(before)[0]
        now = arith.addi(count, llvm.extractvalue(i32(), scanned, [0]))
        above = arith.andi(now, constant(0xFFFF))
        equal = arith.shrui(now, constant(16))
        for word, first in zip(words_, elements(position), strict=True):
            given = [above, equal, word, first, ties.registers.item(), start]
            both = llvm.inline_asm(
                pair, given, _PLACE, "=r,=r,r,r,r,r,r,r,~{memory}", has_side_effects=True
            )
            above, equal = (llvm.extractvalue(i32(), both, [index]) for index in (0, 1))
        return _filled(before, arith.addi(count, llvm.extractvalue(i32(), scanned, [1])))

    return run(places, words, position, ties, before)


def _both(word: Value) -> Value:
    def count(mask: int) -> Value:
        bits = arith.andi(word, constant(mask))
        return llvm.inline_asm(i32(), [bits], "popc.b32 $0, $1;", "=r,r")

    return arith.addi(count(0x01010101), arith.shli(count(0x10101010), constant(16)))


def _address(ref: Value) -> Value:
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def _filled(array: Value, number: Value) -> Value:
    registers = array.registers.copy()
    registers[...] = vector.broadcast(registers.flat[0].type, number)
    return mosaic.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=array.is_signed
    )
