"""Random programs over a device of NumPy: every row reads its own text, and gets the tokens it would get alone.

Several steps at once, preemption, tiny pools, samples, stops, penalties, aborts, faults and interrupts, the host tier,
and junk in every free page and state. The books are checked after every step.
"""

import logging
import random
from dataclasses import replace

import jax
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.speculation.pace import PLAIN_STEPS, Pace
from jaxkv.engine.step_pipeline import StepPipeline
from jaxkv.engine.warm_up import declare_served
from jaxkv.runner import buckets
from tests.engine import simulated_grammar, simulated_requests
from tests.engine.simulated_engines import KINDS, Setting, draw_setting, engine_of
from tests.engine.simulated_grammar import grammar_of
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import Play, check_books
from tests.engine.simulated_requests import LONGEST, answer
from tests.engine.simulated_text import VOCAB

WISHES = (
    {},
    {"temperature": 0.7, "logprobs": 2},
    {"presence_penalty": 0.5},
    {"min_tokens": 3},
    {"logit_bias": {3: 1.0}},
)
OFTEN = ("preemptions", "hits", "rebuilds", "aborts", "host hits")
"""What happens in every long series of programs."""

UNDECLARED = {
    "copies": lambda program: program.kind == "copy",
    "multi-step programs": lambda program: getattr(program, "steps", 1) > 1,
    "swaps": lambda program: program.kind == "swap_out",
    "readmissions": lambda program: program.kind == "readmit",
    "prompts": lambda program: program.kind == "prefill",
    "drafts": lambda program: program.kind == "verify",
    "samplers": lambda program: program.kind == "sample",
}
"""Parts of the simulation that can be left out; a test must then fail."""


@pytest.fixture(autouse=True)
def simulated(monkeypatch, caplog):
    """Keeps arrays off devices, and log messages of intended faults out of the output."""
    put_caches_on_device(monkeypatch)
    # So that these few rows need programs with few masks and programs with many.
    monkeypatch.setattr(buckets, "FEW_MASKS", 2)
    caplog.set_level(logging.CRITICAL)


def kinds(*quick):
    """Parametrises a test over kinds of caches, of which all but the quick ones are slow.

    Windows are in the first test here, and in the one of programs that verify drafts.
    """
    marked = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in quick)) for kind in KINDS]
    return pytest.mark.parametrize("kind", marked)


def play_many(kind, seeds, sizes, wishes=simulated_requests.WISHES, setting_of=draw_setting):
    """Plays some programs, and returns how often that happened which they are about."""
    seen = dict.fromkeys(
        ("preemptions", "hits", "multi-step programs", "rebuilds", "aborts", "host hits"), 0
    )
    seen |= dict.fromkeys(("drafts accepted", "drafts rejected"), 0)
    for seed in seeds:
        draw = random.Random(f"{kind} {seed}")
        play = Play(draw, setting_of(draw, kind), draw.choice(sizes), wishes)
        play.run()
        if play.engine.speculation is not None:
            stats = play.engine.speculation.stats
            seen["drafts accepted"] += sum(stats.accepted)
            seen["drafts rejected"] += sum(stats.drafted) - sum(stats.accepted)
        sequences = [sequence for sequence, _ in play.sequences]
        seen["preemptions"] += sum(one.preemptions for one in sequences)
        seen["hits"] += sum(bool(one.cached) for one in sequences)
        seen["aborts"] += sum(one.reason == "abort" for one in sequences)
        seen["multi-step programs"] += sum(
            times
            for program, times in play.device.asked.items()
            if getattr(program, "steps", 1) > 1
        )
        seen["rebuilds"] += play.engine.recoveries
        seen["host hits"] += play.engine.host.stats.hits if play.engine.host is not None else 0
    return seen


@kinds("full", "windows", "all windows", "hybrid")
def test_everybody_reads_its_own_text_and_gets_its_own_tokens(kind):
    seen = play_many(kind, range(5), (3, 6))
    assert min(seen["preemptions"], seen["hits"]) > 0, seen


@kinds("full", "hybrid")
def test_rows_with_a_grammar_get_the_tokens_of_one_by_one_beside_others(kind):
    """Some rows have a mask and take forced tokens; the oracle chooses every token alone."""
    wishes = simulated_requests.WISHES_WITH_GRAMMARS
    seen = play_many(kind, range(5), (3, 6), wishes)
    assert min(seen["preemptions"], seen["hits"]) > 0, seen


