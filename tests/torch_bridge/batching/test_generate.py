"""`torch_bridge.generate`: the tokens of stock generate and of jaxkv's engine, whatever else runs in the batch."""

import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import torch_bridge
from jaxkv import LLM, SamplingParams, default_model
from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import (
    VOCAB,
    check,
    greedy,
    is_marked,
    mark_last_page,
    prompts,
    tiny_model,
)
from torch_bridge import JaxkvCache
from torch_bridge.batching.sampler import Sampler
from torch_bridge.transformers_cache.fingerprint import KnownModel

pytestmark = pytest.mark.torch
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def texts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def stock(model, prompt, count):
    """Returns the greedy tokens of the model's own generate with its own cache and attention."""
    ids = torch.tensor([prompt])
    return greedy(model, ids, torch.ones_like(ids), count)[0, len(prompt) :].tolist()


def paged(family="llama", **more):
    """Returns a model with attention "jaxkv", and its twin with the stock one."""
    twin, model = tiny_model(family, **more), tiny_model(family, **more)
    model.set_attn_implementation("jaxkv")
    return model, twin


def tokens(outputs):
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def llama():
    return paged()


@pytest.fixture(scope="module")
def cache(llama):
    return JaxkvCache(llama[0], max_tokens=512)


def run(llama, cache, given, sampling=GREEDY, **options):
    options = {"max_sequences": 2, "token_budget": 16, **options}
    out = torch_bridge.generate(llama[0], given, sampling, cache=cache, **options)
    assert not cache.parts.store.allocator.open_sequences
    check(cache)
    return out


def test_more_prompts_than_rows_in_chunks_give_the_tokens_of_stock_generate(llama, cache):
    given = texts(5, 30, 1, 16, 23)
    out = run(llama, cache, given)
    assert tokens(out) == [stock(llama[1], prompt, 9) for prompt in given]
    assert [one.usage.prompt_tokens for one in out] == [5, 30, 1, 16, 23]
    assert {one.outputs[0].finish_reason for one in out} == {"length"}


def test_a_prompt_that_began_alike_is_computed_from_where_it_differs(llama, cache):
    [prompt, end] = texts(32, 5, seed=2)
    run(llama, cache, [prompt])
    out = run(llama, cache, [prompt + end])
    assert out[0].usage.cached_tokens == 32
    assert tokens(out) == [stock(llama[1], prompt + end, 9)]
    ids = torch.tensor([prompt + end])
    cache.reset()
    before = cache.stats().tokens_reused
    greedy(llama[0], ids, torch.ones_like(ids), 2, past_key_values=cache)
    assert cache.stats().tokens_reused == before + 32
    cache.reset()


def test_a_changed_model_reuses_no_page_and_is_compared_behind_its_first_forward(monkeypatch):
    pair = paged(num_hidden_layers=1)
    shared = JaxkvCache(pair[0], max_tokens=256)
    given = texts(40, 40, 21, seed=6)
    run(pair, shared, given[:1])
    for model in pair:
        model.model.layers[0].self_attn.k_proj.weight.data.neg_()
    seen = []
    begin = KnownModel.begin_fingerprint

    def begun(known):
        finish = begin(known)
        return lambda: seen.append("compared") or finish()

    monkeypatch.setattr(KnownModel, "begin_fingerprint", begun)
    pair[0].register_forward_hook(lambda *call: seen.append("forward"))
    sampling = [GREEDY, SamplingParams(temperature=0.8, seed=7, max_tokens=9), GREEDY]
    out = run(pair, shared, given, sampling, max_sequences=2)
    assert seen[:3] == ["forward", "compared", "forward"]
    assert seen.count("compared") == 1
    assert [one.usage.cached_tokens for one in out] == [0, 0, 0]
    assert tokens(out) == tokens(run(pair, JaxkvCache(pair[0], max_tokens=256), given, sampling))
    assert tokens(out)[0] == stock(pair[1], given[0], 9)
    again = run(pair, shared, given, sampling)
    assert [one.usage.cached_tokens for one in again] == [32, 32, 16]
    assert tokens(again) == tokens(out)


