"""An `LLM` on a trainer's arrays: made from parts, updated while it serves, put to sleep and woken up."""

import asyncio
import gc
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

import jaxkv
from jaxkv import LLM, AsyncLLM, CacheConfig, SamplingParams, default_model
from jaxkv.examples import flax_nnx_model as example
from jaxkv.models.flax_model import FlaxModel
from jaxkv.models.registry import build_model
from jaxkv.programs.manifest import compile_count
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

PROMPT = "def add("
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
CACHE = CacheConfig(max_sequences=2, page_size=16)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def parts(one_layer):
    return jaxkv.load_model(one_layer, dtype="float32")


@pytest.fixture(scope="module")
def changed(parts):
    params, _ = parts
    keys = iter(jax.random.split(jax.random.key(0), 10**3))
    return jax.tree.map(
        lambda leaf: leaf + jax.random.normal(next(keys), leaf.shape) * 0.3 * jnp.std(leaf), params
    )


def make(parts, **options):
    params, model = parts
    options = {"tokenizer": default_model.path(), "cache": CACHE, "max_model_len": 64} | options
    return few_programs(LLM.from_parts(model, params, progress=False, **options))


@pytest.fixture(scope="module")
def llm(parts):
    return make(parts)


@pytest.fixture(autouse=True)
def first_weights(request, parts):
    yield
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").update_weights(parts[0], version=0)


@pytest.fixture(scope="module")
def wanted(parts, changed):
    _, model = parts
    ids = make(parts).tokenizer.encode(PROMPT)
    made = {}
    for version, params in enumerate((parts[0], changed)):
        out = jaxkv.generate(params, model, [ids], sampling=GREEDY, eos_ids=model.config.eos_ids)
        made[version] = out.tokens[0, : int(out.lengths[0])].tolist()
    assert made[0] != made[1]
    return made


def test_parts_make_the_llm_of_their_directory_without_a_copy(llm, parts, one_layer):
    loaded = LLM(one_layer, dtype="float32", cache=CACHE, max_model_len=64, progress=False)
    assert (llm.eos_ids, llm.max_model_len) == (loaded.eos_ids, loaded.max_model_len)
    assert (llm.layout, llm.budget) == (loaded.layout, loaded.budget)
    assert llm.get_default_sampling_params() == loaded.get_default_sampling_params()
    mine, given = jax.tree.leaves(llm.params), jax.tree.leaves(parts[0])
    assert all(one is other for one, other in zip(mine, given, strict=True))


def test_parts_have_the_tokens_of_generate(llm, wanted):
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted[0]


def test_parts_without_a_tokenizer_take_token_ids(parts):
    bare = make(parts, tokenizer=None)
    assert bare.eos_ids == parts[1].config.eos_ids
    assert make(parts, tokenizer=None, eos_ids=[3, 3]).eos_ids == (3,)
    assert bare.requests([1, 2], GREEDY)[0].prompt == (1, 2)
    with pytest.raises(ValueError, match="tokenizer"):
        bare.requests(PROMPT, GREEDY)
    assert bare.get_default_sampling_params(max_tokens=3) == SamplingParams(max_tokens=3)


def test_the_tokenizers_end_comes_before_one_that_no_file_of_the_model_names(parts):
    params, model = parts
    named, assumed = (
        build_model(replace(model.config, eos_ids=(2,), assumed_eos=flag)) for flag in (False, True)
    )
    assert make((params, named)).eos_ids == (2,)
    assert make((params, assumed)).eos_ids == (0,)
    assert make((params, assumed), tokenizer=None).eos_ids == (2,)


def test_a_module_of_the_users_own_is_served_and_follows_its_training():
    module, later = (example.Transformer(nnx.Rngs(seed)) for seed in (0, 1))
    model = FlaxModel(module)
    served = few_programs(
        LLM.from_parts(
            model, model.params_of(module), cache=CACHE, max_model_len=32, progress=False
        )
    )
    for number, trained in enumerate((module, later, module), start=1):
        served.update_weights(model.params_of(trained))
        assert served.weight_version == number
        out = served.generate([[1, 2, 3]], GREEDY)[0]
        reference = jaxkv.generate(model.params_of(trained), model, [[1, 2, 3]], sampling=GREEDY)
        assert out.token_ids == reference.tokens[0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {}}, "it lacks"),
        ({"eos_ids": [10**9]}, "eos_ids"),
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"dtype": "float8"}, "dtype"),
        ({"max_modle_len": 3}, "max_model_len"),
    ],
    ids=lambda value: None,
)
def test_wrong_parts_are_refused(parts, options, message):
    params, model = parts
    given = {"model": model, "params": params, "cache": CACHE} | options
    with pytest.raises(ValueError, match=message):
        LLM.from_parts(given.pop("model"), given.pop("params"), progress=False, **given)


def test_a_name_is_no_model(parts, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="for a directory or a name use LLM"):
        LLM.from_parts("some/name", parts[0])


def test_outputs_tell_the_version_of_each_token(llm, changed, wanted):
    for version, params in ((0, None), ("step-7", changed)):
        if params is not None:
            assert llm.update_weights(params, version=version) == version
        out = llm.generate(PROMPT, GREEDY)[0]
        assert out.token_ids == wanted[int(params is not None)]
        assert out.weight_versions == [version] * len(out.token_ids)
    with pytest.raises(ValueError, match="version must be"):
        llm.update_weights(changed)


