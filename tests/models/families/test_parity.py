"""Every family and option computes what Hugging Face Transformers computes, in float32."""

import numpy as np
import pytest

from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
far = cases.far

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
PROMPT = 40
STEPS = 64
EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in cases.SLOW)) for name in cases.CASES
]
# Chunks, steps after the prompt and rows beside one another have the layers of the prompt. One case each is fast: a
# plain one, windows, a rope that depends on the length, norms and caps around blocks, and experts with sinks.
STEPPED = ("llama", "qwen2-layer-types", "phi3-longrope", "gemma2", "gpt-oss")
LATER = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in STEPPED)) for name in cases.CASES
]


@pytest.fixture(scope="module", params=EVERY)
def pair(request, tmp_path_factory):
    """A case, its Hugging Face model, and our model with its parameters read from the saved directory."""
    return cases.maker(cases.CASES, tmp_path_factory)(request.param)


def test_prefill_logits_of_all_positions_equal_transformers(pair):
    case, theirs, model, params = pair
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens)
    # The bound means something only where logits differ by much more.
    assert np.std(wanted) > 0.3
    [got] = Driver(model, params).prefill([tokens])
    assert far(got, wanted) < TOLERANCE


@pytest.mark.parametrize("pair", LATER, indirect=True)
def test_greedy_tokens_equal_transformers_for_64_steps(pair):
    case, theirs, model, params = pair
    tokens = case.prompt(PROMPT)
    wanted, lead = cases.greedy(theirs, tokens, STEPS)
    assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
    driver = Driver(model, params)
    [got] = driver.prefill([tokens])
    chosen = [int(got[-1].argmax())]
    while len(chosen) < STEPS:
        chosen.append(int(driver.decode(chosen[-1:])[0].argmax()))
    assert chosen == wanted


@pytest.mark.parametrize("pair", LATER, indirect=True)
def test_a_prompt_in_two_chunks_gives_the_logits_of_transformers(pair):
    case, theirs, model, params = pair
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens, chunks=(23, PROMPT - 23))
    driver = Driver(model, params)
    [first] = driver.prefill([tokens[:23]])
    [second] = driver.prefill([tokens[23:]])
    assert far(np.concatenate((first, second)), wanted) < TOLERANCE


@pytest.mark.parametrize("pair", LATER, indirect=True)
def test_rows_of_unequal_lengths_equal_runs_of_their_own(pair):
    # Each row has its own length. The middle row is past the original context where rope is stretched.
    case, theirs, model, params = pair
    rows = [case.prompt(length, offset=length) for length in (3, 37, 9)]
    driver = Driver(model, params)
    together = driver.prefill([row[:-1] for row in rows])
    last = driver.decode([row[-1] for row in rows])
    for row, got, end in zip(rows, together, last, strict=True):
        wanted = cases.logits(theirs, row, chunks=(len(row) - 1, 1))
        assert far(np.concatenate((got, end[None])), wanted) < TOLERANCE
