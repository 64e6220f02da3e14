"""Steps that are too large for the memory, or have no program: smaller steps replace them, down to one row."""

from copy import copy
from itertools import count
from types import SimpleNamespace

import jax
import pytest

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.oom_backoff import OomBackoff
from jaxkv.engine.steps.step_plan import Part, part_of
from jaxkv.programs.manifest import Programs
from jaxkv.runner.program_specs import StepSpec
from jaxkv.sampling.features import Features
from tests.engine.engines import (
    assert_equal,
    assert_idle,
    engine_for,
    programs_of,
    request_of,
    too_large,
)
from tests.engine.oracle import Finished

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
REQUESTS = [request_of([7, at, 3 * at % 61, 9], max_tokens=5) for at in range(5)]


@pytest.fixture(scope="module")
def wanted():
    """The answers of a run that has memory, which other tests compare with the oracle."""
    engine = engine_for(prefix_cache=False, all_sizes=True)
    sequences = start(engine)
    engine.run(sequences)
    return [Finished(tuple(one.token_ids), one.reason, None) for one in sequences]


def start(engine, requests=REQUESTS):
    return [engine.add([one])[0] for one in requests]


class Memory:
    """Lets programs of some shapes run out of memory, with or without costing the cache, and notes what was tried."""

    def __init__(self, engine, monkeypatch, refuses, *, loses=False):
        self.refuses, self.loses = refuses, loses
        self.tried = []
        program = engine.runner.program
        monkeypatch.setattr(
            engine.runner,
            "program",
            lambda spec: (
                self.lend(spec, program(spec)) if isinstance(spec, StepSpec) else program(spec)
            ),
        )

    def lend(self, shape, program):
        self.tried.append(shape)
        if not self.refuses(shape):
            return program

        def fail(params, cache, *arrays):
            if self.loses:
                for array in cache.arrays:
                    array.delete()
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

        broken = copy(program)
        broken.compiled = fail
        return broken


@pytest.mark.parametrize("loses", [False, True], ids=["kept", "lost"])
@pytest.mark.parametrize("most", [(16, 1), (4, 2), (1, 1)], ids=str)
def test_steps_shrink_until_they_fit_and_what_never_fits_is_not_tried_again(
    most, loses, wanted, monkeypatch, caplog
):
    """The batch gets smaller and the user sees latency only; each shape fails twice at most."""
    engine = engine_for(most_rebuilds=100, all_sizes=True)
    memory = Memory(
        engine,
        monkeypatch,
        lambda shape: shape.tokens > most[0] or (shape.decode and shape.rows > most[1]),
        loses=loses,
    )
    for _ in range(2):
        sequences = start(engine)
        engine.run(sequences)
        assert_equal(sequences, wanted)
    failed = [shape for shape in memory.tried if memory.refuses(shape)]
    assert failed
    assert max(failed.count(shape) for shape in failed) <= 2
    assert engine.recoveries == (len(failed) if loses else 0)
    assert set(too_large(caplog)) <= set(failed)
    assert_idle(engine)


def test_a_lone_row_is_tried_twice_and_then_fails_with_the_numbers(wanted, monkeypatch):
    """No other request could free memory for it. The next request finds the memory that is back."""
    engine = engine_for(all_sizes=True)
    with monkeypatch.context() as patched:
        memory = Memory(engine, patched, lambda shape: True)
        [lone] = start(engine, [request_of([5])])
        engine.run([lone])
        assert [shape.rows for shape in memory.tried] == [1, 1]
    assert lone.reason == "error"
    assert isinstance(lone.error, MemoryError)
    assert "a step of 1 tokens of one sequence of 1 tokens, padded to 1 tokens" in str(lone.error)
    assert engine.recoveries == 0
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert_idle(engine)


def test_memory_that_is_short_for_a_moment_costs_no_request(wanted, monkeypatch, caplog):
    """What failed once is tried again when a smaller step has run, and stays in use if it runs then."""
    engine = engine_for(all_sizes=True)
    calls = count()
    memory = Memory(engine, monkeypatch, lambda shape: next(calls) in (1, 7))
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert too_large(caplog) == []
    assert len(memory.tried) > 8
    assert_idle(engine)


