"""Products of weights in 8 and 4 bits, which become wgmma's left operand in registers, with 16-bit rows of x.

In wgmma's left-operand fragment a thread has pairs of adjacent numbers, from every eighth column. A pair of 8-bit codes
is loaded as two bytes. A pair of 4-bit codes is one byte: the four threads of a row load the same 16 bytes, and each
picks one byte of every word. So neither the weight nor x is permuted. Codes become bfloat16 or float16 exactly:

- integers become the low bits of a number whose last place has the value 1, from which it is subtracted;
- the bits of floating-point codes are moved to their places, and a product with a power of two corrects the exponent.
  The codes of NaN in e4m3 would become 480; no checkpoint has them.

Tiles lie in shared memory as (rows / 8, width / swizzle, 8, swizzle) with the usual XOR swizzle of 16-byte pieces.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.formats.few_bits import CODES, FewBits
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
    memref,
    times,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.products import accumulators, descriptor, in_layout, moved, nvvm
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, swizzle_of, swizzled

UNIT = 32
"""Columns of the least group with a scale, and of what a product's columns are a multiple of."""

SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
"""Dtypes of scales."""

NARROW_SCALES = ("bfloat16", "float8_e8m0fnu")
"""Those whose numbers are bfloat16."""

_SWIZZLE, _PIECE = 128, 16
# K of one wgmma instruction, and the 16-bit elements in a row of a swizzled tile.
_STEP, _ELEMENTS = 16, 64


class _Kind(NamedTuple):
    """A 16-bit dtype: its PTX name, `magic` (two numbers whose last place is 1), and how float codes are moved."""

    name: str
    magic: int
    e4m3: tuple[int, int, int]
    e2m1: tuple[int, int, int]


# Of floating-point codes: the shift of the magnitude, its mask, and the two factors that correct the exponent.
KINDS = {
    "bfloat16": _Kind("bf16", 0x43004300, (4, 0x07F007F0, 0x7B807B80), (6, 0x01C001C0, 0x7E807E80)),
    "float16": _Kind("f16", 0x64006400, (7, 0x3F803F80, 0x5C005C00), (9, 0x0E000E00, 0x74007400)),
}
_FACTOR = "mov.b32 t, {factor}; mul.rn.{kind}x2 $0, m, t;"
# Each converts a pair, the first code in the low half: $1 has it in its lowest two bytes, or in byte $2 of the word.
# (value & mask) | other is the logical function 0xea.
_CONVERT = {
    "float8_e4m3fn": """{{ .reg .b32 t, m, s;
        prmt.b32 t, $1, 0, 0x4140; shl.b32 m, t, {shift}; shl.b32 s, t, 8;
        and.b32 m, m, {mask}; lop3.b32 m, s, 0x80008000, m, 0xea; """
    + _FACTOR
    + "}}",
    "int8": """{{ .reg .b32 t, m, s;
        prmt.b32 t, $1, 0, 0x4140; lop3.b32 m, t, 0x007f007f, {magic}, 0xea;
        lop3.b32 s, t, 0x00800080, {magic}, 0xea; sub.rn.{kind}x2 $0, m, s; }}""",
    "int4": """{{ .reg .b32 t;
        prmt.b32 t, $1, 0, $2; mul.lo.u32 t, t, 0x1001; lop3.b32 t, t, 0x000f000f, {magic}, 0xea;
        sub.rn.{kind}x2 $0, t, $3; }}""",
    "float4_e2m1fn": """{{ .reg .b32 t, m, s;
        prmt.b32 t, $1, 0, $2; mul.lo.u32 m, t, {both}; mul.lo.u32 s, t, 0x01001000;
        and.b32 m, m, {mask}; lop3.b32 m, s, 0x80008000, m, 0xea; """
    + _FACTOR
    + "}}",
}
_SCALE = """{{ .reg .b16 l, h; .reg .f32 x, y;
    mov.b32 {{l, h}}, $1; cvt.f32.{kind} x, l; cvt.f32.{kind} y, h;
    mul.f32 x, x, $2; mul.f32 y, y, $2; cvt.rn.{kind}x2.f32 $0, y, x; }}"""
NARROW_SCALING = "{ .reg .b32 s; prmt.b32 s, $2, 0, 0x3232; mul.rn.bf16x2 $0, $1, s; }"
"""PTX that multiplies two bfloat16 numbers, $1, by a float32 number that is one of bfloat16, $2, and rounds once."""

