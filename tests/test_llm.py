"""`LLM` on the model inside the package, offline, compared with `generate` and Transformers."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, default_model
from jaxkv.errors import BadCheckpoint, OutOfPages, ProgramRefused
from jaxkv.models.registry import load_config
from jaxkv.programs.manifest import compile_count
from jaxkv.runner.program_specs import StepSpec
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["def add(", "import os\n", "class Node:\n    "]
# Each combination of features is a program, so tests here have few of them: filters and two log-probabilities with
# draws, four without, and `min_tokens` with penalties.
# An `LLM` of the same options finds on disk what another one has compiled.
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "cache": CacheConfig(max_sequences=3, page_size=16),
    "progress": False,
}


@pytest.fixture(scope="module")
def llm(one_layer):
    return few_programs(LLM(one_layer, **OPTIONS))


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """Asserts after each test that only the prefix index holds pages, no request waits, and the records agree."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.sequence_runner.allocator.check()
        llm.engine.prefix.check()
        stats = llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert [group.used for group in stats.cache] == [0] * len(stats.cache)
        assert all(group.free + group.kept == group.total for group in stats.cache)


@pytest.mark.torch
def test_greedy_text_of_the_model_in_the_package_equals_transformers():
    """With all its layers; the other tests here have one."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        default_model.path(), dtype=torch.float32
    )
    llm = LLM(
        dtype="float32",
        max_model_len=64,
        cache=CacheConfig(max_sequences=3, page_size=16),
        progress=False,
    )
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        wanted = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert output.token_ids == wanted[0, ids.shape[1] :].tolist()
        assert output.prompt_token_ids == ids[0].tolist()


@pytest.mark.torch
def test_score_equals_transformers(llm, one_layer):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.LlamaForCausalLM.from_pretrained(one_layer, dtype=torch.float32)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [100, 200], [42]]
    for prompt, scores in zip(prompts, llm.score(prompts), strict=True):
        with torch.no_grad():
            logprobs = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
        wanted = [logprobs[at, token] for at, token in enumerate(prompt[1:])]
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, np.asarray(wanted, np.float32), atol=1e-4)


def test_a_single_text_and_a_single_list_of_ids_are_lists_of_one(llm):
    ids = llm.tokenizer.encode(PROMPTS[0])
    assert llm.generate(PROMPTS[0], GREEDY)[0].text == llm.generate(ids, GREEDY)[0].text


# tests/engine/test_engine.py compares the tokens of an engine with those of `generate`, drawn ones too.
@pytest.mark.slow
@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(
            SamplingParams(temperature=0.8, top_p=0.9, seed=-5, n=2, max_tokens=12), id="drawn"
        ),
    ],
)
def test_tokens_are_those_of_generate_in_one_executable(llm, wish):
    """One step per token, any batch, or a loop on the device: the tokens are the same for the same seeds."""
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    out = jaxkv.generate(
        llm.engine.runner.params, llm.model, ids, sampling=wish, eos_ids=llm.eos_ids
    )
    wanted = [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]
    made = [sample for output in llm.generate(PROMPTS, wish) for sample in output.outputs]
    assert [sample.token_ids for sample in made] == wanted


def test_a_stream_joins_to_the_text_of_generate(llm):
    """This holds alone and in a batch, with and without cached prompts, and with draws and penalties."""
    for wish in (
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, min_tokens=4, max_tokens=12),
    ):
        whole = llm.generate(PROMPTS[0], wish)[0]
        pieces = list(llm.stream(PROMPTS[0], wish))
        assert [piece.token_id for piece in pieces] == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason
        if wish.logprobs is not None:
            for piece, wanted in zip(pieces, whole.logprobs, strict=True):
                assert piece.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_stream_that_is_dropped_gives_its_pages_back(llm):
    pieces = llm.stream(PROMPTS[0], GREEDY)
    next(pieces)
    pieces.close()


def test_samples_differ_and_the_first_is_the_seeds_own(llm):
    wish = SamplingParams(temperature=1.0, top_p=0.9, seed=3, n=3, max_tokens=12, logprobs=2)
    output = llm.generate(PROMPTS[0], wish)[0]
    alone = llm.generate(PROMPTS[0], replace(wish, n=1))[0]
    assert len(output.outputs) == 3
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    assert output.token_ids == output.outputs[0].token_ids == alone.token_ids


def test_more_prompts_than_run_at_once_have_the_same_answers(llm):
    prompts = [*PROMPTS, *PROMPTS[:2]]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs[3:]] == [o.token_ids for o in outputs[:2]]
    assert outputs[0].token_ids == llm.generate(prompts[0], GREEDY)[0].token_ids


def test_each_prompt_has_its_own_parameters_and_old_ones_leave_no_trace(llm):
    """A biased request's entry in the sampling group is clean again for its successor."""
    wishes = [
        SamplingParams(temperature=0.0, min_tokens=4, max_tokens=4, logit_bias={77: 100.0}),
        SamplingParams(temperature=0.0, max_tokens=2),
    ]
    biased, plain = llm.generate(PROMPTS[:2], wishes)
    assert biased.token_ids == [77] * 4
    assert len(plain.token_ids) == 2
    spread = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=4, presence_penalty=0.001)
    assert 77 not in llm.generate(PROMPTS, spread)[0].token_ids


