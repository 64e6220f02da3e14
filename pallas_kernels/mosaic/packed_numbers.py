"""Numbers of 16, 8 and 4 bits in words of 32: PTX, and the same where it is interpreted.

They become float32, or pairs of 16 bits, which a warp multiplies with tensor cores.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.mosaic.dialects import Value, ir, llvm
from pallas_kernels.mosaic.few_bits import KINDS

BITS = {"bfloat16": 16, "float16": 16} | {name: code.bits for name, code in CODES.items()}
"""Bits of the numbers that words hold, by their dtype or their name in `CODES`."""

AS_NUMBER = {
    "f32": "mov.b32 $0, $1;",
    "bf16": "shl.b32 $0, $1, 16;",
    "f16": "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }",
    # 2**(code - 127), a subnormal number for 0, and NaN for 255.
    "f8E8M0FNU": """{ .reg .pred is_nan; .reg .b32 bits;
        shl.b32 bits, $1, 23; max.u32 bits, bits, 0x00400000;
        setp.eq.u32 is_nan, $1, 255; selp.b32 $0, 0x7fc00000, bits, is_nan; }""",
    "i8": "cvt.rn.f32.u32 $0, $1;",
}
"""MLIR's name of a type -> PTX that makes $0, a float32, of the low bits of $1."""

OF_NUMBER = {
    "f32": "mov.b32 $0, $1;",
    "bf16": "{ .reg .b16 half; cvt.rn.bf16.f32 half, $1; mov.b32 $0, {half, half}; }",
    "f16": "{ .reg .b16 half; cvt.rn.f16.f32 half, $1; mov.b32 $0, {half, half}; }",
}
"""MLIR's name of a type -> PTX that makes the low bits of $0 of $1, a float32, rounded to nearest."""

# Two float16 numbers, 1024 + 128 each.
_BASE = "0x64806480"
# What makes pairs of float16, p0 and p1, of a word: of its first two numbers and of the other two.
_AS_PAIRS = {
    "float16": "mov.b32 p0, {word};",
    "float8_e4m3fn": """.reg .b16 low, high; mov.b32 {{low, high}}, {word};
        cvt.rn.f16x2.e4m3x2 p0, low; cvt.rn.f16x2.e4m3x2 p1, high;""",
    # 1024 + 128 + x has x with its sign bit flipped as its low byte.
    "int8": """.reg .b32 turned; xor.b32 turned, {word}, 0x80808080;
        prmt.b32 p0, turned, 0x64646464, 0x4140; sub.rn.f16x2 p0, p0, base;
        prmt.b32 p1, turned, 0x64646464, 0x4342; sub.rn.f16x2 p1, p1, base;""",
}
E2M1_RATE = 2.0**-32
"""What the numbers of `Threads.scaled_pairs` are multiplied by, so that one product corrects exponent and scale."""
# The bits of an e2m1 code v, moved to their places in bfloat16, are v * 2**-126. So the factor of a scale with the e8m0
# code e is 2**(126 - 32 + e - 127), whose exponent in bfloat16 is e and this number.
_EXPONENT = 126 - 32
E2M1_FACTOR = f"""{{ .reg .pred is_number; .reg .b32 t;
    add.u32 t, $1, {_EXPONENT}; setp.lt.u32 is_number, t, 255; mul.lo.u32 t, t, 0x00800080;
    selp.b32 $0, t, 0x7fff7fff, is_number; }}"""
"""PTX that makes of an e8m0 code, $1, what corrects the exponent of e2m1 codes as bfloat16, times the scale."""
# Operands: $0 to $3 the sums, $4 to $7 the left one, $8 and $9 the right one, and what is added.
_MULTIPLY = """{{
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};
}}"""


