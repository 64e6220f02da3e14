"""`LLM` under failures: lost caches, broken devices, interrupts, and streams that are dropped."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxkv import LLM, CacheConfig, SamplingParams
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["def add(", "import os\n", "class Node:\n    "]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return few_programs(
        LLM(
            one_layer_model(tmp_path_factory.mktemp("model")),
            dtype="float32",
            max_model_len=128,
            cache=CacheConfig(max_sequences=3, page_size=16),
            progress=False,
        )
    )


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    """Asserts after each test that only the prefix index holds pages, no request waits, and the records agree."""
    yield
    llm.engine.sequence_runner.allocator.check()
    llm.engine.prefix.check()
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert [group.used for group in stats.cache] == [0] * len(stats.cache)
    assert all(group.free + group.kept == group.total for group in stats.cache)


def test_an_error_at_the_host_read_costs_a_rebuild_and_no_answer(llm, monkeypatch):
    """An out-of-memory shows at the read; every request still gets its tokens, in the same call."""
    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    read, failures = jax.device_get, ["RESOURCE_EXHAUSTED: injected"]

    def fail_once(out):
        if failures:
            raise jax.errors.JaxRuntimeError(failures.pop())
        return read(out)

    before = llm.stats().recoveries
    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_get", fail_once)
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted
    assert llm.stats().recoveries == before + 1


def test_a_cache_that_is_lost_again_and_again_ends_the_call_but_not_the_next(llm, monkeypatch):
    """A new call begins with an empty cache."""
    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]

    def fail(out):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_get", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="injected"):
            llm.generate(PROMPTS, GREEDY)
    assert llm.engine.runner.owner.poisoned
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted


def test_a_broken_device_is_not_used_again(llm, monkeypatch):
    """Neither the next call nor a stream uses it."""

    def fail(out):
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: injected")

    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_get", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL"):
            llm.generate(PROMPTS, GREEDY)
    for again in (lambda: llm.generate(PROMPTS, GREEDY), lambda: next(llm.stream("x", GREEDY))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL"):
            again()
    assert llm.engine.runner.owner.poisoned
    # This one was not really broken.
    llm.engine.runner.owner.rebuild()


def test_a_stream_with_stop_strings_is_refused_at_the_call(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "_tokenizer", None)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.stream(PROMPTS[0], replace(GREEDY, stop="x"))


def test_one_failed_request_leaves_the_others_their_answers(llm, monkeypatch, caplog):
    """The log has the reason, once."""
    wish = replace(GREEDY, stop="never met")
    wanted = [output.token_ids for output in llm.generate(PROMPTS, wish)]
    add, broken = llm.engine.add, []

    def fail(token_id, *, may_stop=True):
        raise OverflowError("injected")

    def add_one_broken(samples, *, streamed=False):
        made = add(samples, streamed=streamed)
        if not broken:
            broken.append(made[0])
            monkeypatch.setattr(made[0].stream, "push", fail)
        return made

    monkeypatch.setattr(llm.engine, "add", add_one_broken)
    outputs = llm.generate(PROMPTS, wish)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == outputs[0].outputs[0].error == "OverflowError: injected"
    assert [output.token_ids for output in outputs[1:]] == wanted[1:]
    assert [output.error for output in outputs[1:]] == [None, None]
    assert sum("injected" in record.getMessage() for record in caplog.records) == 1


def test_a_request_whose_logits_are_not_finite_says_so_in_its_output_and_its_last_piece(
    llm, monkeypatch
):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, llm.engine.runner.params)
    monkeypatch.setattr(llm.engine.runner, "params", broken)
    output = llm.generate(PROMPTS[0], GREEDY)[0]
    assert (output.finish_reason, output.error) == ("error", "the model's logits were not finite")
    last = list(llm.stream(PROMPTS[0], GREEDY))[-1]
    assert (last.finish_reason, last.error) == ("error", "the model's logits were not finite")


def test_explain_knows_of_lost_and_rebuilt_caches(llm):
    prompt = list(range(2, 42))
    for lose in (
        llm.engine.runner.owner.rebuild,
        lambda: llm.engine.runner.owner.poison("injected"),
        lambda: (llm.engine.runner.owner.poison("injected"), llm.generate([[1]], GREEDY)),
    ):
        llm.generate([prompt], GREEDY)
        assert llm.explain(prompt).num_reused > 0
        lose()
        assert llm.explain(prompt).num_reused == 0


def test_a_stream_that_outlives_a_rebuild_is_computed_again_and_goes_on(llm):
    wanted = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    pieces = llm.stream(PROMPTS[0], GREEDY)
    first = next(pieces)
    llm.engine.runner.owner.rebuild()
    assert [first.token_id, *(piece.token_id for piece in pieces)] == wanted


def test_an_interrupt_in_the_middle_gives_everything_back(llm, monkeypatch):
    """Ctrl-C, more than once, while requests are queued, a step is sent or read, or all is cleared up.

    The fixture counts the pages afterwards.
    """
    wanted = llm.generate(PROMPTS[0], GREEDY)[0].token_ids

    def interrupt_after(calls, function):
        left = [None] * calls

        def run(*arguments, **options):
            if not left:
                raise KeyboardInterrupt
            left.pop()
            return function(*arguments, **options)

        return run

    for owner, name in (
        (llm.engine.runner, "program"),
        (llm.engine.runner, "read"),
        (llm.engine.sequence_runner.allocator, "reserve"),
        (llm.engine.scheduler, "add"),
    ):
        for calls in (0, 2):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, interrupt_after(calls, getattr(owner, name)))
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(PROMPTS, replace(GREEDY, n=2))
            assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == wanted
            assert (llm.stats().running, llm.stats().waiting) == (0, 0)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupt_after(0, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                list(llm.stream(PROMPTS[0], GREEDY))
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == wanted


def test_a_dropped_stream_frees_its_pages_even_if_never_started(llm):
    started, idle = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(started)
    del started, idle
