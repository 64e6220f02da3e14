"""The contract of `causal_conv`, signed by every implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv
from pallas_kernels.causal_conv import reference
from pallas_kernels.causal_conv.cases import CASES, Case
from pallas_kernels.inputs.nan_filled_states import Rows
from pallas_kernels.workbench.tolerances import OUTPUT
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import bits, cases, compared, compiled, implementations

SMALL = [case for case in CASES if case.ci]
# The oracle takes too long for the largest.
COMPARED = [case for case in CASES if case.rows.tokens < 4096]
every_implementation = implementations("xla", "mosaic_gpu")


def assert_is_oracle(result, inputs, dtype):
    """Outputs within the tolerance, states to the bit: they are copies."""
    out, pool = (np.asarray(array) for array in result)
    wanted, wanted_pool = state_oracle.causal_conv(inputs)
    tolerance = OUTPUT[dtype]
    np.testing.assert_allclose(out.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(pool.astype(np.float64), wanted_pool)


@compared(COMPARED)
def test_it_equals_the_oracle(implementation, case, dtype):
    """There are rows shorter than the window, rows without tokens and padding; unused places hold NaN."""
    inputs = case.inputs(1, dtype)
    result = compiled(partial(causal_conv, implementation=implementation), inputs)
    assert_is_oracle(result, inputs, dtype)


@cases(SMALL[:5])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    assert_is_oracle(compiled(reference.causal_conv, inputs), inputs, "float32")


@every_implementation
def test_a_history_is_kept_by_a_row_shorter_than_the_window(implementation):
    """[e f] after [a b c d] keeps [c d e f]'s last three."""
    states = jnp.arange(1.0, 5.0, dtype=jnp.bfloat16)[None, 1:, None] * jnp.ones(
        (2, 1, 8), jnp.bfloat16
    )
    x = jnp.asarray([5.0, 6.0], jnp.bfloat16)[:, None] * jnp.ones((1, 8), jnp.bfloat16)
    tables = (jnp.array([ids], jnp.int32) for ids in (0, 0))
    bounds = jnp.array([0, 2], jnp.int32)
    weight = jnp.ones((4, 8), jnp.bfloat16)
    op = partial(causal_conv, activation=None, implementation=implementation)
    out, pool = jax.jit(op)(weight, None, states, x, *tables, bounds)
    np.testing.assert_array_equal(np.asarray(pool[0, :, 0], np.float32), [4, 5, 6])
    np.testing.assert_array_equal(np.asarray(out[:, 0], np.float32), [14, 18])


@every_implementation
@pytest.mark.parametrize(
    "split",
    [1, 37, *(pytest.param(split, marks=pytest.mark.slow) for split in (2, 3, 16))],
)
def test_a_split_run_has_the_same_bits(implementation, split):
    """The second part starts from what the first one kept."""
    rows = Rows((40, 50), (0, 3))
    inputs = Case("", rows, 136, chunk_size=16).inputs(3)
    op = partial(causal_conv, implementation=implementation)
    out, pool = compiled(op, inputs)
    bounds = inputs["cu_q_lens"]
    parts, states = [], inputs["states"]
    for start, stop in ((0, split), (split, None)):
        pieces = [inputs["x"][bounds[row] : bounds[row + 1]][start:stop] for row in range(2)]
        read = inputs["read_states"] if start == 0 else inputs["write_states"]
        now = inputs | {
            "x": np.concatenate(pieces),
            "states": np.asarray(states),
            "cu_q_lens": np.cumsum([0, *map(len, pieces)]).astype(np.int32),
            "read_states": read,
        }
        got, states = compiled(op, now)
        parts.append(np.split(np.asarray(got), [len(pieces[0])]))
    for row in range(2):
        joined = np.concatenate([part[row] for part in parts])
        assert bits(joined) == bits(np.asarray(out)[bounds[row] : bounds[row + 1]])
    written = inputs["write_states"]
    assert bits(np.asarray(states)[written]) == bits(np.asarray(pool)[written])


