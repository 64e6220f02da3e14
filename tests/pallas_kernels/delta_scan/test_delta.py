"""The recurrence of `delta_scan` and `delta_update`, and what is particular to it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_scan, delta_update
from pallas_kernels.arguments.delta import check_delta
from pallas_kernels.delta_scan import reference
from pallas_kernels.inputs.nan_filled_states import Rows
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import compiled
from tests.pallas_kernels.recurrence import CHUNK, CLOSE, Recurrence

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
KEYS = KEY_HEADS * KEY_DIM


DELTA = Recurrence(
    scan=delta_scan,
    update=delta_update,
    reference=reference.delta_scan,
    layer={"a_log": (HEADS,), "dt_bias": (HEADS,)},
    state=(HEADS, KEY_DIM, VALUE_DIM),
    tokens={"qkv": 2 * KEYS + HEADS * VALUE_DIM, "a": HEADS, "b": HEADS},
    out=(HEADS, VALUE_DIM),
    step=state_oracle.delta_step,
)


CHANNELS = replace(
    DELTA,
    layer={"a_log": (HEADS,), "dt_bias": (HEADS * KEY_DIM,)},
    tokens=DELTA.tokens | {"a": HEADS * KEY_DIM},
)


def test_each_component_of_a_key_has_a_decay_of_any_size():
    """Those of a component may forget all while its neighbours forget nothing; no factor overflows.

    Sums of log decays over a piece then reach 64 * -104, where neighbours in float32 differ by 5e-4.
    """
    inputs = CHANNELS.inputs(Rows((70,)))
    inputs["a"][:] = np.random.default_rng(0).choice([-1e4, -30.0, 0.0, 40.0, 1e4], (70, 32))
    inputs["a_log"] = np.array([-20.0, 0.0, 2.0, 4.0], np.float32)
    out, pool = compiled(CHANNELS.scan, inputs | {"chunk_size": 64})
    wanted, states = CHANNELS.oracle(inputs)
    np.testing.assert_allclose(out, wanted, rtol=1e-3, atol=5e-4)
    np.testing.assert_allclose(pool, states, rtol=1e-3, atol=5e-4)


def test_equal_keys_that_are_corrected_fully_keep_a_chunk_exact():
    # The system's worst case: every token corrects the one before it, and nothing is forgotten.
    inputs = DELTA.inputs(Rows((64,)))
    inputs["qkv"][:, KEYS : 2 * KEYS] = 1.0
    inputs["b"][:] = 30.0
    inputs["a"][:] = -30.0
    out, pool = compiled(DELTA.scan, inputs | {"chunk_size": 64})
    wanted, states = DELTA.oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)


def test_columns_that_are_no_number_of_heads_are_refused():
    wrong = {"qkv": np.zeros((19, 50), np.float32), "chunk_size": CHUNK}
    with pytest.raises(ValueError, match="columns"):
        DELTA.call(DELTA.inputs(Rows((19,))) | wrong)


@pytest.mark.parametrize(
    ("name", "size"),
    [("a", (18, 4)), ("a", (19, 32)), ("b", (19, 3)), ("a_log", (3,)), ("dt_bias", (8,))],
)
def test_gates_of_another_shape_are_refused(name, size):
    # Asked of the check itself: in tests, types with shapes refuse such a call before the op does.
    inputs = DELTA.inputs(Rows((19,))) | {name: np.zeros(size, np.float32)}
    names = (*DELTA.layer, "states", *DELTA.tokens)
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        check_delta(*(jnp.asarray(inputs[name]) for name in names))
