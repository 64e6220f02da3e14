"""Requests that name adapters: what they share, when adapters may change, and that nothing is compiled for it.

That the tokens are right is shown in `tests/models/families/test_lora.py`.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, AsyncLLM, CacheConfig, EngineConfig, LoraConfig, SamplingParams
from jaxkv.engine.lora.loaded_adapter import AdapterVersion
from jaxkv.errors import BadCheckpoint
from tests.engine.engines import PAGE, VOCAB, model_of
from tests.few_programs import few_programs
from tests.structured.open_grammar import with_open_grammar
from tests.weights.adapter_files import save_adapter

SHAPES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.mlp.up_proj": (48, 32),
    "model.layers.1.self_attn.o_proj": (32, 32),
    "model.layers.1.mlp.down_proj": (32, 48),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 3 * PAGE + 2).tolist()


def made(**options):
    cache = options.pop("cache", CacheConfig(max_sequences=4, page_size=PAGE))
    options = {"lora": LoraConfig(max_adapters=3, max_rank=4)} | options
    llm = LLM.from_parts(*model_of("plain"), cache=cache, progress=False, **options)
    return few_programs(llm)


def greedy(lora=None, **changes):
    return replace(GREEDY, lora=lora, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder of an adapter; "twin" has the weights of "a"."""
    root = tmp_path_factory.mktemp("adapters")
    for name, seed in {"a": 1, "b": 2, "twin": 1}.items():
        save_adapter(root / name, SHAPES, seed=seed, size=0.4)
    return {name: root / name for name in ("a", "b", "twin")}


@pytest.fixture(scope="module")
def llm(folders):
    return made()


@pytest.fixture(autouse=True)
def loaded(request, folders):
    """Loads "a" and "b" for each test that uses the shared `LLM`, and takes all adapters away after it."""
    if "llm" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("llm")
    for name in ("a", "b"):
        llm.add_lora(name, folders[name])
    yield
    for name in llm.list_loras():
        llm.remove_lora(name)


def test_rows_with_a_grammar_take_their_adapter_too(llm):
    """Their steps are two programs, and this grammar allows every token."""
    prompt = {"prompt_token_ids": PROMPT[1:]}
    asked = [*llm.requests(prompt, greedy("a")), *llm.requests(prompt, greedy())]
    bound = [with_open_grammar(one, VOCAB) for one in asked]
    with llm.lock.held():
        states = [llm.engine.add([one])[0] for one in (*asked, *bound)]
        llm.engine.run(states)
    adapted, plain, *same = [one.token_ids for one in states]
    assert adapted != plain
    assert same == [adapted, plain]
    for one, other in ((0, 2), (1, 3)):
        told, found = ([*map(dict.values, states[at].logprobs)] for at in (one, other))
        np.testing.assert_allclose([*map(list, found)], [*map(list, told)], atol=1e-5)


def cached(llm, lora=None, **prompt):
    """Returns how many tokens of the prompt a request finds in the prefix cache."""
    given = {"prompt_token_ids": PROMPT} | prompt
    [output] = llm.generate([given], greedy(lora))
    return output.usage.cached_tokens


def test_prefixes_are_shared_by_requests_of_one_adapter_alone(llm, folders):
    llm.add_lora("twin", folders["twin"])
    names = (None, "a", "b", "twin")
    assert [cached(llm, name) for name in names] == [0] * 4
    assert [cached(llm, name) for name in names] == [3 * PAGE] * 4
    # A user's salt divides further.
    assert cached(llm, "a", cache_salt="mine") == 0
    assert cached(llm, "a", cache_salt="mine") == 3 * PAGE
    assert llm.explain(PROMPT, lora="a").num_reused == 3 * PAGE
    with pytest.raises(ValueError, match="no adapter 'c' is loaded; loaded are: 'a', 'b', 'twin'"):
        llm.explain(PROMPT, lora="c")


def test_an_adapter_that_is_loaded_again_has_a_new_version_and_finds_no_old_prefix(llm, folders):
    def ask():
        return llm.generate([PROMPT], greedy("c"))[0]

    assert llm.add_lora("c", folders["a"]) == 0
    first = ask()
    assert llm.add_lora("c", folders["b"]) == 1
    again = ask()
    assert again.usage.cached_tokens == 0
    assert (first.adapter, again.adapter) == (AdapterVersion("c", 0), AdapterVersion("c", 1))
    assert again.token_ids == llm.generate([PROMPT], greedy("b"))[0].token_ids != first.token_ids
    assert llm.add_lora("c", folders["a"], version="epoch 7") == "epoch 7"
    assert ask().token_ids == first.token_ids
    assert llm.list_loras()["c"] == "epoch 7"
    with pytest.raises(ValueError, match="the last one of 'c' was 'epoch 7'"):
        llm.add_lora("c", folders["a"])


