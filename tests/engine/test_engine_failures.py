"""Faults during serving: surviving requests have the tokens of a run without faults, and nothing leaks."""

import random
from copy import copy
from dataclasses import replace
from itertools import count

import jax
import numpy as np
import pytest

from jaxkv.cache.state import Cache
from jaxkv.engine.recovery import is_fatal
from jaxkv.engine.request_state import FINISHED
from jaxkv.errors import STEP_FAILURES, CachePoisoned
from jaxkv.programs.manifest import Programs
from jaxkv.runner.program_specs import StepSpec
from tests.engine.engines import PAGE, assert_equal, assert_idle, engine_for, oracle, request_of
from tests.engine.oracle import Finished

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: injected"
REQUESTS = [request_of([7, at, 3 * at % 61, 9], max_tokens=9) for at in range(6)]


@pytest.fixture(scope="module")
def wanted():
    """The answers of a run without faults, which other tests compare with the oracle."""
    engine = engine_for(prefix_cache=False)
    sequences = start(engine)
    engine.run(sequences)
    return [Finished(tuple(one.token_ids), one.reason, None) for one in sequences]


class Faults:
    """Makes chosen reads and dispatches of an engine fail, as JAX does when memory runs out."""

    def __init__(self, engine, monkeypatch, *, reads=(), steps=(), message=OUT_OF_MEMORY):
        self.message = message
        self.reads, self.steps = set(reads), set(steps)
        self.read_count, self.step_count = count(), count()
        get, program = jax.device_get, engine.runner.program
        monkeypatch.setattr(jax, "device_get", lambda out: self.read(get, out))
        monkeypatch.setattr(
            engine.runner,
            "program",
            lambda spec: self.lend(program(spec)) if isinstance(spec, StepSpec) else program(spec),
        )

    def read(self, get, out):
        if next(self.read_count) in self.reads:
            raise jax.errors.JaxRuntimeError(self.message)
        return get(out)

    def lend(self, program):
        if next(self.step_count) not in self.steps:
            return program

        def fail(params, cache, *arrays):
            for array in cache.arrays:
                array.delete()
            raise jax.errors.JaxRuntimeError(self.message)

        broken = copy(program)
        broken.compiled = fail
        return broken


def start(engine, requests=REQUESTS):
    return [engine.add([one])[0] for one in requests]


@pytest.mark.parametrize("message", [OUT_OF_MEMORY, "INTERNAL: a callback raised, injected"])
@pytest.mark.parametrize(
    "faults", [{"reads": [0]}, {"reads": [3, 4]}, {"steps": [2]}, {"steps": [0], "reads": [5]}]
)
def test_a_lost_cache_costs_time_and_no_token(faults, message, wanted, monkeypatch):
    """Steps fail at their dispatch, and at their read with one more step in flight."""
    engine = engine_for()
    Faults(engine, monkeypatch, message=message, **faults)
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert engine.recoveries == sum(map(len, faults.values()))
    assert_idle(engine)


def test_a_hundred_losses_in_a_row_are_survived(wanted, monkeypatch):
    """A hundred steps in a row run out of memory, and every request still has its tokens."""
    engine = engine_for(most_rebuilds=100)
    Faults(engine, monkeypatch, reads=range(100))
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert engine.recoveries == 100
    # From now on steps are as small as they can be, and still serve.
    again = start(engine)
    engine.run(again)
    assert_equal(again, wanted)
    assert_idle(engine)


def test_losses_that_are_far_apart_are_survived_for_ever(wanted, monkeypatch):
    """The clock leaves time between the losses."""
    ticks = count(step=200)
    engine = engine_for(clock=lambda: float(next(ticks)))
    Faults(engine, monkeypatch, reads=range(0, 100, 9))
    for _ in range(4):
        sequences = start(engine)
        engine.run(sequences)
        assert_equal(sequences, wanted)
    assert engine.recoveries > 3
    assert_idle(engine)


def test_a_row_that_gives_way_in_a_step_of_its_own_waits_and_the_others_go_on():
    """After a fault rows run alone. One of them that finds no page does not fail the others."""
    engine = engine_for(free_pages=3, overlap=False, prefix_cache=False)
    served = start(engine, [request_of(range(at, at + PAGE), max_tokens=6) for at in (3, 20)])
    engine.step()
    assert [one.computed for one in served] == [PAGE, PAGE]
    engine.scheduler.isolate(served)
    engine.run(served)
    assert [one.preemptions for one in served] == [0, 1]
    assert_equal(served, oracle([one.request for one in served]))
    assert_idle(engine)


