"""A prefix index with a device simulated by dictionaries, and the invariants that are checked after each step.

A slot of the device stores the text up to its token, the salt, the weights, and the step that computed it. Invariants
compare the index with the slots of its pages, not with hashes.
"""

from dataclasses import dataclass, field

from jaxkv.cache.integrity import check_books
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import ArraySpec, PagedSpec, group_layers
from jaxkv.cache.variants import place, sampling
from jaxkv.errors import OutOfPages, OutOfStates
from tests.cache.layouts import reserve, slots_of


def layout_of(*sizes, states=False):
    """One paged group for each (page size, window)."""
    specs = [
        PagedSpec(f"group{index}", (ArraySpec("key", (3,), "uint8"),), page_size, window)
        for index, (page_size, window) in enumerate(sizes)
    ]
    return group_layers(place(specs + [sampling(5)] * states))


FULL = layout_of((2, None))
WINDOW = layout_of((2, 4))
MIXED = layout_of((2, None), (1, 3), states=True)
ODD = layout_of((4, None), (2, None), (3, 5))
INSIDE = layout_of((1, None), (4, 2))


@dataclass
class Live:
    """One sequence in flight: its text, of which `computed` tokens are dispatched and `collected` are known good.

    `steps` are those not collected yet: (number, tokens that are computed after it).
    """

    text: list
    salt: str | None
    keys: object
    computed: int
    collected: int
    steps: list = field(default_factory=list)


