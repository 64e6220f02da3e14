"""Numbers of 16, 8 and 4 bits in words of 32: PTX that makes float32 of them, and the same where it is interpreted."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.few_bits import CODES, FewBits

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

# Two equal float16 numbers each: 1024 + 128, 1024 + 8, and 2**14.
_BASES = {"int8": "0x64806480", "int4": "0x64086408", "float4_e2m1fn": "0x74007400"}
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
# What makes one of the codes of 4 bits at {shift} and, in the upper half of the word, at {shift} + 16.
_AS_PAIR = {
    "int4": """shr.u32 t, {word}, {shift}; lop3.b32 p{at}, t, 0x000f000f, 0x64006400, 0xea;
        sub.rn.f16x2 p{at}, p{at}, base;""",
    "float4_e2m1fn": """shr.u32 t, {word}, {shift}; shl.b32 p{at}, t, 9; shl.b32 t, t, 12;
        and.b32 p{at}, p{at}, 0x0e000e00; lop3.b32 p{at}, t, 0x80008000, p{at}, 0xea;
        mul.rn.f16x2 p{at}, p{at}, base;""",
}


def unpacked(word: str, kind: str) -> str:
    """Returns PTX that makes float32 numbers n0, n1, ... of an operand that holds numbers of a kind."""
    count = 32 // BITS[kind]
    text = f".reg .b32 {', '.join(f'n{at}' for at in range(count))}; "
    if kind == "bfloat16":
        return f"{text} shl.b32 n0, {word}, 16; and.b32 n1, {word}, 0xffff0000;"
    pairs = range(count // 2)
    text += f".reg .b32 t, base, {', '.join(f'p{at}' for at in pairs)}; .reg .b16 a, b; "
    text += f"mov.b32 base, {_BASES.get(kind, 0)}; "
    if kind in _AS_PAIRS:
        text += _AS_PAIRS[kind].format(word=word)
        places = [(2 * at, 2 * at + 1) for at in pairs]
    else:
        text += " ".join(_AS_PAIR[kind].format(word=word, at=at, shift=4 * at) for at in pairs)
        places = [(at, at + count // 2) for at in pairs]
    for at, (one, other) in zip(pairs, places, strict=True):
        text += f" mov.b32 {{a, b}}, p{at}; cvt.f32.f16 n{one}, a; cvt.f32.f16 n{other}, b;"
    return text


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
