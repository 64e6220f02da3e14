"""The simulated device of `hybrid_world.py` with a host tier; copies are tracked by handle."""

from jaxkv.cache.kept_states.checkpoints import Checkpoint
from jaxkv.offload.swap_in import attach_host
from tests.cache.kept_states.hybrid_world import HybridWorld
from tests.cache.kept_states.hybrid_world import _use as use


class HostWorld(HybridWorld):
    def __init__(self, layout, counts, *, host_bytes, **parts):
        super().__init__(layout, counts, **parts)
        self.swaps = attach_host(self.index, host_bytes)
        self.tier = self.swaps.tier
        self.host = {}
        self.coming = []
        self.landed = 0
        for owner, name in (
            (self.allocator, "reserve"),
            (self.index, "begin_checkpoint"),
            (self.index, "store_checkpoint"),
            (self.index, "reclaim"),
            (self.swaps, "start"),
            (self.swaps, "land"),
        ):
            setattr(owner, name, self._flushed(getattr(owner, name)))

    # What moves.

    def _flushed(self, verb):
        """Reads out what left the index before anything is written to the device."""

        def verb_and_flush(*args, **kwargs):
            try:
                return verb(*args, **kwargs)
            finally:
                self.flush()

        return verb_and_flush

    def flush(self):
        for handle in self.tier.freed():
            del self.host[handle]
        for move in self.tier.departures():
            assert move.handle not in self.host
            self.host[move.handle] = self._device(move.group)[move.unit]
            if move.group in self.memory:
                self.host[move.handle] = list(self.host[move.handle])

    def _device(self, name):
        return self.memory[name] if name in self.memory else self.states[name]

    def begin(self, text, salt):
        """Begins to bring back what the host has of a text; returns whether there was anything to bring, and room."""
        keys = self.index.keys(salt)
        limit = self.index.limit(text, None)
        length, _ = self.swaps.find_prefix(text, keys, limit)
        expected = self.best_of_both(text, salt)
        assert length == expected, f"both tiers find {length} tokens, expected {expected}"
        reused = self.index.match(text, keys).num_tokens
        before = self.free(), self.all_kept(), set(self.checkpoints()), self._references()
        made = self.swaps.start(text, keys, limit, reused, len(text))
        if made is None:
            after = self.free(), self.all_kept(), set(self.checkpoints()), self._references()
            assert after == before, "a swap-in that was refused changed something"
            return False
        assert length > reused
        assert (made.length, made.gained) == (length, length - reused)
        assert made.moves
        self.coming.append((made, list(made.moves), list(text), salt))
        return True

    def _references(self):
        pools = {name: self.allocator.pool(name) for name in (*self.memory, *self.states)}
        return {name: list(pool._references) for name, pool in pools.items()}

    def move(self, count):
        """Writes some of what comes into its places."""
        for _, moves, _, _ in self.coming:
            for move in moves[:count]:
                pool = self.allocator.pool(move.group)
                assert (pool.references(move.unit), move.unit in pool.kept) == (1, False), (
                    "a place that others may read is filled"
                )
                if move.handle in self.host:  # Else its copy was found to be bad meanwhile.
                    content = self.host[move.handle]
                    if move.group in self.memory:
                        content = list(content)
                    self._device(move.group)[move.unit] = content
            del moves[:count]

    def land(self, *, at_once=False):
        """Gives what has come to the index."""
        for one in [one for one in self.coming if not one[1]]:
            made, _, text, salt = one
            self.coming.remove(one)
            wasted = self.swaps.land(made)
            assert not self.allocator.is_open(made.number), "a swap-in that ended holds its places"
            if wasted is None:
                assert not at_once, "a swap-in that nothing came between was refused"
                continue
            self.landed += 1
            for move in wasted:
                assert not self.allocator.pool(move.group).references(move.unit)
            assert self.index.match(text, self.index.keys(salt)).num_tokens >= made.length
            self.check()

    def fetch(self, text, salt):
        """All of it at once."""
        if self.begin(text, salt):
            self.move(10**6)
            self.land(at_once=len(self.coming) == 1)

    def give_up(self):
        for made, *_ in self.coming:
            self.swaps.release(made)
        self.coming.clear()

    def lose(self):
        """Loses the cache: prefixes that had reached the host are found again, and no sequence continues."""
        self.flush()
        before = self.host_pages(), set(self.host_checkpoints())
        self.coming.clear()
        for seq in list(self.live):
            self.release(seq)
        self.index.lose_device()
        for name in self.memory:
            self.memory[name] = [[None] * len(page) for page in self.memory[name]]
        for name in self.states:
            self.states[name] = [None] * len(self.states[name])
        assert (self.host_pages(), set(self.host_checkpoints())) == before
        assert not any(self.all_kept().values())

    def spoil(self, rng):
        """A transfer failed."""
        if self.host:
            self.tier.discard([rng.choice(sorted(self.host))])
            self.flush()

    def fail(self, seq):
        """What a failed sequence held is not on the host either."""
        live = self.live[seq]
        held = {
            name: {text for (salt, text), page in self.kept(name).items() if page in pages}
            for name, pages in (
                (group.name, set(self.held(seq, group.name))) for group in self.groups
            )
        }
        chained = {group.name for group in self.groups if group.spec.window is None}
        super().fail(seq)
        self.flush()
        for name, pages in self.host_pages().items():
            left = {text for salt, text in pages if salt == live.salt}
            assert not held[name] & left, "a page of a failed sequence is still on the host"
            if name in chained:
                assert not any(text[: len(bad)] == bad for text in left for bad in held[name]), (
                    "a page that follows one of a failed sequence is still on the host"
                )

    def reset(self, *, keep_prefix):
        super().reset(keep_prefix=keep_prefix)
        self.give_up()
        self.flush()
        assert keep_prefix or not self.host

    def clear(self):
        super().clear()
        self.give_up()
        self.flush()
        assert not self.host
        assert not len(self.tier)

    # What must hold.

    def host_pages(self):
        """Returns group -> (salt, text) of what the host has, by what was copied there."""
        found = {group.name: set() for group in self.groups}
        for (name, _), entry in self.tier._entries.items():
            if isinstance(entry.kept, Checkpoint):
                continue
            slots = self.host[entry.parts[name]]
            assert None not in slots, "a page that was not full went to the host"
            (weights, salt, text), _ = slots[-1]
            assert weights == self.weights
            for offset, (content, step) in enumerate(slots):
                assert content == (weights, salt, text[: len(text) - len(slots) + 1 + offset])
                assert step in self.good_steps, "a page went to the host before its step was read"
            assert (salt, text) not in found[name]
            found[name].add((salt, text))
        return found

    def host_checkpoints(self):
        """Returns (salt, text) of the host's checkpoints, all parts of which are there and of one text."""
        found = {}
        for entry in self.tier._entries.values():
            one = entry.kept
            if not isinstance(one, Checkpoint):
                continue
            assert set(one.states) == set(self.recurrent)
            assert {*one.states, *one.tails} == set(entry.parts)
            contents = {self.host[handle] for handle in one.states.values()}
            ((weights, salt, text),) = contents
            assert (weights, len(text)) == (self.weights, one.length)
            for name, handle in one.tails.items():
                size = len(self.memory[name][0])
                slots = self.host[handle][: one.length % size]
                assert [slot[0] for slot in slots] == [
                    (weights, salt, text[: one.length // size * size + at + 1])
                    for at in range(len(slots))
                ]
            found[salt, text] = one
        return found

    def best_of_both(self, text, salt):
        """The longest beginning that device and host have together, by trying every length."""
        device, host = self.all_kept(), self.host_pages()
        kept = {name: {**dict.fromkeys(host[name]), **device[name]} for name in host}
        states = {**self.host_checkpoints(), **self.checkpoints()}
        for length in range(len(text) - 1, 0, -1):
            one = states.get((salt, tuple(text[:length]))) if self.recurrent else True
            if self.recurrent and (one is None or not one.confirmed):
                continue
            # Not what a checkpoint inside a page has of its own.
            serves = self._serves if self.recurrent else self._accepts
            if all(serves(group, kept[group.name], text, salt, length) for group in self.groups):
                return length
        return 0

    def check(self):
        self.flush()
        if self.coming:
            self.check_books()
            for seq in self.live:
                self.check_contents(seq)
        else:
            super().check()
        self.tier.check()
        self.host_pages()
        self.host_checkpoints()
        assert len(self.host) == sum(len(entry.parts) for entry in self.tier._entries.values())
        # One that was lost while it came may have come again: then no request waits for the new one.
        pinned = {id(entry) for made, *_ in self.coming for entry in made.entries}
        for entry in self.tier._entries.values():
            assert (entry.pins > 0) == (id(entry) in pinned), "pins and swap-ins do not agree"

    def best(self, text, salt):
        if not self.recurrent:
            return super(HybridWorld, self).best(text, salt)
        return super().best(text, salt)


def run_host_program(world, rng, num_operations):
    """Lets a random engine work over both tiers, and checks everything after each operation."""
    texts = []
    for _ in range(num_operations):
        act = rng.choices(
            ("adopt", "use", "evict", "begin", "move", "land", "spoil", "give_up", "lose", "fail"),
            (6, 14, 4, 2, 3, 3, 0.3, 0.3, 0.05, 0.3),
        )[0]
        if act == "adopt":
            _adopt(world, rng, texts)
        elif act == "use" and world.live:
            operation = rng.choices(("step", "collect", "end", "fork", "rare"), (8, 5, 4, 1, 0.3))[
                0
            ]
            use(world, rng, rng.choice(sorted(world.live)), operation)
        elif act == "evict":
            for name in [group.name for group in world.groups] + world.recurrent:
                world.evict(name, rng.randint(0, world.allocator.pool(name).num_idle))
        elif act == "begin" and texts and len(world.coming) < 3:
            world.begin(*rng.choice(texts))
        elif act == "move":
            world.move(rng.randint(1, 3))
        elif act == "land":
            world.land()
        elif act == "spoil":
            world.spoil(rng)
        elif act == "give_up":
            world.give_up()
        elif act == "lose":
            world.lose()
        elif act == "fail" and world.live:
            world.fail(rng.choice(sorted(world.live)))
        world.check()
        world.check_matches([(salt, text) for text, salt in texts[-2:]])


def _adopt(world, rng, texts):
    """Begins a text of its own, or one that came before, and first brings back what the host has of it."""
    text, salt = [rng.randrange(2) for _ in range(rng.randint(1, 9))], rng.choice((None, "a"))
    if texts and rng.random() < 0.7:
        before, salt = rng.choice(texts)
        text = before + text * (rng.random() < 0.5)
    del texts[:-6]
    texts.append((text[:16], salt))
    if rng.random() < 0.8:
        world.fetch(text, salt)
    if len(world.live) < 2:
        world.adopt(text, salt)
