"""Rows with a grammar overlap like others: their step runs before their masks are known, and is sampled by these."""

import logging
import random
from dataclasses import replace

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED
from jaxkv.errors import CachePoisoned
from tests.engine import simulated_grammar, simulated_requests
from tests.engine.simulated_engines import Setting, engine_of
from tests.engine.simulated_grammar import grammar_of
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import assert_all_is_free, check_books
from tests.engine.simulated_requests import GRAMMAR, answer

SETTING = Setting("full", rows=4, page=8, budget=16, prefix=True)
LONG = 20


@pytest.fixture(autouse=True)
def simulated(monkeypatch, caplog):
    put_caches_on_device(monkeypatch)
    # Some texts have no forced tokens, and all have `LONG` tokens.
    for module in (simulated_grammar, simulated_requests):
        monkeypatch.setattr(module, "allowed_after", allowed)
    caplog.set_level(logging.CRITICAL)


def allowed(key, tokens):
    """Returns the tokens that may follow: with an odd key three of eight are forced."""
    if len(tokens) == LONG:
        return []
    return [7] if key % 2 and len(tokens) % 8 in (4, 5, 6) else [5, 7, 9, 30]


def ask(key, prompt=(3, 4), **wish):
    grammar = None if key is None else grammar_of(key)
    wish = {"temperature": 0.0, "max_tokens": 30} | wish | ({} if key is None else GRAMMAR)
    params = SamplingParams(**wish)
    return Request(prompt=tuple(prompt), params=params, seed=1, stop_ids=(), grammar=grammar)


def serve(engine, requests):
    made = [engine.add([one])[0] for one in requests]
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
        assert not engine._pipeline.may_sample
        check_books(engine)
    assert all(one.status == FINISHED for one in made)
    assert_all_is_free(engine)
    return made


def assert_answers(made, requests):
    for one, request in zip(made, requests, strict=True):
        wanted = answer(request)
        assert (tuple(one.token_ids), one.reason) == (wanted.token_ids, wanted.reason)


def engine_with(**changes):
    return engine_of(random.Random(0), replace(SETTING, **changes))[0]


def test_a_step_runs_before_its_masks_are_known_and_is_sampled_once_the_tokens_before_are_read():
    engine, events = engine_with(), []
    runner = engine.sequence_runner

    def noted(owner, name):
        call = getattr(owner, name)

        def noting(*arguments):
            events.append(name)
            return call(*arguments)

        setattr(owner, name, noting)

    noted(runner, "forward"), noted(runner, "sample"), noted(runner.runner, "read")
    serve(engine, [ask(2)])
    assert events[:2] == ["forward", "sample"]
    # The last forward pass is of a row that has ended, and is read all the same.
    assert events[2:-1] == ["forward", "read", "sample"] * LONG
    assert events[-1] == "read"


def test_rows_with_a_grammar_take_part_in_every_step():
    engine = engine_with()
    requests = [ask(2), ask(None, max_tokens=LONG), ask(4, (9,))]
    assert_answers(serve(engine, requests), requests)
    # All in one step for each token, and once more before the ends are known.
    assert engine.steps == LONG + 1


def test_forced_tokens_are_computed_as_a_chunk_after_the_step_in_flight():
    """Of 8 tokens up to 3 are forced: their chunk samples the next one, and the step before it emits nothing."""
    engine = engine_with()
    requests = [ask(1)]
    assert_answers(serve(engine, requests), requests)
    forced, runs = 6, 2
    assert engine.steps == LONG - forced + runs + 1


def test_without_overlap_forced_tokens_take_no_step_of_their_own():
    engine = engine_with(overlap=False)
    requests = [ask(1)]
    assert_answers(serve(engine, requests), requests)
    assert engine.steps == LONG - 6


@pytest.mark.parametrize("overlap", [True, False])
def test_few_forced_tokens_beside_many_rows_are_computed_one_by_one(overlap):
    """A chunk of 3 tokens saves two rows of four a step or two, but makes the step dearer for all."""
    engine = engine_with(rows=8, budget=32, overlap=overlap)
    requests = [ask(1), *(ask(None, (3, at), max_tokens=LONG) for at in range(7))]
    widest = chunks_of(engine)
    assert_answers(serve(engine, requests), requests)
    assert widest() == [1]
    # A forced token takes no step more than one that is sampled.
    assert engine.steps == LONG + overlap


def test_forced_tokens_of_most_rows_are_computed_as_chunks():
    engine = engine_with(rows=8, budget=32)
    requests = [ask(1, (3, at)) for at in range(6)] + [ask(None, max_tokens=LONG)]
    widest = chunks_of(engine)
    assert_answers(serve(engine, requests), requests)
    assert max(widest()) == 3


def chunks_of(engine):
    """Returns a function that returns the numbers of tokens of a row in the steps without prompts so far, ascending."""
    forward, lens = engine.sequence_runner.forward, set()

    def noting(shape, sampler, rows):
        if min(rows.starts) > 0:
            lens.update(rows.lens)
        return forward(shape, sampler, rows)

    engine.sequence_runner.forward = noting
    return lambda: sorted(lens)


