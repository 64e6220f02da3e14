"""`LLM.rollout`: the samples of several prompts as padded arrays, with log-probabilities of a named distribution."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv import LLM, AsyncLLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.engine.request_state import RequestState
from jaxkv.rollout import rollout_of
from jaxkv.step.loop import ERROR, LENGTH, STOP
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model
from tests.sampling import oracle

PROMPTS = ["def add(", [5, 6, 7, 8, 9, 10, 11, 12, 13]]
SAMPLING = SamplingParams(seed=3, n=3, max_tokens=12, temperature=0.9, stop=["\n"])


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def llm(one_layer):
    cache = CacheConfig(max_sequences=8, page_size=16)
    # Two programs instead of one for each number of rows and of tokens, and for each kind of request.
    engine = EngineConfig(pinned_shapes=True, token_budget=64)
    options = {"dtype": "float32", "max_model_len": 64, "progress": False}
    return few_programs(LLM(one_layer, cache=cache, engine=engine, **options))


def test_rows_are_the_samples_of_generate_padded_on_the_outer_sides(llm):
    outputs = llm.generate(PROMPTS, SAMPLING)
    rollout = llm.rollout(PROMPTS, SAMPLING, prompt_width=11, pad_id=1)
    samples = [(one, sample) for one in outputs for sample in one.outputs]
    assert rollout.prompt_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert rollout.texts == [sample.text for _, sample in samples]
    assert {STOP, LENGTH} == set(rollout.reasons.tolist())
    for row, (output, sample) in enumerate(samples):
        prompt, tokens = output.prompt_token_ids, sample.token_ids
        left, right = 11 - len(prompt), 12 - len(tokens)
        assert rollout.prompt_ids[row].tolist() == [1] * left + prompt
        assert rollout.prompt_mask[row].tolist() == [False] * left + [True] * len(prompt)
        assert rollout.output_ids[row].tolist() == tokens + [1] * right
        assert rollout.output_mask[row].tolist() == [True] * len(tokens) + [False] * right
        assert rollout.weight_versions[row].tolist() == [0] * len(tokens) + [-1] * right
        assert rollout.reasons[row] == (STOP if sample.finish_reason == "stop" else LENGTH)
        assert (rollout.logprobs[row, : len(tokens)] < 0).all()
        assert not rollout.logprobs[row, len(tokens) :].any()
    assert rollout.routed_experts is rollout.prompt_logprobs is None


def reference(logits, params, output):
    """The named distribution of one row of raw logits, for requests with `top_k`."""
    if params.logprobs_mode == "raw":
        return oracle.log_probabilities(logits)
    if params.logprobs_mode == "temperature":
        return oracle.log_probabilities(logits / params.temperature)
    drawn_from = oracle.adjusted(logits, params, output=output)
    bound = np.sort(drawn_from)[-params.top_k]
    return oracle.log_probabilities(
        np.where(drawn_from >= bound, drawn_from / params.temperature, -np.inf)
    )


@pytest.mark.slow
@pytest.mark.torch
def test_log_probabilities_are_those_of_the_distribution_that_each_prompt_names(llm, one_layer):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        one_layer, dtype=torch.float32
    ).eval()
    of_each = [
        SamplingParams(
            seed=1,
            n=2,
            max_tokens=6,
            temperature=1.6,
            top_k=9,
            frequency_penalty=0.5,
            ignore_eos=True,
            logprobs_mode=mode,
            prompt_logprobs=0,
        )
        for mode in ("raw", "temperature", "truncated")
    ]
    rollout = llm.rollout([PROMPTS[1]] * 3, of_each)
    for row, index in enumerate(rollout.prompt_index):
        prompt = rollout.prompt_ids[row].tolist()
        tokens = rollout.output_ids[row].tolist()
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0].double().numpy()
        for at, token in enumerate(tokens):
            raw = logits[len(prompt) - 1 + at]
            wanted = reference(raw, of_each[index], tokens[:at])[token]
            assert rollout.logprobs[row, at] == pytest.approx(wanted, abs=2e-5)
        scores = [
            oracle.log_probabilities(logits[at])[token] for at, token in enumerate(prompt[1:])
        ]
        np.testing.assert_allclose(rollout.prompt_logprobs[row], [0.0, *scores], atol=2e-5)


def test_arrays_are_on_the_device_that_was_named(llm):
    device = jax.devices()[0]
    rollout = llm.rollout(PROMPTS[0], max_tokens=2, temperature=1.0, device=device)
    arrays = (rollout.prompt_ids, rollout.output_mask, rollout.logprobs, rollout.weight_versions)
    for array in arrays:
        assert isinstance(array, jax.Array)
        assert array.devices() == {device}
    assert rollout.output_ids.shape == (1, 2)


def test_named_versions_are_strings(llm):
    llm.update_weights(llm.params, version="step-7")
    rollout = llm.rollout(PROMPTS[0], max_tokens=3, min_tokens=3, output_width=4)
    assert rollout.weight_versions.tolist() == [["step-7"] * 3 + [""]]
    assert isinstance(rollout.to(jax.devices()[0]).weight_versions, np.ndarray)
    llm.update_weights(llm.params, version=0)


def assert_equal(one, other):
    for name in ("prompt_ids", "output_ids", "output_mask", "reasons", "prompt_index"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_concurrent_rollouts_have_the_arrays_of_one_and_are_on_the_device(llm):
    device = jax.devices()[0]
    wanted = [llm.rollout(PROMPTS, SAMPLING), llm.rollout(PROMPTS[1], replace(SAMPLING, seed=9))]

    async def users():
        async with AsyncLLM(llm) as served:
            return await asyncio.gather(
                served.rollout(PROMPTS, SAMPLING, device=device),
                served.rollout(PROMPTS[1], replace(SAMPLING, seed=9), salt="b", priority=1),
            )

    found = asyncio.run(asyncio.wait_for(users(), 120))
    for one, other in zip(found, wanted, strict=True):
        assert_equal(one, other)
    assert found[0].logprobs.devices() == {device}
    assert isinstance(found[1].logprobs, np.ndarray)
    assert found[1].texts == wanted[1].texts


def test_weights_change_in_the_middle_of_a_concurrent_rollout(llm):
    async def users():
        async with AsyncLLM(llm) as served:
            stream = served.stream("x", max_tokens=50, min_tokens=50)
            running = asyncio.create_task(
                served.rollout(PROMPTS, max_tokens=40, min_tokens=40, logprobs=0)
            )
            for _ in range(12):
                await anext(stream)
            await served.update_weights(llm.params, version=7)
            rollout = await running
            await stream.aclose()
            return rollout

    rollout = asyncio.run(asyncio.wait_for(users(), 120))
    assert {0, 7} == set(rollout.weight_versions.ravel().tolist())
    assert (np.diff(rollout.weight_versions, axis=1) >= 0).all()
    llm.update_weights(llm.params, version=0)


def test_a_sample_that_fails_alone_fails_no_concurrent_rollout(llm, monkeypatch):
    request = type(llm)._request
    failing = []

    def first_fails(self, *arguments, **options):
        made = request(self, *arguments, **options)
        failing.append(made)
        return made

    accept = RequestState.accept

    def broken(self, token, logprobs):
        if self.request is failing[0] and self.generated == 2:
            raise ValueError("no text for this token")
        accept(self, token, logprobs)

    monkeypatch.setattr(type(llm), "_request", first_fails)
    monkeypatch.setattr(RequestState, "accept", broken)

    async def user():
        async with AsyncLLM(llm) as served:
            with pytest.raises(ValueError, match="at least one prompt"):
                await served.rollout([])
            return await served.rollout(PROMPTS, SAMPLING)

    rollout = asyncio.run(asyncio.wait_for(user(), 120))
    assert rollout.reasons.tolist()[0] == ERROR
    assert rollout.output_mask[0].sum() == 2
    assert ERROR not in rollout.reasons[1:]
    assert "no text" in rollout.outputs[0].error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompt_width": 8}, "one prompt has, or may get, 9 tokens"),
        ({"output_width": 11}, "one output has, or may get, 12 tokens"),
        ({"logprob_mode": "raw"}, "logprobs_mode"),
        (
            {"sampling": [SAMPLING, replace(SAMPLING, prompt_logprobs=0)]},
            "prompt_logprobs must be given for all prompts",
        ),
    ],
    ids=lambda value: None,
)
def test_what_does_not_fit_is_refused_before_anything_runs(llm, options, message):
    before = llm.stats()
    given = {"prompts": PROMPTS, "sampling": SAMPLING} | options
    with pytest.raises(ValueError, match=message):
        llm.rollout(given.pop("prompts"), given.pop("sampling"), **given)
    assert llm.stats() == before


def test_outputs_without_log_probabilities_are_refused(llm):
    outputs = llm.generate(PROMPTS[0], replace(SAMPLING, n=1))
    with pytest.raises(ValueError, match="generate with SamplingParams"):
        rollout_of(outputs)