class World:
    def __init__(self, layout, counts, *, allocator=PageAllocator, index=PrefixIndex):
        self.layout = layout
        self.allocator = allocator(layout, counts)
        self.index = index(layout, self.allocator, identity="tests", secret=b"tests")
        self.groups = layout.paged_groups
        self.memory = {
            g.name: [[None] * g.page_size for _ in range(counts[g.name])] for g in self.groups
        }
        self.live = {}
        self.good_steps = set()
        self.weights = 0
        self.next_seq = 0
        self.next_step = 0

    # What the device and the books hold.

    def free(self):
        return {g.name: self.allocator.num_free(g.name) for g in self.layout.groups}

    def kept(self, name):
        """Returns (salt, text) -> page for what the index keeps, read from the device."""
        pages = {}
        for page in sorted(self.allocator.pool(name).kept):
            slots = self.memory[name][page]
            assert None not in slots, f"page {page} of {name} is kept and was not computed"
            (weights, salt, text), _ = slots[-1]
            assert weights == self.weights, "a page of other weights is kept"
            for offset, (content, step) in enumerate(slots):
                assert content == (weights, salt, text[: len(text) - len(slots) + 1 + offset])
                assert step in self.good_steps, (
                    f"page {page} of {name} is kept before its step was collected"
                )
            assert (salt, text) not in pages, "two pages are kept for one text"
            pages[salt, text] = page
        return pages

    def kept_otherwise(self, name):
        """Pages that are kept, and not for being full."""
        return []

    def all_kept(self):
        return {group.name: self.kept(group.name) for group in self.groups}

    def best(self, text, salt):
        """The longest hit, by trying every length against what each next token would see."""
        kept = self.all_kept()
        for length in range(len(text) - 1, 0, -1):
            if all(
                self._accepts(group, kept[group.name], text, salt, length) for group in self.groups
            ):
                return length
        return 0

    def _accepts(self, group, kept, text, salt, length):
        window = group.spec.window
        seen = range(0 if window is None else max(0, length - window + 1), length)
        ends = {
            (position // group.page_size + 1) * group.page_size for position in (*seen, length - 1)
        }
        return all(end <= len(text) and (salt, tuple(text[:end])) in kept for end in ends)

    def held(self, seq, name):
        return self.allocator.pages(seq, name)[self.allocator.held(seq).unneeded[name] :]

    # What an engine does.

    def adopt(self, text, salt=None, keys=None):
        keys = keys or self.index.keys(salt)
        expected, before = self.best(text, salt), self.free()
        peek = self.index.match(text, keys)
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        match = self.index.adopt(seq, text, keys)
        assert match == peek
        assert match.num_tokens == expected, (
            f"a hit of {match.num_tokens}, expected {expected}: {match.why}"
        )
        assert self.allocator.num_tokens(seq) == expected
        assert self.free() == before, "a hit took or gave back pages"
        self.live[seq] = Live(list(text), salt, keys, expected, expected)
        for group in self.groups:
            for position in self._seen(group, expected):
                assert self._slot(seq, group, position) is not None
        self.check_contents(seq)
        return seq

    def step(self, seq, num_tokens):
        """Dispatches a step up to `num_tokens`; returns False, and nothing has changed, if there is no room."""
        live = self.live[seq]
        before = self.free(), self.all_kept()
        room = self._room(seq, num_tokens)
        try:
            reservation, taken = reserve(self.allocator, seq, num_tokens)
        except (OutOfPages, OutOfStates):
            assert (self.free(), self.all_kept()) == before, "a failed reserve changed something"
            assert min(room.values()) < 0, f"there was room: {room}"
            return False
        assert min(room.values()) >= 0
        self._after_reserve(seq, reservation, taken, before)
        step, self.next_step = self.next_step, self.next_step + 1
        for group in self.groups:
            start = max(live.computed, self.allocator.held(seq).covered.get(group.name, 0))
            for position in range(start, num_tokens):
                page, offset = self._place(seq, group, position)
                assert self.allocator.pool(group.name).references(page) == 1, (
                    "a page that others hold is written"
                )
                content = (self.weights, live.salt, tuple(live.text[: position + 1]))
                self.memory[group.name][page][offset] = content, step
        live.steps.append((step, num_tokens))
        live.computed = num_tokens
        self.allocator.commit(seq, num_tokens)
        return True

    def _room(self, seq, num_tokens):
        """Pages left over in each group after a step, if the index gives up all that no other sequence holds."""
        left = {}
        for group in self.groups:
            pool, table = (
                self.allocator.pool(group.name),
                self.allocator.pages(seq, group.name),
            )
            idle = sum(pool.references(page) == 1 for page in pool.kept)
            copied = 0
            start = self.allocator.held(seq).first_written(group.name)
            written = range(start // group.page_size, group.pages_for(num_tokens))
            if num_tokens > start:
                for page in (table[i] for i in written if i < len(table)):
                    copied += pool.references(page) - (page in pool.kept) > 1
            more = max(0, group.pages_for(num_tokens) - len(table))
            left[group.name] = pool.num_free + idle - more - copied
        if self.layout.in_place_groups:
            left["sampling"] = self.allocator.num_free("sampling") - 1
            left["sampling"] += any(s for s in self._owned_states(seq))
        return left

    def _owned_states(self, seq):
        state = self.allocator.held(seq).states["sampling"]
        return [
            one for one in state.owned() if self.allocator.pool("sampling").references(one) == 1
        ]

    def _after_reserve(self, seq, reservation, taken, before):
        free, kept = before
        for group in self.groups:
            name, now = group.name, self.kept(group.name)
            lost = kept[name].keys() - now.keys()
            assert now.items() <= kept[name].items()
            short = len(taken[name]) - free[name]
            freed = self.allocator.num_free(name) + len(taken[name]) - free[name]
            if lost:
                assert freed == max(0, short), "more pages were evicted than were missing"
            for page in taken[name]:
                self.memory[name][page] = [None] * group.page_size
        for copy in reservation.copies:
            if copy.group in self.memory:
                self.memory[copy.group][copy.target] = list(self.memory[copy.group][copy.source])

    def collect(self, seq, *, in_flight=0):
        """Learns that all steps but the last few went well, and publishes."""
        live = self.live[seq]
        while len(live.steps) > in_flight:
            step, live.collected = live.steps.pop(0)
            self.good_steps.add(step)
        before = self.all_kept()
        epoch_is_old = live.keys.epoch != self.index._epoch
        told = live.keys.published
        added = self.index.publish(seq, live.text, live.keys, live.collected)
        for group in self.groups:
            name, size = group.name, group.page_size
            now = self.kept(name)
            assert before[name].items() <= now.items(), "publishing replaced or lost a page"
            new = now.keys() - before[name].keys()
            added -= len(new)
            for salt, text in new:
                assert (salt, text) == (live.salt, tuple(live.text[: len(text)]))
                assert now[salt, text] == self.allocator.pages(seq, name)[len(text) // size - 1]
            filled = any(told // g.page_size < live.collected // g.page_size for g in self.groups)
            if filled and not epoch_is_old:
                for position in self._seen(group, live.collected // size * size):
                    text = tuple(live.text[: (position // size + 1) * size])
                    if position // size < self.allocator.held(seq).unneeded[name]:
                        continue  # Given back: it was offered then, and may be evicted by now.
                    assert (live.salt, text) in now, "a page that was computed is not kept"
        assert added == 0

    def free_out_of_window(self, seq):
        """Gives back the pages before every window, as far as their steps were collected."""
        live, kept = self.live[seq], self.all_kept()
        before = {group.name: self.allocator.pages(seq, group.name) for group in self.groups}
        self.allocator.free_out_of_window(seq, live.collected)
        assert self.all_kept() == kept, "the index lost a page that a sequence gave back"
        for group in self.groups:
            size, first = group.page_size, self.allocator.held(seq).unneeded[group.name]
            table = self.allocator.pages(seq, group.name)
            assert table == (0,) * first + before[group.name][first:]
            if group.spec.window is None:
                assert first == 0
                continue
            seen = self._seen(group, live.collected)
            oldest = min((*seen, live.collected - 1), default=0)
            assert first * size <= max(0, oldest), "a page that is seen was given back"
            passed = sum((page + 1) * size <= oldest for page in range(len(table)))
            assert first == passed, "a page that no token sees is held"
        again = self.free()
        self.allocator.free_out_of_window(seq, live.collected)
        assert self.free() == again, "the second time gave back more"

    def fork(self, parent):
        live, seq = self.live[parent], self.next_seq
        self.next_seq += 1
        self.allocator.fork(parent, seq)
        twin = Live(list(live.text), live.salt, live.keys.copy(), live.computed, live.collected)
        twin.steps = list(live.steps)
        self.live[seq] = twin
        return seq

    def release(self, seq):
        self.allocator.release(seq)
        del self.live[seq]

    def fail(self, seq):
        """The sequence's numbers were not finite."""
        pages = {group.name: set(self.held(seq, group.name)) for group in self.groups}
        self.index.withdraw(seq)
        for name, held in pages.items():
            assert not held & set(self.kept(name).values()), (
                "a page of a failed sequence is still kept"
            )
        self.release(seq)

    def evict(self, name, count):
        pool = self.allocator.pool(name)
        free, idle, before = pool.num_free, pool.num_idle, self.all_kept()
        if self.index.reclaim({name: count}, {}):
            assert pool.num_free == free + count, "not as many pages were evicted as asked"
        else:
            assert idle < count
            assert self.all_kept() == before, "a failed eviction evicted something"

    def reset(self, *, keep_prefix):
        before = self.all_kept()
        for seq in list(self.live):
            self.release(seq)
        if not keep_prefix:
            self.index.clear()
        self.weights += not keep_prefix
        if keep_prefix:
            assert self.all_kept() == before
        else:
            self._check_cleared()

    def clear(self):
        self.index.clear()
        self._check_cleared()

    def _check_cleared(self):
        kept = any(self.allocator.pool(group.name).kept for group in self.groups)
        assert not kept, "pages are kept after a clear"

    # What must hold.

    def _seen(self, group, length):
        """Positions that the token at `length` sees of those before it."""
        return range(
            0 if group.spec.window is None else max(0, length - group.spec.window + 1), length
        )

    def _place(self, seq, group, position):
        (slot,) = slots_of(self.allocator, group, seq, position, position + 1)
        return divmod(slot, group.page_size)

    def _slot(self, seq, group, position):
        page, offset = self._place(seq, group, position)
        return self.memory[group.name][page][offset]

    def check_contents(self, seq):
        """Every token that the next one sees is there, of this very text, salt and weights."""
        live = self.live[seq]
        for group in self.groups:
            for position in self._seen(group, live.computed):
                content, _ = self._slot(seq, group, position) or (None, None)
                wanted = self.weights, live.salt, tuple(live.text[: position + 1])
                assert content == wanted, "a page holds another text than its sequence's"

    def check_books(self):
        check_books(self.allocator, self.index, self.allocator.open_sequences)

    def check(self):
        self.check_books()
        for seq in self.live:
            self.check_contents(seq)
        for group in self.groups:
            kept = self.kept(group.name)
            holders = {}
            for seq in self.live:
                for page in self.held(seq, group.name):
                    holders[page] = holders.get(page, 0) + 1
            kept_pages = {*kept.values(), *self.kept_otherwise(group.name)}
            pages = set(holders) | kept_pages
            pool = self.allocator.pool(group.name)
            assert pool.num_free == pool.num_total - len(pages), "a page is neither free nor held"
            for page in pages:
                wanted = holders.get(page, 0) + (page in kept_pages)
                assert pool.references(page) == wanted
            if group.spec.window is None:
                for salt, text in kept:
                    parent = text[: -group.page_size]
                    assert not parent or (salt, parent) in kept, (
                        "a page is kept without the one before it"
                    )

    def check_matches(self, texts):
        for salt, text in texts:
            match = self.index.match(text, self.index.keys(salt))
            expected = self.best(text, salt)
            assert match.num_tokens == expected, (
                f"a hit of {match.num_tokens}, expected {expected}: {text}, {salt}, {match}"
            )
            told = self.index.explain(text, salt)
            assert (told.num_reused, told.num_tokens) == (match.num_tokens, len(text))


def run_program(world, rng, num_operations):
    """Lets a random engine work, with a step in flight now and then, and checks everything after each operation."""
    probes = []
    for _ in range(num_operations):
        operation = rng.choices(
            ("adopt", "step", "collect", "release", "fork", "rare"), (5, 8, 5, 4, 1, 2)
        )[0]
        if operation == "adopt" or not world.live:
            text, salt = (
                [rng.randrange(2) for _ in range(rng.randint(1, 9))],
                rng.choice((None, "a")),
            )
            if probes and rng.random() < 0.7:  # Another turn, or the same again.
                salt, before = rng.choice(probes)
                text = before + text * (rng.random() < 0.5)
            probes = [*probes[-3:], (salt, text[:16])]
            world.adopt(text, salt)
        else:
            _use(world, rng, rng.choice(sorted(world.live)), operation)
        world.check()
        world.check_matches(probes)


def _use(world, rng, seq, operation):
    live = world.live[seq]
    if operation == "step":
        wanted = live.computed + rng.randint(1, 5)
        live.text += [rng.randrange(2) for _ in range(wanted - len(live.text))]
        if not world.step(seq, wanted):
            world.release(rng.choice(sorted(world.live)))
        elif rng.random() < 0.8:
            world.collect(seq, in_flight=rng.randrange(2))
    elif operation == "collect":
        world.collect(seq)
        if rng.random() < 0.5:
            world.free_out_of_window(seq)
    elif operation == "fork":
        world.fork(seq)
    elif operation == "release":
        world.release(seq)
        if rng.random() < 0.5:
            world.adopt(live.text, live.salt, live.keys)
    else:
        rare = rng.choices(("evict", "fail", "reset", "clear"), (4, 3, 1, 1))[0]
        if rare == "evict":
            world.evict(rng.choice(world.groups).name, rng.randint(1, 4))
        elif rare == "fail":
            world.fail(seq)
        elif rare == "reset":
            world.reset(keep_prefix=rng.random() < 0.5)
        else:
            world.clear()
