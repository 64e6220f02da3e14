"""`delta_scan` and `delta_update` against loops over rows and tokens in float64, on hostile rows and states."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_scan, delta_update
from pallas_kernels.arguments.delta import check_delta
from pallas_kernels.delta_scan import reference
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool
from tests.pallas_kernels.state_oracle import rows_of, snapshot_of

CHUNK, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 8, 2, 4, 8, 6
# The scan's own tolerance in float32: sums of up to 64 products of numbers about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
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
    wide = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    drawn = {
        "qkv": (rows.tokens, wide),
        "a": (rows.tokens, HEADS),
        "b": (rows.tokens, HEADS),
    }
    tokens = {
        name: rows.nan_filled(rng.normal(size=size).astype(np.float32))
        for name, size in drawn.items()
    }
    pool = nan_filled_pool(
        rng, tables["read_states"], num_states, (HEADS, KEY_DIM, VALUE_DIM), "float32"
    )
    layer = {name: rng.normal(size=HEADS).astype(np.float32) for name in ("a_log", "dt_bias")}
    return layer | {"states": pool} | tokens | tables


def call(form, inputs, **options):
    """Calls an op with the pool on the device and everything else as the host has it."""
    return form(**(inputs | {"states": jnp.asarray(inputs["states"])}), **options)


def oracle(inputs):
    """Output and pool, both float64."""
    a_log, dt_bias, before, qkv, a, b = (
        inputs[name].astype(np.float64) for name in ("a_log", "dt_bias", "states", "qkv", "a", "b")
    )
    after, out = before.copy(), np.zeros((len(qkv), HEADS, VALUE_DIM))
    keys = KEY_HEADS * KEY_DIM
    for row, tokens in rows_of(inputs, len(qkv)):
        state = before[inputs["read_states"][row]].copy()
        for token in tokens:
            for head in range(HEADS):
                served = head * KEY_HEADS // HEADS
                q = qkv[token, served * KEY_DIM : (served + 1) * KEY_DIM]
                k = qkv[token, keys + served * KEY_DIM : keys + (served + 1) * KEY_DIM]
                v = qkv[token, 2 * keys + head * VALUE_DIM : 2 * keys + (head + 1) * VALUE_DIM]
                q, k = (x / np.sqrt(np.sum(x**2) + 1e-6) for x in (q, k))
                step = np.log1p(np.exp(a[token, head] + dt_bias[head]))
                decayed = state[head] * np.exp(-np.exp(a_log[head]) * step)
                share = 1 / (1 + np.exp(-b[token, head]))
                state[head] = decayed + np.outer(k, share * (v - k @ decayed))
                out[token, head] = q @ state[head] / np.sqrt(KEY_DIM)
            kept = snapshot_of(inputs, token + 1)
            if kept is not None:
                after[kept] = state
        write = int(inputs["write_states"][row])
        if len(tokens) and write < len(after):
            after[write] = state
    return out, after


@pytest.mark.parametrize("form", [delta_scan, reference.delta_scan], ids=["xla", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_scan_is_the_recurrence_token_by_token(name, form):
    inputs = inputs_of(CASES[name])
    arrays = {key: jnp.asarray(value) for key, value in inputs.items()}
    out, pool = form(**arrays, chunk_size=CHUNK)
    wanted, states = oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)
    # What nobody wrote is what it was, bit for bit, NaN included.
    same = np.all((states == inputs["states"]) | np.isnan(states), axis=(1, 2, 3))
    np.testing.assert_array_equal(np.asarray(pool)[same], inputs["states"][same])


def test_a_split_at_a_chunk_has_the_same_bits():
    inputs = inputs_of(CASES["fresh"])
    first, second = ({**inputs} for _ in range(2))
    tokens = ("qkv", "a", "b")
    first |= {name: inputs[name][:16] for name in tokens} | {"cu_q_lens": np.int32([0, 16])}
    first |= {"seq_lens": np.int32([16])}
    second |= {name: inputs[name][16:] for name in tokens} | {"cu_q_lens": np.int32([0, 3])}
    second |= {"read_states": inputs["write_states"]}
    whole, ended = call(delta_scan, inputs, chunk_size=CHUNK)
    one, pool = call(delta_scan, first, chunk_size=CHUNK)
    other, split = call(delta_scan, second | {"states": pool}, chunk_size=CHUNK)
    np.testing.assert_array_equal(whole, np.concatenate((one, other)))
    np.testing.assert_array_equal(ended, split)


def test_an_update_is_a_scan_of_one_token():
    rows = Rows((1,) * 5, (3, 0, 8, 7, 1), padding_rows=2, padding_tokens=2)
    inputs = inputs_of(rows)
    scanned, ended = call(delta_scan, inputs, chunk_size=CHUNK)
    given = {k: v for k, v in inputs.items() if k not in ("cu_q_lens", "seq_lens")}
    stepped, pool = call(delta_update, given)
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
        lambda *given: delta_update(**dict(zip(names, given, strict=True))), donate_argnums=place
    )
    compiled = step.lower(*arrays).compile()
    pool = arrays[place]
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    shape = ",".join(map(str, pool.shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())


def test_equal_keys_that_are_corrected_fully_keep_a_chunk_exact():
    # The system's worst case: every token corrects the one before it, and nothing is forgotten.
    inputs = inputs_of(Rows((64,)))
    inputs["qkv"][:, KEY_HEADS * KEY_DIM : 2 * KEY_HEADS * KEY_DIM] = 1.0
    inputs["b"][:] = 30.0
    inputs["a"][:] = -30.0
    out, pool = call(delta_scan, inputs, chunk_size=64)
    wanted, states = oracle(inputs)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    np.testing.assert_allclose(pool, states, **CLOSE)


def test_no_tokens_change_nothing():
    inputs = inputs_of(Rows((), padding_rows=2))
    out, pool = call(delta_scan, inputs, chunk_size=CHUNK)
    assert out.shape == (0, HEADS, VALUE_DIM)
    np.testing.assert_array_equal(pool, inputs["states"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"qkv": np.zeros((19, 50), np.float32)}, "columns"),
        ({"qkv": np.zeros((19, 56), np.int32)}, "floating"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"cu_q_lens": np.int32([0, 20])}, "cu_q_lens"),
        ({"write_states": np.int32([-1])}, "write_states"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        call(delta_scan, inputs_of(CASES["fresh"]) | {"chunk_size": CHUNK} | wrong)


@pytest.mark.parametrize(("name", "size"), [("a", (18, 4)), ("b", (19, 3)), ("a_log", (3,))])
def test_gates_of_another_shape_are_refused(name, size):
    # Asked of the check itself: in tests, types with shapes refuse such a call before the op does.
    inputs = inputs_of(CASES["fresh"]) | {name: np.zeros(size, np.float32)}
    names = ("a_log", "dt_bias", "states", "qkv", "a", "b")
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        check_delta(*(jnp.asarray(inputs[name]) for name in names))


def test_only_what_is_there_can_be_asked_for():
    with pytest.raises((ValueError, Unsupported), match="mosaic_gpu"):
        call(delta_scan, inputs_of(CASES["fresh"]), chunk_size=CHUNK, implementation="mosaic_gpu")
