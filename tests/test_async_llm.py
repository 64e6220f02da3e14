"""`AsyncLLM`: concurrent callers get their own tokens, can leave at any time, and receive errors."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import get_type_hints

import pytest

from jaxkv import LLM, CacheConfig, SamplingParams
from jaxkv.async_llm import AsyncLLM
from jaxkv.config.sampling import MAX_STOP_STRINGS
from jaxkv.engine.request import Piece
from jaxkv.errors import CachePoisoned
from jaxkv.programs.manifest import compile_count
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["def add(", "import os\n", "class Node:\n    ", "def add(a, b", "for x in "]


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def llm(one_layer):
    return few_programs(
        LLM(
            one_layer,
            dtype="float32",
            max_model_len=64,
            cache=CacheConfig(max_sequences=2, page_size=16),
            progress=False,
        )
    )


@pytest.fixture(scope="module")
def wanted(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def in_service(llm, users):
    """Runs a coroutine with the served model, then checks that nothing is left behind."""

    async def serve():
        async with AsyncLLM(llm) as served:
            result = await asyncio.wait_for(users(served), 120)
            for _ in range(200):
                if not llm.engine.has_work:
                    break
                await asyncio.sleep(0.02)
            return result

    result = asyncio.run(serve())
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    llm.engine.sequence_runner.allocator.check()
    llm.engine.prefix.check()
    return result


async def collect(served, prompt, params=GREEDY, **options):
    return [piece async for piece in served.stream(prompt, params, **options)]


def test_concurrent_streams_have_the_tokens_of_generate(llm, wanted):
    async def users(served):
        return await asyncio.gather(*(collect(served, prompt) for prompt in PROMPTS))

    for pieces, tokens in zip(in_service(llm, users), wanted, strict=True):
        assert [piece.token_id for piece in pieces] == tokens
        assert "".join(piece.text for piece in pieces) == llm.tokenizer.decode(tokens)
        assert [piece.finish_reason for piece in pieces][-2:] == [None, "length"]


def test_samples_and_priorities_and_salts(llm, wanted):
    async def users(served):
        return await asyncio.gather(
            served.generate(PROMPTS[0], replace(GREEDY, n=3)),
            served.generate(PROMPTS[1], GREEDY, priority=-1, salt="one"),
            served.generate(PROMPTS[1], GREEDY, salt="two"),
        )

    samples, one, two = in_service(llm, users)
    assert [sample.token_ids for sample in samples.outputs] == [wanted[0]] * 3
    assert one.token_ids == two.token_ids == wanted[1]
    assert one.text == llm.tokenizer.decode(wanted[1])


def test_fields_of_sampling_params_and_names_of_vllm_are_understood(llm, wanted):
    async def users(served):
        with pytest.raises(ValueError, match=r"AsyncLLM\.generate has no option 'max_token'"):
            await served.generate(PROMPTS[0], max_token=3)
        with pytest.raises(ValueError, match="give one salt"):
            await served.generate({"prompt": "x", "cache_salt": "mine"}, cache_salt="yours")
        return (
            await served.generate(PROMPTS[0], sampling_params=GREEDY, cache_salt="mine"),
            await served.generate({"prompt": PROMPTS[0], "cache_salt": "mine"}, GREEDY),
            await collect(served, PROMPTS[0], None, temperature=0.0, max_tokens=12),
        )

    one, two, pieces = in_service(llm, users)
    assert one.token_ids == two.token_ids == [piece.token_id for piece in pieces] == wanted[0]
    assert one.prompt == PROMPTS[0]
    assert one.request_id != two.request_id


def test_whoever_leaves_takes_nothing_along(llm, wanted):
    """One loop is left early and one task is cancelled; the other requests go on."""

    async def leave(served):
        async for _ in served.stream(PROMPTS[1], GREEDY):
            break

    async def users(served):
        task = asyncio.create_task(served.generate(PROMPTS[2], GREEDY))
        stays = asyncio.create_task(collect(served, PROMPTS[0]))
        await leave(served)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await stays

    assert [piece.token_id for piece in in_service(llm, users)] == wanted[0]


def test_bad_requests_are_refused_and_the_service_goes_on(llm, wanted):
    async def users(served):
        with pytest.raises(ValueError, match="max_model_len is 64"):
            await served.generate([7] * 64, GREEDY)
        with pytest.raises(ValueError, match="one sample"):
            await collect(served, PROMPTS[0], SamplingParams(n=2))
        return await collect(served, PROMPTS[0])

    assert [piece.token_id for piece in in_service(llm, users)] == wanted[0]


@pytest.mark.parametrize(
    "options",
    [{"salt": "\ud800"}, {"salt": 7}, {"priority": None}, {"priority": True}, {"priority": 2**63}],
)
def test_bad_options_are_refused_and_the_neighbours_finish(llm, wanted, options):
    async def users(served):
        stays = asyncio.create_task(collect(served, PROMPTS[0]))
        # A TypeError is the test-time checker's, where the annotation alone refuses it.
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            await served.generate(PROMPTS[1], GREEDY, **options)
        return [await stays, await collect(served, PROMPTS[0], salt=b"\xff")]

    for pieces in in_service(llm, users):
        assert [piece.token_id for piece in pieces] == wanted[0]


def test_a_request_that_cannot_be_queued_fails_alone(llm, wanted, monkeypatch):
    add = llm.engine.add

    def refuse(samples, **options):
        if samples[0].priority == 13:
            raise TypeError("injected")
        return add(samples, **options)

    async def users(served):
        stays = asyncio.create_task(collect(served, PROMPTS[0]))
        with pytest.raises(TypeError, match="injected"):
            await served.generate(PROMPTS[1], GREEDY, priority=13)
        return await stays

    monkeypatch.setattr(llm.engine, "add", refuse)
    assert [piece.token_id for piece in in_service(llm, users)] == wanted[0]


def test_a_stream_that_is_closed_aborts_its_request(llm):
    assert get_type_hints(AsyncLLM.stream)["return"] == AsyncGenerator[Piece, None]

    async def users(served):
        async with aclosing(served.stream(PROMPTS[1], GREEDY)) as pieces:
            async for _ in pieces:
                break

    in_service(llm, users)


@pytest.mark.slow
def test_a_strict_model_serves_what_was_warmed_up_for_the_engine():
    """No stop string was in the warm-up, and yet nothing is compiled."""
    strict = LLM(
        dtype="float32",
        max_model_len=32,
        cache=CacheConfig(max_sequences=2, page_size=16),
        strict=True,
        progress=False,
    )
    strict.warm_up(batch=2, prompt_tokens=8, sampling=GREEDY)
    before = compile_count()

    async def users(served):
        return await asyncio.gather(*(served.generate(prompt, GREEDY) for prompt in PROMPTS[:2]))

    served = in_service(strict, users)
    assert [output.token_ids for output in strict.generate(PROMPTS[:2], GREEDY)] == [
        output.token_ids for output in served
    ]
    strict.generate(PROMPTS[:2], replace(GREEDY, stop="never met"))
    assert compile_count() == before


def test_a_failed_engine_tells_everybody(llm, monkeypatch):
    def fail():
        raise OSError("injected")

    async def users(served):
        monkeypatch.setattr(llm.engine, "step", fail)
        told = await asyncio.gather(
            collect(served, PROMPTS[0]), served.generate(PROMPTS[1]), return_exceptions=True
        )
        assert [type(error) for error in told] == [RuntimeError, RuntimeError]
        with pytest.raises(RuntimeError, match="failed or was closed") as later:
            await served.generate(PROMPTS[0])
        assert isinstance(later.value.__cause__, OSError)
        monkeypatch.undo()

    in_service(llm, users)


def test_an_engine_that_fails_while_it_accepts_requests_tells_them_too(llm, monkeypatch):
    """The one that it was accepting, those that were queued with it or later, and those that run.

    All of them are told although their aborts fail too.
    """
    add, abort = llm.engine.add, llm.engine.abort

    def fail(samples, **options):
        if samples[0].priority:
            raise CachePoisoned("injected")
        return add(samples, **options)

    def abort_and_fail(sample):
        abort(sample)
        raise OSError("injected")

    async def users(served):
        runs = asyncio.create_task(served.generate(PROMPTS[0], replace(GREEDY, max_tokens=50)))
        await asyncio.sleep(0.05)
        monkeypatch.setattr(llm.engine, "add", fail)
        monkeypatch.setattr(llm.engine, "abort", abort_and_fail)
        # The engine's thread waits here until all of them are queued.
        ready = threading.Event()
        held = asyncio.create_task(served.between_steps(ready.wait))
        queued = [
            asyncio.create_task(served.generate(PROMPTS[1], GREEDY, priority=priority))
            for priority in (1, 1, 0)
        ]
        await asyncio.sleep(0.2)
        ready.set()
        await held
        told = await asyncio.gather(runs, *queued, return_exceptions=True)
        assert [str(error) for error in told] == ["the engine has failed or was closed"] * 4
        assert {type(error.__cause__) for error in told} == {CachePoisoned}
        monkeypatch.undo()

    in_service(llm, users)
    assert not llm.lock.lent


def test_a_request_for_prompt_logprobs_survives_a_cache_that_was_lost_before_it(llm, wanted):
    scored = replace(GREEDY, prompt_logprobs=0)

    async def users(served):
        before = await served.generate(PROMPTS[0], scored)
        await served.between_steps(lambda: llm.engine.runner.owner.poison("injected"))
        return before, await served.generate(PROMPTS[0], scored)

    before, after = in_service(llm, users)
    assert after.token_ids == before.token_ids == wanted[0]
    assert after.prompt_logprobs == before.prompt_logprobs


def test_a_closed_service_says_so(llm):
    async def users():
        served = AsyncLLM(llm)
        waiting = asyncio.create_task(collect(served, PROMPTS[0]))
        await asyncio.sleep(0)
        await served.close()
        await served.close()
        with pytest.raises(RuntimeError, match="closed"):
            await served.generate(PROMPTS[0])
        with pytest.raises(RuntimeError, match="closed"):
            await waiting

    asyncio.run(users())
    llm.engine.sequence_runner.allocator.check()


def test_stop_strings_end_texts_before_them(llm):
    """In `generate`, in `stream` and for asynchronous users alike."""
    [whole] = llm.generate(PROMPTS[2], GREEDY)
    stop = whole.text[3:6]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=stop)

    async def users(served):
        return await served.generate(PROMPTS[2], params)

    for output in (llm.generate(PROMPTS[2], params)[0], in_service(llm, users)):
        assert output.text == whole.text.split(stop)[0]
        assert output.finish_reason == "stop"
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    pieces = list(llm.stream(PROMPTS[2], params))
    assert "".join(piece.text for piece in pieces) == whole.text.split(stop)[0]
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "stop", [7, ("",), ("x" * 257,), (b"x",), ("x",) * (MAX_STOP_STRINGS + 1), (None,)]
)
def test_stop_strings_out_of_range_are_refused_by_name(stop):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert hash(SamplingParams(stop=["a", "b"])) == hash(SamplingParams(stop=("a", "b")))


def test_an_llm_that_is_served_runs_nothing_else(llm):
    """Two threads would give one cache away twice."""

    async def users():
        async with AsyncLLM(llm) as served:
            for use in (
                lambda: llm.generate(PROMPTS[0], GREEDY),
                lambda: llm.stream(PROMPTS[0], GREEDY),
                lambda: llm.score([1, 2, 3]),
                lambda: llm.warm_up(batch=1, prompt_tokens=4),
                lambda: AsyncLLM(llm),
            ):
                with pytest.raises(RuntimeError, match="an AsyncLLM serves this LLM"):
                    use()
            return await served.generate(PROMPTS[0], GREEDY)

    assert asyncio.run(users()).token_ids == llm.generate(PROMPTS[0], GREEDY)[0].token_ids