def test_an_adapter_in_use_stays(llm, folders):
    stream = llm.stream(PROMPT, greedy("a"))
    next(stream)
    for change in (lambda: llm.remove_lora("a"), lambda: llm.add_lora("a", folders["b"])):
        with pytest.raises(ValueError, match="1 requests use the adapter 'a'; wait until"):
            change()
    llm.remove_lora("b")
    tokens = [piece.token_id for piece in stream]
    assert len(tokens) == 5
    llm.remove_lora("a")
    with pytest.raises(ValueError, match=r"no adapter 'a' is loaded; loaded are: none\. Load it"):
        llm.generate([PROMPT], greedy("a"))


def test_a_request_whose_adapter_was_replaced_before_it_began_is_refused(llm, folders):
    requests = llm.requests(PROMPT, greedy("a"))
    llm.add_lora("a", folders["b"])
    with pytest.raises(ValueError, match=r"the adapter 'a', version .*, was removed or replaced"):
        llm.engine.add(requests)


@pytest.mark.slow
def test_rows_without_an_adapter_have_the_bits_of_an_llm_without_adapters(folders):
    # One shape for all steps, since steps of other shapes round otherwise.
    engine = EngineConfig(pinned_shapes=True, token_budget=32)
    adapted, plain = made(engine=engine), made(engine=engine, lora=None)
    for name in ("a", "b"):
        adapted.add_lora(name, folders[name])
    prompts = [PROMPT, PROMPT[:9], PROMPT[1:], PROMPT[2:20]]
    got = adapted.generate(prompts, [greedy(name) for name in (None, "a", None, "b")])
    wanted = plain.generate(prompts, greedy())
    for row in (0, 2):
        assert got[row].token_ids == wanted[row].token_ids
        assert got[row].logprobs == wanted[row].logprobs
    for row in (1, 3):
        assert got[row].logprobs != wanted[row].logprobs


@pytest.mark.slow
def test_a_batch_without_adapters_runs_in_programs_without_them(llm):
    def specs():
        return {program.spec for program in llm.engine.runner.programs.manifest()}

    llm.generate([PROMPT, PROMPT[1:]], greedy("a"))
    before = specs()
    assert any(spec.features.lora for spec in before)
    llm.generate([PROMPT[::-1]] * 4, greedy(logprobs=5))
    assert specs() > before
    assert not any(spec.features.lora for spec in specs() - before)


