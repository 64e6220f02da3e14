"""Families with recurrent layers compute what Hugging Face Transformers computes, in float32, however a text is cut."""

import copy
import random

import numpy as np
import pytest

from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.models.registry import load_params
from tests.engine.drafters import Guesser
from tests.engine.hybrid import engine_of, run
from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
far = cases.far

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
PROMPT = 40
STEPS = 40
# Of a model's largest logit: how far it may be from itself, however its text is cut.
TOGETHER = 1e-5
# The first case of each family is taken through everything; the others have an option that one step shows.
THOROUGH = ("mamba2", "bamba", "granite", "nemotron", "falcon-h1", "qwen3-next", "lfm2", "jamba")
THOROUGH += ("zamba2", "kimi-linear")
SLOW = ("jamba-dense", "nemotron-latent", "falcon-h1-norm", "qwen3.5-multimodal", "zamba2-biases")
# The blocks of Bamba are those of Granite, with turned keys, which Falcon-H1 has.
SLOW += ("granite-dense-rope", "bamba")
# test_tensor_parallel.py has the logits of Granite over two devices.
SLOW += ("granite",)
# The blocks of these are those of another family.
BRIEF = ("mamba", "qwen3.5", "qwen3.5-moe", "lfm2-moe")
# One family of each kind of recurrent layer is taken through everything in the fast tests; Falcon-H1 has Mamba-2.
KINDS = ("falcon-h1", "qwen3-next", "lfm2", "jamba")
LONG = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in KINDS))
    for name in (*THOROUGH, *BRIEF)
]
SERVED = [
    pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3-next"))
    for name in (*THOROUGH, *BRIEF)
]
EVERY = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW + BRIEF))
    for name in hybrid_cases.CASES
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cases.maker(hybrid_cases.CASES, tmp_path_factory)


def driver_of(model, params):
    return Driver(model, params, step_tokens=PROMPT + STEPS)


@pytest.mark.parametrize("name", EVERY)
def test_prefill_logits_of_all_positions_equal_transformers(made, name):
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens)
    # The bound means something only where logits differ by much more.
    assert np.std(wanted) > 0.3
    [got] = driver_of(model, params).prefill([tokens])
    assert far(got, wanted) < TOLERANCE


@pytest.mark.parametrize("name", LONG)
def test_greedy_tokens_equal_transformers_and_states_stepped_equal_states_scanned(made, name):
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted, lead = cases.greedy(theirs, tokens, STEPS)
    assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
    driver = driver_of(model, params)
    logits = driver.prefill([tokens])[0][-1:]
    chosen = [int(logits[-1].argmax())]
    while len(chosen) < STEPS:
        logits = np.concatenate((logits, driver.decode(chosen[-1:])))
        chosen.append(int(logits[-1].argmax()))
    assert chosen == wanted
    # Issue 5: a state stepped by `ssd_update` agrees with one scanned.
    [scanned] = driver_of(model, params).prefill([tokens + chosen[:-1]])
    assert far(scanned[PROMPT - 1 :], logits) < TOGETHER * np.max(np.abs(logits))


@pytest.mark.parametrize("name", LONG)
def test_a_prompt_in_pieces_gives_the_logits_of_transformers(made, name):
    # The cuts lie on the grid of the scan's chunks and off it; some pieces are shorter than the convolution.
    case, theirs, model, params = made(name)
    tokens = case.prompt(PROMPT)
    wanted = cases.logits(theirs, tokens)
    [whole] = driver_of(model, params).prefill([tokens])
    for cuts in ((16,), (32, 39), (2, 5, 23), (1, 17)):
        driver, pieces = driver_of(model, params), []
        for start, stop in zip((0, *cuts), (*cuts, PROMPT), strict=True):
            pieces += driver.prefill([tokens[start:stop]])
        assert far(np.concatenate(pieces), wanted) < TOLERANCE, cuts
        assert far(np.concatenate(pieces), whole) < TOGETHER * np.max(np.abs(whole)), cuts


