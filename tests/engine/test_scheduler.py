"""The scheduler under random arrivals, aborts, losses and tiny pools, on a device that stores the text of each slot.

The device keeps, for each slot, a number computed from the whole text up to it, and raises if a row reads another text
than its own. So resumed requests, forks and prefix hits must find exactly their own text.
"""

import random
from collections import deque
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, sampling, window
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RUNNING, WAITING, RequestState
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.steps.step_plan import first_step
from jaxkv.runner.buckets import LOOSE_TOKENS, MOST_PADDING, bucket, filled, token_buckets

LAYOUT = group_layers(
    (
        LayerSpec(0, gqa(1, 8, dtype="float32", page_size=4)),
        LayerSpec(1, window(1, 8, window=5, dtype="float32", page_size=2)),
        LayerSpec(2, sampling(50, penalties=False, bias_entries=0)),
    )
)
PAGED = {"gqa": (4, None), "window": (2, 5)}
COUNTS = {"gqa": 9, "window": 18, "sampling": 5}
MAX_ROWS, BUDGET, LONGEST = 4, 12, 36
STOP = 9


def next_token(tokens, seed):
    drawn = crc32(bytes([*tokens, seed]))
    return STOP if drawn % 17 == 0 else drawn % 3


def oracle(request):
    """Returns the prompt and everything that the request generates when it is alone, and what a device adds in vain."""
    tokens, end = list(request.prompt), None
    for _ in range(request.params.max_tokens):
        tokens.append(next_token(tokens, request.seed))
        if tokens[-1] == STOP and end is None:
            end = len(tokens)
    return tokens[:end], tokens


def chain(tokens):
    """Returns, per position, a number that stands for the text up to it."""
    marks, mark = [], 0
    for token in tokens:
        mark = crc32(bytes([token]), mark)
        marks.append(mark)
    return marks


