"""Random conversations over models with recurrent layers and few pages: every request has the tokens of a run alone.

Conversations continue, branch off or repeat, with samples, stops, aborts, preemptions, lost caches and evictions, over
few checkpoints and pages. The records of pages are checked after every step.
"""

import random

import pytest

from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.engine.request_state import FINISHED
from tests.engine.engines import VOCAB, assert_idle
from tests.engine.hybrid import CHUNK, ask, assert_same, check, engine_of, uncached

LONGEST, OUTPUT = 96, 10
WINDOW = {
    "pattern": (("mamba2+attention",), ("attention", "gated"), ("mamba2",)),
    "windows": (13, None, None),
}
CASES = {
    # A window, the host, outputs beside the states, and pages that end in the middle of a chunk.
    "window": {"page": 8, "pages": 14, "checkpoints": 2, "host_bytes": 2**17, "full_hits": True}
    | WINDOW,
    # Full attention, pages of several chunks.
    "plain": {"page": 32, "pages": 5, "checkpoints": 3},
    # Recurrent layers alone, whose checkpoints go to the host.
    "pure": {
        "page": 16,
        "checkpoints": 2,
        "host_bytes": 2**16,
        "pattern": (("mamba2",), ("mamba2",)),
    },
}
# Several steps in a launch, in one with all of that and in one with more pages.
CASES["window, launches"] = CASES["window"] | {"steps_per_launch": 3}
CASES["plain, launches"] = CASES["plain"] | {"pages": 7, "steps_per_launch": 3}


def play(engine, draw, most):
    """Serves requests that are drawn one after the other, and returns those that came to their end."""
    known = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 50))] for _ in range(2)]
    made, live, number = [], [], 0
    while number < most or live:
        if number < most and len(live) < 6 and draw.random() < 0.4:
            live += engine.add([next_turn(draw, known)] * draw.choice([1, 1, 2]))
            number += 1
        engine.step()
        check(engine)
        happen(engine, draw, live)
        for one in [one for one in live if one.status == FINISHED]:
            live.remove(one)
            if one.reason != "abort":
                made.append(one)
                known[draw.randrange(2)] = one.tokens
    while engine.has_work:
        engine.step()
    check(engine)
    return made


def next_turn(draw, known):
    """Returns a request that continues an earlier text, branches off from it, or repeats it."""
    before = draw.choice(known)
    cut = draw.choice([len(before), len(before), draw.randrange(len(before) + 1)])
    end = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 5, 20]))]
    prompt = (before[:cut] + end)[: LONGEST - OUTPUT] or [1]
    stops = tuple(draw.sample(range(VOCAB), 6)) if draw.random() < 0.5 else ()
    return ask(prompt, max_tokens=draw.choice([1, 4, OUTPUT]), stop_ids=stops)


def happen(engine, draw, live):
    """Lets something go wrong now and then."""
    if live and draw.random() < 0.04:
        engine.abort(draw.choice(live))
    if draw.random() < 0.03:
        engine.scheduler.requeue_all()
    if draw.random() < 0.01:
        engine.runner.owner.poison("the test says so")
    if draw.random() < 0.03:
        groups = [group for group in engine.runner.layout.groups if not group.in_place]
        engine.prefix.reclaim({draw.choice(groups).name: draw.randrange(1, 4)}, {})
    check(engine)


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        pytest.param("window", 200, marks=pytest.mark.slow),
        pytest.param("plain", 200, marks=pytest.mark.slow),
        ("window, launches", 15),
        pytest.param("window, launches", 200, marks=pytest.mark.slow),
        pytest.param("plain, launches", 200, marks=pytest.mark.slow),
        pytest.param("pure", 60, marks=pytest.mark.slow),
    ],
)
def test_random_conversations_have_the_tokens_of_lone_ones(name, requests):
    draw = random.Random(f"{name} {requests}")
    engine = engine_of(
        longest=LONGEST,
        budget=40,
        tokens=48,
        policy=CheckpointPolicy(grid=draw.choice([CHUNK, 2 * CHUNK])),
        most_rebuilds=requests,
        **CASES[name],
    )
    made = play(engine, draw, requests)
    stats = engine.prefix.stats
    # What the test is about did happen.
    assert min(stats.hits, stats.checkpoint_evictions) > 3
    assert (stats.evictions > 0) == bool(engine.runner.layout.paged_groups)
    assert sum(one.preemptions for one in made) > 0
    sent = {getattr(program.spec, "steps", 1) for program in engine.runner.programs.manifest()}
    assert max(sent) == CASES[name].get("steps_per_launch", 1)
    if engine.host is not None:
        assert engine.host.stats.hits > 0
    assert all(one.confirmed for one in engine.prefix._states.kept)
    assert_idle(engine)
    one_step = CASES[name] | {"steps_per_launch": 1}
    alone = engine_of(longest=LONGEST, budget=48, tokens=48, policy=CheckpointPolicy(), **one_step)
    for one in made:
        wishes = {"max_tokens": one.request.params.max_tokens, "stop_ids": one.request.stop_ids}
        assert_same([one], uncached(alone, one.request.prompt, **wishes))