def test_logprobs_name_the_chosen_token_and_the_most_likely(llm):
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3, logprobs=4))[0]
    scores = llm.score([output.prompt_token_ids + output.token_ids])[0][-3:]
    for token, table, score in zip(output.token_ids, output.logprobs, scores, strict=True):
        assert len(table) == 4
        assert max(table, key=table.get) == token
        assert table[token] == pytest.approx(float(score), abs=1e-4)
    none = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=0))[0]
    assert list(none.logprobs[0]) == [none.token_ids[0]]


def test_an_output_prints_its_text_first_and_has_the_names_of_vllm(llm):
    first, second = llm.generate([PROMPTS[0], [7, 8]], replace(GREEDY, logprobs=4))
    shown = repr(first)
    assert repr(first.text) in shown
    assert shown.index("text=") < shown.index("prompt_token_ids=")
    assert (first.prompt, second.prompt) == (PROMPTS[0], None)
    assert first.request_id != second.request_id
    assert first.finished
    chosen = [table[token] for token, table in zip(first.token_ids, first.logprobs, strict=True)]
    assert first.cumulative_logprob == pytest.approx(sum(chosen))
    assert llm.generate(PROMPTS[0], GREEDY)[0].cumulative_logprob is None


def test_fields_of_sampling_params_and_names_of_vllm_are_understood_by_every_call(llm):
    wanted = llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=3))[0].token_ids
    short = SamplingParams(temperature=0.0, max_tokens=3)
    for output in (
        llm.generate(PROMPTS[0], temperature=0.0, max_tokens=3)[0],
        llm.generate(PROMPTS[0], sampling_params=short, use_tqdm=False)[0],
        llm.generate({"prompt": PROMPTS[0]}, [short])[0],
        llm.generate(jnp.asarray(llm.get_tokenizer().encode(PROMPTS[0])), short)[0],
    ):
        assert output.token_ids == wanted
    pieces = list(llm.stream(PROMPTS[0], temperature=0.0, max_tokens=3, top_k=-1))
    assert [piece.token_id for piece in pieces] == wanted
    for call in (
        lambda **options: llm.generate(PROMPTS[0], **options),
        lambda **options: llm.stream(PROMPTS[0], **options),
        lambda **options: llm.warm_up(batch=1, prompt_tokens=4, **options),
    ):
        with pytest.raises(ValueError, match="no option 'max_token'; the closest is max_tokens"):
            call(max_token=3)


def test_without_max_tokens_a_text_goes_to_the_contexts_end(llm):
    output = llm.generate([[7] * 100], temperature=0.0, max_tokens=None, ignore_eos=True)[0]
    assert (len(output.token_ids), output.finish_reason) == (28, "length")


def test_a_prompts_own_salt_separates_its_pages(llm):
    ids = [9] * 40
    llm.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, GREEDY)
    assert llm.explain(ids).num_reused == 0
    assert llm.explain(ids, cache_salt="mine").num_reused > 0
    assert llm.explain({"prompt_token_ids": ids, "cache_salt": "mine"}).num_reused > 0
    with pytest.raises(ValueError, match="salt must be a str, bytes or None, got 5"):
        llm.explain({"prompt_token_ids": ids, "cache_salt": 5})
    with pytest.raises(ValueError, match="give one salt"):
        llm.explain({"prompt_token_ids": ids, "cache_salt": "mine"}, salt="yours")


@pytest.mark.slow
def test_a_seed_of_the_llm_may_have_64_bits():
    llm = LLM(load_format="dummy", max_num_seqs=1, seed=2**64 - 1, max_model_len=32, progress=False)
    assert len(llm.generate([[1, 2]], max_tokens=2)[0].token_ids) == 2