class Device:
    """Remembers what steps write, and checks what they read."""

    def __init__(self):
        self.slots = {name: {} for name in PAGED}
        self.last = {}

    def copy(self, copy):
        if copy.group == "sampling":
            self.last[copy.target] = self.last.get(copy.source)
            return
        size = PAGED[copy.group][0]
        memory = self.slots[copy.group]
        for offset in range(size):
            memory[copy.target * size + offset] = memory.get(copy.source * size + offset)

    def run(self, part, allocator, truth):
        """Returns the token chosen for one row."""
        number, stop = part.sequence.number, part.start + part.count
        entry = allocator.states(number, "sampling")[1]
        given = part.sequence.tokens[part.start : stop]
        if part.carry:
            given = [self.last[entry]]
        assert given == truth[part.start : stop]
        marks = chain(truth[:stop])
        for name, (size, reach) in PAGED.items():
            memory, table = self.slots[name], allocator.pages(number, name)
            oldest = 0 if reach is None else max(0, part.start + 1 - reach)
            for position in range(oldest, stop):
                slot = table[position // size] * size + position % size
                if position >= part.start:
                    memory[slot] = marks[position]
                assert memory.get(slot) == marks[position], (
                    f"{name} position {position} of {number}"
                )
        token = next_token(truth[:stop], part.sequence.request.seed)
        if part.emits:
            self.last[entry] = token
        return token


class Serving:
    """The engine's loop without arrays: one step ahead of what is read."""

    def __init__(
        self, *, prefix=True, counts=COUNTS, max_rows=MAX_ROWS, budget=BUDGET, whole=False
    ):
        self.allocator = PageAllocator(LAYOUT, counts)
        self.index = PrefixIndex(LAYOUT, self.allocator, identity="test") if prefix else None
        self.sizes = token_buckets(LONGEST if whole else budget, per_octave=4 if whole else 2)
        self.counts, self.max_rows, self.budget, self.whole = counts, max_rows, budget, whole
        self.scheduler = Scheduler(
            self.allocator,
            self.index,
            page_size=2,
            max_rows=max_rows,
            token_budget=budget,
            whole_prompts=whole,
            fill=lambda least, most: filled(least, most, self.sizes),
        )
        self.device = Device()
        self.flights = deque()
        self.sequences, self.truth, self.endless = [], {}, {}
        self.preempted_first = self.multi_step = 0
        self.refuses_multi_step = False

    def add(self, prompt, max_tokens=6, *, seed=0, priority=0, samples=1):
        params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
        made = []
        for sample in range(samples):
            request = Request(
                prompt=tuple(prompt),
                params=params,
                seed=(seed + sample) % 256,
                stop_ids=(STOP,),
                priority=priority,
            )
            number = len(self.sequences)
            sequence = RequestState(request=request, number=number, tokens=list(prompt))
            self.sequences.append(sequence)
            self.truth[number], self.endless[number] = oracle(request)
            if made:
                self.scheduler.add_sample(made[0], sequence)
            else:
                self.scheduler.add(sequence)
            made.append(sequence)
        return made

    def dispatch(self):
        first = min(self.scheduler.running, key=lambda one: one.order, default=None)
        plan = self.scheduler.plan()
        self.preempted_first += first in plan.preempted
        self.check(plan)
        for _, copy in plan.copies:
            self.device.copy(copy)
        rows = []
        parts, steps = plan.parts, plan.steps
        if steps > 1 and self.refuses_multi_step:
            parts, steps = [first_step(part) for part in parts], 1
        self.multi_step += steps > 1
        for part in parts:
            turns = [part] if steps == 1 else list(turns_of(part))
            truth = self.endless[part.sequence.number]
            tokens = [self.device.run(turn, self.allocator, truth) for turn in turns]
            rows.append((part, part.sequence.epoch, tokens))
        self.scheduler.dispatched(parts)
        if rows:
            self.flights.append(rows)
        return plan

    def check(self, plan):
        counts = [part.count for part in plan.parts]
        assert len(counts) <= self.max_rows
        assert len({part.sequence.number for part in plan.parts}) == len(counts)
        assert all(part.sequence.status == RUNNING for part in plan.parts)
        if plan.steps > 1:
            assert all(1 <= part.count == part.emits <= plan.steps for part in plan.parts)
            return
        assert sum(counts) <= self.budget or (self.whole and len(counts) == 1)
        if sum(counts) > LOOSE_TOKENS and max(counts) > 1:
            assert bucket(sum(counts), self.sizes) <= MOST_PADDING * sum(counts)

    def collect(self):
        for part, epoch, tokens in self.flights.popleft():
            sequence = part.sequence
            if sequence.epoch != epoch:
                continue
            sequence.collected = part.start + part.count
            if part.emits:
                sequence.pending -= part.emits
                taken = tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens
                sequence.tokens += taken
                sequence.collected -= len(tokens) - len(taken)
            self.publish(sequence)
            if part.emits and (
                STOP in tokens or sequence.generated == sequence.request.params.max_tokens
            ):
                self.scheduler.end(sequence)
            else:
                self.allocator.free_out_of_window(sequence.number, sequence.collected)

    def publish(self, sequence):
        if self.index is not None and sequence.keys is not None:
            self.index.publish(sequence.number, sequence.tokens, sequence.keys, sequence.collected)

    def step(self):
        plan = self.dispatch()
        if self.flights and (len(self.flights) > 1 or not plan.parts):
            self.collect()
        return plan

    def lose(self):
        """Every array is gone, and what is under way with it."""
        self.flights.clear()
        self.device = Device()
        self.scheduler.requeue_all()
        if self.index is not None:
            self.index.clear()

    @property
    def unfinished(self):
        return [one for one in self.sequences if one.status != FINISHED]

    def finish(self, most_steps=2000):
        for _ in range(most_steps):
            if not self.unfinished and not self.flights:
                return
            self.step()
        raise AssertionError(f"{len(self.unfinished)} sequences never end")

    def check_books(self):
        self.allocator.check()
        scheduler = self.scheduler
        assert len(scheduler.running) <= self.max_rows
        for held in (scheduler.running, scheduler.waiting):
            assert held == sorted(held, key=lambda one: one.order)
        assert all(one.status == RUNNING for one in scheduler.running)
        assert all(one.status == WAITING for one in scheduler.waiting)
        if self.index is not None:
            self.index.check()

    def check_idle(self):
        """Nothing is held but by the index."""
        self.check_books()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        for name, count in self.counts.items():
            if name == "sampling":
                assert self.allocator.num_free(name) == count - 1
                continue
            kept = self.allocator.num_reclaimable(name) if self.index else 0
            assert self.allocator.num_free(name) + kept == count


def turns_of(part):
    """Takes a part of several steps apart."""
    for turn in range(part.count):
        yield part._replace(start=part.start + turn, count=1, emits=1, carry=part.carry or turn > 0)


def outputs(serving):
    return [one.tokens for one in serving.sequences]


def truths(serving):
    return [serving.truth[one.number] for one in serving.sequences]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.serving = Serving()
        self.aborted = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 16),
        seed=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 0, 1]),
        samples=st.sampled_from([1, 1, 1, 2, 6]),
    )
    def add(self, prompt, max_tokens, seed, priority, samples):
        self.serving.add(prompt, max_tokens, seed=seed, priority=priority, samples=samples)

    @precondition(lambda self: self.serving.unfinished)
    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.serving.step()

    @precondition(lambda self: self.serving.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.serving.unfinished))
        self.serving.scheduler.end(sequence)
        self.serving.scheduler.end(sequence)
        self.aborted.add(sequence.number)

    @rule()
    def lose_the_cache(self):
        self.serving.lose()

    @rule(steps=st.sampled_from([1, 2, 4, 8]), refuses=st.booleans())
    def plan_several_steps_at_once(self, steps, refuses):
        self.serving.scheduler.most_steps = steps
        self.serving.refuses_multi_step = refuses

    @precondition(lambda self: self.serving.scheduler.running)
    @rule()
    def suspect_everybody(self):
        self.serving.scheduler.isolate(list(self.serving.scheduler.running))

    @precondition(lambda self: self.serving.scheduler.running)
    @rule(data=st.data())
    def leave_some_out_of_a_step(self, data):
        running = self.serving.scheduler.running
        self.serving.scheduler.plan_next(running[data.draw(st.integers(0, len(running) - 1)) :])

    @precondition(lambda self: self.serving.scheduler.running)
    @rule(data=st.data())
    def put_off(self, data):
        self.serving.scheduler.requeue(data.draw(st.sampled_from(self.serving.scheduler.running)))

    @invariant()
    def the_books_agree(self):
        self.serving.check_books()
        assert self.serving.preempted_first == 0

    def teardown(self):
        serving = self.serving
        serving.finish()
        serving.check_idle()
        for one in serving.sequences:
            truth = serving.truth[one.number]
            if one.number in self.aborted:
                assert one.tokens == truth[: len(one.tokens)]
            else:
                assert one.tokens == truth


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_several_steps_at_once_read_and_write_what_single_ones_would():
    """Requests arrive, abort and lose caches in tiny pools. Steps that were planned together may be sent one by one."""
    draw, multi_steps = random.Random(4), 0
    for _ in range(40):
        serving = Serving(prefix=draw.random() < 0.8)
        scheduler, aborted = serving.scheduler, set()
        for _ in range(40):
            scheduler.most_steps = draw.choice([1, 2, 4, 8])
            serving.refuses_multi_step = draw.random() < 0.2
            if draw.random() < 0.15:
                prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 12))]
                serving.add(prompt, draw.randrange(1, 20), seed=draw.randrange(9))
            if draw.random() < 0.03 and serving.unfinished:
                scheduler.end(victim := draw.choice(serving.unfinished))
                aborted.add(victim.number)
            if draw.random() < 0.02:
                serving.lose()
            serving.step()
            serving.check_books()
        serving.finish()
        serving.check_idle()
        multi_steps += serving.multi_step
        for one in serving.sequences:
            truth = serving.truth[one.number]
            assert one.tokens == (truth[: len(one.tokens)] if one.number in aborted else truth)
    assert multi_steps > 100


