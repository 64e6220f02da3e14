"""Engines with a host tier generate the oracle's tokens."""

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.host_tier import host_cache
from jaxkv.engine.warm_up import declare_served
from jaxkv.monitoring.stats import collect_stats
from jaxkv.offload import memory as host_memory
from jaxkv.offload.programs import declare_swaps
from jaxkv.plan import explain_plan
from tests.engine import hybrid
from tests.engine.engines import (
    LONGEST,
    TOKENIZER,
    assert_equal,
    assert_idle,
    oracle,
    request_of,
    sequence_runner_for,
)
from tests.engine.host_engines import (
    MUCH,
    cached,
    check,
    engine_for,
    prompts_of,
    serve,
    waits_for_host,
)


def test_prefixes_come_back_from_the_host_and_tokens_are_the_oracles():
    engine = engine_for()
    made = serve(engine, prompts_of(0, rounds=3))
    assert cached(made) == [0] * 4 + [40] * 8
    stats = collect_stats(engine)
    assert stats.host_cache == "pinned_host"
    assert (stats.host.hits, stats.host.tokens_read, stats.host.failures) == (8, 320, 0)
    assert stats.host.used_bytes <= stats.host.limit_bytes == MUCH
    assert_idle(engine)


def test_an_engine_reserves_pinned_memory_where_it_comes_from_a_pool(monkeypatch):
    reserved, done = [], threading.Event()

    def reserve(memory, num_bytes, ended):
        reserved.append((num_bytes, ended))
        done.set()

    monkeypatch.setattr(host_memory.HostMemory, "reserve", reserve)
    engine_for()
    monkeypatch.setattr(host_cache, "_WITH_POOL", ("cpu",))
    engine = engine_for()
    assert done.wait(60)
    [(num_bytes, ended)] = reserved
    assert num_bytes == MUCH
    assert not ended.is_set()
    engine.host.close()
    assert ended.is_set()


@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_get_the_oracles_tokens(seed):
    """Requests arrive at random, are preempted, and the host evicts as well."""
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


@pytest.mark.slow
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
    assert engine.host.prefetch.num_in_progress == 0
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
    cancel_all = engine.host.prefetch.cancel_all
    engine.host.prefetch.cancel_all = lambda: given.append(cancel_all()) or given[-1]
    engine.run([other])
    assert True in given
    assert other.preemptions == 0
    held.clear()
    engine.run([one])
    assert one.cached == 24
    assert_equal([one, other], oracle([one.request, other.request]))
    assert_idle(engine)


def test_a_host_too_small_for_a_prefix_is_no_help_and_no_harm():
    engine = engine_for(host_bytes=3000)
    made = serve(engine, prompts_of(4))
    assert engine.host.stats.used_bytes <= 3000
    assert engine.host.stats.evictions + engine.host.stats.refused > 0
    assert max(cached(made)) < 40
    assert_idle(engine)


def test_pageable_memory_serves_as_well(monkeypatch):
    # Without pinned memory the tier copies through pageable memory and reports it.
    monkeypatch.setattr(host_memory, "_why_pageable", lambda device: "it is Tuesday")
    engine = engine_for()
    made = serve(engine, prompts_of(0))
    assert cached(made) == [0] * 4 + [40] * 4
    assert collect_stats(engine).host_cache == "pageable"
    assert_idle(engine)


def test_no_bytes_are_no_tier():
    engine = engine_for(host_bytes=0)
    stats = collect_stats(engine)
    assert (engine.host, stats.host, stats.host_cache) == (None, None, "off")
    assert engine.runner.owner._observers == []
    assert CacheConfig().host_bytes == 0
    with pytest.raises(ValueError, match=r"host_bytes must be an int in .*got -1"):
        CacheConfig(host_bytes=-1)


def test_where_nothing_could_be_found_again_the_tier_is_off_and_says_why(caplog):
    # A tier that cannot help is disabled with a reason; the engine works.
    with caplog.at_level(logging.WARNING):
        engine = engine_for(prefix_cache=False)
    assert engine.host is None
    assert collect_stats(engine).host_cache == "disabled: the prefix cache is off"
    assert "the host tier is off although host_bytes is set" in caplog.text


def test_where_prompts_share_nothing_the_tier_is_off_and_says_why():
    sequence_runner = sequence_runner_for(rope="dynamic")
    config = EngineConfig(token_budget=LONGEST)
    engine = Engine(sequence_runner, TOKENIZER, config, host_bytes=MUCH)
    assert engine.host is None
    told = "disabled: this model needs whole prompts, which share no prefix"
    assert collect_stats(engine).host_cache == told


def test_a_tier_that_was_closed_is_gone_and_serving_goes_on():
    # The second close does nothing.
    engine = engine_for()
    prompts = prompts_of(0)
    serve(engine, prompts[:4])
    assert engine.host.close() == ()
    assert engine.host.close() == ()
    assert collect_stats(engine).host_cache == "disabled: closed"
    assert cached(serve(engine, prompts[4:])) == [0] * 4
    assert_idle(engine)


def test_what_leaves_is_read_before_a_copy_overwrites_it():
    # No step runs in between, and the copy runs at once.
    engine = engine_for()
    [prompt] = prompts_of(6, beginnings=1, rounds=1)
    serve(engine, [prompt])
    allocator, sequence_runner = engine.sequence_runner.allocator, engine.sequence_runner
    node = next(iter(engine.prefix._trees["gqa"]))
    pages = sorted(allocator.pool("gqa").kept)
    assert engine.prefix.reclaim({"gqa": len(pages)}, {})
    sequence_runner.copy([PageCopy("gqa", node.page, page) for page in pages if page != node.page])
    made = serve(engine, [prompt[:30]])
    assert cached(made) == [24]
    assert engine.host.stats.hits == 1


def test_the_warm_up_declares_what_moves():
    engine = engine_for()
    needed = declare_served(engine, request_of([1] * 10), 2)
    assert set(declare_swaps(engine.runner.layout)) <= set(needed)
    engine.prefix_reuse.host = None
    needed = declare_served(engine, request_of([1] * 10), 2)
    assert not {one.kind for one in needed} & {"swap_in", "swap_out"}


def test_the_plan_says_what_the_host_holds():
    options = {"dtype": "auto", "max_model_len": None, "free_bytes": None}
    without = explain_plan(None, cache=CacheConfig(), **options)
    told = explain_plan(None, cache=replace(CacheConfig(), host_bytes=2**30), **options)
    assert "host:" not in without
    assert "host: 1,073,741,824 bytes for what the cache gives up, at most 699,050 tokens" in told
    assert "swap_out" in told
    assert "swap_out" not in without