@pytest.mark.parametrize("name", LONG)
def test_rows_of_unequal_lengths_equal_runs_of_their_own(made, name):
    # A fresh row, a continued one and one without tokens share a step.
    case, theirs, model, params = made(name)
    rows = [case.prompt(length, offset=length) for length in (3, 37, 19)]
    driver = driver_of(model, params)
    begun = driver.prefill([[], rows[1][:21], rows[2]])
    ended = driver.prefill([rows[0], rows[1][21:], []])
    for row, *got in zip(rows, begun, ended, strict=True):
        assert far(np.concatenate(got), cases.logits(theirs, row)) < TOLERANCE


@pytest.mark.parametrize("name", SERVED)
def test_conversations_that_begin_from_kept_states_have_the_tokens_of_transformers(made, name):
    # States are restored at the end of a turn, where two prompts diverge and in a repeated prompt, off page ends.
    case, theirs, model, params = made(name)
    engine = engine_of(
        network=(model, params),
        page=8,
        longest=128,
        budget=80,
        tokens=80,
        policy=CheckpointPolicy(),
    )

    def ask(tokens, cached):
        [one] = run(engine, tokens, max_tokens=12)
        wanted, lead = cases.greedy(theirs, tokens, 12)
        assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
        assert one.token_ids == wanted
        assert one.cached == cached
        return one.tokens

    specs = model.cache_specs(page_size=8, dtype="float32")
    # Scans keep states at ends of chunks, so the first prompt's last one serves a prompt that leaves it soon after.
    # Convolutions alone keep them at any token: at the end, and at 66 once a prompt has left the first one there.
    scans = any(getattr(entry.spec, "chunk_size", 1) > 1 for entry in specs)
    prompt, other = case.prompt(70), case.prompt(40, offset=1)
    turn = ask(prompt, 0)
    # The last token was chosen and never computed.
    ask(turn + other[:9], len(turn) - 1)
    ask(prompt[:66] + other[9:], 64 if scans else 0)
    ask(prompt, 64 if scans else 66)


@pytest.mark.slow
@pytest.mark.parametrize("rightness", [0.0, 0.6, 1.0], ids=["never", "often", "always"])
@pytest.mark.parametrize("name", [*THOROUGH, *BRIEF])
def test_tokens_behind_drafts_are_those_of_transformers(made, name, rightness):
    """The second turn begins from states that were kept behind drafts."""
    case, theirs, model, params = made(name)
    engine = engine_of(
        network=(model, params),
        page=8,
        longest=128,
        budget=80,
        tokens=80,
        policy=CheckpointPolicy(),
        speculation=SpeculationConfig(tokens=3, adaptive=False),
    )
    wanted, answers = [], {}
    engine.speculation.drafter = Guesser(
        random.Random(0), rightness, lambda request: answers[request.prompt], model.vocab_size
    )
    # What Falcon-H1 says to the first prompt has a near tie.
    tokens = case.prompt(30, offset=2 if name == "falcon-h1" else 0)
    for at in range(2):
        tokens = tokens + case.prompt(7, offset=1) * at
        wanted, lead = cases.greedy(theirs, tokens, 16)
        assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
        answers[tuple(tokens)] = wanted
        [one] = run(engine, tokens, max_tokens=16)
        assert one.token_ids == wanted
        assert (one.cached > 30) == at
        tokens = list(one.tokens)
    accepted = sum(engine.speculation.stats.accepted)
    assert sum(engine.speculation.stats.drafted) > 10
    assert (accepted > 5) == (rightness > 0)


def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(made, tmp_path):
    # The residual stream, decays and step sizes stay wide, as there.
    case, theirs, model, _ = made("mamba2")
    theirs.save_pretrained(tmp_path)
    params = load_params(tmp_path, model, dtype="bfloat16", progress=False)
    tokens = case.prompt(PROMPT)
    truth = cases.logits(theirs, tokens)
    narrow = copy.deepcopy(theirs).bfloat16()
    narrow.config.dtype = "bfloat16"
    driver = Driver(model, params, step_tokens=PROMPT + STEPS, cache_dtype="bfloat16")
    [got] = driver.prefill([tokens])
    error = np.sqrt(np.mean((got - truth) ** 2))
    theirs_error = np.sqrt(np.mean((cases.logits(narrow, tokens) - truth) ** 2))
    assert 0 < error < 1.25 * theirs_error