@pytest.mark.slow
def test_fifty_thousand_random_steps_lose_nobody_and_no_page():
    """Requests arrive, abort, lose caches and run alone after faults; some steps have no room for all."""
    draw, steps = random.Random(2), 0
    while steps < 50_000:
        serving = Serving(prefix=draw.random() < 0.8, budget=draw.choice([5, 12]))
        aborted = set()
        for _ in range(150):
            scheduler, running = serving.scheduler, list(serving.scheduler.running)
            verb = draw.choices(
                ["add", "step", "abort", "lose", "alone", "left"], [3, 30, 1, 1, 1, 1]
            )[0]
            if verb == "add" and len(serving.unfinished) < 12:
                prompt = [draw.randrange(2) for _ in range(draw.randrange(1, 20))]
                seed, samples = draw.randrange(4), draw.choice([1, 1, 3])
                serving.add(prompt, draw.randrange(1, 16), seed=seed, samples=samples)
            elif verb == "abort" and serving.unfinished:
                victim = draw.choice(serving.unfinished)
                scheduler.end(victim)
                aborted.add(victim.number)
            elif verb == "lose":
                serving.lose()
            elif verb == "alone" and running:
                scheduler.isolate(running)
            elif verb == "left" and running:
                scheduler.plan_next(running[draw.randrange(len(running)) :])
            serving.step()
            serving.check_books()
            steps += 1
        serving.finish()
        serving.check_idle()
        assert serving.preempted_first == 0
        for one in serving.sequences:
            truth = serving.truth[one.number]
            assert one.tokens == (truth[: len(one.tokens)] if one.number in aborted else truth)


