"""Random programs of sequences on a simulated memory: every sequence reads its own tokens, and no page leaks.

The machine simulates the device. A page slot stores the (position, token) written there, a state the tuple of its
tokens. Rows of a step run one after the other, so a row that overwrites what a later row reads is caught.
"""

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place, window
from jaxkv.errors import OutOfPages, OutOfStates
from tests.cache.layouts import HALF, hybrid, reserve, slots_of
from tests.example_counts import examples

ZERO = ()


class PageAllocatorMachine(RuleBasedStateMachine):
    layout = hybrid()
    counts: ClassVar = {"gqa": 7, "odd": 13, "mamba2": 6, "sampling": 5}
    none_held: ClassVar = counts | {"mamba2": 5, "sampling": 4}

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(self.layout, self.counts)
        self.expected = {}
        self.next_seq = 0
        self.next_token = 0
        self.slots = {group.name: {} for group in self.layout.paged_groups}
        self.states = {
            group.name: {0: ZERO} for group in self.layout.groups if group.unit == "state"
        }

    def free(self):
        return {name: self.allocator.num_free(name) for name in self.counts}

    def reserve(self, seq, num_tokens):
        """Reserves and makes the copies, or returns False with nothing changed."""
        before = self.free()
        try:
            reservation, taken = reserve(self.allocator, seq, num_tokens)
        except (OutOfPages, OutOfStates):
            assert self.free() == before
            return False
        for name, state in reservation.new_states.items():
            self.states[name][state] = ZERO if name == "sampling" else "junk of an earlier owner"
        for name, pages in taken.items():
            size = self.layout.group(name).page_size
            for page in pages:
                for slot in range(page * size, page * size + size):
                    self.slots[name].pop(slot, None)
        for copy in reservation.copies:
            self.copy(copy)
        return True

    def copy(self, copy):
        if copy.group in self.states:
            self.states[copy.group][copy.target] = self.states[copy.group][copy.source]
            return
        size = self.layout.group(copy.group).page_size
        memory = self.slots[copy.group]
        for offset in range(size):
            if copy.source * size + offset in memory:
                memory[copy.target * size + offset] = memory[copy.source * size + offset]

    def compute(self, seq, tokens):
        """Writes the tokens into the allocated slots, from what the states hold."""
        start, stop = len(self.expected[seq]), len(self.expected[seq]) + len(tokens)
        for name in self.slots:
            slots = slots_of(self.allocator, self.layout.group(name), seq, start, stop)
            for slot, position, token in zip(slots, range(start, stop), tokens, strict=True):
                self.slots[name][int(slot)] = (position, token)
        for name, memory in self.states.items():
            read, write = self.allocator.states(seq, name)
            assert write != 0
            memory[write] = memory[read] + tuple(tokens)

    def first(self, seq, group):
        return self.allocator.held(seq).unneeded[group.name]

    @rule()
    def open(self):
        self.allocator.open(self.next_seq)
        self.expected[self.next_seq] = []
        self.next_seq += 1

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def step(self, data):
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.expected)), unique=True, min_size=1)
        )
        work = []
        for seq in chosen:
            tokens = [self.next_token + i for i in range(data.draw(st.integers(1, 6)))]
            self.next_token += len(tokens)
            if self.reserve(seq, len(self.expected[seq]) + len(tokens)):
                work.append((seq, tokens))
        self.allocator.check()
        for seq, tokens in work:
            self.compute(seq, tokens)
        for seq, tokens in work:
            self.expected[seq] += tokens
            self.allocator.commit(seq, len(self.expected[seq]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), extra=st.integers(0, 3))
    def reserve_for_a_step_that_never_runs(self, data, extra):
        seq = data.draw(st.sampled_from(sorted(self.expected)))
        self.reserve(seq, len(self.expected[seq]) + extra)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.expected)))
        before = self.free()
        try:
            self.allocator.fork(parent, self.next_seq)
        except ValueError:
            held = self.allocator.held(parent)
            assert held.writable > held.computed
        else:
            self.expected[self.next_seq] = list(self.expected[parent])
            self.next_seq += 1
        assert self.free() == before

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(sorted(self.expected)))
        self.allocator.release(seq)
        del self.expected[seq]
        with pytest.raises(ValueError, match="not open"):
            self.allocator.release(seq)

    @invariant()
    def the_books_agree(self):
        self.allocator.check()
        if not self.expected:
            assert self.free() == self.none_held

    @invariant()
    def every_sequence_finds_what_it_wrote(self):
        for seq, tokens in self.expected.items():
            assert self.allocator.num_tokens(seq) == len(tokens)
            for name in self.slots:
                group = self.layout.group(name)
                start = min(self.first(seq, group) * group.page_size, len(tokens))
                slots = slots_of(self.allocator, group, seq, start, len(tokens))
                found = [self.slots[name].get(int(slot)) for slot in slots]
                assert found == list(enumerate(tokens))[start:]
                assert start <= max(0, len(tokens) - 4)
            for name, memory in self.states.items():
                assert memory[self.allocator.held(seq).states[name].read] == tuple(tokens)

    @invariant()
    def the_zero_state_is_never_written(self):
        assert all(memory[0] == ZERO for memory in self.states.values())


class PagedMachine(PageAllocatorMachine):
    """Without states, tokens can be taken back; a window that has freed pages can go back as far as it still sees."""

    layout = group_layers(place([gqa(1, 2, **HALF), window(1, 2, window=5, **HALF)]))
    counts: ClassVar = {group.name: 9 for group in layout.groups}
    none_held = counts

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free_out_of_window(self, data):
        seq = data.draw(st.sampled_from(sorted(self.expected)))
        self.allocator.free_out_of_window(seq, len(self.expected[seq]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data):
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.expected)), unique=True, min_size=1)
        )
        lengths = {seq: data.draw(st.integers(0, len(self.expected[seq]))) for seq in chosen}
        before = self.free()
        lacking = any(
            self.first(seq, group) * group.page_size > max(0, count - 4)
            for seq, count in lengths.items()
            for group in self.layout.paged_groups
        )
        try:
            self.allocator.truncate(lengths)
        except ValueError:
            assert lacking
            assert self.free() == before
        else:
            assert not lacking
            for seq, count in lengths.items():
                del self.expected[seq][count:]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def take_back(self, data):
        """Drafts of one sequence are rejected."""
        seq = data.draw(st.sampled_from(sorted(self.expected)))
        count = data.draw(st.integers(0, len(self.expected[seq])))
        lacking = any(
            self.first(seq, group) * group.page_size > max(0, count - 4)
            for group in self.layout.paged_groups
        )
        before, reserved = self.free(), self.allocator.held(seq).reserved
        try:
            self.allocator.take_back(seq, count)
        except ValueError:
            assert lacking
        else:
            assert not lacking
            del self.expected[seq][count:]
            assert self.allocator.held(seq).reserved == reserved
        assert self.free() == before


TestPageAllocatorMachine = PageAllocatorMachine.TestCase
TestPageAllocatorMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
