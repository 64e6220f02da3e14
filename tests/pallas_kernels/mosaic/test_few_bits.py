"""The PTX that widens codes in registers, run instruction by instruction in Python."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic.few_bits import NARROW_SCALING, conversion
from pallas_kernels.mosaic.packed_numbers import (
    E2M1_FACTOR,
    E2M1_RATE,
    pairs_of_word,
    power_conversion,
    word_conversion,
    zero_conversion,
)

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MAGIC = {"bfloat16": 0x43004300, "float16": 0x64006400}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TWO = {"bfloat16": "bf16x2", "float16": "f16x2"}
INSTRUCTION = re.compile(r"(\S+) (\S+), ([^;]+)")


def halves(word, dtype):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(DTYPES[dtype])


def bytes_of(word, other, selector):
    both = word | other << 32
    return sum((both >> 8 * (selector >> 4 * at & 7) & 255) << 8 * at for at in range(4))


def run(text, dtype, *operands, results=1):
    """Returns the two numbers of each result after the instructions of a block, those of $0 first."""
    words = run_words(text, dtype, *operands, results=results)
    found = [halves(word, dtype).astype(np.float64).tolist() for word in words]
    return found[0] if results == 1 else found


def run_words(text, dtype, *operands, results):
    """Returns the bits of the results after the instructions of a block."""
    names = {f"${place}": value for place, value in enumerate(operands, results)}
    kind = TWO[dtype]

    def packed(numbers):
        low, high = np.asarray(numbers, DTYPES[dtype]).view(np.uint16).tolist()
        return low | high << 16

    run_one = {
        "mov.b32": lambda a: a,
        "prmt.b32": bytes_of,
        "shl.b32": lambda a, b: a << b,
        "shr.b32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "mul.lo.u32": lambda a, b: a * b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
        "add.u32": lambda a, b: a + b,
        "setp.lt.u32": lambda a, b: a < b,
        "selp.b32": lambda a, b, which: a if which else b,
        "cvt.rni.u32.f32": lambda a: int(np.rint(np.uint32(a).view(np.float32))),
        # The last operand is the truth table: of (a & b) | c, and of a where b is set, else c.
        "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c, 0xE2: a & b | c & ~b}[table],
        "max.u16x2": lambda a, b: max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16,
        f"fma.rn.{kind}": lambda a, b, c: packed(
            halves(a, dtype) * halves(b, dtype) + halves(c, dtype)
        ),
        f"mul.rn.{kind}": lambda a, b: packed(halves(a, dtype) * halves(b, dtype)),
        f"sub.rn.{kind}": lambda a, b: packed(halves(a, dtype) - halves(b, dtype)),
    }
    statements = [part.strip() for part in text.strip(" {}").split(";") if part.strip()]
    statements = [part for part in statements if not part.startswith(".reg")]
    for statement in statements:
        found = INSTRUCTION.fullmatch(statement)
        assert found is not None, statement
        name, target, others = found.groups()
        values = [names[part] if part in names else int(part, 0) for part in others.split(", ")]
        names[target] = run_one[name](*values) & 0xFFFFFFFF
    return [names[f"${place}"] for place in range(results)]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("code", "stored"), [("int8", np.int8), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)]
)
def test_words_of_8_bits_are_widened_exactly_into_pairs_two_places_apart(code, stored, dtype):
    every = [byte for byte in range(256) if code == "int8" or byte & 127 != 127]
    text = word_conversion(code, dtype)
    for shift, first in enumerate(every):
        octets = [every[(step * shift + first) % len(every)] for step in range(4)]
        word = int.from_bytes(octets, "little")
        numbers = np.array(octets, np.uint8).view(stored).astype(np.float64)
        wanted = [numbers[place::2].tolist() for place in (0, 1)]
        assert run(text, dtype, word, results=pairs_of_word(code)) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_of_4_bits_are_widened_exactly_into_pairs_four_places_apart(dtype):
    e2m1, int4 = word_conversion("float4_e2m1fn", dtype), word_conversion("int4", dtype)
    for first in range(256):
        codes = [(first >> 4 * (place % 2)) + 5 * place & 15 for place in range(8)]
        word = sum(code << 4 * place for place, code in enumerate(codes))
        zero = first % 16
        signed = [(-1) ** (code >> 3) * E2M1[code & 7] for code in codes]
        shifted = [code - zero for code in codes]
        base = MAGIC[dtype] | zero * 0x10001
        pairs = [(place, place + 4) for place in range(4)]
        count = pairs_of_word("int4")
        assert run(e2m1, dtype, word, results=count) == [
            [signed[at] for at in pair] for pair in pairs
        ]
        found = run(int4, dtype, word, base, results=count)
        assert found == [[shifted[at] for at in pair] for pair in pairs]


def test_words_of_e2m1_are_scaled_exactly_by_the_product_that_corrects_their_exponent():
    """By powers of two from 2**-93 to 2**33; larger ones and NaN make NaN, and the least ones may lose places."""
    text = word_conversion("float4_e2m1fn", "bfloat16", takes_factor=True)
    codes = [3, 1, 15, 9, 7, 0, 2, 8]
    word = sum(code << 4 * place for place, code in enumerate(codes))
    signed = np.array([(-1) ** (code >> 3) * E2M1[code & 7] for code in codes])
    for scale in range(256):
        [factor] = run_words(E2M1_FACTOR, "bfloat16", scale, results=1)
        found = np.array(run(text, "bfloat16", word, factor, results=4)).T.ravel() / E2M1_RATE
        wanted = signed * 2.0 ** (scale - 127)
        if scale > 127 + 33:
            assert np.isnan(found).all()
        elif scale < 127 - 93:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-94)
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_become_what_codes_are_subtracted_from(dtype):
    text = word_conversion("int4", dtype)
    word = sum(code << 4 * code for code in range(8))
    for zero in (0, 8, 15, 127):
        given = int(np.float32(zero).view(np.uint32))
        [base] = run_words(zero_conversion(dtype), dtype, given, results=1)
        found = np.array(run(text, dtype, word, base, results=4)).T.ravel()
        np.testing.assert_array_equal(found, np.arange(8) - zero)


def test_words_of_powers_of_two_become_float32():
    """All of e8m0: the least is subnormal, and the code of NaN is NaN."""
    for first in range(0, 256, 4):
        octets = [first, 255 - first, first + 2, first + 3]
        wanted = np.array(octets, np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        word = int.from_bytes(octets, "little")
        with np.errstate(invalid="ignore"):
            words = [
                run_words(power_conversion(half), "bfloat16", word, results=2) for half in (0, 1)
            ]
        np.testing.assert_array_equal(np.array(words, np.uint32).view(np.float32).ravel(), wanted)


def test_narrow_scales_multiply_pairs_with_one_rounding():
    """Powers of two are exact, down to subnormal results; other bfloat16 scales round as a product in float64 would."""
    draw = np.random.default_rng(0)
    exponents = [-127, -126, -40, 0, 7, 120]
    scales = [2.0**exponent for exponent in exponents]
    scales += draw.normal(size=20).astype(ml_dtypes.bfloat16).astype(np.float64).tolist()
    for scale in scales:
        bits = int(np.float32(scale).view(np.uint32))
        for low, high in draw.choice([*E2M1, -6, -0.5, 119, -127], size=(8, 2)).tolist():
            pair = np.array([low, high], ml_dtypes.bfloat16).view(np.uint16).tolist()
            found = run(NARROW_SCALING, "bfloat16", pair[0] | pair[1] << 16, bits)
            wanted = np.array([low * scale, high * scale]).astype(ml_dtypes.bfloat16)
            assert found == wanted.astype(np.float64).tolist()
            if scale in scales[: len(exponents)] and max(abs(low), abs(high)) <= 6:
                assert found == [low * scale, high * scale]
