"""Engines with a host tier generate the oracle's tokens when a transfer fails."""

import logging

import pytest

from jaxkv.errors import CachePoisoned
from jaxkv.monitoring.stats import collect_stats
from jaxkv.offload import transfers as host_transfers
from jaxkv.offload.memory import HostMemory
from tests.engine.engines import (
    assert_equal,
    assert_idle,
    oracle,
)
from tests.engine.host_engines import (
    cached,
    engine_for,
    prompts_of,
    serve,
    waits_for_host,
)


def host_failure():
    import jax

    return jax.errors.JaxRuntimeError("INTERNAL: lost")


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
    "reading out": (None, "run_read_only", _is("swap_out")),
    "writing in": (None, "update", _is("swap_in")),
    "sending": (HostMemory, "copy_to_host", lambda *_: True),
    "settling": (HostMemory, "wait_for_copies", lambda *_: True),
    "bringing": (HostMemory, "copy_to_device", lambda *_: True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transfer_that_fails_costs_only_its_prefix(fault, monkeypatch, caplog):
    """The failure is recorded on the transfer, the prefix is a miss, and the answer is right."""
    engine = engine_for()
    owner, name, when = FAULTS[fault]
    left = fails(
        monkeypatch,
        owner or type(engine.runner),
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
    fails(monkeypatch, HostMemory, "copy_to_host", RuntimeError("gone"), times=10**6)
    with caplog.at_level(logging.WARNING):
        made = serve(engine, prompts_of(1))
    told = collect_stats(engine)
    assert told.host_cache == "disabled: 3 transfers in a row failed, the last with: gone"
    assert told.host.used_bytes == 0
    assert cached(made) == [0] * 8
    assert sum("the host tier is shut down" in record.message for record in caplog.records) == 1
    assert engine.prefix.explain([1, 2]).num_with_host is None
    assert_idle(engine)


def test_a_tier_that_ends_while_a_prefix_is_written_costs_its_prefixes_and_nothing_else(
    monkeypatch,
):
    # The tier gives up after too many failures, just before the program that writes the units that arrived.
    engine = engine_for()
    other, one, held = waits_for_host(engine, monkeypatch)
    monkeypatch.setattr(host_transfers, "is_ready", lambda units: True)
    engine.host.transfers.why_hopeless = lambda: "a test"
    held.clear()
    engine.run([one, other])
    assert engine.host.kind == "disabled: a test"
    assert engine.host.prefetch.num_in_progress == one.cached == 0
    assert_equal([one, other], oracle([one.request, other.request]))
    assert_idle(engine)


def test_what_is_on_the_host_outlives_a_lost_cache():
    engine = engine_for()
    prompts = prompts_of(2)
    serve(engine, prompts[:4])
    engine.runner.owner.poison("a test")
    made = serve(engine, prompts[4:])
    # The others were on the device alone, at least in part.
    assert cached(made)[:2] == [40, 40]
    assert engine.recoveries == 1
    assert_idle(engine)


def test_a_cache_that_is_lost_while_a_prefix_is_written_is_replaced(monkeypatch):
    engine = engine_for()

    def poison(runner, declared, *_):
        if declared.kind == "swap_in":
            runner.owner.poison("the write failed")
            return True
        return False

    prompts = prompts_of(2)
    serve(engine, prompts[:4])
    left = fails(monkeypatch, type(engine.runner), "update", CachePoisoned("lost"), when=poison)
    made = serve(engine, prompts[4:])
    assert left == [0]
    assert engine.recoveries == 1
    assert cached(made)[:2] == [40, 40]
    assert_idle(engine)


def test_a_step_that_was_lost_sends_nothing_false_to_the_host(monkeypatch):
    engine = engine_for()
    prompts = prompts_of(3)
    serve(engine, prompts[:2])
    read, failed = type(engine.runner).read, []

    def lose(runner, out):
        if not failed:
            failed.append(True)
            runner.owner.poison("a step failed while it ran")
            raise host_failure()
        return read(runner, out)

    monkeypatch.setattr(type(engine.runner), "read", lose)
    serve(engine, prompts[2:])
    assert engine.recoveries == 1
    assert_idle(engine)
