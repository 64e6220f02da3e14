"""The experts that an engine keeps for each token are those that Transformers' routers choose."""

import numpy as np
import pytest

from jaxkv import LLM, CacheConfig, SamplingParams, SpeculationConfig
from jaxkv.errors import ProgramRefused
from jaxkv.programs.manifest import compile_count
from jaxkv.rollout import NO_EXPERT
from tests.few_programs import few_programs

torch = pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")

pytestmark = pytest.mark.torch

ALL = cases.CASES | latent_cases.CASES
SAMPLING = SamplingParams(seed=5, n=3, max_tokens=9)


@pytest.fixture(
    scope="module",
    params=[
        "mixtral",
        pytest.param("mixtral-window-tied", marks=pytest.mark.slow),
        pytest.param("gemma4", marks=pytest.mark.slow),
        pytest.param("qwen3-moe", marks=pytest.mark.slow),
        pytest.param("v3", marks=pytest.mark.slow),
    ],
)
def pair(request, tmp_path_factory):
    """A case, its model in Transformers, and an engine of ours that keeps the chosen experts."""
    case, theirs, model, params = cases.maker(ALL, tmp_path_factory)(request.param)
    cache = CacheConfig(page_size=8, max_sequences=4, routed_experts=True)
    llm = LLM.from_parts(model, params, cache=cache, max_model_len=64, progress=False)
    return case, theirs, few_programs(llm)


def chosen_by(theirs, tokens):
    """Returns Transformers' experts, int [tokens, expert layers, top_k], in ascending order."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.append(given[1].numpy()))
        for name, module in theirs.named_modules()
        if name.endswith(".experts")
    ]
    with torch.no_grad():
        theirs(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.sort(np.stack(seen, axis=1), axis=2)


def check(output, theirs):
    for sample in output.outputs:
        wanted = chosen_by(theirs, [*output.prompt_token_ids, *sample.token_ids[:-1]])
        assert sample.routed_experts.dtype == np.int16
        np.testing.assert_array_equal(np.sort(sample.routed_experts, axis=2), wanted)


def test_prompts_samples_and_cached_prefixes_have_the_experts_of_transformers(pair):
    case, theirs, llm = pair
    long, short = case.prompt(21), case.prompt(3, offset=1)
    first = llm.generate([long, short], SAMPLING)
    again = llm.generate([long, long[:16] + short], SAMPLING)
    assert [one.usage.cached_tokens for one in (*first, *again)] == [0, 0, 16, 16]
    for output in (*first, *again):
        check(output, theirs)


def test_rollouts_have_them_beside_the_concatenated_tokens(pair):
    case, theirs, llm = pair
    rollout = llm.rollout([case.prompt(21), case.prompt(3, offset=1)], SAMPLING)
    ids = np.concatenate([rollout.prompt_ids, rollout.output_ids], axis=1)
    mask = np.concatenate([rollout.prompt_mask, rollout.output_mask], axis=1)
    for tokens, real, experts in zip(ids, mask, rollout.routed_experts, strict=True):
        computed = np.flatnonzero(real)[:-1]
        wanted = chosen_by(theirs, tokens[computed].tolist())
        np.testing.assert_array_equal(np.sort(experts[computed], axis=2), wanted)
        assert (np.delete(experts, computed, axis=0) == NO_EXPERT).all()


def test_steps_that_verify_drafts_keep_the_experts_of_transformers(pair):
    case, theirs, llm = pair
    cache = CacheConfig(page_size=8, max_sequences=4, routed_experts=True)
    drafts = SpeculationConfig(tokens=2, shortest_ngram=1, adaptive=False)
    drafting = few_programs(
        LLM.from_parts(
            llm.model,
            llm.params,
            cache=cache,
            max_model_len=64,
            speculation=drafts,
            progress=False,
        )
    )
    repetitive = case.prompt(3) * 6
    for output in drafting.generate([repetitive, case.prompt(5, offset=1)], SAMPLING):
        check(output, theirs)
    assert sum(drafting.stats().speculation.drafted) > 0


@pytest.mark.slow
def test_a_strict_engine_compiles_their_programs_in_the_warm_up(pair):
    case, theirs, llm = pair
    cache = CacheConfig(page_size=8, max_sequences=4, routed_experts=True)
    strict = LLM.from_parts(
        llm.model, llm.params, cache=cache, max_model_len=64, strict=True, progress=False
    )
    strict.warm_up(batch=2, prompt_tokens=16, sampling=SAMPLING)
    before = compile_count()
    check(strict.generate(case.prompt(12), SAMPLING)[0], theirs)
    assert compile_count() == before
    with pytest.raises(ProgramRefused, match="experts"):
        strict.requests(case.prompt(20), SamplingParams(max_tokens=30))


@pytest.mark.slow
def test_prefixes_from_the_host_and_from_files_have_the_experts_of_transformers(pair, tmp_path):
    case, theirs, llm = pair
    options = {
        "page_size": 8,
        "max_sequences": 4,
        "routed_experts": True,
        "budget_bytes": budget(llm),
    }
    one_by_one = SamplingParams(seed=1, max_tokens=2)

    def make(**more):
        cache = CacheConfig(**options, **more)
        return LLM.from_parts(llm.model, llm.params, cache=cache, max_model_len=64, progress=False)

    prompts = [case.prompt(48, offset=number) for number in range(5)]
    hosted = make(host_bytes=2**24)
    for prompt in prompts:
        hosted.generate(prompt, one_by_one)
    again = hosted.generate(prompts[0], one_by_one)[0]
    assert hosted.stats().host.tokens_read > 0
    assert again.usage.cached_tokens >= 40
    check(again, theirs)

    first = make()
    first.generate(prompts[1], one_by_one)
    first.save_prefixes(tmp_path / "prefixes")
    second = make()
    second.load_prefixes(tmp_path / "prefixes")
    restored = second.generate(prompts[1], one_by_one)[0]
    assert restored.usage.cached_tokens >= 40
    check(restored, theirs)


@pytest.mark.slow
def test_a_preempted_request_has_the_experts_of_transformers(pair):
    case, theirs, llm = pair
    # Pages for three of these texts, of which four run.
    tight = CacheConfig(page_size=8, max_sequences=4, routed_experts=True, budget_bytes=budget(llm))
    small = LLM.from_parts(llm.model, llm.params, cache=tight, max_model_len=64, progress=False)
    prompts = [case.prompt(7, offset=number) for number in range(4)]
    outputs = small.generate(prompts, SamplingParams(seed=1, max_tokens=40, ignore_eos=True))
    assert sum(output.usage.preemptions for output in outputs) > 0
    for output in outputs:
        check(output, theirs)


def budget(llm):
    per_page = sum(group.bytes_per_unit for group in llm.layout.paged_groups)
    states = sum(
        group.bytes_per_unit * llm.budget.counts[group.name]
        for group in llm.layout.groups
        if group.unit == "state"
    )
    return states + 18 * per_page
