"""A real engine process: its tokens are those of an `LLM`, and neither process outlives the other."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
from dataclasses import replace

import msgspec
import pytest
from jax.errors import JaxRuntimeError

from jaxkv import (
    LLM,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    StructuredOutputs,
    default_model,
)
from jaxkv.errors import CachePoisoned, CorruptBooks
from jaxkv.serve import engine_program, exit_codes
from jaxkv.serve.engine_client import EngineLost, RequestRefused
from jaxkv.serve.engine_process import EngineProcess
from jaxkv.serve.generation import generate
from jaxkv.serve.inbox import Inbox
from jaxkv.serve.warm_samplings import WARM_SAMPLINGS
from jaxkv.serve.wire import AskStats, Start, frame
from jaxkv.text.tokenizer import load_tokenizer
from tests.one_layer import one_layer_model
from tests.weights.adapter_files import save_adapter

CACHE = {"max_sequences": 2, "page_size": 16}
PROCESSORS = {"digest": "tests.sampling.processors:digest"}
START = Start(dtype="float32", max_model_len=64, cache=CACHE, logits_processors=PROCESSORS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n\n"])
# Greedy too: the process compiles other programs for requests that draw.
ENDLESS = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
PROMPTS = ["def add(", "import os\n", "class Node:\n    "]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def read_all(call):
    while await call.arrivals():
        pass


async def started(start=START):
    process = EngineProcess(start)
    process.client.start()
    await process.client.ready()
    return process


@pytest.mark.slow
def test_a_served_adapter_gives_the_tokens_of_an_llm_with_it(tmp_path):
    shapes = {
        "model.layers.0.self_attn.q_proj": (256, 256),
        "model.layers.3.mlp.down_proj": (256, 576),
    }
    save_adapter(tmp_path / "sql", shapes, size=0.3)
    llm = LLM(dtype="float32", max_model_len=64, cache=CacheConfig(**CACHE), lora=True)
    llm.add_lora("sql", tmp_path / "sql")
    ids = llm.tokenizer.encode("def add(")
    sampling = [replace(GREEDY, stop=(), lora=name) for name in (None, "sql")]
    wanted = [out.token_ids for out in llm.generate([ids, ids], sampling)]
    assert wanted[0] != wanted[1]
    warm = ((2, 16, ("greedy",)),)
    room = {"max_adapters": 1, "max_rank": 8}
    changes = {"lora": room, "lora_modules": {"sql": str(tmp_path / "sql")}, "warm_up": warm}

    async def test():
        process = await started(msgspec.structs.replace(START, **changes))
        client = process.client

        async def tokens(params):
            made = generate(client, None, ids, params)
            found = []
            while new := await made.deltas():
                found += new
            return [token for delta in found for token in delta.ids]

        assert await asyncio.gather(*map(tokens, sampling)) == wanted
        with pytest.raises(RequestRefused, match="no adapter 'other' is loaded; loaded are: 'sql'"):
            await client.submit(ids, replace(sampling[0], lora="other")).arrivals()
        await process.end()

    asyncio.run(test())


def test_a_served_model_gives_the_texts_of_an_llm_and_ends_with_its_server(tmp_path):
    folder = one_layer_model(tmp_path / "model")
    # Few programs for each process to compile; those of other engines are in tests/serve/test_real_server.py.
    engine = {"pinned_shapes": True, "token_budget": 64}
    options = {"cache": CacheConfig(**CACHE), "engine": EngineConfig(**engine)}
    llm = LLM(folder, dtype="float32", max_model_len=64, progress=False, **options)
    wanted = llm.generate(PROMPTS, GREEDY)

    async def test():
        process = await started(msgspec.structs.replace(START, model=str(folder), engine=engine))
        client = process.client
        tokenizer = load_tokenizer(client.facts.directory)
        frames = []
        client.on_step = frames.append

        async def text(prompt, params=GREEDY):
            made = generate(client, tokenizer, tokenizer.encode(prompt), params)
            found = []
            while new := await made.deltas():
                found += new
            return "".join(d.text for d in found), found[-1].finish_reason, found[-1].stop_reason

        got = await asyncio.gather(*map(text, PROMPTS))
        assert got == [(out.text, out.finish_reason, out.stop_reason) for out in wanted]
        # One frame has the tokens of all requests of a step.
        assert len(frames) <= (await client.stats())["steps"]
        assert max(len(each.tokens) for each in frames) > 1
        choice = replace(GREEDY, structured_outputs=StructuredOutputs(choice=["fine"]))
        assert (await text("x", choice))[:2] == ("fine", "stop")
        wrong = replace(GREEDY, stop=(), structured_outputs=StructuredOutputs(regex="(("))
        with pytest.raises(RequestRefused, match="unclosed"):
            await client.submit([1] * 8, wrong).arrivals()
        other = SamplingParams(logits_processors={"other": {}})
        with pytest.raises(
            RequestRefused, match=r"'other'.* not registered; registered are: digest"
        ):
            await client.submit([1] * 8, other).arrivals()
        with pytest.raises(RequestRefused, match="max_model_len"):
            await client.submit([1] * 64, SamplingParams()).arrivals()
        left = client.submit([1] * 8, ENDLESS)
        await left.arrivals()
        left.abort()
        # Aborts of calls and samples that have ended, or never were, change nothing.
        for number, sample in ((0, None), (0, 7), (10**6, None)):
            client.end(number, sample, done=True)
        stats = await client.stats()
        assert stats["running"] == stats["waiting"] == 0
        assert all(group["used"] == 0 for group in stats["cache"])
        assert "maps" not in stats
        seen = (await client.stats(pages=True))["maps"]
        assert [sum(group["counts"]) for group in seen] == [one["total"] for one in stats["cache"]]
        os.kill(process._process.pid, signal.SIGINT)
        os.kill(process._process.pid, signal.SIGTERM)
        assert (await client.stats())["running"] == 0
        call = client.submit([1] * 8, ENDLESS)
        await call.arrivals()
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost):
            await read_all(call)
        await process.end()
        assert not alive(process._process.pid)

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_sampling_defaults_are_those_of_the_model_s_file_if_wanted(tmp_path, wanted):
    folder = shutil.copytree(default_model.path(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')

    async def test():
        process = await started(
            msgspec.structs.replace(START, model=str(folder), sampling_defaults=wanted)
        )
        facts = process.client.facts
        assert facts.sampling_defaults == ({"temperature": 0.25, "top_k": 7} if wanted else {})
        await process.end()

    asyncio.run(asyncio.wait_for(test(), 120))


# tests/serve/test_server.py has an engine that is refused, which ends the server with the engine's words, and
# tests/programs/test_bundle.py such a folder.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "reason"),
    [("model", "config.json"), ("programs", "holds no bundle of programs")],
)
def test_what_does_not_load_is_refused_with_its_reason(tmp_path, option, reason):
    async def test():
        process = EngineProcess(Start(**{option: str(tmp_path)}))
        process.client.start()
        with pytest.raises(EngineLost):
            await process.client.ready()
        assert process.client.exit_code == exit_codes.REFUSED
        assert reason in process.client.last_words
        assert await process.end() == exit_codes.REFUSED

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_parent_that_ends_while_the_model_loads_ends_the_process_whatever_it_sent(monkeypatch):
    ended, released = threading.Event(), threading.Event()

    def end(code):
        ended.set()
        released.wait(30)

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = socket.socketpair()
    with contextlib.closing(Inbox(theirs)) as inbox:
        over = engine_program._end_with(inbox)
        ours.sendall(frame(AskStats(1)))
        assert not ended.wait(0.05)
        ours.close()
        assert ended.wait(30)
        over()
        released.set()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"), exit_codes.DEVICE_BROKEN),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), exit_codes.OUT_OF_MEMORY),
        (CachePoisoned("the cache was lost by another user of it"), exit_codes.OUT_OF_MEMORY),
        (CorruptBooks("page 3 has two owners"), exit_codes.FAILED),
    ],
)
def test_the_exit_code_tells_what_ended_the_engine(error, code):
    assert engine_program.exit_code_of(error) == code


def test_a_lost_cache_on_a_broken_device_is_a_broken_device():
    error = CachePoisoned("a step failed")
    error.__cause__ = JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert engine_program.exit_code_of(error) == exit_codes.DEVICE_BROKEN


@pytest.mark.slow
def test_a_warmed_up_engine_compiles_nothing_for_requests_of_the_size():
    sizes = {"dtype": "float32", "max_model_len": 64, "cache": CACHE}
    sizes |= {"warm_up": ((2, 16, tuple(WARM_SAMPLINGS)),)}
    sizes |= {"logits_processors": {"mine": "tests.sampling.processors:allowed_range"}}
    sampling = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"top_p": 0.5, "seed": 4}]
    sampling += [each | {"logits_processors": {"mine": {"low": 9}}} for each in sampling]

    async def test():
        process = await started(Start(**sizes))
        before = (await process.client.stats())["programs"]
        assert before > 0
        await asyncio.gather(
            *(
                read_all(process.client.submit([7] * 16, SamplingParams(max_tokens=48, **given)))
                for given in sampling
            )
        )
        assert (await process.client.stats())["programs"] == before
        await process.end()

    asyncio.run(asyncio.wait_for(test(), 600))


@pytest.mark.slow
def test_an_engine_that_warms_up_in_the_background_serves_and_then_has_all_programs():
    sizes = {"dtype": "float32", "max_model_len": 64, "cache": CACHE | {"max_sequences": 8}}
    sizes |= {"warm_up": ((8, 40, ("greedy", "drawn")),), "warm_up_in_background": True}
    cache = CacheConfig(**CACHE | {"max_sequences": 8})
    llm = LLM(dtype="float32", max_model_len=64, cache=cache, progress=False)
    greedy = replace(GREEDY, stop=())
    [wanted] = llm.generate([[7] * 16], greedy)
    assert llm.warm_up(batch=8, prompt_tokens=40, sampling=greedy).programs > 3

    async def test():
        process = await started(Start(**sizes))
        before = await process.client.stats()
        assert before["programs"] > 0
        for _ in range(2):
            made = generate(process.client, None, [7] * 16, greedy)
            found = []
            while new := await made.deltas():
                found += [token for delta in new for token in delta.ids]
            assert tuple(found) == tuple(wanted.token_ids)
            while (await process.client.stats())["programs_pending"]:
                await asyncio.sleep(0.1)
        after = await process.client.stats()
        assert after["programs"] > before["programs"]
        assert after["compiled_late"] == 0
        await process.end()

    asyncio.run(asyncio.wait_for(test(), 600))