def draw_speculating(draw, kind):
    """Returns a setting at random, in which drafts are right with some probability."""
    setting = draw_setting(draw, kind)
    drafts, rightness = draw.choice((1, 2, 3, 4, 7)), draw.choice((0.0, 0.5, 0.9, 1.0))
    budget = max(setting.budget, drafts + 1)
    share = draw.choice((0.7, 1.0, 1.0))
    return replace(setting, drafts=drafts, rightness=rightness, budget=budget, drafted_share=share)


def draw_drafts_on_device(draw, kind):
    """Returns a setting as `draw_speculating` does, in which steps may be sent before their drafts are counted."""
    setting = draw_speculating(draw, kind)
    return replace(setting, on_device=True, overlap=draw.random() < 0.9)


DRAFTERS = {"host": draw_speculating, "device": draw_drafts_on_device}


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("full", "host"),
        ("hybrid", "device"),
        pytest.param("full", "device", marks=pytest.mark.slow),
        pytest.param("windows", "host", marks=pytest.mark.slow),
        pytest.param("windows", "device", marks=pytest.mark.slow),
        pytest.param("hybrid", "host", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(kind, drafter):
    """Beside preemptions, prefix hits, aborts, faults and bursts; some drafts are right and some are not."""
    seen = play_many(kind, range(8), (3, 6), setting_of=DRAFTERS[drafter])
    assert min(seen[what] for what in ("drafts accepted", "drafts rejected", "hits")) > 0, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_for_long(kind, drafter):
    for wishes in (simulated_requests.WISHES, simulated_requests.WISHES_WITH_GRAMMARS):
        seen = play_many(kind, range(100, 180), (4, 10, 20), wishes, DRAFTERS[drafter])
        # Several steps at once are rare beside requests with a grammar.
        assert min(times for what, times in seen.items() if what != "multi-step programs") > 5, seen


def test_a_step_without_a_program_waits_for_the_tokens_in_flight(monkeypatch):
    """Only a program that verifies drafts knows where the rows are; without it the host reads the step before."""
    draw, choose, left_out = random.Random(0), StepPipeline._verify_shape, []

    def choose_now_and_then(pipeline, parts):
        if any(part.sequence.unread_drafts for part in parts) and draw.random() < 0.3:
            left_out.append(parts)
            return None
        return choose(pipeline, parts)

    monkeypatch.setattr(StepPipeline, "_verify_shape", choose_now_and_then)
    seen = play_many("full", range(6), (3, 6), setting_of=draw_drafts_on_device)
    assert seen["drafts accepted"] > 0
    assert len(left_out) > 5


def test_steps_that_verify_drafts_of_the_device_overlap():
    setting = Setting("full", rows=2, drafts=3, rightness=0.7, prefix=False, on_device=True)
    engine, _ = engine_of(random.Random(0), setting)
    made, ahead = [], []
    for at in range(2):
        made += engine.add([_ask([7 + at, 3], LONGEST - 2, {})])
    while all(one.status != FINISHED for one in made):
        engine.step()
        ahead.append(engine._pipeline.num_in_flight)
    stats = engine.speculation.stats
    # The first prompts and drafts come from the host, and the last tokens of a request are counted one by one.
    assert stats.overlapped > stats.steps - 6
    assert sum(ahead) > len(ahead) - 8
    assert sum(stats.accepted) > 20


def test_steps_that_verify_drafts_overlap_beside_a_row_with_one_token_left():
    """At most one token of it is left, so it takes part without a draft."""
    setting = Setting("full", rows=4, drafts=3, rightness=0.7, prefix=False, on_device=True)
    engine, _ = engine_of(random.Random(0), setting)
    requests = [_ask([7 + at, 3], most, {}) for at, most in enumerate((LONGEST - 2, 10, 17, 25))]
    made, ahead = [engine.add([one])[0] for one in requests], []
    while any(one.status != FINISHED for one in made):
        engine.step()
        ahead.append(engine._pipeline.num_in_flight)
    assert [tuple(one.token_ids) for one in made] == [answer(one).token_ids for one in requests]
    # The first drafts come from the host, and the last tokens of the last request are counted one by one.
    assert all(ahead[1:-2]), ahead


def test_drafting_pauses_where_no_draft_is_right_and_steps_overlap_again():
    setting = Setting("full", rows=1, drafts=2, prefix=False, drafted_share=None)
    engine, _ = engine_of(random.Random(0), setting)
    read, now = engine.speculation.read, [0.0]

    def read_later(parts):
        # A step for which drafts are asked takes a fifth longer than one without.
        stats = engine.speculation.stats
        now[0] += 1.2 if stats.steps and not stats.is_paused else 1
        read(parts)

    engine.speculation.read = read_later
    engine.speculation.pace = Pace(lambda: now[0], (2, 1))
    [made], ahead = engine.add([_ask([7, 3], LONGEST - 2, {})]), []
    while engine.has_work:
        engine.step()
        ahead.append(engine._pipeline.num_in_flight)
    assert len(made.token_ids) == LONGEST - 2
    stats = engine.speculation.stats
    assert (stats.pauses, stats.is_paused) == (1, True)
    assert 2 <= stats.steps < 8
    assert stats.drafted[0] > stats.drafted[1] > 0
    # With drafts each step is read before the next one is planned; those before and after are not.
    first = ahead.index(0, 2)
    assert PLAIN_STEPS < first < PLAIN_STEPS + 4
    assert not any(ahead[first : first + stats.steps])
    assert all(ahead[first + stats.steps + 2 : -2])


def test_an_engine_with_too_many_rows_drafts_nothing_and_overlaps():
    setting = Setting("full", rows=5, drafts=7, rightness=1.0, budget=40, prefix=False)
    engine, _ = engine_of(random.Random(0), setting)
    engine.shapes._verified = (8,)
    made = engine.add([replace(_ask([7, 3], 20, {}), seed=seed) for seed in range(5)])
    while all(one.status != FINISHED for one in made):
        engine.step()
    assert engine.speculation.stats.steps == 0


def test_a_budget_without_room_for_the_drafts_of_a_row_is_refused():
    with pytest.raises(ValueError, match="at most 16 tokens does not hold 20 drafts"):
        engine_of(random.Random(0), Setting("full", drafts=20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_a_grammar_get_their_own_tokens_for_long(kind):
    wishes = simulated_requests.WISHES_WITH_GRAMMARS
    seen = play_many(kind, range(100, 180), (4, 10, 20), wishes)
    assert min(seen[what] for what in OFTEN) > 10, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_everybody_reads_its_own_text_for_long(kind):
    seen = play_many(kind, range(100, 180), (4, 10, 20))
    assert min(seen[what] for what in OFTEN) > 10, seen
    assert seen["multi-step programs"] > 10, seen


def serve_declared(draw, kind, declare=declare_served, wishes=WISHES, **drafting):
    """Serves requests that are no more than an example, which `declare` lists the programs of.

    Returns:
        Which were asked for without being declared, and all that were asked for; `None` if the engine has no room for
        the example.
    """
    setting = replace(
        draw_setting(draw, kind, coarse=False, fault_rate=0.0, broken_every=0),
        rows=draw.choice((1, 2, 4, 5, 9)),
        budget=draw.choice((4, 7, 16, 40, 200)),
        most_rebuilds=draw.choice((0, 10**6)),
        rightness=0.7,
        **drafting,
    )
    engine, device = engine_of(draw, setting)
    longest = draw.randint(1, 50)
    most, wish = draw.randint(1, LONGEST + 1 - longest), draw.choice(wishes)
    samples = draw.choice((1, 1, 3))
    at_once = samples * draw.choice((1, 2, 3, 6))
    example = _ask([1] * longest, most, wish)
    try:
        engine.check(example)
    except ValueError:
        return None
    declared = declare(engine, example, at_once)
    engine.runner._known |= dict.fromkeys(declared)
    engine.runner.programs.strict = True
    stem = [draw.randrange(VOCAB) for _ in range(longest)]
    made, left = [], 10
    while left or engine.has_work:
        live = sum(one.status != FINISHED for one in made)
        if left and live + samples <= at_once and draw.random() < 0.5:
            left -= 1
            prompt = _prompt(draw, stem)
            request = _ask(prompt, draw.choice((most, draw.randint(1, most))), wish)
            made += engine.add([replace(request, seed=number) for number in range(samples)])
        if setting.most_rebuilds and draw.random() < 0.02:
            engine.runner.owner.poison("the test says so")
        if engine.has_work:
            engine.step()
        check_books(engine)
    assert all(one.error is None for one in made)
    return set(device.asked) - set(declared), set(device.asked)


def _ask(prompt, most, wish):
    wish = {"temperature": 0.0, "max_tokens": most} | wish
    if "min_tokens" in wish:
        wish["min_tokens"] = min(wish["min_tokens"], most)
    return Request(
        prompt=tuple(prompt),
        params=SamplingParams(**wish),
        seed=0,
        stop_ids=(),
        grammar=grammar_of(7 * len(prompt)) if "structured_outputs" in wish else None,
    )


def _prompt(draw, stem):
    """Returns a text up to the length of a stem, which begins like it for a while."""
    same = draw.choice((len(stem), draw.randint(0, len(stem))))
    more = draw.randint(0, len(stem) - same)
    return stem[:same] + [draw.randrange(VOCAB) for _ in range(more)] or [5]


def assert_declared(kind, seeds, wishes=WISHES, **drafting):
    served = 0
    for seed in seeds:
        draw = random.Random(f"{kind} {seed} declared")
        told = serve_declared(draw, kind, wishes=wishes, **drafting)
        if told is not None:
            late, asked = told
            assert not late, (kind, seed, late)
            served += bool(asked)
    assert served > 0


@kinds("full", "hybrid")
def test_no_program_is_asked_for_that_was_not_declared(kind):
    """Serving needs only what a warm-up declares, for every schedule and every state of the cache."""
    assert_declared(kind, range(4))


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_no_program_that_verifies_drafts_is_asked_for_that_was_not_declared(on_device):
    assert_declared("windows", range(3), drafts=3, on_device=on_device)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "hybrid"])
def test_no_program_of_a_grammar_is_asked_for_that_was_not_declared(kind):
    assert_declared(kind, range(6), (simulated_requests.GRAMMAR,))


def test_the_chunks_of_forced_tokens_are_declared_where_nothing_else_returns(monkeypatch):
    monkeypatch.setattr(
        simulated_grammar, "allowed_after", lambda key, tokens: [7] if len(tokens) < 30 else [7, 8]
    )
    setting = Setting("full", rows=1, page=8, budget=64, most_rebuilds=0, prefix=False)
    engine, device = engine_of(random.Random(0), setting)
    example = _ask([1], 40, simulated_requests.GRAMMAR)
    declared = declare_served(engine, example, 1)
    engine.runner._known |= dict.fromkeys(declared)
    engine.runner.programs.strict = True
    [made] = engine.add([example])
    while engine.has_work:
        engine.step()
    assert made.token_ids[:30] == [7] * 30
    assert set(device.asked) <= set(declared)
    assert max(one.tokens for one in device.asked if one.kind == "prefill") > 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_no_program_is_asked_for_that_was_not_declared_for_long(kind):
    assert_declared(kind, range(100, 130))


@pytest.mark.parametrize("what", UNDECLARED)
def test_a_program_that_is_not_declared_is_noticed(what):
    """The test above can fail: of what is declared, one kind of program is left out."""

    def forgetful(engine, request, count):
        return [one for one in declare_served(engine, request, count) if not UNDECLARED[what](one)]

    for seed in range(40):
        draw = random.Random(f"{what} {seed}")
        wishes = (simulated_requests.GRAMMAR,) if what == "samplers" else WISHES
        drafts = 3 * (what == "drafts")
        told = serve_declared(draw, "full", declare=forgetful, wishes=wishes, drafts=drafts)
        if told is not None and any(map(UNDECLARED[what], told[0])):
            return
    pytest.fail(f"no test missed the programs: {what}")


def test_an_engine_over_the_device_compiles_nothing(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    draw = random.Random(0)
    play = Play(draw, draw_setting(draw, "hybrid", host_bytes=2**22), 3)
    play.run()
    assert play.device.asked
    assert not play.engine.runner.programs.manifest()