@pytest.mark.slow
def test_every_bit_of_a_seed_of_the_llm_changes_dummy_weights():
    def embedding(seed):
        options = {"load_format": "dummy", "max_num_seqs": 1, "max_model_len": 32}
        with LLM(seed=seed, progress=False, **options) as llm:
            weights = np.asarray(llm.engine.runner.params["embed"], np.float32)
            small = llm.model.init_params(jax.random.key(seed % 2**32), jnp.bfloat16)
            return weights, np.asarray(small["embed"], np.float32)

    weights, of_32_bits = embedding(5)
    np.testing.assert_array_equal(weights, of_32_bits)
    for seed in (5 + 2**32, 5 + 2**63, 5 - 2**63):
        assert np.any(embedding(seed)[0] != weights)


def test_seeds_of_the_llm_that_differ_in_their_sign_give_requests_other_seeds(one_layer):
    texts = []
    for seed in (1, -1):
        options = {"max_num_seqs": 2, "max_model_len": 32, "progress": False}
        with few_programs(LLM(one_layer, seed=seed, **options)) as llm:
            texts.append([one.token_ids for one in llm.generate([[1], [1]], max_tokens=8)])
    assert texts[0] != texts[1]


def test_a_seed_of_the_llm_repeats_dummy_weights_and_the_texts_of_requests_without_one(one_layer):
    texts, options = [], {"load_format": "dummy", "max_num_seqs": 2, "max_model_len": 32}
    for _ in range(2):
        llm = few_programs(LLM(one_layer, seed=5, progress=False, **options))
        assert llm.engine.runner.owner.counts["sampling"] == 3
        texts.append([output.token_ids for output in llm.generate([[1], [1]], max_tokens=4)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def chatty(folder):
    """Writes one layer of the small model, and gives it a chat template."""
    model_with_end_ids(folder, [0])
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def lookup(word: str) -> str:
    """Looks a word up.

    Args:
        word: the word
    """


def test_chat_passes_tools_documents_and_the_choice_of_a_template(tmp_path):
    folder = chatty(tmp_path / "model")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool_use.jinja").write_text(
        "{{ tools[0].function.name }}{{ documents[0].text }}{{ x }}{{ messages[-1].content }}"
    )
    llm = few_programs(LLM(folder, **OPTIONS))
    asked = {"tools": [lookup], "documents": [{"text": "D"}], "chat_template_kwargs": {"x": 5}}
    text = llm.tokenizer.decode(llm.chat_prompt("hi", **asked))
    assert text == "lookupD5hi"
    output = llm.chat("hi", max_tokens=2, temperature=0.0, **asked)
    assert output.prompt_token_ids == llm.chat_prompt("hi", **asked)
    assert llm.tokenizer.decode(llm.chat_prompt("hi")) == "# user: hi\n"
    continued = llm.chat_prompt("hi", continue_final_message=True)
    assert llm.tokenizer.decode(continued) == "# user: hi"
    assert llm.tokenizer.decode(llm.chat_prompt("hi", chat_template="{{ 1 + 1 }}")) == "2"
    with pytest.raises(
        ValueError, match=r"LLM\.chat_prompt has no option 'tool'; the closest is tools"
    ):
        llm.chat_prompt("hi", tool=[])
    with pytest.raises(ValueError, match=r"LLM\.generate has no option 'tools'"):
        llm.generate("hi", tools=[])


def test_chat_answers_a_text_a_conversation_and_a_list_of_these(tmp_path):
    llm = few_programs(LLM(chatty(tmp_path / "model"), **OPTIONS))
    hi, bye = ([{"role": "user", "content": text}] for text in ("hi", "bye"))
    one = llm.chat(hi, GREEDY)
    assert llm.chat("hi", GREEDY).token_ids == one.token_ids
    several = llm.chat([hi, bye], sampling_params=GREEDY, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in several] == [
        len(llm.chat_prompt("hi")),
        len(llm.chat_prompt("bye")),
    ]
    assert several[0].token_ids == one.token_ids
    with pytest.raises(ValueError, match=r"^conversation 1: messages must be"):
        llm.chat([hi, [{"content": "no role"}]])


def test_the_stop_reason_is_the_string_or_the_id_that_ended_the_text(llm):
    whole = llm.generate(PROMPTS[2], GREEDY)[0]
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    third = whole.token_ids[2]
    by_id = llm.generate(PROMPTS[2], replace(GREEDY, stop_token_ids=(third,)))[0]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", third)
    string = whole.text[3:6]
    by_string = llm.generate(PROMPTS[2], replace(GREEDY, stop=("never", string)))[0]
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", string)


def test_the_models_own_end_id_is_no_stop_reason(llm, monkeypatch):
    third = llm.generate(PROMPTS[2], GREEDY)[0].token_ids[2]
    monkeypatch.setattr(llm, "eos_ids", (third,))
    ended = llm.generate(PROMPTS[2], GREEDY)[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def model_with_end_ids(folder, ids):
    """Writes one layer of the small model, with these ids as its end ids."""
    one_layer_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def test_a_folder_that_names_no_end_ends_texts_as_its_tokenizer_does(tmp_path):
    folder = model_with_end_ids(tmp_path / "model", None)
    raw = json.loads((folder / "config.json").read_text())
    del raw["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(raw))
    options = {"max_model_len": 32, "cache": CacheConfig(max_sequences=1), "progress": False}
    # Transformers' default for Llama is 2.
    assert load_config(folder).eos_ids == (2,)
    assert LLM(folder, **options).eos_ids == (0,)


def test_a_model_with_more_end_ids_than_fit_is_refused_and_one_with_fewer_serves(tmp_path):
    options = {"max_model_len": 32, "cache": CacheConfig(max_sequences=1), "progress": False}
    with pytest.raises(BadCheckpoint, match="65 end ids, at most 64"):
        LLM(model_with_end_ids(tmp_path / "many", list(range(65))), **options)
    llm = LLM(model_with_end_ids(tmp_path / "most", list(range(64))), **options)
    wish = SamplingParams(
        temperature=0.0, min_tokens=2, max_tokens=2, stop_token_ids=range(64, 128)
    )
    # A prompt of one token has no program of its own.
    output = llm.generate([[5]], wish)[0]
    assert (output.finish_reason, output.error) in (("length", None), ("stop", None))
    assert output.token_ids[0] >= 128


def test_the_end_of_the_context_ends_the_text(llm):
    """120 of 128 tokens leave room for 8, also if max_tokens is larger."""
    output = llm.generate(
        [[7] * 120], SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)
    )
    assert len(output[0].token_ids) == 8
    assert output[0].finish_reason == "length"


@pytest.mark.parametrize("most", [None, 99])
def test_more_least_tokens_than_the_context_has_room_for_are_refused(llm, most):
    least = SamplingParams(temperature=0.0, max_tokens=most, min_tokens=9)
    told = (
        "min_tokens is 9, but a prompt of 120 tokens leaves room for 8, since max_model_len is 128"
    )
    with pytest.raises(ValueError, match=told):
        llm.generate([[7] * 120], least)
    [output] = llm.generate([[7] * 120], replace(least, min_tokens=8))
    assert len(output.token_ids) == 8


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([7] * 128, "max_model_len is 128"),
        ("", "at least one token"),
        ([], "at least one"),
        ([4096], "4096"),
        ([-1], "-1"),
        ([True], "True"),
        (b"def ", "bytes"),
        ("\ud800", "surrogate|UTF-8"),
        ("x" * 10**7, "a text of 10000000 characters has at least .* tokens, but at most 128 fit"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_numbers(llm, prompt, message):
    """The prompt is refused before anything is taken for it."""
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt], GREEDY)


def test_repeating_a_request_compiles_nothing(llm):
    """The second time, and for other lengths in the same buckets, nothing is compiled."""
    llm.generate(PROMPTS, GREEDY)
    list(llm.stream(PROMPTS[0], GREEDY))
    before = compile_count()
    llm.generate([prompt + " " for prompt in PROMPTS], GREEDY)
    list(llm.stream(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=10)))
    assert compile_count() == before