def test_too_many_losses_in_too_short_a_time_are_raised(wanted, monkeypatch):
    """Three losses are repaired and the fourth is raised. The next call begins to count anew."""
    engine = engine_for(clock=lambda: 0.0)
    with monkeypatch.context() as patched:
        Faults(engine, patched, reads=range(100))
        sequences = start(engine)
        with pytest.raises(jax.errors.JaxRuntimeError, match="injected"):
            engine.run(sequences)
    assert engine.recoveries == 3
    assert {one.reason for one in sequences} == {"abort"}
    assert_idle(engine)


def test_a_broken_device_is_not_used_again(monkeypatch):
    """An illegal address ends the engine: the context of the device is not used again."""
    engine = engine_for()
    Faults(engine, monkeypatch, reads=[1], message="CUDA_ERROR_ILLEGAL_ADDRESS: an illegal ...")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL"):
        engine.run(start(engine))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL"):
        engine.run(start(engine))
    assert engine.recoveries == 0
    assert engine.runner.owner.rebuilds == 1
    assert is_fatal(RuntimeError("unspecified launch failure"))
    assert not is_fatal(jax.errors.JaxRuntimeError(OUT_OF_MEMORY))


def test_a_device_that_breaks_at_a_dispatch_is_not_used_again(wanted, monkeypatch):
    """The cache's buffers live, so that only the error says so; no request is to blame."""
    engine = engine_for()

    def fail(shape, rows):
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_LAUNCH_FAILED")

    with monkeypatch.context() as patched:
        patched.setattr(engine.sequence_runner, "step", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="LAUNCH_FAILED"):
            engine.run(start(engine))
    sequences = start(engine)
    with pytest.raises(jax.errors.JaxRuntimeError, match="LAUNCH_FAILED"):
        engine.run(sequences)
    assert {one.error for one in sequences} == {None}


def test_a_request_that_breaks_its_step_fails_alone(wanted):
    """The packer refuses a token id of one request among five good ones."""
    engine = engine_for()
    bad = request_of([3, 999, 4])
    requests = [*REQUESTS[:3], bad, *REQUESTS[3:]]
    sequences = start(engine, requests)
    engine.run(sequences)
    broken = sequences.pop(3)
    assert broken.reason == "error"
    assert "999" in str(broken.error)
    assert_equal(sequences, wanted)
    assert_idle(engine)


def test_a_step_that_fails_once_is_tried_again_row_by_row(wanted, monkeypatch):
    engine = engine_for()
    step, calls = engine.sequence_runner.step, count()

    def fail_once(shape, rows):
        if next(calls) == 3:
            raise ValueError("injected")
        return step(shape, rows)

    monkeypatch.setattr(engine.sequence_runner, "step", fail_once)
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert engine.recoveries == 0


def spoil(sequence_runner, page):
    """Makes the keys of one page of the full-attention layers no numbers."""
    live = sequence_runner.runner.owner.take()
    arrays = list(live.arrays)
    place = live.keys.index((0, "key"))
    values = np.array(arrays[place])
    values[page] = np.nan
    arrays[place] = jax.numpy.array(values)
    sequence_runner.runner.owner.put(Cache(arrays=tuple(arrays), keys=live.keys))


