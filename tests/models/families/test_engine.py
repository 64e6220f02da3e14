"""Families through the engine: prompts behind cached prefixes, several in a step, have the tokens of Transformers."""

import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.engines import TOKENIZER, assert_idle, fill_free, keep_junk
from tests.engine.hybrid import run

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")

pytestmark = pytest.mark.torch

ROWS, PAGE, LONGEST, TOKENS, STEPS = 3, 8, 64, 32, 8
# One case of each family whose layers all have pages; those with states are in test_hybrid_parity.
SERVED = ("mixtral", "qwen3-moe", "granite-moe", "glm4-moe")
SLOW = ("mixtral", "granite-moe", "glm4-moe")
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SERVED]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cases.maker(cases.CASES, tmp_path_factory)


def engine_of(model, params):
    """Returns an engine of two programs whose pools hold junk wherever nothing is kept."""
    wish = CacheConfig(max_sequences=ROWS, page_size=PAGE)
    layout, plan = plan_cache(model, wish, dtype="float32", max_model_len=LONGEST, free_bytes=None)
    runner = ModelRunner(model, params, layout, plan.counts, Programs())
    sequence_runner = SequenceRunner(runner, max_tokens=LONGEST, max_rows=ROWS)
    fill_free(sequence_runner)
    engine = Engine(sequence_runner, TOKENIZER, EngineConfig(token_budget=TOKENS))
    engine.shapes.decode_rows, engine.shapes.token_buckets = (ROWS,), (TOKENS,)
    engine.scheduler._fill = lambda least, most: most
    keep_junk(engine)
    return engine


@pytest.mark.parametrize("name", EVERY)
def test_prompts_behind_cached_prefixes_have_the_tokens_of_transformers(made, name):
    case, theirs, model, params = made(name)
    engine = engine_of(model, params)
    base, other = case.prompt(21), case.prompt(21, offset=1)
    # They share two pages, one page and nothing with the first prompt. Together they exceed a step's tokens.
    prompts = [base, base[:19] + other[19:], base[:11] + other[:6], other]
    cached = [0, 2 * PAGE, PAGE, 0]
    served = run(engine, base, max_tokens=STEPS) + run(engine, *prompts[1:], max_tokens=STEPS)
    for prompt, one, reused in zip(prompts, served, cached, strict=True):
        wanted, lead = cases.greedy(theirs, prompt, STEPS)
        assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
        assert one.token_ids == wanted
        assert one.cached == reused
    assert_idle(engine)