# A warm engine compiles nothing in tests/engine/test_engine.py, which refuses what was not declared; a strict `LLM`
# answers in tests/test_bundled_programs.py.
@pytest.mark.slow
def test_strict_mode_refuses_what_was_not_warmed_up(one_layer):
    llm = LLM(
        one_layer,
        dtype="float32",
        max_model_len=64,
        cache=CacheConfig(max_sequences=2, page_size=16),
        # Prompts in chunks, which have few sizes.
        engine=EngineConfig(token_budget=8),
        strict=True,
        progress=False,
    )
    llm.warm_up(batch=1, prompt_tokens=8, sampling_params=GREEDY)
    cold = [array.copy() for array in llm.engine.runner.owner.handle().cache.arrays]
    before = compile_count()
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 12
    assert len(list(llm.stream([1, 2, 3], GREEDY))) == 12
    assert compile_count() == before
    with pytest.raises(ProgramRefused, match="draws"):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, max_tokens=12))
    # At a bucket's edge, with penalties, for several samples and for scores: what was declared is what runs.
    penalised = SamplingParams(temperature=0.5, presence_penalty=1.0, n=3, seed=1, max_tokens=7)
    llm.warm_up(batch=1, prompt_tokens=10, sampling=penalised, score=True)
    before = compile_count()
    llm.generate([[5] * 10], penalised)
    list(llm.stream([5] * 10, replace(penalised, n=1)))
    llm.score([[5] * 10])
    assert compile_count() == before
    # Compilation ran nothing, so the cache was still all zeros when the first request came.
    assert all(not array.any() for array in cold)


