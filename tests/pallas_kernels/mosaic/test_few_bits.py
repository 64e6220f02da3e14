"""The PTX that widens codes in registers, run instruction by instruction in Python."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic.few_bits import conversion

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MAGIC = {"bfloat16": 0x43004300, "float16": 0x64006400}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INSTRUCTION = re.compile(r"(\S+) (\S+), ([^;]+)")


def halves(word, dtype):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(DTYPES[dtype])


def bytes_of(word, other, selector):
    both = word | other << 32
    return sum((both >> 8 * (selector >> 4 * at & 7) & 255) << 8 * at for at in range(4))


def run(text, dtype, *operands):
    """Returns the two numbers of $0 after the instructions of a block."""
    names = {f"${place}": value for place, value in enumerate(operands, 1)}
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]

    def packed(numbers):
        low, high = np.asarray(numbers, DTYPES[dtype]).view(np.uint16).tolist()
        return low | high << 16

    run_one = {
        "mov.b32": lambda a: a,
        "prmt.b32": bytes_of,
        "shl.b32": lambda a, b: a << b,
        "and.b32": lambda a, b: a & b,
        "mul.lo.u32": lambda a, b: a * b,
        # The last operand is the truth table of (a & b) | c.
        "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
        f"mul.rn.{kind}": lambda a, b: packed(halves(a, dtype) * halves(b, dtype)),
        f"sub.rn.{kind}": lambda a, b: packed(halves(a, dtype) - halves(b, dtype)),
    }
    _, *statements = [part.strip() for part in text.strip(" {}").split(";") if part.strip()]
    for statement in statements:
        found = INSTRUCTION.fullmatch(statement)
        assert found is not None, statement
        name, target, others = found.groups()
        values = [names[part] if part in names else int(part, 0) for part in others.split(", ")]
        names[target] = run_one[name](*values) & 0xFFFFFFFF
    return halves(names["$0"], dtype).astype(np.float64).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("code", "stored"), [("int8", np.int8), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)]
)
def test_pairs_of_8_bits_are_widened_exactly(code, stored, dtype):
    """Every code in either place, subnormal numbers included; the codes of NaN are left out."""
    every = [byte for byte in range(256) if code == "int8" or byte & 127 != 127]
    text = conversion(code, dtype)
    for low, high in zip(every, reversed(every), strict=True):
        wanted = np.array([low, high], np.uint8).view(stored).astype(np.float64).tolist()
        assert run(text, dtype, low | high << 8) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("member", range(4))
def test_pairs_of_4_bits_are_widened_exactly_whichever_byte_they_are_in(member, dtype):
    """The code in the lower bits is the first; zero points are 0 to 15."""
    e2m1, int4 = conversion("float4_e2m1fn", dtype), conversion("int4", dtype)
    for byte in range(256):
        # Neighbours that would show.
        word = byte << 8 * member | (byte ^ 255) << 8 * (member ^ 1) | 0xA5 << 8 * (member ^ 2)
        codes = byte & 15, byte >> 4
        signed = [(-1) ** (code >> 3) * E2M1[code & 7] for code in codes]
        assert run(e2m1, dtype, word, 0x4440 + member) == signed
        zero = byte % 16
        base = MAGIC[dtype] | zero * 0x10001
        assert run(int4, dtype, word, 0x4440 + member, base) == [code - zero for code in codes]