def test_the_last_token_of_prompts_that_are_found_whole_is_written_to_copies_of_their_page(llama):
    shared = JaxkvCache(llama[0], max_tokens=256)
    [prompt] = texts(32, seed=12)
    run(llama, shared, [prompt])
    page = mark_last_page(shared, prompt)
    for samples in (1, 2):
        sampling = SamplingParams(temperature=0.0, max_tokens=9, n=samples)
        out = run(llama, shared, [prompt] * 3, sampling, max_sequences=4)
        assert tokens(out) == [stock(llama[1], prompt, 9)] * 3 * samples
        assert [one.usage.cached_tokens for one in out] == [31] * 3
        assert is_marked(shared, page)


def test_a_failed_forward_ends_all_requests_and_the_next_call_begins_anew(llama, cache):
    given = texts(20, 7, 11, seed=3)
    calls = []

    def fail(module, args, kwargs):
        calls.append(kwargs["input_ids"].shape)
        if len(calls) == 5:
            raise RuntimeError("in the middle")

    hook = llama[0].register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        torch_bridge.generate(
            llama[0], given, GREEDY, cache=cache, max_sequences=2, token_budget=16
        )
    hook.remove()
    assert not cache.parts.store.allocator.open_sequences
    assert tokens(run(llama, cache, given)) == [stock(llama[1], prompt, 9) for prompt in given]


def test_an_interrupt_between_steps_frees_all_pages_and_keeps_the_pool(llama, cache, monkeypatch):
    given = texts(20, 7, 11, seed=4)
    [kept] = texts(32, seed=5)
    run(llama, cache, [kept])
    read, reads = Sampler.read, []

    def interrupt(self, step):
        reads.append(step)
        if len(reads) == 4:
            raise KeyboardInterrupt
        return read(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            torch_bridge.generate(
                llama[0], given, GREEDY, cache=cache, max_sequences=2, token_budget=16
            )
    assert not cache.parts.store.allocator.open_sequences
    check(cache)
    assert run(llama, cache, [kept])[0].usage.cached_tokens == 31
    assert tokens(run(llama, cache, given)) == [stock(llama[1], prompt, 9) for prompt in given]


def test_ids_without_a_token_add_no_text(llama, cache):
    [prompt] = texts(12, seed=7)
    said = stock(llama[1], prompt, 9)
    few = Tokenizer(WordLevel({f"<{token}>": token for token in range(60)}, unk_token="<0>"))
    words = PreTrainedTokenizerFast(tokenizer_object=few)
    [out] = run(llama, cache, [prompt], tokenizer=words)
    assert out.token_ids == said
    assert max(said) >= 60
    assert out.text.split() == [f"<{token}>" for token in said if token < 60]


def test_a_second_call_with_the_same_cache_inside_the_first_is_refused(llama, cache):
    def again(module, args, kwargs):
        torch_bridge.generate(llama[0], [[3]], GREEDY, cache=cache, max_sequences=2)

    hook = llama[0].register_forward_pre_hook(again, with_kwargs=True)
    with pytest.raises(RuntimeError, match="is not over"):
        torch_bridge.generate(llama[0], [[3], [4]], GREEDY, cache=cache, max_sequences=2)
    hook.remove()
    assert len(tokens(run(llama, cache, texts(5, 6)))) == 2


def test_what_cannot_be_served_is_refused_by_name(llama, cache):
    model, twin = llama
    with pytest.raises(Unsupported, match=r'set_attn_implementation\("jaxkv"\)'):
        torch_bridge.generate(twin, [[1]], GREEDY)
    with pytest.raises(
        ValueError, match=r"prompt 1: torch_bridge\.generate has no prompt_logprobs"
    ):
        torch_bridge.generate(model, [[1], [2]], [GREEDY, SamplingParams(prompt_logprobs=1)])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        torch_bridge.generate(model, [[1]], SamplingParams(stop="a"))
    with pytest.raises(ValueError, match="pass a cache, or max_tokens"):
        torch_bridge.generate(model, [[1]], SamplingParams(max_tokens=None))
    with pytest.raises(ValueError, match="made for another model"):
        torch_bridge.generate(paged()[0], [[1]], GREEDY, cache=cache)
    with pytest.raises(ValueError, match="token id 96 is outside"):
        torch_bridge.generate(model, [[96]], GREEDY, cache=cache)
    with pytest.raises(ValueError, match="max_sequences"):
        torch_bridge.generate(model, [[1]], GREEDY, cache=cache, max_sequences=0)
    with pytest.raises(ValueError, match="tokenizer must be"):
        torch_bridge.generate(model, [[1]], GREEDY, tokenizer=3)
    assert torch_bridge.generate(model, [], GREEDY) == []


def test_a_call_with_a_cache_plans_no_layers_and_needs_attention_over_pages(monkeypatch):
    def plan(*given, **options):
        raise AssertionError("the cache has the plans")

    model, _ = paged(num_hidden_layers=1)
    cache = JaxkvCache(model, max_tokens=64)
    monkeypatch.setattr("torch_bridge.batching.generate.plan_layers", plan)
    torch_bridge.generate(model, [[5, 6]], SamplingParams(max_tokens=1), cache=cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match=r'set_attn_implementation\("jaxkv"\)'):
        torch_bridge.generate(model, [[5, 6]], GREEDY, cache=cache)


def test_a_model_whose_rotary_angles_depend_on_the_length_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    turning, _ = paged(rope_parameters=rope)
    with pytest.raises(Unsupported, match="depend on the length"):
        torch_bridge.generate(turning, [[1]], GREEDY)


def hybrid():
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1, 2],
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(config).eval()