def two_that_share(engine):
    """Returns two running sequences that begin with the same two pages, which the index keeps, and the prompt."""
    stem = tuple(range(1, 2 * PAGE + 1))
    requests = [request_of((*stem, 50, at), max_tokens=12 + 10 * at) for at in range(2)]
    first = engine.add([requests[0]])[0]
    while engine.prefix.explain((*stem, 9)).num_reused < 2 * PAGE:
        engine.step()
    second = engine.add([requests[1]])[0]
    for _ in range(3):
        engine.step()
    tables = [engine.sequence_runner.allocator.pages(one.number, "gqa") for one in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    return first, second, tables[0], (*stem, 9)


def test_pages_that_a_neighbour_withdrew_come_back_when_a_sharer_has_read_them(monkeypatch):
    """All pages of the failed request leave the index; those that another's finite tokens prove good return."""
    engine = engine_for()
    first, second, pages, prompt = two_that_share(engine)
    spoil(engine.sequence_runner, pages[2])
    engine.run([first])
    assert first.reason == "error"
    assert engine.prefix.explain(prompt).num_reused == 0
    engine.run([second])
    assert second.reason == "length"
    assert engine.prefix.explain(prompt).num_reused == 2 * PAGE
    [third] = start(engine, [request_of(prompt)])
    engine.run([third])
    assert third.cached == 2 * PAGE
    calm = engine_for(prefix_cache=False)
    truth = start(calm, [second.request, third.request])
    calm.run(truth)
    assert [one.tokens for one in truth] == [second.tokens, third.tokens]
    assert_idle(engine)


def test_a_page_that_is_bad_itself_fails_all_who_share_it_and_never_comes_back():
    """No request that reads the page has finite logits, so that none proves it good."""
    engine = engine_for()
    first, second, pages, prompt = two_that_share(engine)
    spoil(engine.sequence_runner, pages[0])
    engine.run([first, second])
    assert {first.reason, second.reason} == {"error"}
    assert engine.prefix.explain(prompt).num_reused == 0
    [again] = start(engine, [request_of(prompt)])
    engine.run([again])
    assert again.reason == "length"
    assert_idle(engine)


def test_logits_that_are_no_numbers_fail_one_request(wanted):
    """Pages of the failed request are not shared, and are clean for the next one that gets them."""
    engine = engine_for()
    long = request_of(range(1, 2 * PAGE + 5), max_tokens=12)
    sequences = start(engine, [*REQUESTS[:3], long])
    for _ in range(6):
        engine.step()
    assert sequences[3].status != FINISHED
    sequence_runner = engine.sequence_runner
    page = sequence_runner.allocator.pages(sequences[3].number, "gqa")[0]
    assert engine.prefix.explain(long.prompt).num_reused > 0
    spoil(sequence_runner, page)
    engine.run(sequences)
    assert sequences[3].reason == "error"
    assert engine.prefix.explain(long.prompt).num_reused == 0
    assert_equal(sequences[:3], wanted[:3])
    again = start(engine, REQUESTS)
    engine.run(again)
    assert_equal(again, wanted)
    assert_idle(engine)


class Broken:
    """A text that cannot be made."""

    def push(self, token_id, *, may_stop=True):
        raise OverflowError("injected")

    def finish(self, *, may_stop=True):
        raise OverflowError("injected")


def test_a_broken_stop_string_fails_one_request(wanted):
    """An exception in the matching of stop strings fails that request and no other."""
    engine = engine_for()
    sequences = start(engine)
    sequences[2].stream = Broken()
    engine.run(sequences)
    broken = sequences.pop(2)
    assert (broken.reason, type(broken.error)) == ("error", OverflowError)
    assert_equal(sequences, wanted[:2] + wanted[3:])
    assert_idle(engine)


@pytest.mark.parametrize("where", ["read", "step", "admit", "reserve", "fork"])
def test_an_interrupt_leaves_the_others_where_they_can_go_on(where, wanted, monkeypatch):
    """Ctrl-C: the call that was interrupted takes its requests along, another's are computed again."""
    engine = engine_for()
    [other] = start(engine, REQUESTS[:1])
    mine = start(engine, [request_of([1, 2], repetition_penalty=1.5), *REQUESTS[1:]])
    mine += engine.add([request_of([4, 5, 6])] * 3)
    with monkeypatch.context() as patched:
        owner = engine.sequence_runner
        owner = {"reserve": owner.allocator, "fork": owner.allocator, "read": engine.runner}.get(
            where, owner
        )
        calls, usual = count(), getattr(owner, where)

        def interrupt(*given, **options):
            if next(calls) == (2 if where in ("read", "step") else 0):
                raise KeyboardInterrupt
            return usual(*given, **options)

        patched.setattr(owner, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.run(mine)
    # The samples fork when some of the others have ended.
    assert {one.reason for one in mine} == ({"abort", "length"} if where == "fork" else {"abort"})
    engine.run([other])
    assert_equal([other], wanted[:1])
    assert_idle(engine)


def test_a_cache_that_others_lost_or_replaced_is_noticed(wanted):
    """After that, what was computed before means nothing: it is computed again in the new cache."""
    engine = engine_for()
    sequences = start(engine)
    for _ in range(3):
        engine.step()
    engine.runner.owner.rebuild()
    for _ in range(3):
        engine.step()
    engine.runner.owner.poison("injected")
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert_idle(engine)


def test_a_lost_cache_before_a_step_is_seen_by_the_step(wanted, monkeypatch):
    """The copies that samples need may be what loses the cache."""
    engine = engine_for()
    run, calls = engine.sequence_runner.copy, count()

    def lose(copies):
        if next(calls) == 0:
            engine.runner.owner.poison("injected")
            raise CachePoisoned("injected")
        run(copies)

    monkeypatch.setattr(engine.sequence_runner, "copy", lose)
    sequences = engine.add([REQUESTS[0]] * 3)
    engine.run(sequences)
    assert_equal(sequences, [wanted[0]] * 3)
    assert engine.recoveries == 1
    assert_idle(engine)


@pytest.mark.parametrize("losses", [1, 2])
def test_scores_that_lose_the_cache_are_tried_twice(losses, wanted, monkeypatch):
    """Requests in progress lose no token, and the engine serves on."""
    engine = engine_for(most_rebuilds=9)
    prompt = REQUESTS[0].prompt
    scored = replace(REQUESTS[0], params=replace(REQUESTS[0].params, prompt_logprobs=0))
    logprobs = engine.score_text(prompt)
    sequences = start(engine, REQUESTS[1:3])
    engine.step()
    run, calls = engine.sequence_runner.score, count()

    def lose(*arguments):
        if next(calls) < losses:
            engine.runner.owner.poison("injected")
            raise CachePoisoned("injected")
        return run(*arguments)

    monkeypatch.setattr(engine.sequence_runner, "score", lose)
    if losses == 1:
        [first] = engine.add([scored])
    else:
        for ask in (lambda: engine.add([scored]), lambda: engine.score_text(prompt)):
            calls = count()
            with pytest.raises(RuntimeError, match="have lost the cache twice: injected"):
                ask()
            # An `AsyncLLM` takes a call that leaves a lost cache for the end of its engine.
            assert not engine.runner.owner.poisoned
        [first] = engine.add([scored])
    assert engine.recoveries == (1 if losses == 1 else 4)
    engine.run([first, *sequences])
    assert_equal([first, *sequences], wanted[:3])
    assert [*map(dict.popitem, first.prompt_logprobs[1:])] == [
        (token, pytest.approx(one, abs=1e-5))
        for token, one in zip(prompt[1:], logprobs, strict=True)
    ]
    assert_idle(engine)


def test_a_lost_cache_is_no_failure_of_a_step():
    assert not issubclass(CachePoisoned, STEP_FAILURES)


def test_a_program_that_was_asked_for_while_the_cache_was_lost_is_not_refused_later():
    engine = engine_for(programs=Programs())
    sequence_runner = engine.sequence_runner
    sequence_runner.runner.owner.poison("injected")
    shape = StepSpec(16, 4, (8, 8))
    with pytest.raises(CachePoisoned, match="injected"):
        sequence_runner.runner.program(shape)
    assert sequence_runner.runner.refusal(shape) is None


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_random_faults_change_no_token(wanted, monkeypatch, seeds):
    """The fault matrix at random: losses, refused steps and aborts, in a tight pool."""
    for seed in seeds:
        draw = random.Random(seed)
        engine = engine_for(free_pages=8, most_rebuilds=1000)
        with monkeypatch.context() as patched:
            reads = [at for at in range(200) if draw.random() < 0.1]
            steps = [at for at in range(200) if draw.random() < 0.1]
            Faults(engine, patched, reads=reads, steps=steps)
            sequences = start(engine)
            gone = draw.randrange(6)
            while any(one.status != FINISHED for one in sequences):
                engine.step()
                if draw.random() < 0.1:
                    engine.abort(sequences[gone])
        kept = [at for at in range(6) if sequences[at].reason != "abort"]
        assert len(kept) >= 5
        assert_equal([sequences[at] for at in kept], [wanted[at] for at in kept])
        assert_idle(engine)
