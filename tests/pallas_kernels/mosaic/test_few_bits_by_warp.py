"""Products by `mma.sync`: the emitted code runs in NumPy, on all threads of a warpgroup at once.

Fragments of m16n8k16 are those of the PTX manual; in thread 4 g + m of a warp: rows g and g + 8 of the left operand and
of the sums, columns 2 m and 2 m + 1 of each 8.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import few_bits_by_warp, packed_numbers
from pallas_kernels.mosaic.few_bits_turn import Packing
from tests.pallas_kernels.few_bits import drawn, exact
from tests.pallas_kernels.mosaic.test_few_bits import DTYPES, bytes_of, run_words

THREADS = np.arange(128)
WARP, GROUP, MEMBER = THREADS // 32, THREADS // 4 % 8, THREADS % 4


def swizzled(rows):
    """Returns rows of bytes as they lie in shared memory: tiles of 8 x 128, whose pieces of 16 are permuted by row."""
    height, width = rows.shape
    pieces = rows.reshape(height // 8, 8, width // 128, 8, 16)
    own = [pieces[:, row][:, :, np.arange(8) ^ row] for row in range(8)]
    return np.stack(own, 2).ravel()


def load(memory, offset, size):
    """Returns the words of adjacent bytes of each thread, which must be aligned."""
    assert not np.any(offset % min(size, 16))
    octets = memory[offset[:, None] + np.arange(size)]
    return list(np.ascontiguousarray(octets).view(np.uint32).T.copy())


def multiply(dtype, given):
    """Returns the accumulators of one `mma.sync` of each warp."""

    def numbers(words):
        return np.stack(words, 1).astype(np.uint32).view(DTYPES[dtype]).astype(np.float32)

    a, b, sums = numbers(given[:4]), numbers(given[4:6]), np.stack(given[6:], 1)
    left, right = np.zeros((4, 16, 16), np.float32), np.zeros((4, 16, 8), np.float32)
    for place in range(8):
        register, one = divmod(place, 2)
        column = 2 * MEMBER + one + 8 * (register // 2)
        left[WARP, GROUP + 8 * (register % 2), column] = a[:, place]
    for place in range(4):
        register, one = divmod(place, 2)
        right[WARP, 2 * MEMBER + one + 8 * register, GROUP] = b[:, place]
    products = left @ right
    found = [products[WARP, GROUP + 8 * (at // 2), 2 * MEMBER + at % 2] for at in range(4)]
    return [sums[:, at] + found[at] for at in range(4)]


def simulated(monkeypatch, dtype):
    """Replaces what emits code by what computes it."""

    def inline_asm(_, given, text, kinds):
        if "mma.sync" in text:
            return multiply(dtype, given)
        count, of_text = kinds.count("=r"), "bfloat16" if "bf16x2" in text else "float16"
        each = [
            run_words(text, of_text, *map(int, own), results=count)
            for own in zip(*given, strict=True)
        ]
        return list(np.array(each, np.uint32).T)

    def constant(number):
        return np.full(128, number, np.uint32)

    arith = SimpleNamespace(
        xori=np.bitwise_xor,
        ori=np.bitwise_or,
        andi=np.bitwise_and,
        shrui=np.right_shift,
        shli=np.left_shift,
        constant=lambda _, number: np.full(128, number, np.float32),
        trunci=lambda _, value: value.astype(np.uint16),
        bitcast=lambda to, value: value.view(to),
        extf=lambda to, value: value.astype(to),
    )
    types = {
        "F32Type": SimpleNamespace(get=lambda: np.float32),
        "F16Type": SimpleNamespace(get=lambda: np.float16),
        "IntegerType": SimpleNamespace(get_signless=lambda _: None),
    }
    llvm = SimpleNamespace(
        inline_asm=inline_asm,
        extractvalue=lambda _, found, place: found[place[0]],
        StructType=SimpleNamespace(get_literal=lambda _: None),
    )
    utils = SimpleNamespace(
        thread_idx=lambda: THREADS.astype(np.uint32), memref_ptr=lambda memory: memory
    )
    for name, fake in {
        "arith": arith,
        "llvm": llvm,
        "utils": utils,
        "ir": SimpleNamespace(**types),
        "i32": lambda: None,
        "constant": constant,
        "add": lambda value, other: value + np.uint32(other),
        "times": lambda value, by: value * np.uint32(by),
        "divide": lambda value, by: (value // np.uint32(by), value % np.uint32(by)),
        "_load": load,
        "_permuted": lambda low, high, selector: np.array(
            [bytes_of(int(a), int(b), selector) for a, b in zip(low, high, strict=True)], np.uint32
        ),
        "_multiply_add": lambda number, factor, other: number * factor + other,
    }.items():
        monkeypatch.setattr(few_bits_by_warp, name, fake)
        if name in ("llvm", "ir"):
            monkeypatch.setattr(packed_numbers, name, fake)


def words_of(array, tile):
    """Returns the words of each row's elements, for the lower and the upper half of each thread's rows."""
    octets = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    octets = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 4)))
    rows = 64 * tile + 16 * WARP + GROUP
    words = np.ascontiguousarray(octets).view(np.uint32)
    return [[words[rows, word], words[rows + 8, word]] for word in range(words.shape[1])]


@pytest.mark.parametrize(
    ("kind", "dtype", "height", "folds", "chunk", "rows"),
    [
        ("e4m3 by row", "bfloat16", 64, 2, 256, 16),
        ("e4m3 by 128", "float16", 64, 4, 256, 8),
        ("int8 by 32", "bfloat16", 128, 1, 128, 8),
        ("int4 by 128", "bfloat16", 64, 2, 512, 8),
        ("int4 by 64, zeros", "bfloat16", 64, 4, 256, 16),
        ("mxfp4", "bfloat16", 128, 2, 256, 8),
        ("mxfp4", "float16", 64, 1, 512, 8),
    ],
)
def test_emitted_code_is_exact(kind, dtype, height, folds, chunk, rows, monkeypatch):
    """Every form of scales and zero points, one and several products of 64 rows, and folds of one warp and more."""
    weight = drawn(kind, (height,), chunk)
    packing = Packing.of(weight)
    assert few_bits_by_warp.fits(packing, chunk)
    draw = np.random.default_rng(1)
    x = draw.normal(size=(folds * rows, chunk)).astype(DTYPES[dtype])
    before = draw.normal(size=(height, rows)).astype(np.float32)
    simulated(monkeypatch, dtype)

    codes = swizzled(np.asarray(weight.codes).view(np.uint8))
    shape = weight.codes.shape
    product = few_bits_by_warp._Product(
        codes, swizzled(x.view(np.uint8)), shape, jnp.dtype(dtype), rows, chunk, packing, folds
    )
    arrays = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
    tiles = range(height // 64)
    factors = [[word for array in arrays for word in words_of(array, tile)] for tile in tiles]
    places = [
        [
            (64 * tile + 16 * WARP + GROUP + 8 * half, 8 * block + 2 * MEMBER + one)
            for block in range(rows // 8)
            for half in (0, 1)
            for one in (0, 1)
        ]
        for tile in tiles
    ]
    found = product.added([[before[place] for place in own] for own in places], factors)

    result = np.full((height, rows), np.nan)
    for own, registers in zip(places, found, strict=True):
        for place, register in zip(own, registers, strict=True):
            result[place] = register
    wide = x.astype(np.float64).reshape(folds, rows, chunk)
    parts = exact(weight).reshape(folds, -1, chunk)
    wanted = before + np.einsum("frk,fnk->frn", parts, wide).reshape(height, rows)
    most = np.abs(before) + np.einsum("frk,fnk->frn", np.abs(parts), np.abs(wide)).reshape(
        height, rows
    )
    assert np.all(np.abs(result - wanted) <= 1e-6 * most)
