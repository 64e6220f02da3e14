"""Division of float32 numbers into a 16-bit number and its rounding error, two numbers at a time (inline PTX)."""

from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.mosaic.dialects import Value, i32, inline, ir, llvm, vector
from pallas_kernels.mosaic.private_types import Layout

# $0, $1: pairs of rounded numbers and of errors; $2, $3: the numbers.
_SPLIT = """{{
    .reg .b32 low, high;
    .reg .b16 l, h;
    cvt.rn.{kind}.f32 $0, $3, $2;
    {widen}
    sub.f32 low, $2, low;
    sub.f32 high, $3, high;
    cvt.rn.{kind}.f32 $1, high, low;
}}"""
_KINDS = {
    "bfloat16": {
        "kind": "bf16x2",
        "widen": "shl.b32 low, $0, 16; and.b32 high, $0, 0xffff0000;",
    },
    "float16": {
        "kind": "f16x2",
        "widen": "mov.b32 {l, h}, $0; cvt.f32.f16 low, l; cvt.f32.f16 high, h;",
    },
}


def two_parts(
    numbers: Array, dtype: DTypeLike, *, layout: Layout, interpret: bool
) -> tuple[Array, Array]:
    """Returns the numbers rounded to a dtype, and the errors of rounding, rounded too.

    The compiler's own code for a pair takes twice the instructions, since it takes pairs apart and joins them again.

    Args:
        numbers: float32 in registers.
        dtype: bfloat16 or float16.
        layout: register layout of the numbers; a thread holds an even number of adjacent ones.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        rounded = numbers.astype(dtype)
        return rounded, (numbers - rounded.astype(jnp.float32)).astype(dtype)
    code = _SPLIT.format(**_KINDS[jnp.dtype(dtype).name])
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.dtype(dtype), layout=layout)

    @inline(arg_types=(layout,), return_type=(result, result))
    def run(_: Any, numbers: Value) -> tuple[Value, Value]:  # noqa: ANN401 - private to JAX
        kind = ir.BF16Type.get() if jnp.dtype(dtype) == jnp.bfloat16 else ir.F16Type.get()
        pair, both = ir.VectorType.get((2,), kind), llvm.StructType.get_literal([i32(), i32()])
        parts = [np.empty_like(numbers.registers) for _ in range(2)]
        for place, register in np.ndenumerate(numbers.registers):
            given = [vector.extract(register, [], [index]) for index in range(2)]
            found = llvm.inline_asm(both, given, code, "=&r,=&r,f,f")
            for index, part in enumerate(parts):
                word = llvm.extractvalue(i32(), found, [index])
                part[place] = llvm.bitcast(pair, word)
        rounded, lost = (
            mosaic.FragmentedArray(_registers=part, _layout=numbers.layout, _is_signed=None)
            for part in parts
        )
        return rounded, lost

    return run(numbers)
