"""Under the fixed order of sums a row's bits do not depend on the sizes of the call, and a switch of order traces anew.

The "xla" implementations run here. Programs of several sizes are compiled, because XLA chooses orders by sizes.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_scan, ragged_attention, selective_scan, skinny_matmul, ssd_scan
from pallas_kernels.fixed_order import (
    ROWS,
    by_row_tiles,
    fixed_order,
    is_fixed,
    sum_of_last,
)

DRAW = np.random.default_rng(5)


def normal(*shape, dtype="float32"):
    return jnp.asarray(DRAW.normal(size=shape), dtype)


def bits(array):
    """Returns the bytes of each row."""
    return [row.tobytes() for row in np.asarray(array)]


def fixed(function, *arguments):
    """Returns the function's result, compiled as one program under the fixed order."""
    with fixed_order():
        return jax.jit(function)(*arguments)


def test_a_function_is_traced_again_when_the_order_changes():
    """JAX's cache of traces knows the order, also inside of functions that are compiled on their own."""

    @jax.jit
    def order(x):
        return x + int(is_fixed())

    assert not is_fixed()
    found = [int(order(0))]
    with fixed_order():
        found.append(int(order(0)))
        with fixed_order(False):
            found.append(int(order(0)))
        found.append(int(order(0)))
    assert [*found, int(order(0))] == [0, 1, 0, 1, 0]
    assert not is_fixed()


@pytest.mark.parametrize("width", [1, 2, 7, 24, 33])
def test_halves_are_added_to_each_other(width):
    """The order is that of this loop, in float32."""
    x = DRAW.normal(size=(3, width)).astype(np.float32)
    wanted = [row.copy() for row in x]
    for at, row in enumerate(wanted):
        while len(row) > 1:
            half = len(row) // 2
            row = np.concatenate([row[:half] + row[half : 2 * half], row[2 * half :]])
        wanted[at] = row
    np.testing.assert_array_equal(np.asarray(fixed(sum_of_last, jnp.asarray(x))), wanted)


def test_rows_are_computed_in_tiles_of_one_size():
    """Every call of the function has the same number of rows, and padding does not reach the result."""
    seen = []

    def double(rows):
        seen.append(rows.shape)
        return {"out": 2 * rows}

    x = normal(2 * ROWS + 3, 5)
    np.testing.assert_array_equal(fixed(lambda x: by_row_tiles(double, x)["out"], x), 2 * x)
    assert set(seen) == {(ROWS, 5)}
    assert by_row_tiles(double, x)["out"].shape == x.shape
    assert seen[-1] == x.shape
    assert fixed(lambda x: by_row_tiles(double, x)["out"], x[:0]).shape == (0, 5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_row_of_a_product_is_the_same_alone_and_anywhere_among_others(dtype):
    weight, x = normal(40, 96, dtype=dtype), normal(37, 96, dtype=dtype)

    def multiply(x):
        return skinny_matmul(weight, x, activation="silu", implementation="xla")

    wanted = bits(fixed(multiply, x))
    for rows in ([36], [5, 0, 17], [*range(36, 10, -1)]):
        assert bits(fixed(multiply, x[np.array(rows)])) == [wanted[row] for row in rows]


PAGE, PAGES = 8, 24


def attend(pools, q, table, seq_lens, bounds, window):
    ids = [jnp.asarray(each, jnp.int32) for each in (table, seq_lens, bounds)]
    run = partial(ragged_attention, scale=0.3, window=window, implementation="xla")
    return bits(fixed(run, q, *pools, *ids))


@pytest.mark.parametrize("window", [11, pytest.param(None, marks=pytest.mark.slow)])
def test_a_query_has_the_same_bits_in_every_chunk_and_beside_other_rows(window):
    """A prompt of 90 tokens, in one step, token by token at its end, and between two other rows."""
    pools = normal(PAGES, PAGE, 2, 16), normal(PAGES, PAGE, 2, 16)
    q = normal(90, 4, 16)
    table = np.arange(PAGES)
    whole = attend(pools, q, table[None, :12], [90], [0, 90], window)
    # Its pages are elsewhere in a table of another width.
    assert attend(pools, q[89:], table[None], [90], [0, 1], window) == whole[89:]
    others = normal(70, 4, 16)
    packed = jnp.concatenate([others[:33], q[40:71], others[33:]])
    between = attend(
        pools,
        packed,
        np.stack([table[::-1], table, np.roll(table, 5)]),
        [50, 71, 101],
        [0, 33, 64, 101],
        window,
    )
    assert between[33:64] == whole[40:71]


HEADS, CHANNELS = (4,), (12,)
# The op, the shape of a state, the shapes of a layer's weights, and the columns of the tokens' inputs.
SCANS: dict[str, Any] = {
    "ssd": (ssd_scan, (4, 8, 8), (HEADS, HEADS, HEADS), (4 * 8 + 2 * 2 * 8, 4)),
    "delta": (delta_scan, (4, 8, 8), (HEADS, HEADS), (2 * 2 * 8 + 4 * 8, 4, 4)),
    "selective": (selective_scan, (12, 8), ((12, 8), CHANNELS, CHANNELS), (12, 12, 8, 8)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ssd", "float32"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("delta", "float32"), ("selective", "float32"), ("ssd", "bfloat16"))
        ),
    ],
)
def test_a_state_and_its_outputs_have_the_same_bits_however_the_tokens_are_divided(name, dtype):
    """In one step, and in steps that end inside of chunks, one of them of a single token."""
    scan, shape, weights, columns = SCANS[name]
    layer = [normal(*each) for each in weights]
    tokens = [normal(50, width) for width in columns]

    def step(states, tables, tokens, layer):
        return scan(*layer, states, *tokens, *tables, chunk_size=16, implementation="xla")

    def run(cuts):
        states, outs = jnp.zeros((3, *shape), dtype), []
        for start, stop in pairwise(cuts):
            tables = [[0, stop - start], [stop], [1 if start else 0], [1]]
            tables = [jnp.asarray(table, jnp.int32) for table in tables]
            inputs = [part[start:stop] for part in tokens]
            out, states = fixed(step, states, tables, inputs, layer)
            outs += bits(out)
        return outs, bits(states)[1]

    assert run([0, 50]) == run([0, 21, 22, 50])