def test_a_cache_too_small_for_one_sequence_says_so():
    with pytest.raises(ValueError, match="lower max_model_len"):
        LLM(
            max_model_len=512,
            cache=CacheConfig(max_sequences=1, page_size=16, budget_bytes=400_000),
            progress=False,
        )


# Penalties of a row beside others are in tests/sampling/test_sample_promises.py, and those of a row before it in
# test_each_prompt_has_its_own_parameters_and_old_ones_leave_no_trace.
@pytest.mark.slow
def test_penalised_and_plain_rows_share_steps_without_noticing(llm):
    wishes = [
        SamplingParams(temperature=0.0, repetition_penalty=1.8, min_tokens=4, max_tokens=10),
        GREEDY,
        SamplingParams(temperature=0.9, seed=4, max_tokens=10, frequency_penalty=1.0, min_tokens=4),
    ]
    together = llm.generate(PROMPTS, wishes)
    for prompt, wish, output in zip(PROMPTS, wishes, together, strict=True):
        assert llm.generate(prompt, wish)[0].token_ids == output.token_ids


# tests/engine/test_engine.py has pinned shapes in float32, with penalties and in a tight pool.
@pytest.mark.slow
def test_pinned_shapes_make_bfloat16_tokens_independent_of_the_batch():
    llm = LLM(
        dtype="bfloat16",
        max_model_len=32,
        cache=CacheConfig(max_sequences=6, page_size=16),
        engine=EngineConfig(pinned_shapes=True, token_budget=16),
        progress=False,
    )
    prompts = ["lambda ", "assert self", "x = ", *PROMPTS]
    together = llm.generate(prompts, GREEDY)
    assert llm.generate(prompts[1], GREEDY)[0].token_ids == together[1].token_ids


def test_prompts_in_chunks_and_without_prefix_cache_have_the_same_answers(llm, one_layer):
    """A budget of 8 tokens cuts a prompt of 30 into chunks, beside tokens of other requests."""
    prompts = [list(range(100, 130)), list(range(100, 131)), [7]]
    wanted = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    other = LLM(
        one_layer,
        dtype="float32",
        max_model_len=128,
        cache=CacheConfig(max_sequences=3, page_size=16),
        engine=EngineConfig(token_budget=8, prefix_cache=False, overlap=False),
        progress=False,
    )
    for _ in range(2):
        outputs = other.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == wanted
        assert [output.usage.cached_tokens for output in outputs] == [0, 0, 0]
    assert [group.kept for group in other.stats().cache] == [0, 0]
    assert other.stats().prefix is None
    specs = [program.spec for program in other.engine.runner.programs.manifest()]
    assert max(spec.tokens for spec in specs if isinstance(spec, StepSpec)) == 8
    with pytest.raises(ValueError, match="prefix cache is off"):
        other.explain(prompts[0])


def test_pages_run_out_with_the_numbers_and_nothing_is_consumed():
    llm = LLM(
        dtype="float32",
        max_model_len=64,
        cache=CacheConfig(max_sequences=2, page_size=16),
        progress=False,
    )
    llm.engine.sequence_runner.allocator.open(10**6)
    llm.engine.sequence_runner.allocator.reserve(10**6, 64)
    llm.engine.sequence_runner.allocator.open(10**6 + 1)
    llm.engine.sequence_runner.allocator.reserve(10**6 + 1, 40)
    with pytest.raises(OutOfPages, match="asked for"):
        llm.generate([[1] * 40], GREEDY)
    llm.engine.sequence_runner.allocator.check()
    assert llm.engine.sequence_runner.allocator.num_free("gqa") == 1


