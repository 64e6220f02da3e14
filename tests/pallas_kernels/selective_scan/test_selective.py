"""`selective_scan` and `selective_update` against loops over rows and tokens in float64, on hostile rows and states."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import selective_scan, selective_update
from pallas_kernels.arguments.selective import check_selective
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool
from pallas_kernels.selective_scan import reference
from tests.pallas_kernels.state_oracle import rows_of, snapshot_of

CHUNK, CHANNELS, STATE = 8, 6, 4
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
LAYER = ("a_log", "skip", "dt_bias")
TOKENS = {"x": CHANNELS, "dt": CHANNELS, "b": STATE, "c": STATE}
CASES = {
    "fresh": Rows((19,)),
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


def inputs_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    tables, num_states = rows.tables(rng, CHUNK)
    tokens = {
        name: rows.nan_filled(rng.normal(size=(rows.tokens, width)).astype(np.float32))
        for name, width in TOKENS.items()
    }
    pool = nan_filled_pool(rng, tables["read_states"], num_states, (CHANNELS, STATE), "float32")
    layer = {
        "a_log": rng.normal(size=(CHANNELS, STATE)).astype(np.float32),
        "skip": rng.normal(size=CHANNELS).astype(np.float32),
        "dt_bias": rng.normal(size=CHANNELS).astype(np.float32),
    }
    return layer | {"states": pool} | tokens | tables


def call(form, inputs, **options):
    """Calls an op with the pool on the device and everything else as the host has it."""
    return form(**(inputs | {"states": jnp.asarray(inputs["states"])}), **options)


def oracle(inputs):
    """Output and pool, both float64."""
    names = (*LAYER, "states", *TOKENS)
    a_log, skip, dt_bias, before, x, dt, b, c = (inputs[name].astype(np.float64) for name in names)
    after, out = before.copy(), np.zeros(x.shape)
    for row, tokens in rows_of(inputs, len(x)):
        state = before[inputs["read_states"][row]].copy()
        for token in tokens:
            for channel in range(CHANNELS):
                step = np.log1p(np.exp(dt[token, channel] + dt_bias[channel]))
                for n in range(STATE):
                    state[channel, n] *= np.exp(-np.exp(a_log[channel, n]) * step)
                    state[channel, n] += step * x[token, channel] * b[token, n]
                read = sum(state[channel, n] * c[token, n] for n in range(STATE))
                out[token, channel] = read + skip[channel] * x[token, channel]
            kept = snapshot_of(inputs, token + 1)
            if kept is not None:
                after[kept] = state
        write = int(inputs["write_states"][row])
        if len(tokens) and write < len(after):
            after[write] = state
    return out, after


@pytest.mark.parametrize(
    "form", [selective_scan, reference.selective_scan], ids=["xla", "reference"]
)
@pytest.mark.parametrize("name", CASES)
def test_a_scan_is_the_recurrence_token_by_token(name, form):
    inputs = inputs_of(CASES[name])
    arrays = {key: jnp.asarray(value) for key, value in inputs.items()}
    out, pool = form(**arrays, chunk_size=CHUNK)
    wanted, states = oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)
    # A state that is not written keeps its bits, NaN included.
    same = np.all((states == inputs["states"]) | np.isnan(states), axis=(1, 2))
    np.testing.assert_array_equal(np.asarray(pool)[same], inputs["states"][same])


def test_a_split_at_a_chunk_has_the_same_bits():
    inputs = inputs_of(CASES["fresh"])
    first = inputs | {name: inputs[name][:16] for name in TOKENS}
    first |= {"cu_q_lens": np.int32([0, 16]), "seq_lens": np.int32([16])}
    second = inputs | {name: inputs[name][16:] for name in TOKENS}
    second |= {"cu_q_lens": np.int32([0, 3]), "read_states": inputs["write_states"]}
    whole, ended = call(selective_scan, inputs, chunk_size=CHUNK)
    one, pool = call(selective_scan, first, chunk_size=CHUNK)
    other, split = call(selective_scan, second | {"states": pool}, chunk_size=CHUNK)
    np.testing.assert_array_equal(whole, np.concatenate((one, other)))
    np.testing.assert_array_equal(ended, split)


def test_an_update_is_a_scan_of_one_token():
    rows = Rows((1,) * 5, (3, 0, 8, 7, 1), padding_rows=2, padding_tokens=2)
    inputs = inputs_of(rows)
    scanned, ended = call(selective_scan, inputs, chunk_size=CHUNK)
    given = {k: v for k, v in inputs.items() if k not in ("cu_q_lens", "seq_lens")}
    stepped, pool = call(selective_update, given)
    np.testing.assert_allclose(stepped, scanned, **CLOSE)
    np.testing.assert_allclose(pool, ended, **CLOSE)
    np.testing.assert_allclose(pool, oracle(inputs)[1], **CLOSE)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_update_writes_its_donated_pool_in_place(rows):
    # This holds for a single row too, which XLA sees as one slice.
    inputs = inputs_of(Rows((1,) * rows, (3,) * rows))
    names = [name for name in inputs if name not in ("cu_q_lens", "seq_lens")]
    place = names.index("states")
    arrays = [jnp.asarray(inputs[name]) for name in names]
    step = jax.jit(
        lambda *given: selective_update(**dict(zip(names, given, strict=True))),
        donate_argnums=place,
    )
    compiled = step.lower(*arrays).compile()
    pool = arrays[place]
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    shape = ",".join(map(str, pool.shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())


def test_huge_steps_forget_everything_and_stay_finite():
    inputs = inputs_of(Rows((64,)))
    inputs["dt"][::7] = 80.0
    out, pool = call(selective_scan, inputs, chunk_size=64)
    wanted, states = oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)


def test_no_tokens_change_nothing():
    inputs = inputs_of(Rows((), padding_rows=2))
    out, pool = call(selective_scan, inputs, chunk_size=CHUNK)
    assert out.shape == (0, CHANNELS)
    np.testing.assert_array_equal(pool, inputs["states"])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"x": np.zeros((19, CHANNELS), np.int32)}, "floating"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"cu_q_lens": np.int32([0, 20])}, "cu_q_lens"),
        ({"write_states": np.int32([-1])}, "write_states"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        call(selective_scan, inputs_of(CASES["fresh"]) | {"chunk_size": CHUNK} | wrong)


@pytest.mark.parametrize(
    ("name", "size"),
    [("dt", (18, CHANNELS)), ("b", (19, 3)), ("a_log", (CHANNELS, 3)), ("skip", (3,))],
)
def test_arrays_of_another_shape_are_refused(name, size):
    # The check is called directly: in tests, shape annotations refuse such a call before the op does.
    inputs = inputs_of(CASES["fresh"]) | {name: np.zeros(size, np.float32)}
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        check_selective(*(jnp.asarray(inputs[key]) for key in (*LAYER, "states", *TOKENS)))


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises((ValueError, Unsupported), match="mosaic_gpu"):
        call(
            selective_scan,
            inputs_of(CASES["fresh"]),
            chunk_size=CHUNK,
            implementation="mosaic_gpu",
        )
