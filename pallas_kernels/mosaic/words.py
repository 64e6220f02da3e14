"""32-bit words in registers and byte addresses in Mosaic GPU kernels, as inline MLIR and PTX."""

from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    divide,
    i32,
    ir,
    llvm,
    utils,
    vector,
)
from pallas_kernels.mosaic.rows import flat_pieces

_THREADS = 128
_KINDS = {"bfloat16": "bf16x2", "float16": "f16x2"}
# Converts one register of four e4m3 values to two registers of two 16-bit values, times a float32 scale. A product is
# rounded to float32 and then to 16 bits, as in the reference decoder of `formats/`.
_DECODE = """{{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 first, second;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {{low, high}}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {{h0, h1}}, first;
    mov.b32 {{h2, h3}}, second;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    mul.f32 f0, f0, $3;
    mul.f32 f1, f1, $3;
    mul.f32 f2, f2, $3;
    mul.f32 f3, f3, $3;
    cvt.rn.{kind}.f32 $0, f1, f0;
    cvt.rn.{kind}.f32 $1, f3, f2;
}}"""


def decoded(words: list[Value], scale: Value, dtype: DTypeLike) -> tuple[Value, Value]:
    """Returns 16 dequantised 16-bit values as two vectors of four words.

    The inline assembly has side effects, so the compiler cannot move the conversion down to the later store.

    Args:
        words: four words of 16 e4m3 values.
        scale: the bits of their float32 scale.
        dtype: bfloat16 or float16.
    """
    pair = llvm.StructType.get_literal([i32(), i32()])
    code = _DECODE.format(kind=_KINDS[jnp.dtype(dtype).name])
    scale = arith.bitcast(ir.F32Type.get(), scale)
    numbers = []
    for word in words:
        both = llvm.inline_asm(pair, [word, scale], code, "=r,=r,r,f", has_side_effects=True)
        numbers += [llvm.extractvalue(i32(), both, [part]) for part in (0, 1)]
    return four(numbers[:4]), four(numbers[4:])


def load_words(place: Value, chosen: Value, count: int) -> list[Value]:
    """Loads `count` (1, 2 or 4) words from global memory, or returns zeros without a read where `chosen` is 0."""
    outs = [f"${number}" for number in range(count)]
    zeros = " ".join(f"mov.b32 {out}, 0;" for out in outs)
    kind, target = ("b32", outs[0]) if count == 1 else (f"v{count}.b32", f"{{{', '.join(outs)}}}")
    code = (
        f"{{ .reg .pred is_chosen; setp.ne.b32 is_chosen, ${count + 1}, 0; {zeros} "
        f"@is_chosen ld.global.{kind} {target}, [${count}]; }}"
    )
    # "=&r": results are written before the arguments are read. "~{memory}" keeps the load in order with other accesses,
    # so that the compiler does not move it before a fence that would then wait for it.
    kinds = ",".join([*["=&r"] * count, "l", "r", "~{memory}"])
    address = llvm.ptrtoint(i64(), place)
    if count == 1:
        return [llvm.inline_asm(i32(), [address, chosen], code, kinds, has_side_effects=True)]
    several = llvm.StructType.get_literal([i32()] * count)
    words = llvm.inline_asm(several, [address, chosen], code, kinds, has_side_effects=True)
    return [llvm.extractvalue(i32(), words, [part]) for part in range(count)]


def do(code: str, kinds: str, *arguments: Value) -> None:
    """Emits inline PTX that returns no value; `kinds` are the operand constraints."""
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, list(arguments), code, kinds, has_side_effects=True)


def four(words: list[Value]) -> Value:
    """Returns a vector of four words."""
    return vector.from_elements(four_words(), words)


def four_words() -> Value:
    """Returns the type of a vector of four words."""
    return ir.VectorType.get((4,), i32())


def words_of(piece: Value) -> list[Value]:
    """Returns a vector's four words."""
    return [vector.extract(piece, [], [place]) for place in range(4)]


def flat(length: int) -> Any:  # noqa: ANN401 - private to JAX
    """Returns the register layout of `length` words in vectors of four, the same number for each thread."""
    (piece,) = flat_pieces(length, 4)
    return piece.layout


def fragments(registers: list[Value]) -> Value:
    """Returns the array whose registers in this thread are these vectors of four words."""
    length = 4 * _THREADS * len(registers)
    layout = flat(length).to_mgpu()
    held = np.empty(layout.registers_shape((length,)), dtype=object)
    for place, register in zip(np.ndindex(held.shape), registers, strict=True):
        held[place] = register
    return mosaic.FragmentedArray(_registers=held, _layout=layout, _is_signed=True)


def at(start: Value, offset: Value | int) -> Value:
    """Returns the address `offset` bytes after `start`."""
    if isinstance(offset, int):
        offset = arith.constant(i64(), offset)
    return utils.getelementptr(start, [offset], ir.IntegerType.get_signless(8))


def thread() -> Value:
    """Returns the thread's index in its warpgroup."""
    return divide(utils.thread_idx(), _THREADS)[1]


def wide(value: Value) -> Value:
    """Zero-extends a 32-bit integer to 64 bits."""
    return arith.extui(i64(), value)


def i64() -> Value:
    """Returns the 64-bit integer type, which addresses have."""
    return ir.IntegerType.get_signless(64)


def of_bytes(value: Value, size: int) -> Value:
    """Returns the byte offset of element `value` of an array of elements of `size` bytes."""
    return arith.muli(wide(value), wide(constant(size)))