def test_no_program_depends_on_the_adapters(llm, folders):
    prompts = [PROMPT, PROMPT[3:], PROMPT[5:]]
    llm.generate(prompts, [greedy(name) for name in ("a", None, "b")])
    known = len(llm.engine.runner.programs.manifest())
    llm.add_lora("twin", folders["twin"])
    llm.remove_lora("b")
    llm.add_lora("a", folders["b"])
    llm.generate([one[::-1] for one in prompts], [greedy(name) for name in ("twin", "a", "a")])
    assert len(llm.engine.runner.programs.manifest()) == known


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_the_adapter(llm):
    [output] = llm.generate([PROMPT], greedy("a", prompt_logprobs=0))
    got = [
        table[token] for token, table in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert got == pytest.approx(llm.score(PROMPT, lora="a")[0].tolist(), abs=1e-6)
    assert np.abs(llm.score(PROMPT)[0] - got).max() > 0.01


def test_a_rollout_tells_the_adapter_of_each_sample_and_is_scored_by_it(llm):
    prompts, sampling = [PROMPT, PROMPT], [greedy("a"), greedy()]
    rollout = llm.rollout(prompts, sampling)
    version = llm.list_loras()["a"]
    assert rollout.adapters == [AdapterVersion("a", version), None]
    scored = llm.score(prompts, rollout, sampling)
    np.testing.assert_allclose(scored, rollout.logprobs, atol=1e-5)
    assert np.abs(scored[0] - scored[1]).max() > 0.01
    # With an adapter alone the sampling is greedy, and samples may be longer than its default.
    [output] = llm.generate([PROMPT], greedy("a", max_tokens=20, ignore_eos=True, logprobs=0))
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    [again] = llm.score([PROMPT], [[output.token_ids]], lora="a")
    np.testing.assert_allclose(again, [table[token] for table, token in pairs], atol=1e-5)


def test_what_does_not_fit_is_refused_and_changes_nothing(llm, folders, tmp_path):
    llm.add_lora("twin", folders["twin"])
    before = llm.list_loras()
    wrong = {
        "head": ({"lm_head": (VOCAB, 32)}, {}, "to which requests cannot add adapters"),
        "shape": ({"model.layers.0.self_attn.q_proj": (32, 31)}, {}, r"of shape \[32, 31\]"),
        "rank": (SHAPES, {"rank": 5}, r"has rank 5 .*LoraConfig\(max_rank=5\)"),
        "scale": (SHAPES, {"alpha": 1e40}, "is not finite in float32"),
        "dora": (SHAPES, {"use_dora": True}, "use_dora True is not supported"),
    }
    for name, (shapes, options, message) in wrong.items():
        save_adapter(tmp_path / name, shapes, **options)
        with pytest.raises(BadCheckpoint, match=message):
            llm.add_lora("b", tmp_path / name)
    with pytest.raises(ValueError, match="3 adapters are loaded and there is room for 3"):
        llm.add_lora("d", folders["a"])
    with pytest.raises(ValueError, match="lora must be the name of an adapter"):
        llm.add_lora("", folders["a"])
    with pytest.raises(ValueError, match=r"version must be an int or a str, got True"):
        llm.add_lora("b", folders["a"], version=True)
    assert llm.list_loras() == before


@pytest.mark.slow
def test_asyncio_callers_change_adapters_while_requests_run(folders):
    llm = made()

    async def run():
        async with AsyncLLM(llm) as served:
            assert await served.add_lora("a", folders["a"]) == 0
            asked = asyncio.gather(*(served.generate(PROMPT, greedy(name)) for name in ("a", None)))
            assert await served.add_lora("b", folders["b"]) == 0
            outputs = await asked
            await served.remove_lora("a")
            with pytest.raises(ValueError, match="no adapter 'a' is loaded"):
                await served.generate(PROMPT, greedy("a"))
            return [*outputs, await served.generate(PROMPT, greedy("b"))]

    got = [output.adapter for output in asyncio.run(run())]
    assert got == [AdapterVersion("a", 0), None, AdapterVersion("b", 0)]


def test_adapters_need_room_and_an_engine():
    model, params = model_of("plain")
    with pytest.raises(ValueError, match="lora names an adapter of an LLM"):
        jaxkv.generate(params, model, [[1, 2, 3]], sampling=greedy("a"), eos_ids=())
    for options, message in (
        ({"lora": True, "enable_lora": True}, "one option of LLM"),
        ({"lora": None, "max_loras": 2}, "max_loras needs adapters; give enable_lora=True"),
        ({"lora": None, "max_cpu_loras": 2}, "every loaded adapter has a place on the device"),
    ):
        with pytest.raises(ValueError, match=message):
            made(**options)
    without = made(lora=None)
    with pytest.raises(ValueError, match=r"make the LLM with enable_lora=True or lora=LoraConfig"):
        without.generate([PROMPT], greedy("a"))
    named = made(lora=None, enable_lora=True, max_loras=2, max_lora_rank=4)
    assert named.engine.adapters.config == LoraConfig(max_adapters=2, max_rank=4)


@pytest.mark.slow
def test_a_strict_llm_that_was_warmed_up_for_adapters_compiles_nothing_for_any_of_them(folders):
    llm = made(strict=True)
    llm.add_lora("a", folders["a"])
    for name in (None, "a"):
        llm.warm_up(batch=3, prompt_tokens=len(PROMPT), sampling=greedy(name), score=True)
    llm.add_lora("b", folders["b"])
    known = len(llm.engine.runner.programs.manifest())
    llm.generate([PROMPT, PROMPT[1:], PROMPT[2:]], [greedy(name) for name in ("b", None, "a")])
    llm.generate([PROMPT[3:]], greedy())
    llm.score(PROMPT, lora="b")
    assert len(llm.engine.runner.programs.manifest()) == known


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"engine": EngineConfig(steps_per_launch=4)},
        {"engine": EngineConfig(token_budget=8)},
        {"engine": EngineConfig(pinned_shapes=True)},
        {"cache": CacheConfig(max_sequences=4, page_size=PAGE, budget_bytes=72_000)},
        {"engine": EngineConfig(prefix_cache=False)},
    ],
    ids=["bursts", "chunks", "pinned", "preempted", "no-prefixes"],
)
def test_however_requests_run_each_has_the_tokens_of_its_adapter(folders, options):
    rows = [("a", 26), (None, 20), ("b", 26), ("a", 11), ("b", 7), (None, 26)]
    prompts = [PROMPT[:length] for _, length in rows]
    sampling = [greedy(name, max_tokens=30, logprobs=None) for name, _ in rows]
    alone, together = made(), made(**options)
    for name in ("a", "b"):
        alone.add_lora(name, folders[name])
        together.add_lora(name, folders[name])
    wanted = [alone.generate([p], s)[0].token_ids for p, s in zip(prompts, sampling, strict=True)]
    assert len({tuple(tokens) for tokens in wanted}) == len(rows)
    outputs = together.generate(prompts, sampling)
    assert [output.token_ids for output in outputs] == wanted
    if "cache" in options:
        assert any(output.usage.preemptions for output in outputs if output.adapter)


@pytest.mark.slow
def test_prefixes_on_the_host_are_those_of_one_adapter_alone(folders):
    cache = CacheConfig(max_sequences=2, page_size=PAGE, budget_bytes=72_000, host_bytes=2**26)
    llm = made(cache=cache)
    llm.add_lora("a", folders["a"])
    first = llm.generate([PROMPT], greedy("a"))[0]
    draw = np.random.default_rng(9)
    for _ in range(12):
        llm.generate([draw.integers(0, VOCAB, 50).tolist()], greedy())
    assert llm.explain(PROMPT, lora="a").num_reused < 3 * PAGE
    assert cached(llm) == 0
    again = llm.generate([PROMPT], greedy("a"))[0]
    assert again.usage.cached_tokens == 3 * PAGE
    assert again.token_ids == first.token_ids
    host = llm.stats().host
    assert host is not None
    assert host.hits > 0