def test_a_shape_that_cannot_be_compiled_is_asked_for_once(wanted, monkeypatch):
    """The cache lives, smaller steps run, and no request fails."""
    programs = Programs()
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs, all_sizes=True)
    asked = []
    get = programs.get

    def compile_most(key, build):
        asked.append(key)
        if key.kind == "decode" and key.rows == 4:
            raise NotImplementedError("injected: no lowering")
        return get(key, build)

    monkeypatch.setattr(programs, "get", compile_most)
    sequences = start(engine)
    engine.run(sequences)
    assert_equal(sequences, wanted)
    assert sum(key.rows == 4 and key.kind == "decode" for key in asked) == 1
    assert engine.runner.owner.rebuilds == 1
    assert_idle(engine)


def test_whose_program_cannot_be_had_in_any_size_fails_alone(wanted, monkeypatch):
    """Only the request that needs the program fails."""
    programs = Programs()
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs, all_sizes=True)
    get = programs.get

    def refuse_draws(key, build):
        if key.features.draws:
            raise ValueError("injected: no draws")
        return get(key, build)

    monkeypatch.setattr(programs, "get", refuse_draws)
    requests = [*REQUESTS[:2], request_of([1, 2, 3], temperature=1.0), *REQUESTS[2:]]
    sequences = start(engine, requests)
    engine.run(sequences)
    drawn = sequences.pop(2)
    assert "no draws" in str(drawn.error)
    assert_equal(sequences, wanted)
    assert_idle(engine)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("what", ["admit", "copy"])
def test_what_a_request_needs_first_is_tried_twice_if_memory_is_short(
    what, times, wanted, monkeypatch
):
    """A clean entry for its penalties, or the copy of a page it shares: only its owner waits, or fails."""
    engine = engine_for(all_sizes=True)
    run, calls = getattr(engine.sequence_runner, what), count()

    def fail(*given):
        # The copies fail together and then alone: two attempts of one owner.
        attempts = times if what == "admit" else 2 * times
        if next(calls) < attempts:
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
        return run(*given)

    others = start(engine, REQUESTS[:2])
    if what == "copy":
        engine.run(engine.add([request_of(range(16))]))
        mine = request_of(range(16))
    else:
        mine = request_of([1, 2, 3], repetition_penalty=1.5)
    monkeypatch.setattr(engine.sequence_runner, what, fail)
    [owner] = start(engine, [mine])
    engine.run([owner, *others])
    assert_equal(others, wanted[:2])
    assert owner.retried
    if times == 1:
        assert (owner.reason, owner.preemptions) == ("length", 1)
        engine.run(again := start(engine, [mine]))
        assert owner.token_ids == again[0].token_ids
    else:
        assert owner.reason == "error"
        assert "RESOURCE_EXHAUSTED" in str(owner.error)
    assert_idle(engine)


def test_a_copy_that_fails_is_charged_to_its_owner(monkeypatch):
    """Samples of one prompt each copy its last page, and the one whose copy is refused fails alone."""
    samples = [request_of(range(3, 24), seed=at) for at in range(4)]
    calm = engine_for(all_sizes=True)
    calm.run(truth := calm.add(samples))
    engine = engine_for(all_sizes=True)
    run, victims = engine.sequence_runner.copy, []

    def refuse_one(copies):
        if any(one.target in victims and one.group == "gqa" for one in copies):
            raise ValueError("injected")
        if not victims and copies:
            pages = [one.target for one in copies if one.group == "gqa"]
            victims.append(pages[1])
            raise ValueError("injected")
        return run(copies)

    monkeypatch.setattr(engine.sequence_runner, "copy", refuse_one)
    sequences = engine.add(samples)
    engine.run(sequences)
    assert [one.reason for one in sequences].count("error") == 1
    for one, want in zip(sequences, truth, strict=True):
        if one.reason != "error":
            assert one.token_ids == want.token_ids
    assert_idle(engine)


def shape(tokens, rows, width=4, **options):
    return StepSpec(tokens, rows, (width,), Features(), **options)


def shape_of(parts):
    tokens = sum(part.count for part in parts)
    sizes = [size for size in (1, 2, 4, 16, 64) if size >= tokens]
    return shape(sizes[0], len(parts), decode=tokens == len(parts))