def mamba2():
    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return Mamba2ForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("make", [hybrid, mamba2])
def test_models_with_recurrent_layers_give_the_tokens_of_stock_generate(make):
    model, twin = make(), make()
    if make is hybrid:
        model.set_attn_implementation("jaxkv")
    given = texts(5, 30, 1, 16, 23)
    shared = JaxkvCache(model, max_tokens=512, max_sequences=2)
    wanted = [stock(twin, prompt, 9) for prompt in given]
    assert len({token for one in wanted for token in one}) > 5
    for _ in range(2):
        out = run((model, twin), shared, given, max_sequences=3, token_budget=20)
        assert tokens(out) == wanted
        assert all(one.usage.cached_tokens == 0 for one in out)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, n=2)
    together = run((model, twin), shared, given, params, max_sequences=3)
    alone = run((model, twin), shared, [given[1]], params, max_sequences=3)
    assert tokens(alone) == tokens([together[1]])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_other_families_give_the_tokens_of_stock_generate(family):
    pair = paged(family)
    given = texts(5, 30, 1, 16, 23, 40)
    shared = JaxkvCache(pair[0], max_tokens=512)
    wanted = [stock(pair[1], prompt, 9) for prompt in given]
    for _ in range(2):
        assert tokens(run(pair, shared, given, max_sequences=3)) == wanted


@pytest.mark.slow
def test_soft_caps_of_gemma2_give_the_tokens_of_stock_generate():
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "eos_token_id": None,
        "initializer_range": 0.15,
    }
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(Gemma2ForCausalLM(Gemma2Config(**sizes)).eval())
    pair[0].set_attn_implementation("jaxkv")
    pair[1].set_attn_implementation("eager")
    given = texts(5, 30, 19)
    shared = JaxkvCache(pair[0], max_tokens=256)
    assert tokens(run(pair, shared, given)) == [stock(pair[1], prompt, 9) for prompt in given]


@pytest.mark.slow
def test_replayed_steps_give_the_tokens_of_stock_generate(llama, monkeypatch):
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
    )
    shared = JaxkvCache(llama[0], max_tokens=512, graphs=True)
    given = texts(5, 30, 1, 16, 23)
    wanted = [stock(llama[1], prompt, 9) for prompt in given]
    assert tokens(run(llama, shared, given, max_sequences=3)) == wanted
    stats = shared.stats()
    assert stats.why_not_replayed is None
    assert stats.steps_replayed > 10
    # One for prompts, and one for each number of rows.
    assert (stats.graphs_recorded, stats.prompts_replayed > 0) == (1 + 3, True)
    ids, mask = prompts(2, 8)
    wanted = greedy(llama[1], ids, mask, 5)
    assert torch.equal(greedy(llama[0], ids, mask, 5, past_key_values=shared), wanted)


