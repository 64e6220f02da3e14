"""`LLM` on tiny models of many families: greedy tokens are those of Transformers, also after a cached prefix."""

from dataclasses import replace

import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")

pytestmark = pytest.mark.torch

TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
CACHE = CacheConfig(max_sequences=1, page_size=8)
ENGINE = EngineConfig(token_budget=64, pinned_shapes=True, steps_per_launch=1)
# A family with parts of its own in and around attention; the others, whose logits test_parity.py has, are slow.
NAMES = ("gemma3-multimodal",)
PLAIN = (
    "hunyuan",
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma4-e2b",
    "granite",
    "mistral3",
    "olmo2",
    "phi3",
    "seed-oss",
)
PLAIN += ("mixtral", "granite-moe", "glm4-moe", "smollm3", "glm4", "olmo3", "qwen3-moe")


def check(case, directory, *, stem, max_model_len, reuses=True, engine=ENGINE):
    """Serves two prompts that begin with the same `stem` tokens, a multiple of the page size."""
    theirs = case.build()
    theirs.save_pretrained(directory)
    llm = LLM(
        directory,
        dtype="float32",
        max_model_len=max_model_len,
        cache=CACHE,
        engine=engine,
        progress=False,
    )
    first = case.prompt(stem)
    for length, cached in ((5, 0), (9, stem * reuses)):
        prompt = first + case.prompt(length, offset=length)
        wanted, lead = cases.greedy(theirs, prompt, TOKENS)
        assert lead > 1e-3, f"seed {case.seed} has a near tie: choose another"
        [output] = llm.generate([prompt], GREEDY)
        assert output.token_ids == wanted
        assert output.usage.cached_tokens == cached


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN)]
)
def test_tokens_equal_transformers_without_and_with_a_cached_prefix(name, tmp_path):
    check(cases.CASES[name], tmp_path, stem=24, max_model_len=64)


@pytest.mark.parametrize(("stem", "max_model_len", "reuses"), [(16, 32, True), (32, 64, False)])
def test_longrope_reuses_prefixes_where_all_sequences_are_in_the_original_context(
    stem, max_model_len, reuses, tmp_path
):
    """The original context has 32 tokens. Prompts beyond it have the tokens of Transformers, too."""
    case = cases.CASES["phi3-longrope"]
    check(case, tmp_path, stem=stem, max_model_len=max_model_len, reuses=reuses)


@pytest.mark.slow
def test_zamba2_has_pages_and_states_of_each_use_of_a_shared_block(tmp_path):
    """Prompts are computed in steps of 16 tokens, and the second one begins from pages and a state of the first."""
    case = hybrid_cases.CASES["zamba2"]
    check(case, tmp_path, stem=32, max_model_len=64, engine=replace(ENGINE, token_budget=16))
