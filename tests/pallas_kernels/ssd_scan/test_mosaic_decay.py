"""The sums in front of the `ssd_scan` kernel, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from pallas_kernels.packed.rows import cut
from pallas_kernels.ssd_scan.mosaic_decay import decays

LOG2_E = np.log2(np.e)


def summed(heads, side, *, interpret):
    """What the kernel makes of rows that begin and end within pieces, and what is right, piece by piece."""
    rng = np.random.default_rng(heads)
    bounds = np.array([0, 35, 35, 36, 69], np.int32)
    positions = np.array([3, 0, 30, 32], np.int32)
    tokens = int(bounds[-1]) + 5
    dt = rng.standard_normal((tokens, heads)).astype(np.float32)
    # No step at all, and one that leaves nothing.
    dt[5], dt[50] = -np.inf, 900.0
    a_log = rng.uniform(-1, 2, heads).astype(np.float32)
    bias = rng.standard_normal(heads).astype(np.float32)
    pieces = cut(jnp.asarray(bounds), jnp.asarray(positions), tokens=tokens, size=side)
    options = {"size": side, "dt_limits": (0.0, float("inf")), "interpret": interpret}
    found = np.asarray(jax.jit(lambda *arrays: decays(*arrays, pieces, **options))(a_log, bias, dt))
    wanted = []
    for start, length in zip(np.asarray(pieces.start), np.asarray(pieces.length), strict=True):
        step = np.logaddexp(0, dt[start : start + length].astype(np.float64) + bias)
        passed = np.cumsum(-np.exp(a_log.astype(np.float64)) * step * LOG2_E, axis=0)
        with np.errstate(divide="ignore"):
            wanted.append((passed, passed - np.log2(step)))
    return found, wanted


# A block takes 128 heads, then the powers of two in the rest: one head; four, two and one; 128 and one.
# 3 + 35 tokens from a multiple of the pieces' size on, none, one, and 33.
LENGTHS = {32: [29, 6, 1, 32, 1], 64: [35, 1, 32, 1]}
SIZES = [(1, 32), (1, 64), (7, 32), (129, 32), (129, 64)]
INTERPRETED = [
    pytest.param(*sizes, True, marks=[pytest.mark.slow] * (sizes != (129, 32))) for sizes in SIZES
]


@pytest.mark.parametrize(
    ("heads", "side", "interpret"),
    [*INTERPRETED, *(pytest.param(*sizes, False, marks=pytest.mark.gpu) for sizes in SIZES)],
)
def test_each_piece_is_summed_in_the_order_of_its_tokens(heads, side, interpret):
    found, wanted = summed(heads, side, interpret=interpret)
    lengths = [len(passed) for passed, _ in wanted]
    assert [length for length in lengths if length] == LENGTHS[side]
    for (passed, less), pair, length in zip(wanted, found, lengths, strict=True):
        if not length:
            continue
        np.testing.assert_allclose(pair[:, 0, :length].T, passed, rtol=3e-6, atol=1e-6)
        np.testing.assert_allclose(pair[:, 1, :length].T, less, rtol=3e-6, atol=1e-5)
        # Behind the last token nothing passes and nothing is added.
        assert (pair[:, 0, length:] == pair[:, 0, length - 1 : length]).all()
        assert (pair[:, 1, length:] == np.inf).all()
    if interpret:
        assert not interpreter.get_races().races_found
        interpreter.reset_gpu_interpret_mode_state()
