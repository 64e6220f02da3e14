"""A step whose last tokens are left out of recurrent states leaves the states of a step without them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.driver import Driver
from tests.models.recurrent_model import VOCAB, recurrent_model

# Row by row: tokens of the step, and how many of the last are left out. Rows cross ends of chunks or not.
STEPS = [(5, 2), (4, 3), (1, 0)], [(3, 0), (5, 1), (5, 4)]


@pytest.fixture(scope="module")
def made():
    return recurrent_model()


@partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def run_without_last(model, params, cache, batch, rejected):
    cache, hidden, writes = model.forward_unsettled(params, cache, batch)
    return model.settled(cache, batch, writes, rejected), model.logits(params, hidden)


def drive(made, leaves_out=None):
    """Runs prompts, the steps and one more; returns the logits of all that was kept.

    Args:
        made: the model and its parameters.
        leaves_out: returns how many tokens the states leave out of a row; `None` to run the others alone.
    """
    model, params = made
    driver = Driver(model, params, page_size=4, max_tokens=48, step_tokens=24)
    tokens = iter(np.random.default_rng(0).integers(VOCAB, size=100).tolist())
    logits = driver.prefill([[next(tokens) for _ in range(count)] for count in (6, 7, 3)])
    for step in STEPS:
        new = [[next(tokens) for _ in range(count)] for count, _ in step]
        kept = [row[: len(row) - out] for row, (_, out) in zip(new, step, strict=True)]
        if leaves_out is None:
            logits += driver.prefill(kept)
            continue
        rejected = jnp.asarray([leaves_out(out) for _, out in step], jnp.int32)
        batch = driver.batch(new)
        driver.cache, found = run_without_last(model, params, driver.cache, batch, rejected)
        bounds = np.asarray(batch.cu_q_lens)
        for row, one in enumerate(kept):
            logits.append(np.asarray(found)[bounds[row] : bounds[row] + len(one)])
            driver.lengths[row] += len(one)
            driver.steps[row] += 1
    return logits + driver.prefill([[next(tokens)] for _ in range(3)])


@pytest.fixture(scope="module")
def wanted(made):
    return drive(made)


def far(wanted, got):
    pairs = zip(wanted, got, strict=True)
    return max(np.max(np.abs(one - other)) for one, other in pairs)


def test_tokens_left_out_leave_no_trace(made, wanted):
    assert far(wanted, drive(made, lambda out: out)) < 1e-4


def test_tokens_left_in_are_noticed(made, wanted):
    assert far(wanted, drive(made, lambda out: 0)) > 1e-2
