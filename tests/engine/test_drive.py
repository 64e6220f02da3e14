"""Whole requests over the engine: usage and timing are counted once, also after preemptions, failures and aborts."""

import threading

import pytest

from jaxkv.engine.drive import output_of, serve_all, serve_stream
from jaxkv.engine.engine_lock import EngineLock
from jaxkv.engine.request_state import FINISHED
from jaxkv.errors import ProgramRefused
from tests.engine.engines import TOKENIZER, assert_idle, engine_for, oracle, request_of

REQUESTS = [request_of([7, at, 3 * at % 61, 9] * 4, max_tokens=24) for at in range(4)]


def test_whoever_gives_way_says_so_and_counts_its_tokens_once():
    engine = engine_for(free_pages=10, prefix_cache=False)
    outputs = [
        output_of(samples, TOKENIZER)
        for samples in serve_all(engine, [[request] for request in REQUESTS])
    ]
    assert [tuple(output.token_ids) for output in outputs] == [
        wanted.token_ids for wanted in oracle(REQUESTS)
    ]
    assert sum(output.usage.preemptions for output in outputs) > 0
    for output in outputs:
        assert (output.usage.prompt_tokens, output.usage.cached_tokens) == (16, 0)
        assert output.usage.output_tokens == len(output.token_ids)
        # The first admission and the first token count, not those after a preemption.
        times = output.timing
        assert times.arrived <= times.admitted <= times.first_token <= times.finished
    assert_idle(engine)


def test_a_stream_goes_on_while_others_are_served_and_is_not_cleared_up_with_them():
    engine, lock = engine_for(), EngineLock()
    pieces = serve_stream(lock, engine, REQUESTS[0])
    tokens = [next(pieces).token_id]
    [[other]] = serve_all(engine, [[REQUESTS[1]]])
    tokens += [piece.token_id for piece in pieces]
    wanted = oracle(REQUESTS)
    assert (tuple(tokens), tuple(other.token_ids)) == (wanted[0].token_ids, wanted[1].token_ids)
    assert_idle(engine)


@pytest.mark.parametrize("use", ["none", "held", "lent", "closed"])
def test_a_complete_stream_ends_whatever_others_do_with_the_engine(use, monkeypatch):
    engine, lock, checks = engine_for(), EngineLock(), []
    monkeypatch.setattr(engine, "check_if_idle", lambda: checks.append(use))
    begun, end = threading.Event(), threading.Event()

    def hold():
        with lock.held():
            begun.set()
            end.wait(60)

    pieces = serve_stream(lock, engine, REQUESTS[0])
    for piece in pieces:
        if piece.finish_reason is not None:
            break
    holder = threading.Thread(target=hold, daemon=True)
    if use == "held":
        holder.start()
        begun.wait(10)
    elif use != "none":
        {"lent": lock.lend, "closed": lock.close}[use]()
    assert list(pieces) == []
    assert checks == (["none"] if use == "none" else [])
    end.set()


def test_a_request_that_can_never_be_served_leaves_nothing_of_the_others_behind():
    engine = engine_for()
    with pytest.raises(ValueError, match="needs room for"):
        serve_all(engine, [[REQUESTS[0]], [request_of([1] * 60, max_tokens=60)]])
    assert_idle(engine)


def test_a_program_that_is_refused_ends_a_stream_with_the_reason(monkeypatch):
    engine = engine_for()
    monkeypatch.setattr(engine.runner, "fit", lambda declared: declared)

    def refuse(declared):
        raise ProgramRefused("injected")

    monkeypatch.setattr(engine.runner, "program", refuse)
    with pytest.raises(ProgramRefused, match="injected"):
        list(serve_stream(EngineLock(), engine, REQUESTS[0]))
    assert_idle(engine)


def test_ended_prompts_are_handed_over_in_order_while_others_run():
    engine = engine_for()
    requests = [
        [request_of([5, at, 9], max_tokens=count)] for at, count in enumerate((3, 12, 2, 2, 24))
    ]
    given, running = [], []

    def ended(samples):
        given.append([one.token_ids for one in samples])
        running.append(len(engine.scheduler.running))
        assert all(one.status == FINISHED for one in samples)

    made = serve_all(engine, requests, ended=ended)
    assert given == [[one.token_ids for one in samples] for samples in made]
    assert [len(tokens) for [tokens] in given] == [3, 12, 2, 2, 24]
    # The third and the fourth wait for the second, though they ended before it.
    assert running == [2, 1, 1, 1, 0]
    assert_idle(engine)