@pytest.mark.slow
def test_a_seeded_request_draws_the_same_tokens_alone_and_among_others(llama, cache):
    given = texts(5, 30, 1, 16, 23)
    sampling = [
        SamplingParams(temperature=0.8, seed=7, max_tokens=9),
        GREEDY,
        SamplingParams(temperature=1.3, seed=8, top_k=20, top_p=0.9, min_p=0.02, max_tokens=9),
        SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.3, max_tokens=9, n=2),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={5: 3.0}, max_tokens=9),
    ]
    together = run(llama, cache, given, sampling, max_sequences=3)
    for prompt, params, output in zip(given, sampling, together, strict=True):
        alone = run(llama, cache, [prompt], params, max_sequences=3)
        assert tokens(alone) == tokens([output])
    samples = together[3].outputs
    assert samples[0].token_ids != samples[1].token_ids


@pytest.mark.slow
def test_a_pool_that_is_too_small_for_all_preempts_and_loses_no_token(llama):
    given = texts(20, 18, 25, seed=6)
    params = [
        SamplingParams(temperature=1.0, seed=seed, presence_penalty=0.5, max_tokens=40)
        for seed in range(3)
    ]
    roomy, small = (JaxkvCache(llama[0], max_tokens=size) for size in (512, 96))
    wanted = run(llama, roomy, given, params, max_sequences=3)
    got = run(llama, small, given, params, max_sequences=3)
    assert tokens(got) == tokens(wanted)
    assert sum(one.usage.preemptions for one in got) > 0


@pytest.mark.slow
def test_tokens_texts_and_log_probabilities_are_those_of_the_engine():
    folder = default_model.path()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("jaxkv")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    given = ["class Stack:\n    def ", "import ", "def add(a, b):\n    return"]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=24, stop="\n\n", logprobs=3),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, max_tokens=24, n=2),
        SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.2, max_tokens=24),
    ]
    with LLM(folder, dtype="float32") as llm:
        wanted = llm.generate(given, sampling)
    got = torch_bridge.generate(model, given, sampling, tokenizer=tokenizer)
    assert tokens(got) == tokens(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert [sample.text for sample in one.outputs] == [sample.text for sample in other.outputs]
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert one.outputs[0].stop_reason == other.outputs[0].stop_reason
        assert one.prompt == other.prompt
    for mine, theirs in zip(got[0].outputs[0].logprobs, wanted[0].outputs[0].logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(abs(mine[token] - theirs[token]) < 1e-3 for token in mine)


@pytest.mark.slow
def test_a_request_whose_logits_are_not_finite_ends_alone():
    pair = paged()
    for model in pair:
        with torch.no_grad():
            model.get_input_embeddings().weight[95] = torch.nan
    given = [[token % 95 for token in prompt] for prompt in texts(20, 9, 30, seed=8)]
    given[1][3] = 95
    shared = JaxkvCache(pair[0], max_tokens=256)
    out = run(pair, shared, given, max_sequences=3, token_budget=32)
    assert [one.outputs[0].finish_reason for one in out] == ["length", "error", "length"]
    assert "not finite" in out[1].outputs[0].error
    for at in (0, 2):
        assert out[at].token_ids == stock(pair[1], given[at], 9)


@pytest.mark.slow
def test_end_ids_and_stop_ids_end_a_request(llama, cache):
    [prompt] = texts(12, seed=7)
    said = stock(llama[1], prompt, 9)
    stops = said[4]
    at = said.index(stops)
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(stops,))
    [out] = run(llama, cache, [prompt], params)
    assert out.token_ids == said[: at + 1]
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stops)
    model, _ = llama
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, stops
    try:
        [out] = run(llama, cache, [prompt], GREEDY)
        assert (out.token_ids, out.outputs[0].stop_reason) == (said[: at + 1], None)
        longer = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=9)
        assert len(run(llama, cache, [prompt], longer)[0].token_ids) == 9
    finally:
        model.generation_config.eos_token_id = before


@pytest.mark.slow
def test_the_example_finds_its_prompts_again_and_draws_the_same_tokens_alone():
    done = subprocess.run(
        [sys.executable, "-m", "torch_bridge.examples.many_prompts"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "6 prompts in 3 rows: 33 tokens computed, 96 found in the cache" in done.stdout
    assert "alone: True" in done.stdout
