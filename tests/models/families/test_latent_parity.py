"""Families with latent attention compute what Hugging Face Transformers computes, in float32, however they attend."""

import numpy as np
import pytest

from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")
far = cases.far

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
PROMPT = 40
STEPS = 64
# Between them every option; the others have one that a single step shows.
THOROUGH = ("v2-lite", "v3", "v32")
# The router of v3 is in v32, and attention to all tokens in v2. Mistral Small 4 is fast behind Mistral3's class.
SLOW = ("v3-halves", "v3", "mistral4", "kimi-k2.5")
EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in latent_cases.CASES
]
CUT = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in THOROUGH]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cases.maker(latent_cases.CASES, tmp_path_factory)


@pytest.mark.parametrize("name", EVERY)
def test_logits_of_all_positions_equal_transformers_absorbed_and_expanded(made, name):
    # The two paths give the same results.
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens)
    # The bound means something only where logits differ by much more.
    assert np.std(wanted) > 0.3
    for fresh in (False, True) if name in THOROUGH else (True,):
        [got] = Driver(model, params, fresh=fresh).prefill([tokens])
        assert far(got, wanted) < TOLERANCE, fresh


@pytest.mark.parametrize(
    ("name", "fresh"),
    [("v2-lite", True), pytest.param("v3", False, marks=pytest.mark.slow), ("v32", True)],
)
def test_greedy_tokens_equal_transformers_for_64_steps(made, name, fresh):
    # Decode steps, which are absorbed, read the pages that an expanded prefill wrote.
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted, lead = cases.greedy(theirs, tokens, STEPS)
    assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
    driver = Driver(model, params, fresh=fresh)
    [got] = driver.prefill([tokens])
    chosen = [int(got[-1].argmax())]
    while len(chosen) < STEPS:
        chosen.append(int(driver.decode(chosen[-1:])[0].argmax()))
    assert chosen == wanted


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("cut", [1, 8, 23])
def test_a_prompt_behind_a_cached_prefix_gives_the_logits_of_transformers(made, name, cut):
    # An expanded step writes part of a page, one page or several, and an absorbed step reads them.
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens)
    driver = Driver(model, params, fresh=True)
    [first] = driver.prefill([tokens[:cut]])
    [second] = driver.prefill([tokens[cut:]])
    assert far(np.concatenate((first, second)), wanted) < TOLERANCE


@pytest.mark.parametrize("name", CUT)
def test_rows_with_and_without_a_prefix_share_a_step(made, name):
    # One row continues, one decodes, one begins.
    case, theirs, model, params = made(name)
    rows = [case.prompt(length, offset=length) for length in (37, 9, 3)]
    driver = Driver(model, params, fresh=True)
    begun = driver.prefill([rows[0][:20], rows[1][:-1], []])
    ended = driver.prefill([rows[0][20:], rows[1][-1:], rows[2]])
    for row, *got in zip(rows, begun, ended, strict=True):
        assert far(np.concatenate(got), cases.logits(theirs, row)) < TOLERANCE