_MULTIPLY = """{{
    .reg .pred adds;
    setp.ne.b32 adds, {adds}, 0;
    wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{sums}}}, {{{left}}}, ${right}, adds, 1, 1, 0;
}}"""


def start_product(
    codes: Ref,
    x: Ref,
    zeros: Array | None,
    *,
    code: str,
    first: int,
    columns: int,
    interpret: bool,
    scales: Array | None = None,
    are_narrow: bool = False,
    onto: Array | None = None,
) -> Array:
    """Issues the product of some columns; the result is valid only after `products.wait_for`.

    Args:
        codes: [64, bytes] in shared memory, with the widest swizzle that divides the bytes.
        x: bfloat16 or float16 [rows, chunk] in shared memory, swizzled by 128 bytes; `rows` is a multiple of 8.
        zeros: int32 zero points of int4 codes, one per row, in the layout `PER_ROW`; `None` for 8.
        code: name in `CODES`.
        first: first column, a multiple of `UNIT`.
        columns: number of columns, a multiple of `UNIT`.
        interpret: whether the interpreter runs this.
        scales: float32, one per row, likewise; they multiply the numbers, which are rounded to x's dtype.
        are_narrow: whether scales have a dtype in `NARROW_SCALES`, which takes fewer instructions.
        onto: float32 [64, rows] to which the product is added, also one that was issued and not waited for.

    Returns:
        float32 [64, rows].
    """
    if interpret:
        numbers = _numbers(codes, zeros, code=code)
        if scales is not None:
            numbers = (numbers * scales[:, None]).astype(x.dtype).astype(jnp.float32)
        own = slice(first, first + columns)
        wide = x[...].astype(jnp.float32)[:, own]
        found = jnp.dot(numbers[:, own], wide.T, precision=lax.Precision.HIGHEST)
        return found if onto is None else onto + found
    width, chunk = x.shape
    result = plgpu.ShapeDtypeStruct((WGMMA_ROWS, width), jnp.dtype(jnp.float32), layout=WGMMA)
    types = (
        plgpu.RefType(swizzled(codes.shape[1], codes.dtype)),
        plgpu.RefType(swizzled(chunk, x.dtype)),
    )
    per_row = {"zeros": zeros, "scales": scales}
    per_row = {name: array for name, array in per_row.items() if array is not None}
    before = () if onto is None else (onto,)
    kind = KINDS[jnp.dtype(x.dtype).name]
    layouts = *(PER_ROW for _ in per_row), *(WGMMA for _ in before)

    @inline(arg_types=(*types, *layouts), return_type=result)
    def run(_: Value, codes_ref: Value, x_ref: Value, *arrays: Value) -> Value:
        # By half of the rows. Sums to add to are the last array.
        factors = {
            name: [vector.extract(register, [], [0]) for register in array.registers.flat]
            for name, array in zip(per_row, arrays, strict=False)
        }
        scaled = partial(_scaled, kind=kind, are_narrow=are_narrow)
        left = _left_operands(
            codes_ref, codes.shape[1], factors, code, kind, first, columns, scaled
        )
        nvvm.wgmma_fence_aligned()
        right = descriptor(x_ref, 0, chunk // _ELEMENTS * ROW_TILE * _SWIZZLE)
        sums = accumulators(arrays[-1]) if before else []
        for step in range(columns // _STEP):
            low, high = left[0, step], left[1, step]
            tile, inside = divmod(first + step * _STEP, _ELEMENTS)
            here = moved(right, tile * ROW_TILE * _SWIZZLE + 2 * inside)
            sums = _multiply(sums, [low[0], high[0], low[1], high[1]], here, width, kind)
        nvvm.wgmma_commit_group_sync_aligned()
        return in_layout(sums, width)

    return run(codes, x, *per_row.values(), *before)


def _left_operands(
    codes: Value,
    octets: int,
    factors: Mapping[str, list[Value]],
    code: str,
    kind: _Kind,
    first: int,
    columns: int,
    scaled: Callable[[Value, Value], Value],
) -> dict[tuple[int, int], list[Value]]:
    """Returns this thread's two registers of numbers, by half of the rows and step.

    Args:
        codes: the codes in shared memory, `octets` bytes per row.
        octets: bytes of a row.
        factors: "zeros" and "scales" of the two halves, where there are any.
        code: name in `CODES`.
        kind: dtype of the numbers.
        first: first column.
        columns: number of columns.
        scaled: multiplies a register of two numbers by a scale.
    """
    start, bits, text = utils.memref_ptr(codes), CODES[code].bits, _conversion(code, kind)
    warp = divide(divide(utils.thread_idx(), 32)[0], 4)[1]
    group, member = divide(divide(utils.thread_idx(), 32)[1], 4)
    bases = _bases(factors.get("zeros"), kind) if code == "int4" else [None] * 2
    swizzle = swizzle_of(octets)
    mask = divide(group, _SWIZZLE // swizzle)[0]
    left: dict[tuple[int, int], list[Value]] = {}
    for half in (0, 1):
        row = add(times(add(times(warp, 2), half), ROW_TILE * octets), times(group, swizzle))
        for place in range(first * bits // 8, (first + columns) * bits // 8, _PIECE):
            tile, piece = divmod(place // _PIECE, swizzle // _PIECE)
            turned = times(arith.xori(mask, constant(piece)), _PIECE)
            at = add(add(row, tile * ROW_TILE * swizzle), turned)
            step = (place * 8 // bits - first) // _STEP
            if bits == 8:
                left[half, step] = _two_pairs(start, at, member, text)
            else:
                both = _four_pairs(start, at, member, bases[half], text)
                left[half, step], left[half, step + 1] = both[:2], both[2:]
    if "scales" not in factors:
        return left
    return {
        (half, step): [scaled(pair, factors["scales"][half]) for pair in pairs]
        for (half, step), pairs in left.items()
    }


def load_scales(scales: Ref, rows: Array, groups: Array, *, interpret: bool) -> Array:
    """Returns `scales[rows, groups]` from global memory as float32, one per row; indices are not checked.

    Args:
        scales: [out, groups] of a dtype in `SCALES`.
        rows: int32 [64] in the layout `PER_ROW`.
        groups: int32, likewise.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        return scales[...].astype(jnp.float32)[rows, groups]
    return _gather(scales, rows, groups, jnp.float32)


def load_zeros(zeros: Ref, rows: Array, groups: Array, *, interpret: bool) -> Array:
    """Returns `zeros[rows, groups]` from global memory as int32, one per row; arguments as in `load_scales`."""
    if interpret:
        return zeros[...].astype(jnp.int32)[rows, groups]
    return _gather(zeros, rows, groups, jnp.int32)


def _numbers(codes: Ref, zeros: Array | None, *, code: str) -> Array:
    """Returns the float32 numbers of all codes, zero points subtracted, for the interpreter."""
    ones = jnp.ones((WGMMA_ROWS, 1), jnp.float32)
    numbers = FewBits(codes[...], ones, None, None, code).numbers()
    return numbers if zeros is None else numbers + (8 - zeros).astype(jnp.float32)[:, None]


def _bases(zeros: list[Value] | None, kind: _Kind) -> list[Value]:
    """Returns what is subtracted from int4 codes in their magic numbers, for both halves of a thread's rows."""
    if zeros is None:
        return [constant(kind.magic | 0x00080008)] * 2
    return [arith.ori(times(zero, 0x00010001), constant(kind.magic)) for zero in zeros]


def _scaled(pair: Value, scale: Value, *, kind: _Kind, are_narrow: bool) -> Value:
    """Returns a register of two 16-bit numbers, multiplied by a float32 scale and rounded once."""
    if are_narrow and kind.name == "bf16":
        bits = arith.bitcast(i32(), scale)
        return llvm.inline_asm(i32(), [pair, bits], NARROW_SCALING, "=r,r,r")
    text = _SCALE.format(kind=kind.name)
    return llvm.inline_asm(i32(), [pair, scale], text, "=r,r,f")


def _two_pairs(start: Value, at: Value, member: Value, text: str) -> list[Value]:
    """Loads this thread's two pairs of 16 codes of 8 bits."""
    i16 = ir.IntegerType.get_signless(16)
    found = []
    for half in (0, 8):
        pair = llvm.load(i16, _byte(start, add(add(at, half), times(member, 2))))
        found.append(_convert([arith.extui(i32(), pair)], text))
    return found


def _four_pairs(
    start: Value, at: Value, member: Value, base: Value | None, text: str
) -> list[Value]:
    """Loads this thread's four pairs of 32 codes of 4 bits."""
    words = llvm.load(ir.VectorType.get((4,), i32()), _byte(start, at))
    # Byte `member` of the word, then zeros.
    others = [add(member, 0x4440)] + ([] if base is None else [base])
    return [_convert([vector.extract(words, [], [place]), *others], text) for place in range(4)]


def conversion(code: str, dtype: DTypeLike) -> str:
    """Returns the PTX that turns a pair of codes, $1, into a register of two 16-bit numbers, $0.

    Args:
        code: name in `CODES`. $1 has two 8-bit codes in its low half, or 4-bit codes in the byte that $2 selects.
        dtype: bfloat16 or float16. Of int4 $3 is the zero point, in both halves, as an integer beside `magic`.
    """
    return _conversion(code, KINDS[jnp.dtype(dtype).name])


def _conversion(code: str, kind: _Kind) -> str:
    shift, mask, factor = kind.e2m1 if code == "float4_e2m1fn" else kind.e4m3
    return _CONVERT[code].format(
        kind=kind.name,
        magic=kind.magic,
        shift=shift,
        mask=mask,
        factor=factor,
        # The lower code's magnitude goes to the low half, the upper one's, four bits on, to the high half.
        both=(1 << shift) + (1 << shift + 12),
    )


def _convert(given: list[Value], text: str) -> Value:
    return llvm.inline_asm(i32(), given, text, ",".join(["=r"] + ["r"] * len(given)))


def _multiply(
    sums: list[Value], left: list[Value], right: Value, width: int, kind: _Kind
) -> list[Value]:
    """Issues one wgmma and returns the accumulator's registers; it adds to `sums` unless they are empty."""
    f32, count = ir.F32Type.get(), width // 2
    begin = count + len(sums)
    text = _MULTIPLY.format(
        adds=int(bool(sums)),
        width=width,
        kind=kind.name,
        sums=", ".join(f"${place}" for place in range(count)),
        left=", ".join(f"${begin + place}" for place in range(4)),
        right=begin + 4,
    )
    # Accumulator inputs are tied to the output registers.
    tied = [str(place) for place in range(len(sums))]
    kinds = ",".join(["=f"] * count + tied + ["r"] * 4 + ["l"])
    struct = llvm.StructType.get_literal([f32] * count)
    found = llvm.inline_asm(struct, [*sums, *left, right], text, kinds, has_side_effects=True)
    return [llvm.extractvalue(f32, found, [place]) for place in range(count)]


def _gather(ref: Ref, rows: Array, groups: Array, dtype: DTypeLike) -> Array:
    """Returns one element per row, converted to float32 or int32."""
    result = plgpu.ShapeDtypeStruct(rows.shape, jnp.dtype(dtype), layout=PER_ROW)
    is_exponent = ref.dtype == jnp.float8_e8m0fnu

    @inline(arg_types=(plgpu.RefType(), PER_ROW, PER_ROW), return_type=result)
    def load(_: Value, source: Value, *places: Value) -> Value:
        registers = np.empty(places[0].registers.shape, dtype=object)
        for place in np.ndindex(registers.shape):
            index = [
                arith.index_cast(ir.IndexType.get(), vector.extract(each.registers[place], [], [0]))
                for each in places
            ]
            number = memref.load(source, index)
            if is_exponent:
                octet = arith.bitcast(ir.IntegerType.get_signless(8), number)
                number = power_of_two(arith.extui(i32(), octet))
            elif dtype == jnp.int32:
                number = arith.extui(i32(), number)
            elif ref.dtype != jnp.float32:
                number = arith.extf(ir.F32Type.get(), number)
            registers[place] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        signed: Any = True if dtype == jnp.int32 else None
        return mosaic.FragmentedArray(
            _registers=registers, _layout=PER_ROW.to_mgpu(), _is_signed=signed
        )

    return load(ref, rows, groups)


def power_of_two(code: Value) -> Value:
    """Returns the float32 number of an e8m0 code: 2**(code - 127), a subnormal number for 0, and NaN for 255."""
    bits = arith.maxui(arith.shli(code, constant(23)), constant(1 << 22))
    is_nan = arith.cmpi(arith.CmpIPredicate.eq, code, constant(255))
    bits = arith.select(is_nan, constant(0x7FC00000), bits)
    return arith.bitcast(ir.F32Type.get(), bits)


def _byte(start: Value, offset: Value) -> Value:
    return utils.getelementptr(start, [offset], ir.IntegerType.get_signless(8))
