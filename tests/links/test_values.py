"""Values come back as they were, and nothing but values and known records is written or read."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.links.values import Values


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    tags: tuple[str, ...] = ()


class Pair(NamedTuple):
    name: str
    version: int


VALUES = Values([Point, Pair])


def back(value):
    return VALUES.read(VALUES.write(value))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 0, -(2**63), 2**64 - 1, 1.5, float("inf"), "aä\n\ud800"],
        (1, (2, [])),
        {1: {"tuple": (1,)}, ("a", None): b"\0\xff"},
        Point(x=3, tags=("a", "b")),
        [Pair("lora", 2), {"Point": [1]}],
    ],
)
def test_a_value_comes_back_with_its_types(value):
    found = back(value)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "uint8"])
def test_an_array_comes_back_bit_for_bit(dtype):
    array = np.asarray(jnp.arange(6).reshape(2, 3) % 2, jnp.dtype(dtype))
    for given in (array, array.T, array[:0], np.asarray(array[0, 0])):
        found = back(given)
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert found.tobytes() == given.tobytes()


def test_scalars_of_numpy_become_plain_numbers():
    assert back([np.int32(3), np.float64(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, 1j])
def test_what_is_no_value_is_refused_with_its_type(value):
    with pytest.raises(ValueError, match=f"of type {type(value).__name__} cannot be sent"):
        VALUES.write([value])


@pytest.mark.parametrize(
    "structure",
    [
        {"os.system": ["true"]},
        {"Point": [1]},
        {"bytes": 3},
        {"array": [1, "float32", [2]]},
        {"array": [1, "O", [1]]},
        {},
    ],
)
def test_bytes_that_were_not_written_by_it_are_refused(structure):
    with pytest.raises((ValueError, TypeError)):
        VALUES.read([json.dumps(structure).encode(), b"\0" * 4])