# "auto" is bfloat16 here.
@pytest.mark.parametrize(
    "dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow), "auto"]
)
def test_every_dtype_serves(dtype, one_layer):
    cache = CacheConfig(max_sequences=1)
    llm = LLM(one_layer, dtype=dtype, max_model_len=64, cache=cache, progress=False)
    # A prompt of one token has no program of its own.
    assert len(llm.generate([[5]], SamplingParams(temperature=0.0, max_tokens=4))) == 1
    assert str(llm.engine.runner.params["embed"].dtype) == (
        "bfloat16" if dtype == "auto" else dtype
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"engine": "fast"}, "EngineConfig"),
        ({"cache": {"page_size": 16}}, "CacheConfig"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"model": "no/such/dir"}, "no/such/dir"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    # A TypeError is the test-time checker's, where the annotation alone refuses it.
    with pytest.raises((ValueError, OSError, TypeError), match=message):
        LLM(**options, progress=False)


def test_weights_are_loaded_with_a_bar_on_a_terminal_alone(capsys, monkeypatch):
    options = {"max_model_len": 64, "cache": CacheConfig(max_sequences=1)}
    LLM(**options)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    LLM(**options, progress=False)
    assert capsys.readouterr().err == ""
    LLM(**options)
    assert "loading weights" in capsys.readouterr().err


def test_stats_say_what_runs_and_why(llm):
    """The model in the package has heads that no kernel takes, on a GPU too."""
    stats = llm.stats()
    assert stats.implementation == "xla"
    assert stats.implementation_reasons == llm.engine.runner.implementation.reasons
    assert stats.implementation_reasons
    assert stats.device == jax.devices()[0].device_kind


def test_stats_count_pages_bytes_and_programs(llm):
    llm.generate(PROMPTS, GREEDY)
    before = llm.stats()
    assert [group.name for group in before.cache] == [group.name for group in llm.layout.groups]
    assert before.cache_bytes == llm.budget.bytes
    assert all(group.used == 0 for group in before.cache)
    with llm.engine.sequence_runner.reserved(40):
        [paged] = [group for group in llm.stats().cache if group.name == "gqa"]
        assert (paged.unit, paged.used) == ("page", 3)
        assert paged.used + paged.kept + paged.free == paged.total
    assert before.programs == len(llm.engine.runner.programs.manifest()) > 0
    assert before.compile_seconds > 0
    assert before.compiled_late == 0


def test_an_implementation_that_cannot_run_here_is_refused_with_its_reason():
    options = {"max_model_len": 64, "cache": CacheConfig(max_sequences=1), "progress": False}
    with pytest.raises(ValueError, match="cannot run as mosaic_gpu"):
        LLM(implementation="mosaic_gpu", **options)
    with pytest.raises(
        ValueError, match="one of mosaic_gpu, xla, cudnn, xla_products, got 'fastest'"
    ):
        LLM(implementation="fastest", **options)


def test_an_implementation_that_was_asked_for_needs_no_reason():
    cache = CacheConfig(max_sequences=1, page_size=16)
    named = LLM(implementation="xla", max_model_len=64, cache=cache, progress=False)
    assert named.stats().implementation == "xla"
    assert named.stats().implementation_reasons == ()


def test_the_recommended_sampling_is_that_of_generation_config_json(tmp_path):
    folder = one_layer_model(tmp_path / "model")
    recommended = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25}
    recommended["repetition_penalty"] = 1.5
    (folder / "generation_config.json").write_text(json.dumps(recommended | {"do_sample": True}))
    cache = CacheConfig(max_sequences=1, page_size=16)
    with LLM(folder, max_model_len=32, cache=cache, progress=False) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**recommended)
        chosen = llm.get_default_sampling_params(top_k=3, max_tokens=2)
        assert chosen == SamplingParams(**recommended | {"top_k": 3}, max_tokens=2)
        assert llm.generate([[5]], chosen)[0].usage.output_tokens == 2
        with pytest.raises(ValueError, match="the closest is max_tokens"):
            llm.get_default_sampling_params(max_new_tokens=2)
        (folder / "generation_config.json").write_text('{"top_p": 2}')
        with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be"):
            llm.get_default_sampling_params()


def test_a_revision_is_that_of_a_name_and_no_folder_has_any():
    with pytest.raises(ValueError, match="the model is the small model inside the package"):
        LLM(revision="main")
    with pytest.raises(ValueError, match="revision 'v1' is one of a name on the Hugging Face Hub"):
        LLM(default_model.path(), revision="v1")
