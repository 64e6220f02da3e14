"""Engines whose prefixes go through the host: the oracle's tokens all the same, whatever fails; A-17, S4-17..21.

The device's pool is so small that nearly every prefix that comes back does so from the host.
"""

import logging
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache.accounts import PageCopy
from jaxkv.config import CacheConfig
from jaxkv.engine import host_memory, host_transfers
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_config import EngineConfig
from jaxkv.engine.host_memory import HostMemory
from jaxkv.engine.host_programs import SWAP_IN, SWAP_OUT, declare_swaps
from jaxkv.engine.host_transfers import HostTransfers
from jaxkv.engine.stats import collect_stats
from jaxkv.engine.warm_up import declare_served
from jaxkv.errors import CachePoisoned
from jaxkv.plan import explain_plan
from tests.engine import hybrid
from tests.engine.engines import (
    LONGEST,
    NOBODY,
    PAGE,
    ROWS,
    TOKENIZER,
    VOCAB,
    assert_equal,
    assert_idle,
    executor_for,
    keep_junk,
    oracle,
    request_of,
)

MUCH = 2**22


def engine_for(*, free_pages=8, host_bytes=MUCH, **config):
    """Returns an engine with a tier on the host; of each group all but `free_pages` pages are somebody else's."""
    executor = executor_for()
    executor.host_bytes = host_bytes
    executor.accounts.open(NOBODY)
    executor.accounts.reserve(NOBODY, (ROWS * LONGEST // PAGE - free_pages) * PAGE)
    engine = Engine(executor, TOKENIZER, EngineConfig(**{"token_budget": 16} | config))
    # Two programs serve every test here.
    shapes = engine.shapes
    shapes.decode_rows, shapes.token_buckets, shapes.lengths = (ROWS,), (16,), (LONGEST,)
    engine.scheduler._fill = lambda least, most: most
    keep_junk(engine)
    return engine


def prompts_of(seed, *, beginnings=4, rounds=2, shared=40):
    """Returns prompts that begin alike in turns, so that each beginning is pushed out before it is asked for again."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(0, VOCAB, shared).tolist() for _ in range(beginnings)]
    return [head + draw.integers(0, VOCAB, 5).tolist() for _ in range(rounds) for head in heads]


def serve(engine, prompts, **params):
    """Serves prompts one after the other, checks the books after each, and then the answers."""
    params = {"max_tokens": 4} | params
    requests = [request_of(prompt, **params) for prompt in prompts]
    made = []
    for request in requests:
        made += engine.add([request])
        engine.run(made[-1:])
        check(engine)
    assert_equal(made, oracle(requests))
    return made


def check(engine):
    engine.executor.accounts.check()
    engine.prefix.check()
    if engine.host is not None:
        engine.host.tier.check()


def cached(made):
    return [one.cached for one in made]


def test_prefixes_come_back_from_the_host_and_tokens_are_the_oracles():
    engine = engine_for()
    made = serve(engine, prompts_of(0, rounds=3))
    assert cached(made) == [0] * 4 + [40] * 8
    stats = collect_stats(engine)
    assert stats.host_cache == "pinned_host"
    assert (stats.host.hits, stats.host.tokens_read, stats.host.failures) == (8, 320, 0)
    assert stats.host.used_bytes <= stats.host.limit_bytes == MUCH
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_get_the_oracles_tokens(seed):
    """Reliability B1 under load: arrivals at random, preemptions, and a host that forgets too."""
    engine = engine_for(free_pages=14, host_bytes=12_000)
    draw = np.random.default_rng(seed)
    prompts = prompts_of(seed, beginnings=3, rounds=5, shared=24)
    requests = [request_of(prompt, max_tokens=6) for prompt in draw.permutation(prompts).tolist()]
    waiting, made = list(requests), []
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), int(draw.integers(0, 3)))):
            made += engine.add([waiting.pop(0)])
        engine.step()
        check(engine)
    assert_equal(made, oracle(requests))
    assert engine.host.stats.hits >= 2
    assert engine.host.stats.evictions > 0
    assert_idle(engine)


def test_a_hybrid_models_states_come_back_with_their_pages():
    engine = hybrid.engine_of(
        page=32, longest=192, budget=128, tokens=128, pages=5, checkpoints=2, host_bytes=2**24
    )
    texts = hybrid.texts(3, 80, 80, 80)
    ends = hybrid.texts(4, 7, 7, 7)
    prompts = [text + end for text, end in zip(texts, ends, strict=True)]
    made = [hybrid.run(engine, prompt)[0] for prompt in (*texts, *prompts)]
    assert cached(made) == [0, 0, 0, 80, 80, 80]
    engine.host.tier.check()
    assert engine.host.stats.hits == 3
    moved = {move.group for one in engine.host.transfers.transfers for move in one.moves}
    assert moved == {"gqa", "mamba2"}
    hybrid.assert_same(made, hybrid.uncached(engine, *texts, *prompts))
    assert engine.host.stats.hits == 3
    assert_idle(engine)


def held_up(engine, monkeypatch):
    """Makes nothing come back until the list that is returned is emptied."""
    advance, held = HostTransfers.advance, [True]
    monkeypatch.setattr(
        HostTransfers, "advance", lambda *a, **k: False if held else advance(*a, **k)
    )
    return held


def waits_for_host(engine, monkeypatch, *, output=12):
    """Returns one that generates and one that waits for its prefix, which comes when the list is emptied."""
    prompts = prompts_of(5, beginnings=3, rounds=1, shared=24)
    serve(engine, prompts)
    held = held_up(engine, monkeypatch)
    [other] = engine.add([request_of(prompts[2][:5], max_tokens=output)])
    engine.step()
    [one] = engine.add([request_of(prompts[0])])
    engine.step()
    assert engine.host.fetches.under_way == 1
    return other, one, held


def test_others_run_on_while_one_waits_for_its_prefix(monkeypatch):
    engine = engine_for()
    other, one, held = waits_for_host(engine, monkeypatch)
    before = other.generated
    for _ in range(5):
        engine.step()
        check(engine)
    assert other.generated >= before + 4
    assert (one.generated, one.status) == (0, "waiting")
    held.clear()
    engine.run([one, other])
    assert one.cached == 24
    assert_equal([one, other], oracle([one.request, other.request]))
    assert_idle(engine)


def test_a_request_that_is_aborted_while_its_prefix_comes_leaves_nothing(monkeypatch):
    engine = engine_for()
    other, one, held = waits_for_host(engine, monkeypatch)
    engine.abort(one)
    assert engine.host.fetches.under_way == 0
    check(engine)
    held.clear()
    engine.run([other])
    assert_equal([other], oracle([other.request]))
    assert all(entry.pins == 0 for entry in engine.host.tier._entries.values())
    assert_idle(engine)


def test_whoever_runs_takes_the_places_of_what_comes(monkeypatch):
    engine = engine_for(free_pages=6)
    other, one, held = waits_for_host(engine, monkeypatch, output=36)
    given = []
    give_way = engine.host.fetches.give_way
    engine.host.fetches.give_way = lambda: given.append(give_way()) or given[-1]
    engine.run([other])
    assert True in given
    assert other.preemptions == 0
    held.clear()
    engine.run([one])
    assert one.cached == 24
    assert_equal([one, other], oracle([one.request, other.request]))
    assert_idle(engine)


def fails(monkeypatch, owner, name, error, *, times=1, when=lambda *_: True):
    """Makes a method fail some times."""
    method, left = getattr(owner, name), [times]

    def failing(*args, **kwargs):
        if left[0] and when(*args):
            left[0] -= 1
            raise error
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return left


def _is(kind):
    return lambda engine, declared, *_: declared.kind == kind


FAULTS = {
    "reading out": (None, "look", _is(SWAP_OUT)),
    "writing in": (None, "update", _is(SWAP_IN)),
    "sending": (HostMemory, "send", lambda *_: True),
    "settling": (HostMemory, "settle", lambda *_: True),
    "bringing": (HostMemory, "bring", lambda *_: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transfer_that_fails_costs_only_its_prefix(fault, monkeypatch, caplog):
    """S4-17, S4-20: recorded on the transfer, the prefix is a miss, and the answer is right."""
    engine = engine_for()
    owner, name, when = FAULTS[fault]
    left = fails(
        monkeypatch,
        owner or type(engine.executor),
        name,
        # Not for want of memory: then the tier would keep to the bytes that it had by then, which is a matter of time.
        RuntimeError("gone"),
        when=when,
    )
    with caplog.at_level(logging.WARNING):
        made = serve(engine, prompts_of(1))
    assert left == [0]
    assert engine.host.stats.failures == 1
    errors = [one.error for one in engine.host.transfers.transfers if one.error is not None]
    assert [str(error) for error in errors] == ["gone"]
    assert sum("the host are lost" in record.message for record in caplog.records) == 1
    assert cached(made)[4:].count(40) == 3
    assert collect_stats(engine).host_cache == "pinned_host"
    assert_idle(engine)


def test_transfers_that_fail_again_and_again_end_the_tier(monkeypatch, caplog):
    engine = engine_for()
    fails(monkeypatch, HostMemory, "send", RuntimeError("gone"), times=10**6)
    with caplog.at_level(logging.WARNING):
        made = serve(engine, prompts_of(1))
    told = collect_stats(engine)
    assert told.host_cache == "disabled: 3 transfers in a row failed, the last with: gone"
    assert told.host.used_bytes == 0
    assert cached(made) == [0] * 8
    assert sum("go to the host no more" in record.message for record in caplog.records) == 1
    assert engine.prefix.explain([1, 2]).num_with_host is None
    assert_idle(engine)


def test_a_tier_that_ends_while_a_prefix_is_written_costs_its_prefixes_and_nothing_else(
    monkeypatch,
):
    # S4-20: that transfers failed too often is noticed before the very program that writes what has come.
    engine = engine_for()
    other, one, held = waits_for_host(engine, monkeypatch)
    monkeypatch.setattr(host_transfers, "is_ready", lambda units: True)
    engine.host.transfers.why_hopeless = lambda: "a test"
    held.clear()
    engine.run([one, other])
    assert engine.host.kind == "disabled: a test"
    assert engine.host.fetches.under_way == one.cached == 0
    assert_equal([one, other], oracle([one.request, other.request]))
    assert_idle(engine)


def test_what_is_on_the_host_outlives_a_lost_cache():
    engine = engine_for()
    prompts = prompts_of(2)
    serve(engine, prompts[:4])
    engine.executor.owner.poison("a test")
    made = serve(engine, prompts[4:])
    # The others were on the device alone, at least in part.
    assert cached(made)[:2] == [40, 40]
    assert engine.recoveries == 1
    assert_idle(engine)


def test_a_cache_that_is_lost_while_a_prefix_is_written_is_replaced(monkeypatch):
    engine = engine_for()

    def poison(executor, declared, *_):
        if declared.kind == SWAP_IN:
            executor.owner.poison("the write failed")
            return True
        return False

    prompts = prompts_of(2)
    serve(engine, prompts[:4])
    left = fails(monkeypatch, type(engine.executor), "update", CachePoisoned("lost"), when=poison)
    made = serve(engine, prompts[4:])
    assert left == [0]
    assert engine.recoveries == 1
    assert cached(made)[:2] == [40, 40]
    assert_idle(engine)


def test_a_step_that_was_lost_sends_nothing_false_to_the_host(monkeypatch):
    engine = engine_for()
    prompts = prompts_of(3)
    serve(engine, prompts[:2])
    read, failed = type(engine.executor).read, []

    def lose(executor, out):
        if not failed:
            failed.append(True)
            executor.owner.poison("a step failed while it ran")
            raise host_failure()
        return read(executor, out)

    monkeypatch.setattr(type(engine.executor), "read", lose)
    serve(engine, prompts[2:])
    assert engine.recoveries == 1
    assert_idle(engine)


def host_failure():
    import jax

    return jax.errors.JaxRuntimeError("INTERNAL: lost")


def test_a_host_too_small_for_a_prefix_is_no_help_and_no_harm():
    engine = engine_for(host_bytes=3000)
    made = serve(engine, prompts_of(4))
    assert engine.host.stats.used_bytes <= 3000
    assert engine.host.stats.evictions + engine.host.stats.refused > 0
    assert max(cached(made)) < 40
    assert_idle(engine)


def test_pageable_memory_serves_as_well(monkeypatch):
    # S4-17.
    monkeypatch.setattr(host_memory, "_why_not_pinned", lambda device: "it is Tuesday")
    engine = engine_for()
    made = serve(engine, prompts_of(0))
    assert cached(made) == [0] * 4 + [40] * 4
    assert collect_stats(engine).host_cache == "pageable"
    assert_idle(engine)


def test_no_bytes_are_no_tier():
    # S4-18.
    engine = engine_for(host_bytes=0)
    stats = collect_stats(engine)
    assert (engine.host, stats.host, stats.host_cache) == (None, None, "off")
    assert engine.executor.before_update is None
    assert CacheConfig().host_bytes == 0
    with pytest.raises(ValueError, match=r"host_bytes must be an int in .*got -1"):
        CacheConfig(host_bytes=-1)


def test_where_nothing_could_be_found_again_the_tier_is_off_and_says_why(caplog):
    # S4-17.
    with caplog.at_level(logging.WARNING):
        engine = engine_for(prefix_cache=False)
    assert engine.host is None
    assert collect_stats(engine).host_cache == "disabled: the prefix cache is off"
    assert "nothing will be kept on the host" in caplog.text


def test_where_prompts_share_nothing_the_tier_is_off_and_says_why():
    executor = executor_for(rope="dynamic")
    executor.host_bytes = MUCH
    engine = Engine(executor, TOKENIZER, EngineConfig(token_budget=LONGEST))
    assert engine.host is None
    told = "disabled: prompts of this model share nothing"
    assert collect_stats(engine).host_cache == told


def test_a_tier_that_was_closed_is_gone_and_serving_goes_on():
    # S4-19.
    engine = engine_for()
    prompts = prompts_of(0)
    serve(engine, prompts[:4])
    assert engine.host.close() == ()
    assert engine.host.close() == ()
    assert collect_stats(engine).host_cache == "disabled: closed"
    assert cached(serve(engine, prompts[4:])) == [0] * 4
    assert_idle(engine)


def test_what_leaves_is_read_before_a_copy_overwrites_it():
    # S4-20: no step in between, and the copy runs at once.
    engine = engine_for()
    [prompt] = prompts_of(6, beginnings=1, rounds=1)
    serve(engine, [prompt])
    accounts, executor = engine.executor.accounts, engine.executor
    node = next(iter(engine.prefix._trees["gqa"]))
    pages = sorted(accounts.pool("gqa").kept)
    assert engine.prefix.reclaim({"gqa": len(pages)}, {})
    executor.copy([PageCopy("gqa", node.page, page) for page in pages if page != node.page])
    made = serve(engine, [prompt[:30]])
    assert cached(made) == [24]
    assert engine.host.stats.hits == 1


def test_the_warm_up_declares_what_moves():
    engine = engine_for()
    needed = declare_served(engine, request_of([1] * 10), 2)
    assert set(declare_swaps(engine.executor.layout)) <= set(needed)
    engine.host = None
    needed = declare_served(engine, request_of([1] * 10), 2)
    assert not {one.kind for one in needed} & {SWAP_IN, SWAP_OUT}


def test_the_plan_says_what_the_host_holds():
    options = {"dtype": "auto", "max_model_len": None, "free_bytes": None}
    without = explain_plan(None, cache=CacheConfig(), **options)
    told = explain_plan(None, cache=replace(CacheConfig(), host_bytes=2**30), **options)
    assert "host:" not in without
    assert "host: 1,073,741,824 bytes for what the cache gives up, at most 699,050 tokens" in told
    assert "swap_out" in told
    assert "swap_out" not in without