def test_the_oldest_gets_on_when_all_want_the_last_page():
    """With room for little more than one request, all of them end, in order of arrival."""
    serving = Serving(counts={"gqa": 7, "window": 14, "sampling": 5}, prefix=False)
    for seed in range(6):
        serving.add([0, 1, 0, 1], 20, seed=seed)
    while serving.unfinished or serving.flights:
        plan = serving.step()
        # The preempted request does not take the pages back at once.
        assert not (plan.preempted and plan.new_entries)
    assert outputs(serving) == truths(serving)
    assert sum(one.preemptions for one in serving.sequences) > 0
    assert serving.sequences[0].preemptions == 0
    serving.check_idle()


def test_the_first_waits_where_it_is_for_pages_that_others_hold():
    serving = Serving(prefix=False)
    serving.allocator.open(-1)
    serving.allocator.reserve(-1, 7 * 4)
    [first] = serving.add([0, 1, 0, 1, 0], 12, seed=3)
    for _ in range(10):
        plan = serving.step()
    assert plan.is_empty
    assert serving.scheduler.shortage is not None
    assert (first.status, first.preemptions, first.computed) == (RUNNING, 0, 8)
    serving.allocator.release(-1)
    serving.finish()
    assert outputs(serving) == truths(serving)
    assert first.preemptions == 0
    serving.check_idle()


def test_the_more_urgent_goes_first_and_equals_in_order_of_arrival():
    serving = Serving(max_rows=1)
    for priority in (1, 0, 1, 0):
        serving.add([0, 1], 1, priority=priority)
    ended = []
    while serving.unfinished:
        before = set(serving.unfinished)
        serving.step()
        ended += [one.number for one in before - set(serving.unfinished)]
    assert ended == [1, 3, 0, 2]


def test_a_long_prompt_does_not_stop_those_that_generate():
    """Every step of a long prompt also advances the rows that generate."""
    serving = Serving(counts={"gqa": 40, "window": 80, "sampling": 5})
    [talker] = serving.add([0], 30, seed=3)
    serving.step()
    serving.add([1] * 36, 1)
    for _ in range(3):
        plan = serving.step()
        assert {part.sequence.number: part.count for part in plan.parts} == {0: 1, 1: 11}
    assert talker.generated > 0


def test_samples_start_from_one_computation_of_their_prompt():
    serving = Serving(prefix=False)
    samples = serving.add([0, 1, 1, 0, 1, 0, 0], 5, samples=4, seed=7)
    computed = 0
    while serving.unfinished or serving.flights:
        computed += sum(part.count for part in serving.step().parts if part.start < 7)
    assert computed == 6 + 4
    assert [one.tokens for one in samples] == truths(serving)
    serving.check_idle()


