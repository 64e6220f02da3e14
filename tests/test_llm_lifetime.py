"""The end of an `LLM`: memory that `close` and garbage collection free, later calls, and forked children."""

import asyncio
import functools
import gc
import logging
import os
import select
import signal
import weakref

import jax
import pytest

from jaxkv import LLM, AsyncLLM, CacheConfig, SamplingParams
from jaxkv.engine import engine_lock as turns
from jaxkv.programs import compile as compilation
from jaxkv.programs import manifest as programs
from jaxkv.programs.lowering import trace
from tests.one_layer import one_layer_model

PROMPT = "def add("
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes an `LLM` of one layer."""
    model = one_layer_model(tmp_path_factory.mktemp("models") / "one")
    cache = CacheConfig(max_sequences=2, page_size=16, host_bytes=2**20)
    options = {"dtype": "float32", "max_model_len": 64, "cache": cache, "progress": False}
    return functools.partial(LLM, model, **options)


def device_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_dropped_llm_leaves_neither_programs_nor_traces_nor_arrays(make, monkeypatch):
    traces = []

    def spied(name, lowering):
        traced = trace(name, lowering)
        traces.append(weakref.ref(traced.jaxpr))
        return traced

    monkeypatch.setattr(compilation, "trace", spied)
    before = device_bytes()
    llm = make()
    llm.generate([PROMPT, "import os"], GREEDY)
    programs = [weakref.ref(program) for program in llm.engine.runner.programs.manifest()]
    held = [
        weakref.ref(part) for part in (llm, llm.engine, llm.engine.sequence_runner, llm.tokenizer)
    ]
    assert programs
    assert device_bytes() > before
    del llm
    assert device_bytes() == before
    assert {part() for part in held} == {None}
    assert {program() for program in programs} == {None}
    assert {alive() for alive in traces} == {None}


def test_close_frees_the_devices_memory_at_once_while_the_llm_is_referred_to(make):
    before = device_bytes()
    llm = make()
    llm.generate(PROMPT, GREEDY)
    stream = llm.stream("import os", SamplingParams(temperature=0.0, max_tokens=32))
    next(stream)
    cache = llm.engine.runner.owner.handle().cache
    gc.disable()
    try:
        llm.close()
        left = sum(array.nbytes for array in jax.live_arrays())
    finally:
        gc.enable()
    assert left <= before
    assert all(array.is_deleted() for array in cache.arrays)
    assert llm.engine.runner.programs.manifest() == ()
    assert list(stream)[-1].finish_reason == "abort"


def test_close_frees_the_memory_of_an_llm_whose_program_could_not_be_compiled(
    make, monkeypatch, caplog
):
    # pytest's log records would refer to the errors, whose tracebacks refer to the parameters.
    caplog.set_level(logging.CRITICAL, logger="jaxkv")
    before = device_bytes()
    llm = make()

    def fail(name, lowering):
        raise jax.errors.JaxRuntimeError(f"INTERNAL: {name} of {len(lowering.arguments)} arguments")

    monkeypatch.setattr(programs, "Build", fail)
    assert llm.generate(PROMPT, GREEDY)[0].finish_reason == "error"
    assert device_bytes() > before
    llm.close()
    assert device_bytes() <= before


def test_a_closed_llm_refuses_every_use_and_is_closed_once(make):
    with make(strict=True) as llm:
        llm.warm_up(batch=1, prompt_tokens=8, sampling=GREEDY)
        llm.generate(PROMPT, GREEDY)
    llm.close()
    messages = [{"role": "user", "content": "hi"}]
    for use in (
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: llm.stream(PROMPT, GREEDY),
        lambda: llm.score(PROMPT),
        lambda: llm.explain(PROMPT),
        lambda: llm.chat_prompt(messages),
        lambda: llm.warm_up(batch=1, prompt_tokens=8),
        llm.stats,
        lambda: AsyncLLM(llm),
    ):
        with pytest.raises(RuntimeError, match="this LLM was closed"):
            use()


def test_an_llm_that_is_served_is_closed_after_its_service(make):
    llm = make()

    async def serve():
        async with AsyncLLM(llm):
            with pytest.raises(RuntimeError, match="AsyncLLM serves this LLM"):
                llm.close()

    asyncio.run(serve())
    llm.close()
    with pytest.raises(RuntimeError, match="was closed"):
        llm.generate(PROMPT, GREEDY)


def told_in_a_forked_child(use):
    """Returns the message of the exception of `use` in a forked child; `None` if it does not end within a minute."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use()
            told = "nothing was refused"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], 60)
        return os.read(reading, 65536).decode() if ready else None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


@pytest.mark.filterwarnings("ignore:.*fork", "ignore:.*multi-threaded")
def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(make, monkeypatch):
    monkeypatch.setattr(turns, "_first_process", [])
    llm = make()
    wanted = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    for use in (
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: list(stream),
        lambda: llm.chat_prompt([{"role": "user", "content": "hi"}]),
        lambda: AsyncLLM(llm),
        llm.stats,
        make,
    ):
        told = told_in_a_forked_child(use)
        assert told is not None
        assert told.startswith("RuntimeError: process ")
        assert f"was forked from process {os.getpid()}, which had made an LLM" in told
    assert told_in_a_forked_child(llm.close) == "nothing was refused"
    assert told_in_a_forked_child(stream.close) == "nothing was refused"
    list(stream)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == wanted


@pytest.mark.filterwarnings("ignore:.*fork", "ignore:.*multi-threaded")
def test_a_request_to_a_service_of_the_parent_is_refused_in_a_forked_child(make):
    served = AsyncLLM(make())

    def use():
        asyncio.run(served.generate(PROMPT, GREEDY))

    told = told_in_a_forked_child(use)
    assert told is not None
    assert "was forked from" in told
    assert told_in_a_forked_child(lambda: asyncio.run(served.close())) == "nothing was refused"
    asyncio.run(served.close())