def unpacked(word: str, kind: str) -> str:
    """Returns PTX that makes float32 numbers n0, n1, ... of an operand with numbers of a kind of 16 or 8 bits."""
    count = 32 // BITS[kind]
    text = f".reg .b32 {', '.join(f'n{at}' for at in range(count))}; "
    if kind == "bfloat16":
        return f"{text} shl.b32 n0, {word}, 16; and.b32 n1, {word}, 0xffff0000;"
    pairs = range(count // 2)
    text += f".reg .b32 base, {', '.join(f'p{at}' for at in pairs)}; .reg .b16 a, b; "
    text += f"mov.b32 base, {_BASE}; {_AS_PAIRS[kind].format(word=word)}"
    for at in pairs:
        text += f" mov.b32 {{a, b}}, p{at}; cvt.f32.f16 n{2 * at}, a; cvt.f32.f16 n{2 * at + 1}, b;"
    return text


def word_conversion(code: str, dtype: DTypeLike, *, takes_factor: bool = False) -> str:
    """Returns the PTX that turns a word of codes, the input operand, into registers of two 16-bit numbers.

    Output i has the codes i and i + half of those in the word. The inputs follow the outputs; that of int4 has a second
    one, the zero point in both halves as an integer beside `magic`.

    Args:
        code: name in `CODES`.
        dtype: bfloat16 or float16.
        takes_factor: whether the factor that corrects the exponent of floating-point codes, in both halves, is a second
            input.
    """
    kind = KINDS[jnp.dtype(dtype).name]
    bits = CODES[code].bits
    count = pairs_of_word(code)
    word, base = f"${count}", f"${count + 1}"
    two = f"{kind.name}x2"
    lines = [".reg .b32 m, s, f, w;"]
    shift, mask, factor = kind.e2m1 if code == "float4_e2m1fn" else kind.e4m3
    # Whether a code of 4 bits times 2**shift + 2**12 is its bits twice, those of the magnitude and of the sign.
    is_doubled = code == "float4_e2m1fn" and shift + bits <= 12
    if CODES[code].is_float:
        lines.append(f"mov.b32 f, {base if takes_factor else hex(factor)};")
    if code == "float8_e4m3fn":
        lines.append(f"and.b32 w, {word}, 0x80808080;")
    if is_doubled:
        lines.append(f"shr.b32 w, {word}, 8;")
    for place in range(count):
        down = bits * place
        if code == "int4":
            lines += [
                _shifted("m", word, -down),
                f"lop3.b32 m, m, 0x000f000f, {kind.magic:#x}, 0xea;",
                f"sub.rn.{two} ${place}, m, {base};",
            ]
        elif code == "int8":
            lines += [
                _shifted("m", word, -down),
                f"lop3.b32 s, m, 0x00800080, {kind.magic:#x}, 0xea;",
                f"lop3.b32 m, m, 0x007f007f, {kind.magic:#x}, 0xea;",
                f"sub.rn.{two} ${place}, m, s;",
            ]
        elif code == "float8_e4m3fn":
            # 0xe2 takes m where the mask is set, else s: signs, of which the other pair's are inside the mask.
            lines += [
                _shifted("m", word, shift - down),
                _shifted("s", "w", bits - down),
                f"lop3.b32 m, m, {mask:#x}, s, 0xe2;",
                f"mul.rn.{two} ${place}, m, f;",
            ]
        elif is_doubled:
            inside = down % 8
            lines += [
                f"and.b32 m, {word if down < 8 else 'w'}, {0x000F000F << inside:#x};",
                f"mul.lo.u32 m, m, {(1 << 12 - inside) + (1 << shift - inside):#x};",
                f"and.b32 m, m, {mask | 0x80008000:#x};",
                f"mul.rn.{two} ${place}, m, f;",
            ]
        else:
            lines += [
                _shifted("m", word, shift - down),
                f"and.b32 m, m, {mask:#x};",
                _shifted("s", word, 12 - down),
                "lop3.b32 m, s, 0x80008000, m, 0xea;",
                f"mul.rn.{two} ${place}, m, f;",
            ]
    return "{ " + " ".join(lines) + " }"


def power_conversion(half: int) -> str:
    """Returns the PTX that turns half of a word of e8m0 codes, $2, into the float32 numbers $0 and $1.

    They are as of `power_of_two`: by way of two bfloat16 numbers, of which the least is subnormal, and times 0 infinity
    becomes NaN.
    """
    return f"""{{ .reg .b32 t, c, z;
        prmt.b32 t, $2, 0, {0x4342 if half else 0x4140:#x}; shl.b32 t, t, 7;
        mov.b32 c, 0x00400040; max.u16x2 t, t, c;
        mov.b32 z, 0; fma.rn.bf16x2 t, t, z, t; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }}"""


def pairs_of_word(code: str) -> int:
    """Returns the registers that a word of codes becomes."""
    return 16 // CODES[code].bits


def zero_conversion(dtype: DTypeLike) -> str:
    """Returns the PTX that makes `word_conversion`'s second input, $0, of a zero point, the float32 number $1."""
    magic = KINDS[jnp.dtype(dtype).name].magic
    return f"{{ .reg .b32 t; cvt.rni.u32.f32 t, $1; mad.lo.u32 $0, t, 0x00010001, {magic:#x}; }}"


def multiply_tile(operands: list[Value], sums: list[Value], dtype: DTypeLike) -> list[Value]:
    """Returns a lane's four float32 sums with `Threads.tile_product` of its six operands added."""
    f32 = ir.F32Type.get()
    struct = llvm.StructType.get_literal([f32] * 4)
    text = _MULTIPLY.format(kind=KINDS[jnp.dtype(dtype).name].name)
    kinds = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    found = llvm.inline_asm(struct, [*operands, *sums], text, kinds)
    return [llvm.extractvalue(f32, found, [place]) for place in range(4)]


def as_words(array: Array) -> Array:
    """Returns the bits of an array of one axis, whose size is whole words, as int32."""
    return lax.bitcast_convert_type(array.reshape(-1, 4 // array.dtype.itemsize), jnp.int32)


def numbers_of(words: Array, kind: str) -> list[Array]:
    """Returns the float32 numbers that words hold, first to last; see `Threads.numbers`."""
    if kind not in CODES:
        halves = lax.bitcast_convert_type(words, jnp.dtype(kind))
        return list(halves.astype(jnp.float32).T)
    codes = lax.bitcast_convert_type(words, CODES[kind].stored)
    scales = jnp.ones((len(words), 1), jnp.float32)
    return list(FewBits(codes, scales, None, None, kind).numbers().T)


def pairs_of(words: Array, kind: str, dtype: str, zero: Array | None) -> list[Array]:
    """Returns the pairs of 16-bit numbers that words of codes become; see `Threads.pairs`."""
    numbers = numbers_of(words, kind)
    if zero is not None:
        numbers = [number + (8 - zero) for number in numbers]
    return _in_pairs(numbers, dtype)


def _in_pairs(numbers: list[Array], dtype: DTypeLike) -> list[Array]:
    half = len(numbers) // 2
    return [
        lax.bitcast_convert_type(jnp.stack(pair, axis=-1).astype(dtype), jnp.int32)
        for pair in zip(numbers[:half], numbers[half:], strict=True)
    ]


def scaled_pairs_of(words: Array, exponents: Array) -> list[Array]:
    """Returns pairs of bfloat16 numbers of words of e2m1 codes and of e8m0 codes; see `Threads.scaled_pairs`."""
    is_number = exponents + _EXPONENT < 255
    scales = jnp.ldexp(jnp.float32(E2M1_RATE), jnp.where(is_number, exponents - 127, 0))
    scales = jnp.where(is_number, scales, jnp.nan)
    numbers = [number * scales for number in numbers_of(words, "float4_e2m1fn")]
    return _in_pairs(numbers, jnp.bfloat16)


def tile_product(left: Sequence[Array], right: Sequence[Array], dtype: str) -> list[Array]:
    """Returns the four float32 numbers of each lane of `Threads.tile_product`, without sums, from all lanes' words."""
    lanes = -1, 8, 4

    def numbers(words: Sequence[Array]) -> Array:
        """Returns float32 [words, warps, lines, members, 2]."""
        each = [lax.bitcast_convert_type(word.reshape(lanes), jnp.dtype(dtype)) for word in words]
        return jnp.stack(each).astype(jnp.float32)

    # Rows are (lower or upper, line), the contraction is (first or second half, member, one of two).
    rows = numbers(left).reshape(2, 2, *numbers(left).shape[1:])
    found = jnp.einsum("hrwlme,hwnme->wrln", rows, numbers(right), precision=lax.Precision.HIGHEST)
    found = found.reshape(*found.shape[:3], 4, 2)
    return [found[:, row, :, :, one].reshape(-1) for row in (0, 1) for one in (0, 1)]


def _shifted(target: str, source: str, left: int) -> str:
    if not left:
        return f"mov.b32 {target}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};"
