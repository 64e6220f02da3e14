"""Random programs of sequences on a simulated memory: every sequence reads its own tokens, and no page leaks.

The machine simulates the device. A page slot stores the (position, token) written there, a state the tuple of its
tokens. Rows of a step run one after the other, so a row that overwrites what a later row reads is caught.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.errors import OutOfPages, OutOfStates
from tests.cache.layouts import hybrid, slots_of

LAYOUT = hybrid()
COUNTS = {"gqa": 7, "odd": 13, "mamba2": 6, "sampling": 5}
PAGED = ("gqa", "odd")
ZERO = ()


class PageAllocatorMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(LAYOUT, COUNTS)
        self.expected = {}
        self.next_seq = 0
        self.next_token = 0
        self.slots = {name: {} for name in PAGED}
        self.states = {name: {0: ZERO} for name in ("mamba2", "sampling")}

    def free(self):
        return {name: self.allocator.num_free(name) for name in COUNTS}

    def reserve(self, seq, num_tokens):
        """Reserves and makes the copies, or returns False with nothing changed."""
        before = self.free()
        try:
            reservation = self.allocator.reserve(seq, num_tokens)
        except (OutOfPages, OutOfStates):
            assert self.free() == before
            return False
        for name, state in reservation.new_states.items():
            self.states[name][state] = ZERO if name == "sampling" else "junk of an earlier owner"
        for name, pages in reservation.new_pages.items():
            size = LAYOUT.group(name).page_size
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
        size = LAYOUT.group(copy.group).page_size
        memory = self.slots[copy.group]
        for offset in range(size):
            if copy.source * size + offset in memory:
                memory[copy.target * size + offset] = memory[copy.source * size + offset]

    def compute(self, seq, tokens):
        """Writes the tokens into the allocated slots, from what the states hold."""
        start, stop = len(self.expected[seq]), len(self.expected[seq]) + len(tokens)
        for name in PAGED:
            slots = slots_of(self.allocator, LAYOUT.group(name), seq, start, stop)
            for slot, position, token in zip(slots, range(start, stop), tokens, strict=True):
                self.slots[name][int(slot)] = (position, token)
        for name, memory in self.states.items():
            read, write = self.allocator.states(seq, name)
            assert write != 0
            memory[write] = memory[read] + tuple(tokens)

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
            assert self.free() == COUNTS | {"mamba2": 5, "sampling": 4}

    @invariant()
    def every_sequence_finds_what_it_wrote(self):
        for seq, tokens in self.expected.items():
            assert self.allocator.num_tokens(seq) == len(tokens)
            for name in PAGED:
                slots = slots_of(self.allocator, LAYOUT.group(name), seq, 0, len(tokens))
                found = [self.slots[name].get(int(slot)) for slot in slots]
                assert found == list(enumerate(tokens))
            for name, memory in self.states.items():
                assert memory[self.allocator.held(seq).states[name].read] == tuple(tokens)

    @invariant()
    def the_zero_state_is_never_written(self):
        assert all(memory[0] == ZERO for memory in self.states.values())


TestPageAllocatorMachine = PageAllocatorMachine.TestCase
TestPageAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
