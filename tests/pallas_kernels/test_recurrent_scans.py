"""What a scan and its update owe, whatever they compute: `delta` and `selective` against loops in float64.

Rows and states are hostile. What is particular to a recurrence is tested beside it, from where `Recurrence` comes.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.inputs.nan_filled_states import Rows
from tests.pallas_kernels.contract import compiled
from tests.pallas_kernels.delta_scan.test_delta import DELTA
from tests.pallas_kernels.recurrence import CHUNK, CLOSE
from tests.pallas_kernels.selective_scan.test_selective import SELECTIVE

RECURRENCES = {"delta": DELTA, "selective": SELECTIVE}
# What is slow of the first is tested of `delta_scan` in its own suite, with an oracle of its own.
of_selective = pytest.mark.parametrize(
    "op",
    [
        pytest.param(DELTA, id="delta", marks=pytest.mark.slow),
        pytest.param(SELECTIVE, id="selective"),
    ],
)
of_each = pytest.mark.parametrize("op", RECURRENCES.values(), ids=RECURRENCES)
FRESH = Rows((19,))
CASES = {
    "fresh": FRESH,
    # Rows have no token, one, a chunk, one more or several chunks; some continue in the middle of a chunk.
    "hostile": Rows(
        (0, 1, 8, 9, 7, 33, 0, 3),
        (5, 0, 8, 3, 0, 13, 0, 1),
        padding_rows=3,
        padding_tokens=5,
        snapshots=True,
    ),
    "aligned": Rows((16, 8), (8, 0), snapshots=True),
}


@of_selective
@pytest.mark.parametrize("form", ["scan", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_scan_is_the_recurrence_token_by_token(op, name, form):
    inputs = op.inputs(CASES[name])
    out, pool = compiled(getattr(op, form), inputs | {"chunk_size": CHUNK})
    wanted, states = op.oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)
    # A state that is not written keeps its bits, NaN included.
    kept = (states == inputs["states"]) | np.isnan(states)
    same = np.all(kept, axis=tuple(range(1, kept.ndim)))
    np.testing.assert_array_equal(np.asarray(pool)[same], inputs["states"][same])


@of_selective
def test_a_split_at_a_chunk_has_the_same_bits(op):
    inputs = op.inputs(FRESH)
    first = inputs | {name: inputs[name][:16] for name in op.tokens}
    first |= {"cu_q_lens": np.int32([0, 16]), "seq_lens": np.int32([16])}
    second = inputs | {name: inputs[name][16:] for name in op.tokens}
    second |= {"cu_q_lens": np.int32([0, 3]), "read_states": inputs["write_states"]}
    whole, ended = compiled(op.scan, inputs | {"chunk_size": CHUNK})
    one, pool = compiled(op.scan, first | {"chunk_size": CHUNK})
    second |= {"states": np.asarray(pool)}
    other, split = compiled(op.scan, second | {"chunk_size": CHUNK})
    np.testing.assert_array_equal(whole, np.concatenate((one, other)))
    np.testing.assert_array_equal(ended, split)


@of_each
def test_an_update_is_a_scan_of_one_token(op):
    rows = Rows((1,) * 5, (3, 0, 8, 7, 1), padding_rows=2, padding_tokens=2)
    inputs = op.inputs(rows)
    scanned, ended = compiled(op.scan, inputs | {"chunk_size": CHUNK})
    given = {k: v for k, v in inputs.items() if k not in ("cu_q_lens", "seq_lens")}
    stepped, pool = compiled(op.update, given)
    np.testing.assert_allclose(stepped, scanned, **CLOSE)
    np.testing.assert_allclose(pool, ended, **CLOSE)
    np.testing.assert_allclose(pool, op.oracle(inputs)[1], **CLOSE)


@of_each
@pytest.mark.parametrize("rows", [1, 3])
def test_an_update_writes_its_donated_pool_in_place(op, rows):
    # This holds for a single row too, which XLA sees as one slice.
    inputs = op.inputs(Rows((1,) * rows, (3,) * rows))
    names = [name for name in inputs if name not in ("cu_q_lens", "seq_lens")]
    place = names.index("states")
    arrays = [jnp.asarray(inputs[name]) for name in names]
    step = jax.jit(
        lambda *given: op.update(**dict(zip(names, given, strict=True))), donate_argnums=place
    )
    made = step.lower(*arrays).compile()
    pool = arrays[place]
    assert made.memory_analysis().alias_size_in_bytes == pool.nbytes
    shape = ",".join(map(str, pool.shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", made.as_text())


@of_each
def test_no_tokens_change_nothing(op):
    inputs = op.inputs(Rows((), padding_rows=2))
    out, pool = op.call(inputs, chunk_size=CHUNK)
    assert out.shape == (0, *op.out)
    np.testing.assert_array_equal(pool, inputs["states"])


@of_each
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"cu_q_lens": np.int32([0, 20])}, "cu_q_lens"),
        ({"write_states": np.int32([-1])}, "write_states"),
    ],
    ids=["chunk_size", "cu_q_lens", "write_states"],
)
def test_tables_that_do_not_fit_are_refused(op, wrong, reason):
    with pytest.raises(ValueError, match=reason):
        op.call(op.inputs(FRESH) | {"chunk_size": CHUNK} | wrong)


@of_each
def test_tokens_that_are_no_numbers_of_floating_point_are_refused(op):
    inputs = op.inputs(FRESH)
    name = next(iter(op.tokens))
    with pytest.raises(ValueError, match="floating"):
        op.call(inputs | {name: inputs[name].astype(np.int32)}, chunk_size=CHUNK)


@of_each
def test_an_implementation_that_does_not_exist_is_refused(op):
    with pytest.raises((ValueError, Unsupported), match="mosaic_gpu"):
        op.call(op.inputs(FRESH), chunk_size=CHUNK, implementation="mosaic_gpu")
