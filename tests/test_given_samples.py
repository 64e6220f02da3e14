"""`score` with outputs: samples whose tokens are given have the log-probabilities of decode steps, bit for bit."""

import asyncio
import inspect
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import (
    LLM,
    AsyncLLM,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    StructuredOutputs,
    default_model,
)
from jaxkv.examples.small_llama import SmallLlama, init_params, save_hf
from jaxkv.given_samples import given_samples
from jaxkv.programs.manifest import compile_count

SIZES = SmallLlama(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=48
)
HEAD = list(range(20, 44))
PROMPTS = [[5, 6, 7], [*HEAD, 9], [8] * 11, [*HEAD, 1, 2], [*HEAD, 3]]
SAMPLING = SamplingParams(
    n=2,
    temperature=0.9,
    top_k=40,
    frequency_penalty=0.3,
    max_tokens=12,
    stop_token_ids=tuple(range(64)),
    stop=["an", "re"],
    logprobs_mode="truncated",
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    weights = init_params(SIZES, jax.random.key(3))
    weights = {name: leaf * (5 if leaf.ndim > 1 else 1) for name, leaf in weights.items()}
    save_hf(SIZES, weights, folder, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model.path() / name, folder)
    return folder, *jaxkv.load_model(folder, dtype="float32")


def made(parts, dtype="float32", cache=None, **engine):
    folder, params, model = parts
    return LLM.from_parts(
        model,
        jax.tree.map(lambda leaf: leaf.astype(dtype), params),
        tokenizer=folder,
        cache=cache or CacheConfig(max_sequences=4, page_size=8),
        engine=EngineConfig(token_budget=16, **engine),
        max_model_len=48,
        seed=0,
        progress=False,
    )


def assert_same_bits(scores, rollout, rows=slice(None)):
    wanted = zip(rollout.logprobs[rows], rollout.output_mask[rows], strict=True)
    for told, (logprobs, mask) in zip(scores, wanted, strict=True):
        assert told.dtype == np.float32
        np.testing.assert_array_equal(told, logprobs[mask])


@pytest.fixture(scope="module")
def pinned(parts):
    """An engine of one program, with pages for half of its rows."""
    probe = made(parts, pinned_shapes=True)
    states = sum(
        group.bytes_per_unit * probe.budget.counts[group.name]
        for group in probe.layout.groups
        if group.unit == "state"
    )
    page = sum(group.bytes_per_unit for group in probe.layout.paged_groups)
    tight = CacheConfig(max_sequences=4, page_size=8, budget_bytes=states + 9 * page)
    return made(parts, cache=tight, pinned_shapes=True)


@pytest.mark.slow
def test_rollouts_with_hits_chunks_and_preemptions_are_replayed_in_one_program(pinned):
    cold = pinned.rollout(PROMPTS, SAMPLING)
    warm = pinned.rollout(PROMPTS, replace(SAMPLING, seed=4))
    assert cold.output_ids.tolist() != warm.output_ids.tolist()
    assert {1, 2} == set(cold.reasons.tolist()) | set(warm.reasons.tolist())
    usage = [one.usage for one in (*cold.outputs, *warm.outputs)]
    assert sum(one.cached_tokens for one in usage) > 0
    assert sum(one.preemptions for one in usage) > 0
    compiled = compile_count()
    for rollout in (cold, warm):
        assert_same_bits(pinned.score(PROMPTS, rollout, SAMPLING), rollout)
    # In another order, beside other samples and one by one, too.
    ids = [[one.token_ids for one in each.outputs] for each in warm.outputs]
    back = pinned.score(PROMPTS[::-1], ids[::-1], SAMPLING)
    assert_same_bits([back[8 - 2 * (row // 2) + row % 2] for row in range(10)], warm)
    assert_same_bits(pinned.score(PROMPTS[1], [ids[1]], SAMPLING), warm, slice(2, 4))
    assert compile_count() == compiled


def test_concurrent_callers_get_the_bits_of_one_beside_others(pinned, monkeypatch):
    # The first sample has stop strings and stop ids in the middle.
    stopped = pinned.tokenizer.encode("an area", add_special=False)
    outputs = [[[7, *stopped, 0, 63], []], [[1]], [[4, 4, 4], [2, 63, 2]]]
    wanted = pinned.score(PROMPTS[:3], outputs, SAMPLING)
    texts = [[*PROMPTS[1], *HEAD[:22]], PROMPTS[0]]
    whole = pinned.score(texts)

    tried, score_text = [], pinned.engine.score_text
    monkeypatch.setattr(
        pinned.engine, "score_text", lambda *given: tried.append(given) or score_text(*given)
    )

    async def users():
        async with AsyncLLM(pinned) as served:
            # It holds so many pages that the first text waits for its end.
            stream = served.stream([9] * 30, max_tokens=18, ignore_eos=True)
            await anext(stream)
            told = await asyncio.gather(
                served.score(PROMPTS[:3], outputs, SAMPLING),
                served.score(texts),
                served.score(PROMPTS[0], [outputs[0]], SAMPLING, priority=-1),
            )
            with pytest.raises(ValueError, match="sampling are for decode steps"):
                await served.score(texts, sampling=SAMPLING)
            with pytest.raises(ValueError, match="samples of 1 prompts for 2"):
                await served.score(PROMPTS[:2], [[[1]]])
            return told

    beside, of_texts, first = asyncio.run(asyncio.wait_for(users(), 120))
    assert len(tried) > len(texts)
    for told, expected in ((beside, wanted), (of_texts, whole), (first, wanted[:2])):
        assert [one.tolist() for one in told] == [one.tolist() for one in expected]


def test_given_tokens_are_those_of_another_text_and_nothing_ends_it(pinned):
    outputs = [[[7, 8, 9, 0, 63], []], [[1]]]
    told = pinned.score(PROMPTS[:2], outputs)
    assert [len(one) for one in told] == [5, 0, 1]
    for prompt, given, scores in zip(
        [PROMPTS[0], PROMPTS[1]], [outputs[0][0], outputs[1][0]], [told[0], told[2]], strict=True
    ):
        [whole] = pinned.score([[*prompt, *given]])
        np.testing.assert_allclose(scores, whole[len(prompt) - 1 :], atol=1e-5)


def test_scoring_changes_neither_later_seeds_nor_cached_prefixes(pinned, monkeypatch):
    drawn = []
    monkeypatch.setattr(pinned, "_draw_seed", drawn.append)
    pinned.score(PROMPTS[:1], [[[1, 2]]], replace(SAMPLING, n=1))
    assert not drawn
    monkeypatch.undo()
    pinned.generate([PROMPTS[2]], max_tokens=1)
    found = pinned.explain(PROMPTS[2]).num_reused
    pinned.score([[7] * 10], [[[1, 2]]])
    assert pinned.explain([7] * 10).num_reused == 0
    assert pinned.explain(PROMPTS[2]).num_reused == found > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_rollout_on_an_empty_prefix_cache_is_replayed_in_its_own_shapes(parts, dtype, steps):
    llm = made(parts, dtype, steps_per_launch=steps)
    llm.rollout(PROMPTS, SAMPLING)
    for seed in (1, 2):
        llm.update_weights(llm.params)
        rollout = llm.rollout(PROMPTS, replace(SAMPLING, seed=seed))
        assert sum(one.usage.cached_tokens for one in rollout.outputs) > 0
        compiled, begun = compile_count(), llm.engine.steps
        assert_same_bits(llm.score(PROMPTS, rollout, SAMPLING), rollout)
        steps = llm.engine.steps - begun
        # A replay does not begin with the pages of the one before it.
        assert_same_bits(llm.score(PROMPTS, rollout, SAMPLING), rollout)
        assert llm.engine.steps - begun == 2 * steps
        assert compile_count() == compiled


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_program_gives_the_same_bits_in_bfloat16_and_after_an_update(parts, dtype):
    llm = made(parts, dtype, pinned_shapes=True)
    rollout = llm.rollout(PROMPTS, SAMPLING)
    llm.update_weights(jax.tree.map(lambda leaf: leaf * 1.5, llm.params))
    other = llm.score(PROMPTS, rollout, SAMPLING)
    assert not np.array_equal(other[0], rollout.logprobs[0][rollout.output_mask[0]])
    llm.update_weights(jax.tree.map(lambda leaf: leaf / 1.5, llm.params), version="back")
    llm.update_weights(jax.tree.map(lambda leaf: leaf.astype(dtype), parts[1]), version="first")
    assert_same_bits(llm.score(PROMPTS, rollout, SAMPLING), rollout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_batch_invariance_one_step_per_text_has_the_bits_of_decode_steps_too(parts, dtype):
    llm = made(parts, dtype, batch_invariant=True)
    sampling = replace(SAMPLING, logprobs_mode="raw")
    llm.rollout(PROMPTS, sampling)
    rollout = llm.rollout(PROMPTS, replace(sampling, seed=4))
    assert sum(one.usage.cached_tokens for one in rollout.outputs) > 0
    assert_same_bits(llm.score(PROMPTS, rollout, sampling), rollout)
    ids = [[one.token_ids for one in each.outputs] for each in rollout.outputs]
    back = llm.score(PROMPTS[::-1], ids[::-1], sampling)
    assert_same_bits([back[8 - 2 * (row // 2) + row % 2] for row in range(10)], rollout)
    texts = [
        [*prompt, *sample] for prompt, group in zip(PROMPTS, ids, strict=True) for sample in group
    ]
    lens = rollout.output_mask.sum(axis=1)
    whole = llm.score(texts)
    assert_same_bits([one[-count:] for one, count in zip(whole, lens, strict=True)], rollout)
    # The pure function too, on the engine's model, which has the fixed order of sums.
    told = np.asarray(jaxkv.score(llm.params, llm.engine.runner.model, texts))
    rows = [row[len(text) - n : len(text)] for row, text, n in zip(told, texts, lens, strict=True)]
    assert_same_bits(rows, rollout)


@pytest.mark.parametrize(
    ("outputs", "sampling", "message"),
    [
        (None, SAMPLING, "give outputs"),
        ([[[1]]], None, "samples of 1 prompts for 2"),
        ([[[1]], []], None, "one or more samples"),
        ([[[1]], [[10**9]]], None, "outside"),
        ([[[1] * 13], [[1]]], SAMPLING, "a sample of 13 tokens is longer than max_tokens=12"),
        ([[[1] * 46], [[1]]], None, "prompt 0"),
        (
            [[[1]], [[1]]],
            SamplingParams(structured_outputs=StructuredOutputs(regex="a+")),
            "masks of structured_outputs",
        ),
    ],
    ids=lambda value: None,
)
def test_what_does_not_fit_is_refused(pinned, outputs, sampling, message):
    with pytest.raises(ValueError, match=message):
        pinned.score(PROMPTS[:2], outputs, sampling)


def test_a_text_is_no_sample():
    # Without the shape checker of the tests, which refuses it in its own way.
    with pytest.raises(ValueError, match="outputs must be a Rollout"):
        inspect.unwrap(given_samples)("text", 1, 50)


@pytest.mark.slow
def test_a_replay_evicts_what_its_rollout_evicted(parts):
    """In a pool with pages for little more than its rows, and with windows, whose pages are evicted in two classes."""
    _, params, model = parts
    windowed = replace(model, config=replace(model.config, windows=(None, 9)))
    llm = LLM.from_parts(
        windowed,
        params,
        cache=CacheConfig(max_sequences=4, page_size=4),
        engine=EngineConfig(token_budget=16, steps_per_launch=1),
        max_model_len=48,
        progress=False,
    )
    sampling = replace(SAMPLING, n=3, stop=(), stop_token_ids=())
    llm.rollout(PROMPTS, sampling)
    llm.update_weights(params)
    ran, step = [], llm.engine.sequence_runner.step

    def record(shape, rows):
        ran.append((shape, rows.starts, rows.lens))
        return step(shape, rows)

    llm.engine.sequence_runner.step = record
    rollout = llm.rollout(PROMPTS, replace(sampling, seed=5))
    wanted = ran.copy()
    for _ in range(2):
        ran.clear()
        assert_same_bits(llm.score(PROMPTS, rollout, sampling), rollout)
        assert ran == wanted
