"""Requests with adapters give the tokens of Transformers' model with the adapters' sums, several in one batch.

The truth is PEFT's published formula, weight + scale * B @ A, added to the weights of Transformers' model in float32.
"""

import copy
from itertools import pairwise
from typing import Any

import pytest

from jaxkv import LLM, CacheConfig, LoraConfig, SamplingParams
from tests.few_programs import few_programs
from tests.weights.adapter_files import save_adapter

torch = pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")

pytestmark = pytest.mark.torch

CASES = cases.CASES | hybrid_cases.CASES | latent_cases.CASES
STEPS = 12
# Modules of which a leaf has several, in the order of the checkpoint or of our own, and of every kind of block.
MODULES = {
    "llama-biases-tied": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "phi3": "qkv_proj o_proj gate_up_proj down_proj",
    "glm4": "q_proj k_proj v_proj o_proj gate_up_proj down_proj",
    "gemma2": "q_proj v_proj gate_proj down_proj",
    # Whose key projections without a window make values too.
    "gemma4": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "gemma4-shared-keys": "q_proj v_proj o_proj up_proj down_proj",
    "mixtral": "q_proj k_proj v_proj o_proj",
    "v3": "q_a_proj q_b_proj kv_a_proj_with_mqa o_proj gate_proj up_proj down_proj",
    "qwen3-next": "q_proj k_proj v_proj o_proj in_proj_qkvz in_proj_ba out_proj",
    "kimi-linear": "q_proj k_proj v_proj f_a_proj f_b_proj b_proj g_a_proj g_b_proj kv_a_proj_with_mqa o_proj up_proj",
    "bamba": "q_proj k_proj v_proj o_proj in_proj out_proj gate_proj up_proj down_proj",
    "mamba": "in_proj x_proj dt_proj out_proj",
    "lfm2": "q_proj k_proj v_proj in_proj out_proj w1 w2 w3",
}
FAST = ("llama-biases-tied",)


EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in MODULES]


@pytest.fixture(scope="module", params=EVERY)
def served(request, tmp_path_factory):
    """An `LLM` with the adapters "a" and "b", and adapter -> Transformers' model with its sums."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    theirs = case.build()
    theirs.save_pretrained(folder)
    modules = dict(theirs.named_modules())
    suffixes = MODULES[request.param].split()
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in modules.items()
        if name.split(".")[-1] in suffixes and ".experts" not in name
    }
    assert {name.split(".")[-1] for name in shapes} == set(suffixes)
    folders = tmp_path_factory.mktemp("adapters")
    llm = LLM(
        folder,
        dtype="float32",
        cache=CacheConfig(max_sequences=4, page_size=16),
        max_model_len=96,
        lora=LoraConfig(max_adapters=3, max_rank=6),
        progress=False,
    )
    models: dict[Any, Any] = {None: theirs}
    ranks = {name: 2 + number % 5 for number, name in enumerate(shapes)}
    half = dict(list(shapes.items())[::2])
    for name, wish in {
        "a": {"shapes": shapes, "rank": ranks, "alpha": 12, "use_rslora": True, "seed": 1},
        "b": {"shapes": half, "rank": 3, "alpha": 7, "seed": 2},
    }.items():
        added = save_adapter(folders / name, **wish, size=0.2)
        llm.add_lora(name, folders / name)
        models[name] = copy.deepcopy(theirs)
        weights = dict(models[name].named_modules())
        with torch.no_grad():
            for module, change in added.items():
                weights[module].weight += torch.from_numpy(change).float()
    return case, few_programs(llm), models


def test_a_batch_of_adapters_and_none_gives_the_tokens_of_the_sums(served):
    case, llm, models = served
    rows = [("a", 33), (None, 33), ("b", 33), ("a", 9), (None, 21), ("b", 40)]
    prompts = [case.prompt(length) for _, length in rows]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, lora=name)
        for name, _ in rows
    ]
    wanted = [
        cases.greedy(models[name], prompt, STEPS)
        for (name, _), prompt in zip(rows, prompts, strict=True)
    ]
    assert min(lead for _, lead in wanted) > 1e-4, "a near tie: choose another seed"
    outputs = llm.generate(prompts, sampling)
    assert [one.token_ids for one in outputs] == [tokens for tokens, _ in wanted]
    again = llm.generate(prompts, sampling)
    assert [one.token_ids for one in again] == [tokens for tokens, _ in wanted]
    assert all(one.usage.cached_tokens for one in again if len(one.prompt_token_ids) > 32)
    told = [None if one.adapter is None else one.adapter.name for one in outputs]
    assert told == [name for name, _ in rows]
    # Adapters that changed no token would prove nothing.
    first = [tokens for tokens, _ in wanted[:3]]
    assert all(one != other for one, other in pairwise([*first, first[0]]))


@pytest.mark.slow
def test_scores_of_an_adapter_are_those_of_the_sums(served):
    case, llm, models = served
    text = case.prompt(30)
    for name, model in models.items():
        scores = torch.from_numpy(cases.logits(model, text)).log_softmax(-1)
        wanted = [float(scores[at, token]) for at, token in enumerate(text[1:])]
        assert llm.score(text, lora=name)[0] == pytest.approx(wanted, abs=2e-4)