@pytest.mark.parametrize("victims", [{0}, {1}, {2}, {0, 1}, {0, 3}, {1, 2, 3}])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("length", [13, 18, 24])
def test_samples_that_are_aborted_leave_the_others_alone(victims, steps, length):
    """vLLM #14326: the first sample, another one or all of them go before the prompt is computed."""
    serving = Serving(prefix=False)
    prompt = [0, 1] * 12
    samples = serving.add(prompt[:length], 5, samples=4, seed=3)
    for _ in range(steps):
        serving.step()
    for victim in victims:
        serving.scheduler.end(samples[victim])
    serving.finish()
    assert all(samples[victim].tokens == prompt[:length] for victim in victims)
    samples = [one for at, one in enumerate(samples) if at not in victims]
    assert [one.tokens for one in samples] == [serving.truth[one.number] for one in samples]
    serving.check_idle()


def test_a_second_prompt_computes_only_what_the_first_has_not():
    """Of two whole pages all but the last token is skipped."""
    serving = Serving()
    serving.add([0, 1] * 4, 1)
    serving.finish()
    [again] = serving.add([0, 1] * 4, 1)
    plan = serving.step()
    assert [(part.start, part.count) for part in plan.parts] == [(7, 1)]
    assert again.cached == 7
    assert plan.copies
    serving.finish()
    assert outputs(serving) == truths(serving)


@pytest.mark.parametrize("pages", [9, 40])
def test_whole_prompts_are_neither_cut_nor_starved_nor_shared(pages):
    """Nor when they come back: the prompt whole, then what it had generated, token by token."""
    counts = {"gqa": pages, "window": 2 * pages, "sampling": 4}
    serving = Serving(whole=True, budget=8, max_rows=3, counts=counts)
    serving.add([0], 30, seed=3)
    serving.step()
    for length in (20, 3, 4, 20):
        serving.add([1] * length, 12, samples=2, seed=length)
    first = {}
    while serving.unfinished or serving.flights:
        for part in serving.step().parts:
            first.setdefault(part.sequence.number, part.count)
            assert part.start == 0 or part.count == 1
    assert all(first[one.number] == len(one.request.prompt) for one in serving.sequences)
    assert (sum(one.preemptions for one in serving.sequences) > 0) == (pages == 9)
    assert outputs(serving) == truths(serving)


def test_steps_fill_their_buckets():
    """A step of more than 64 tokens is padded by at most a quarter."""
    counts = {"gqa": 2000, "window": 4000, "sampling": 31}
    serving = Serving(counts=counts, max_rows=30, budget=256)
    for seed in range(60):
        serving.add([seed % 2] * (1 + 37 * seed % 230), 1 + seed % 40, seed=seed)
    serving.finish()
    for length in range(LOOSE_TOKENS, 256, 13):
        serving.add([1] * length, 1, seed=length)
        serving.finish()
    assert outputs(serving) == truths(serving)


def test_prompts_and_rows_take_turns_where_no_bucket_fits_both():
    serving = Serving(budget=5)
    [talker] = serving.add([0], 30, seed=3)
    serving.step()
    serving.scheduler._fill = lambda least, most: most if least == 1 else None
    serving.add([1] * 20, 1)
    for _ in range(3):
        assert [part.sequence.number for part in serving.step().parts] == [1]
        assert [part.sequence for part in serving.step().parts] == [talker]


def test_a_suspect_runs_alone():
    serving = Serving()
    made = [serving.add([0, 1], 8, seed=seed)[0] for seed in range(3)]
    serving.step()
    serving.scheduler.isolate(made[:2])
    assert [part.sequence for part in serving.step().parts] == made[:1]
    assert [part.sequence for part in serving.step().parts] == made[1:2]
    assert len(serving.step().parts) > 1


def test_a_suspect_that_has_ended_runs_no_more():
    """Its pages may be another request's by then."""
    serving = Serving()
    one, other = [serving.add([0, 1], 8, seed=seed)[0] for seed in range(2)]
    serving.step()
    serving.step()
    assert one.status == other.status == RUNNING
    serving.scheduler.isolate([one, other])
    serving.scheduler.end(one)
    assert not serving.scheduler.plan().parts
    assert [part.sequence for part in serving.scheduler.plan().parts] == [other]


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match="budget"):
        Serving(budget=3, max_rows=4)