def test_an_open_stream_sees_an_update_at_its_next_step(llm, changed):
    pieces, compiled = [], 0
    for piece in llm.stream(PROMPT, GREEDY):
        pieces.append(piece)
        if len(pieces) == 3:
            compiled = compile_count()
            llm.update_weights(changed, version=1, requests="recompute")
    assert compile_count() == compiled
    versions = [piece.weight_version for piece in pieces if piece.token_id is not None]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    ids = [piece.token_id for piece in pieces if piece.token_id is not None]
    first = versions.index(1)
    prompt = [*llm.tokenizer.encode(PROMPT), *ids[:first]]
    out = jaxkv.generate(
        changed,
        llm.model,
        [prompt],
        sampling=SamplingParams(temperature=0.0, max_tokens=len(ids) - first),
        eos_ids=llm.eos_ids,
    )
    assert ids[first:] == out.tokens[0, : int(out.lengths[0])].tolist()


def device_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_sleep_gives_back_the_cache_to_the_byte_and_wake_up_takes_it_again(llm, wanted):
    llm.generate(PROMPT, GREEDY)
    awake, compiled = device_bytes(), compile_count()
    llm.sleep()
    assert awake - device_bytes() == llm.budget.bytes
    for call in (lambda: llm.generate(PROMPT), lambda: llm.score(PROMPT), lambda: llm.explain("a")):
        with pytest.raises(RuntimeError, match="sleeps"):
            call()
    with pytest.raises(RuntimeError, match="sleeps"):
        llm.warm_up(batch=1, prompt_tokens=8)
    llm.sleep()
    llm.wake_up()
    llm.wake_up()
    assert device_bytes() == awake
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted[0]
    assert compile_count() == compiled


def test_sleep_of_level_two_lets_go_of_the_weights(llm, changed, wanted):
    llm.update_weights(jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), changed))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(changed))
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted[1]
    awake = device_bytes()
    llm.sleep(level=2)
    assert awake - device_bytes() == llm.budget.bytes + size
    assert llm.params is None
    with pytest.raises(RuntimeError, match="update_weights first"):
        llm.wake_up()
    llm.update_weights(changed)
    llm.wake_up()
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted[1]
    with pytest.raises(ValueError, match="level"):
        llm.sleep(level=3)


@pytest.mark.parametrize("call", ["sleep", "update_weights"])
def test_a_request_that_ends_inside_a_call_is_delivered(llm, parts, wanted, call):
    """Its last token is in flight when the call begins, and no step follows the call."""

    async def users():
        async with AsyncLLM(llm) as served:
            loop, commands, calls = asyncio.get_running_loop(), served._loop, []
            options = {} if call == "sleep" else {"params": parts[0], "requests": "recompute"}

            def begin_when_last_is_in_flight():
                running = llm.engine.scheduler.running
                if not running or running[0].generated + running[0].pending < GREEDY.max_tokens:
                    commands.put_later(begin_when_last_is_in_flight)
                    return
                calls.append(
                    asyncio.run_coroutine_threadsafe(getattr(served, call)(**options), loop)
                )
                while commands._commands.empty():
                    time.sleep(0.001)

            answer = asyncio.create_task(served.generate(PROMPT, GREEDY))
            commands.put(begin_when_last_is_in_flight)
            assert (await asyncio.wait_for(answer, 60)).token_ids == wanted[0]
            await asyncio.wrap_future(calls[0])
            await served.wake_up()

    asyncio.run(asyncio.wait_for(users(), 240))


def test_a_served_llm_is_updated_and_sleeps_while_requests_wait(llm, changed, wanted):
    async def users():
        async with AsyncLLM(llm) as served:
            with pytest.raises(RuntimeError, match="AsyncLLM"):
                llm.update_weights(changed)
            assert (await served.generate(PROMPT, GREEDY)).token_ids == wanted[0]
            assert await served.update_weights(changed, version=1) == 1
            assert (await served.generate(PROMPT, GREEDY)).token_ids == wanted[1]
            with pytest.raises(ValueError, match="structure"):
                await served.update_weights({})
            stream = served.stream(PROMPT, GREEDY)
            pieces = [await anext(stream)]
            await served.sleep()
            with pytest.raises(RuntimeError, match="sleeps"):
                await served.generate("import os", GREEDY)
            await served.wake_up()
            pieces += [piece async for piece in stream]
            assert [piece.token_id for piece in pieces if piece.token_id is not None] == wanted[1]
        with pytest.raises(RuntimeError, match="closed"):
            await served.sleep()

    asyncio.run(asyncio.wait_for(users(), 240))
    assert llm.weight_version == 1


def test_a_call_that_a_sleeping_engine_refuses_ends_neither_it_nor_its_requests(
    llm, changed, wanted
):
    async def users():
        async with AsyncLLM(llm) as served:
            stream = served.stream(PROMPT, GREEDY)
            pieces = [await anext(stream)]
            await served.sleep(level=2)
            with pytest.raises(RuntimeError, match="sleeps"):
                await served.score(PROMPT)
            with pytest.raises(RuntimeError, match="update_weights"):
                await served.wake_up()
            with pytest.raises(ValueError, match="structure"):
                await served.update_weights({})
            await served.update_weights(changed)
            await served.wake_up()
            pieces += [piece async for piece in stream]
            assert len(pieces) == GREEDY.max_tokens
            assert (await served.generate(PROMPT, GREEDY)).token_ids == wanted[1]

    asyncio.run(asyncio.wait_for(users(), 240))