def parts_of(*counts):
    made = []
    for number, tokens in enumerate(counts):
        request = request_of([1] * 60)
        sequence = RequestState(request=request, number=number, tokens=[1] * 60)
        sequence.pages = SimpleNamespace(computed=0, reserved=60)
        made.append(part_of(sequence, tokens))
    return made


def retreat(*, whole=False, refused=()):
    return OomBackoff(
        (16, 64),
        (1, 2, 4),
        whole=whole,
        refusal=lambda shape: KeyError() if shape in refused else None,
    )


ERROR = jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


def test_a_larger_shape_than_one_that_failed_is_avoided_too_and_others_are_not(caplog):
    kept = retreat()
    kept.note_failure(shape(16, 2), ERROR, lost=False)
    assert kept.avoids(shape(16, 2))
    assert kept.avoids(shape(64, 4, 8))
    assert not kept.avoids(shape(16, 1))
    assert not kept.avoids(shape(16, 2, 2))
    kept.note_success(shape(4, 1))
    assert not kept.avoids(shape(64, 4))
    kept.note_failure(shape(16, 2), ERROR, lost=True)
    kept.note_success(shape(4, 1))
    assert kept.avoids(shape(64, 4))
    assert too_large(caplog) == [shape(16, 2)]


def test_prompts_are_cut_before_rows_are_left_out():
    kept = retreat()
    kept.note_failure(shape(64, 3), ERROR, lost=False)
    parts, chosen = kept.cut(parts_of(1, 1, 40), shape_of)
    assert [part.count for part in parts] == [1, 1, 14]
    assert chosen == shape(16, 3)
    kept.note_failure(shape(16, 1), ERROR, lost=False)
    parts, chosen = kept.cut(parts_of(1, 1, 40), shape_of)
    assert [part.count for part in parts] == [1, 1, 2]
    kept.note_failure(shape(1, 1), ERROR, lost=False)
    parts, chosen = kept.cut(parts_of(1, 1, 40), shape_of)
    assert [part.count for part in parts] == [1]
    assert kept.avoids(chosen)
    assert kept.give_up(parts[0], chosen) is None


def test_prompts_that_are_known_to_their_end_are_left_out_one_by_one():
    """They have no tokens to cut, and a hybrid's full hit once had no smaller step, for ever."""
    kept = retreat()
    kept.note_failure(shape(1, 1), ERROR, lost=False)
    for counts, left in (((0, 0), [0]), ((1, 0), [1]), ((0, 40), [0])):
        parts, chosen = kept.cut(parts_of(*counts), shape_of)
        assert [part.count for part in parts] == left
        assert kept.avoids(chosen)


def test_whole_prompts_are_left_out_but_never_cut():
    kept = retreat(whole=True)
    kept.note_failure(shape(16, 1), ERROR, lost=False)
    parts, _ = kept.cut(parts_of(1, 1, 12), shape_of)
    assert [part.count for part in parts] == [1, 1]
    parts, chosen = kept.cut(parts_of(12, 12), shape_of)
    assert [part.count for part in parts] == [12]
    assert kept.avoids(chosen)


def test_losses_of_the_cache_are_not_held_against_the_smallest_step():
    """The limit on their number is the engine's."""
    kept, [part] = retreat(), parts_of(1)
    for _ in range(5):
        kept.note_failure(shape(1, 1), ERROR, lost=True)
    assert kept.give_up(part, shape(1, 1)) is None
    for _ in range(2):
        kept.note_failure(shape(1, 1), ERROR, lost=False)
    assert isinstance(kept.give_up(part, shape(1, 1)), MemoryError)
    assert kept.give_up(part, shape(1, 1)) is None


def test_a_refused_program_is_told_as_it_is():
    kept = retreat(refused=[shape(1, 1), shape(4, 4)])
    assert kept.note_failure(shape(4, 4), ValueError(), lost=False)
    assert not kept.note_failure(shape(2, 2), ValueError(), lost=False)
    assert kept.avoids(shape(4, 4))
    assert not kept.avoids(shape(16, 4))
    assert isinstance(kept.give_up(Part(None, 0, 1, True, False), shape(1, 1)), KeyError)
