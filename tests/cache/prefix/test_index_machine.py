"""Random programs of an engine on a device simulated by dictionaries: every hit is the longest, correct and pinned.

`world.py` has the invariants. This file has the random programs, and a test of all short prompts in sequence.
"""

import itertools
import random

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.cache.layouts import reserve
from tests.cache.prefix.world import FULL, INSIDE, MIXED, ODD, WINDOW, World, layout_of, run_program
from tests.example_counts import examples


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


SALTS = (None, "", "tenant")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class PrefixMachine(RuleBasedStateMachine):
    """Every verb in any order. There are only two tokens, so that texts often agree."""

    layout = FULL
    counts = {"group0": 7}  # noqa: RUF012 - never changed

    def __init__(self):
        super().__init__()
        self.world = World(self.layout, self.counts)
        self.probes = []

    def choose(self, data):
        return data.draw(st.sampled_from(sorted(self.world.live)))

    @rule(text=TOKENS, salt=st.sampled_from(SALTS))
    def adopt(self, text, salt):
        self.probes = [*self.probes[-3:], (salt, text)]
        self.world.adopt(text, salt)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), extra=st.integers(1, 4), collect=st.booleans())
    def step(self, data, extra, collect):
        seq = self.choose(data)
        live = self.world.live[seq]
        wanted = live.computed + extra
        short = max(0, wanted - len(live.text))
        live.text += data.draw(st.lists(st.integers(0, 1), min_size=short, max_size=short))
        if self.world.step(seq, wanted) and collect:
            self.world.collect(seq)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), in_flight=st.integers(0, 1))
    def collect(self, data, in_flight):
        self.world.collect(self.choose(data), in_flight=in_flight)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def free_out_of_window(self, data):
        self.world.free_out_of_window(self.choose(data))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.choose(data)
        held = self.world.allocator.held(seq)
        if held.writable == held.computed:
            self.world.fork(seq)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def reserve_for_a_step_that_never_runs(self, data):
        seq = self.choose(data)
        before = self.world.free(), self.world.all_kept()
        try:
            reservation, taken = reserve(
                self.world.allocator, seq, self.world.live[seq].computed + 1
            )
        except RuntimeError:
            assert (self.world.free(), self.world.all_kept()) == before
        else:
            self.world._after_reserve(seq, reservation, taken, before)
            self.world.check()
            self.world.release(seq)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), back=st.booleans())
    def release(self, data, back):
        """An end, an abort, or a preemption after which the same text is adopted again."""
        seq = self.choose(data)
        live = self.world.live[seq]
        self.world.release(seq)
        if back:
            self.world.adopt(live.text, live.salt, live.keys)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def fail(self, data):
        self.world.fail(self.choose(data))

    @rule(data=st.data(), count=st.integers(1, 4))
    def evict(self, data, count):
        name = data.draw(st.sampled_from([group.name for group in self.world.groups]))
        self.world.evict(name, count)

    @rule(keep_prefix=st.booleans(), really=st.integers(0, 3))
    def reset(self, keep_prefix, really):
        if really == 0:
            self.world.reset(keep_prefix=keep_prefix)

    @rule(really=st.integers(0, 3))
    def clear(self, really):
        if really == 0:
            self.world.clear()

    @invariant()
    def everything_agrees(self):
        self.world.check()
        self.world.check_matches(self.probes)


class WindowMachine(PrefixMachine):
    layout, counts = WINDOW, {"group0": 9}


class MixedMachine(PrefixMachine):
    layout, counts = MIXED, {"group0": 8, "group1": 14, "sampling": 5}


class OddMachine(PrefixMachine):
    layout, counts = ODD, {"group0": 6, "group1": 11, "group2": 8}


class InsideMachine(PrefixMachine):
    layout, counts = INSIDE, {"group0": 20, "group1": 5}


def with_settings(machine, most=30, steps=40):
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples(most),
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestFull = with_settings(PrefixMachine)
TestWindow = with_settings(WindowMachine)
TestMixed = with_settings(MixedMachine)
TestOdd = with_settings(OddMachine)
TestInside = with_settings(InsideMachine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "machine",
    [
        PrefixMachine,
        WindowMachine,
        *(
            pytest.param(machine, marks=pytest.mark.slow)
            for machine in (MixedMachine, OddMachine, InsideMachine)
        ),
    ],
)
def test_long_random_programs_keep_every_promise(machine, seed):
    """The books are checked after each operation, with many hits, evictions and failures."""
    world = World(machine.layout, machine.counts)
    run_program(world, random.Random(seed), 800)
    stats = world.index.stats
    assert min(stats.hits, stats.misses, stats.evictions) >= 10


TEXTS = [text for length in range(1, 7) for text in itertools.product((0, 1), repeat=length)]


@pytest.mark.parametrize(
    "sizes", [[(2, None)], [(2, 3)], [(2, None), (3, None)], [(2, None), (1, 3)]]
)
def test_every_short_text_finds_just_what_it_shares_with_every_other(sizes):
    """The pairs are all texts over two tokens of up to three pages, but for the names of the tokens."""
    layout = layout_of(*sizes)
    world = World(layout, {group.name: 6 for group in layout.groups})
    for first in (text for text in TEXTS if text[0] == 0):
        seq = world.adopt(first)
        assert world.step(seq, len(first))
        world.collect(seq)
        world.release(seq)
        for second in TEXTS:
            common = sum(itertools.takewhile(bool, map(int.__eq__, first, second)))
            whole = min(common // size * size for size, _ in sizes)
            found = world.index.match(second, world.index.keys()).num_tokens
            assert found == min(whole, len(second) - 1)
        world.reset(keep_prefix=False)


def operations(world):
    """What can happen next in a cache of three pages with two texts."""
    able = [lambda: world.evict("group0", 1)]
    if len(world.live) < 3:
        able += [lambda text=text: world.adopt(text) for text in ((0, 0, 1, 0), (0, 0, 1))]
    for seq, live in world.live.items():
        able.append(lambda seq=seq: world.release(seq))
        if live.computed < len(live.text):
            able.append(lambda seq=seq, live=live: world.step(seq, len(live.text)))
        if live.steps:
            able.append(lambda seq=seq: world.collect(seq))
    return able


def test_every_short_program_keeps_every_promise():
    """The interleavings are all of up to five operations of three sequences over three pages."""
    programs, todo = 0, [()]
    while todo:
        choices = todo.pop()
        world = World(layout_of((2, None)), {"group0": 3})
        for choice in choices:
            operations(world)[choice]()
        world.check()
        programs += 1
        if len(choices) < 5:
            todo += [(*choices, choice) for choice in range(len(operations(world)))]
    assert programs > 1000
