"""Plain weights rounded as they are read, against the definition in float64 and ml_dtypes' own casts."""

import math
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv import default_model, load_model
from jaxkv.weights import staging
from jaxkv.weights.load import reading_order
from jaxkv.weights.quantised import rounding
from jaxkv.weights.quantised.rounding import ROUNDINGS, e4m3_codes, rounded
from jaxkv.weights.safetensors import StoredTensor, open_checkpoint
from jaxkv.weights.staging import READERS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ROWS, COLUMNS = 37, 256


def test_codes_of_8_bit_floats_are_those_of_a_cast():
    """All numbers of 16 bits, the ties between two codes, and the numbers next to both."""
    every = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    codes = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    some = np.concatenate([every[np.isfinite(every)], codes, ties])
    near = [np.nextafter(some, np.float32(towards)) for towards in (-np.inf, np.inf)]
    numbers = np.concatenate([some, *near, -some])
    numbers = numbers[np.isfinite(numbers)]
    wanted = np.clip(numbers, -448, 448).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(e4m3_codes(numbers), wanted)


@pytest.fixture(params=["float32", "bfloat16"])
def tensor(tmp_path, request, monkeypatch):
    """A stored matrix with a row of zeros, large and small rows, which is read five rows at a time."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=(ROWS, COLUMNS)) * 10.0 ** draw.integers(-4, 4, (ROWS, 1))
    values[3] = 0
    stored = values.astype(np.float32 if request.param == "float32" else BFLOAT16)
    save_file({"weight": stored}, tmp_path / "model.safetensors")
    monkeypatch.setattr(rounding, "PIECE", 5 * COLUMNS)
    with open_checkpoint(tmp_path) as tensors:
        yield tensors["weight"], stored.astype(np.float64)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_are_rounded_to_the_nearest_code_of_their_scale(tensor, name):
    stored, values = tensor
    form, dtype = ROUNDINGS[name], stored_dtype(stored)
    rows = rounded(stored, form, dtype).rows
    codes = np.concatenate([rows.codes(0, 30), rows.codes(30, 7)])
    scales = np.concatenate([rows.scales(0, 11), rows.scales(11, 26)])
    grouped = values.reshape(ROWS, -1, form.group(COLUMNS))
    wanted = (np.abs(grouped).max(2) / form.largest).astype(np.float32).astype(dtype)
    # The quotient is rounded to float32 once more than the definition says.
    np.testing.assert_allclose(scales.astype(np.float64), wanted.astype(np.float64), rtol=1e-7)
    wide = scales.astype(np.float64)[..., None]
    numbers = grouped / np.where(wide == 0, 1, wide)
    numbers = np.clip(numbers, -8 if name == "int4" else -form.largest, form.largest)
    if name == "fp8":
        found = codes.view(E4M3).astype(np.float64)
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**-6))) - 3)
    else:
        found = codes.view(np.int8) if name == "int8" else codes.astype(np.float64) - 8
        step = 1
    apart = np.abs(found.reshape(numbers.shape) - numbers) / step
    assert apart.max() <= 0.5 + 1e-5


def stored_dtype(stored):
    return BFLOAT16 if stored.dtype == "BF16" else np.dtype(np.float32)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_are_read_once_for_codes_and_scales(tensor, name, monkeypatch):
    stored, _ = tensor
    rows = rounded(stored, ROUNDINGS[name], stored_dtype(stored)).rows
    alone = rounded(stored, ROUNDINGS[name], stored_dtype(stored)).rows.scales(0, ROWS)
    read, elements = StoredTensor.read, []

    def counted(self, target, first=0):
        elements.append(target.size)
        read(self, target, first)

    monkeypatch.setattr(StoredTensor, "read", counted)
    rows.codes(0, ROWS)
    assert sum(elements) == ROWS * COLUMNS
    np.testing.assert_array_equal(rows.scales(0, ROWS), alone)
    assert sum(elements) == ROWS * COLUMNS
    # The memory of the scales is free, so they are made again.
    np.testing.assert_array_equal(rows.scales(0, ROWS), alone)
    assert sum(elements) == 2 * ROWS * COLUMNS


def test_scales_are_read_after_the_codes_of_further_parameters():
    parts = [1, *[2, 1, 3] * 30]
    order = reading_order(parts)
    assert sorted(order) == [(at, part) for at, count in enumerate(parts) for part in range(count)]
    assert [at for at, part in order if part == 0] == list(range(len(parts)))
    several = [at for at, count in enumerate(parts) if count > 1]
    for number, at in enumerate(several):
        codes = [one for one, part in order[: order.index((at, 1))] if part == 0 and parts[one] > 1]
        assert len(codes) >= min(number + 2 * READERS, len(several))


def test_a_load_reads_rows_of_rounded_weights_once(monkeypatch):
    """With one reader, codes are made before their scales are asked for; more of them take part in the same order."""
    monkeypatch.setattr(staging, "READERS", 1)
    read, elements = StoredTensor.read, Counter()

    def counted(self, target, first=0):
        elements[self.name] += target.size
        read(self, target, first)

    monkeypatch.setattr(StoredTensor, "read", counted)
    load_model(quantization="int4")
    with open_checkpoint(default_model.path()) as tensors:
        assert elements == {name: math.prod(one.shape) for name, one in tensors.items()}