@every_implementation
def test_one_token_each_has_the_bits_of_packed_rows(implementation):
    inputs = Case("", Rows((1,) * 5, (1, 0, 3, 9, 2)), 264, packed=False).inputs(4)
    op = partial(causal_conv, implementation=implementation)
    packed = inputs | {"cu_q_lens": np.arange(6, dtype=np.int32)}
    for got, wanted in zip(compiled(op, inputs), compiled(op, packed), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """The bits of a row do not depend on its neighbours or on its place."""
    inputs = Case("", Rows((33, 2, 20), (4, 1, 0), padding_tokens=3), 136).inputs(5)
    op = partial(causal_conv, implementation=implementation)
    out, _ = compiled(op, inputs)
    order = [2, 0, 1]
    tokens = np.split(np.arange(55), inputs["cu_q_lens"][1:3])
    moved = np.concatenate([tokens[row] for row in order])
    permuted = inputs | {
        "x": np.concatenate([inputs["x"][moved], inputs["x"][55:]]),
        "cu_q_lens": np.cumsum([0, *(len(tokens[row]) for row in order)]).astype(np.int32),
        "read_states": inputs["read_states"][order],
        "write_states": inputs["write_states"][order],
    }
    again, _ = compiled(op, permuted)
    assert bits(np.asarray(out)[moved]) == bits(np.asarray(again)[:55])


@every_implementation
def test_a_read_id_past_the_end_reads_zeros(implementation):
    inputs = Case("", Rows((5, 1), (0, 0)), 136).inputs(6)
    op = partial(causal_conv, implementation=implementation)
    far = inputs | {"read_states": np.array([2**31 - 1, len(inputs["states"])], np.int32)}
    for got, wanted in zip(compiled(op, far), compiled(op, inputs), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
@pytest.mark.parametrize("packed", [True, False])
def test_a_donated_pool_is_written_in_place(implementation, packed):
    """All bytes alias, and no copy is as large as the pool."""
    case = Case("", Rows((1,) * 8, (3,) * 8), 136, packed=packed)
    inputs = case.inputs(7)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    arrays["states"] = jnp.zeros((999, 3, 136), jnp.bfloat16)

    def run(states, others):
        return causal_conv(states=states, **others, implementation=implementation)

    states = arrays.pop("states")
    program = jax.jit(run, donate_argnums=0).lower(states, arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == states.nbytes
    assert not re.search(r"= \w+\[999,3,136\]\S* copy\(", program.as_text())


def refused(message, **changes):
    good = Case("", Rows((3, 2), (4, 0), snapshots=True), 8, chunk_size=2).inputs(8, "float32")
    inputs = good | changes
    inputs["states"] = jnp.asarray(inputs["states"])
    with pytest.raises(ValueError, match=message):
        causal_conv(**inputs)


def test_tables_that_would_race_are_refused(as_in_production):
    ids = partial(np.array, dtype=np.int32)
    refused(
        "row 1 reads state 3, which row 0 writes", read_states=ids([1, 3]), write_states=ids([3, 2])
    )
    refused("state 3 for rows 0 and 1", read_states=ids([0, 0]), write_states=ids([3, 3]))
    kept = {"snapshot_ends": ids([2, 3]), "read_states": ids([1, 0]), "write_states": ids([2, 3])}
    refused("names state 1, which this call also reads", **kept, snapshot_states=ids([4, 1]))
    refused("names state 4, which this call also reads", **kept, snapshot_states=ids([4, 4]))
    kept["snapshot_ends"] = ids([3, 2])
    refused(r"must increase .* \[3, 2\]", **kept, snapshot_states=ids([4, 5]))


def test_what_does_not_fit_is_refused_with_what_was_got(as_in_production):
    ids = partial(np.array, dtype=np.int32)
    refused("weight must have at least 2 taps, got 1", weight=np.zeros((1, 8), np.float32))
    refused(r"states must have shape \[any, 3, 8\]", states=np.zeros((9, 2, 8), np.float32))
    refused("bias must have x's dtype", bias=np.zeros(8, np.float16))
    refused("8 channels from column 3 on, got 8 columns", first_channel=3)
    refused("activation must be one of", activation="gelu")
    refused("read_states must be int32", read_states=np.array([1, 0], np.int64))
    refused("write_states holds a negative number", write_states=ids([-1, 3]))
    refused(r"rise from 0 to at most 5 tokens, got \[0, 4, 3\]", cu_q_lens=ids([0, 4, 3]))
    refused(r"rise from 0 to at most 5 tokens, got \[0, 4, 6\]", cu_q_lens=ids([0, 4, 6]))
    refused("without cu_q_lens every row has one token, got 2 rows and 5", cu_q_lens=None)
    refused("belong together, got only one", snapshot_states=None)
