"""The recurrence of `selective_scan` and `selective_update`, and what is particular to it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import selective_scan, selective_update
from pallas_kernels.arguments.selective import check_selective
from pallas_kernels.inputs.nan_filled_states import Rows
from pallas_kernels.selective_scan import reference
from tests.pallas_kernels.recurrence import CLOSE, Recurrence

CHANNELS, STATE = 6, 4


def step(layer, before, token):
    """The selective state space, number by number."""
    state, out = before.copy(), np.zeros(CHANNELS)
    for channel in range(CHANNELS):
        x = token["x"][channel]
        size = np.log1p(np.exp(token["dt"][channel] + layer["dt_bias"][channel]))
        for n in range(STATE):
            state[channel, n] *= np.exp(-np.exp(layer["a_log"][channel, n]) * size)
            state[channel, n] += size * x * token["b"][n]
        read = sum(state[channel, n] * token["c"][n] for n in range(STATE))
        out[channel] = read + layer["skip"][channel] * x
    return state, out


SELECTIVE = Recurrence(
    scan=selective_scan,
    update=selective_update,
    reference=reference.selective_scan,
    layer={"a_log": (CHANNELS, STATE), "skip": (CHANNELS,), "dt_bias": (CHANNELS,)},
    state=(CHANNELS, STATE),
    tokens={"x": CHANNELS, "dt": CHANNELS, "b": STATE, "c": STATE},
    out=(CHANNELS,),
    step=step,
)


def test_huge_steps_forget_everything_and_stay_finite():
    inputs = SELECTIVE.inputs(Rows((64,)))
    inputs["dt"][::7] = 80.0
    out, pool = SELECTIVE.call(inputs, chunk_size=64)
    wanted, states = SELECTIVE.oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)


@pytest.mark.parametrize(
    ("name", "size"),
    [("dt", (18, CHANNELS)), ("b", (19, 3)), ("a_log", (CHANNELS, 3)), ("skip", (3,))],
)
def test_arrays_of_another_shape_are_refused(name, size):
    # The check is called directly: in tests, shape annotations refuse such a call before the op does.
    inputs = SELECTIVE.inputs(Rows((19,))) | {name: np.zeros(size, np.float32)}
    names = (*SELECTIVE.layer, "states", *SELECTIVE.tokens)
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        check_selective(*(jnp.asarray(inputs[key]) for key in names))