def test_without_overlap_a_lone_forced_token_takes_no_step_of_its_own(monkeypatch):
    for module in (simulated_grammar, simulated_requests):
        monkeypatch.setattr(
            module,
            "allowed_after",
            lambda key, tokens: (
                [] if len(tokens) == LONG else [7] if len(tokens) % 4 == 2 else [5, 7, 9, 30]
            ),
        )
    engine = engine_with(overlap=False)
    requests = [ask(1)]
    assert_answers(serve(engine, requests), requests)
    assert engine.steps == LONG - 5


def fail_at(engine, numbers, error):
    """Lets some calls of `SequenceRunner.sample` raise an error before they do anything."""
    sample, calls = engine.sequence_runner.sample, iter(range(1000))

    def failing(*arguments):
        if next(calls) in numbers:
            raise error
        return sample(*arguments)

    engine.sequence_runner.sample = failing


@pytest.mark.parametrize("error", [MemoryError("once"), RuntimeError("once")])
@pytest.mark.parametrize("kind", ["full", "windows", "hybrid"])
def test_a_step_that_cannot_be_sampled_is_computed_again_and_loses_nothing(error, kind):
    engine = engine_with(kind=kind)
    requests = [ask(1), ask(None, max_tokens=LONG), ask(2, range(12))]
    fail_at(engine, {5}, error)
    made = serve(engine, requests)
    assert_answers(made, requests)
    assert [one.preemptions for one in made] == [1, 1, 1]
    assert engine.recoveries == 0


def test_a_step_that_cannot_be_sampled_twice_fails_its_requests_and_no_later_ones():
    engine = engine_with()
    fail_at(engine, {3, 4}, RuntimeError("twice"))
    for one in serve(engine, [ask(1), ask(2)]):
        assert (one.reason, str(one.error)) == ("error", "twice")
        assert 0 < one.generated < LONG
    assert_answers(serve(engine, [ask(1), ask(2)]), [ask(1), ask(2)])
    assert engine.recoveries == 0


def test_steps_get_smaller_while_memory_is_too_short_to_sample_them():
    engine = engine_with()
    sample, rows = engine.sequence_runner.sample, []

    def failing(sampler, *arguments):
        rows.append(sampler.rows)
        if sampler.rows > 2:
            raise MemoryError("too many rows")
        return sample(sampler, *arguments)

    engine.sequence_runner.sample = failing
    requests = [ask(key, (key,)) for key in (1, 2, 3, 4)]
    assert_answers(serve(engine, requests), requests)
    assert rows.count(4) == 2


def test_a_request_that_cannot_be_sampled_alone_fails_alone():
    engine = engine_with(rows=1)
    fail_at(engine, {3, 4, 5, 6}, MemoryError("too much"))
    [failed, other] = serve(engine, [ask(1), ask(2)])
    assert failed.reason == "error"
    assert "out of memory 2 times" in str(failed.error)
    assert other.reason in ("stop", "error")


def test_a_cache_that_is_lost_between_the_programs_is_rebuilt():
    engine = engine_with()
    sample, calls = engine.sequence_runner.sample, iter(range(1000))

    def losing(*arguments):
        if next(calls) == 5:
            engine.runner.owner.poison("injected")
            raise CachePoisoned("injected")
        return sample(*arguments)

    engine.sequence_runner.sample = losing
    requests = [ask(1), ask(None, max_tokens=LONG), ask(2, range(12))]
    assert_answers(serve(engine, requests), requests)
    assert engine.recoveries == 1


def test_an_interrupt_between_the_programs_loses_nothing():
    engine = engine_with()
    requests = [ask(1), ask(2)]
    made = [engine.add([one])[0] for one in requests]
    fail_at(engine, {5}, KeyboardInterrupt())
    for _ in range(5):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine._pipeline.num_in_flight == 0
    while engine.has_work:
        engine.step()
    assert_answers(made, requests)


def test_a_request_that_its_grammar_fails_ends_while_its_next_step_runs():
    engine = engine_with()
    grammar = grammar_of(2, fails_after=5)
    failing, other = replace(ask(2), grammar=grammar), ask(4)
    failed, served = serve(engine, [failing, other])
    assert (failed.reason, failed.generated) == ("error", 5)
    assert_answers([served], [other])


def test_strict_mode_finds_a_missing_sampler_before_the_first_program_runs():
    engine = engine_with()
    ran = []
    forward = engine.sequence_runner.forward
    engine.sequence_runner.forward = lambda *arguments: (ran.append(1), forward(*arguments))[1]
    engine.runner.programs.strict = True
    engine.runner.programs.seal()
    program = engine.runner.program

    def refusing(spec):
        if spec.kind == "sample":
            raise ValueError("refused")
        return program(spec)

    engine.runner.program = refusing
    free = ask(None, max_tokens=LONG)
    bound, served = serve(engine, [ask(2), free])
    assert (bound.reason, str(bound.error)) == ("error", "refused")
    assert not ran
    assert_answers([served], [free])
