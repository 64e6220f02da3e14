"""The simulated device of `prefix/world.py` with recurrent groups: a state stores the whole text before it.

Invariants compare checkpoints with the texts in states and slots.
"""

from functools import partial

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import ArraySpec, PagedSpec, StateSpec, group_layers
from jaxkv.cache.variants import place, sampling
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from tests.cache.prefix.world import World


def hybrid_of(*sizes, chunk=1, groups=1):
    """One paged group for each (page size, window), and recurrent ones."""
    paged = [
        PagedSpec(f"group{index}", (ArraySpec("key", (3,), "uint8"),), page_size, window)
        for index, (page_size, window) in enumerate(sizes)
    ]
    states = [
        StateSpec(f"state{index}", (ArraySpec("ssm", (2,), "float32"),), chunk_size=chunk)
        for index in range(groups)
    ]
    return group_layers(place([*paged, *states, sampling(5)]))


class HybridWorld(World):
    def __init__(self, layout, counts, *, checkpoints=3, policy=None, index=PrefixIndex, **parts):
        made = partial(index, checkpoints=checkpoints, policy=policy or CheckpointPolicy())
        super().__init__(layout, counts, index=made, **parts)
        self.recurrent = [group.name for group in layout.state_groups]
        self.states = {name: [None] * counts[name] for name in self.recurrent}
        self.taken = {}
        self._commit, self.allocator.commit = self.allocator.commit, self._commit_states

    # What the device holds.

    def kept(self, name):
        tails = set(self.kept_otherwise(name))
        pool = self.allocator.pool(name)
        full, whole = pool.kept - tails, pool._kept
        pool._kept = full
        try:
            return super().kept(name)
        finally:
            pool._kept = whole

    def kept_otherwise(self, name):
        return [one.tails[name] for one in self.index._states.kept if name in one.tails]

    def checkpoints(self):
        """Returns (salt, text) -> checkpoint, by what its states hold; all of them must hold the same."""
        found = {}
        for one in self.index._states.kept:
            contents = {self.states[name][one.states[name]] for name in self.recurrent}
            assert len(contents) == 1, "the states of a checkpoint come after different texts"
            ((weights, salt, text),) = contents
            assert (weights, len(text)) == (self.weights, one.length)
            assert (salt, text) not in found, "two checkpoints are kept for one text"
            found[salt, text] = one
            for group in self.groups:
                inside = one.length % group.page_size
                assert (group.name in one.tails) == bool(inside)
                for offset in range(inside):
                    slot = self.memory[group.name][one.tails[group.name]][offset]
                    wanted = text[: one.length - inside + offset + 1]
                    assert slot is not None, "a tail was not copied"
                    assert slot[0] == (self.weights, salt, wanted), "a tail holds other tokens"
        return found

    def best(self, text, salt):
        kept, checkpoints = self.all_kept(), self.checkpoints()
        for length in range(len(text) - 1, 0, -1):
            one = checkpoints.get((salt, tuple(text[:length])))
            if one is not None and one.confirmed:
                assert all(
                    self._serves(group, kept[group.name], text, salt, length)
                    for group in self.groups
                ), "a checkpoint is kept without the pages that it needs"
                return length
        return 0

    def _serves(self, group, kept, text, salt, length):
        size, window = group.page_size, group.spec.window
        first = 0 if window is None else max(0, length - max(1, window - 1))
        ends = range((first // size + 1) * size, length // size * size + 1, size)
        return all((salt, tuple(text[:end])) in kept for end in ends)

    # What an engine does.

    def _commit_states(self, seq, num_tokens):
        """Plays the step's recurrent layers: reads, writes, and keeps what the index takes states for."""
        live, computed = self.live[seq], self.allocator.num_tokens(seq)
        text = (self.weights, live.salt, tuple(live.text[:num_tokens]))
        for length in live.keys.places:
            if not computed < length <= num_tokens or live.keys.epoch != self.index._epoch:
                continue
            free = self.free()
            states = self.index.begin_checkpoint(seq, live.text, live.keys, length)
            if states is None:
                assert all(self.free()[name] >= free[name] for name in self.recurrent)
                continue
            assert set(states) == set(self.recurrent)
            for name, state in states.items():
                pool = self.allocator.pool(name)
                assert (pool.references(state), state in pool.kept) == (1, False)
                self.states[name][state] = (self.weights, live.salt, tuple(live.text[:length]))
            self.taken.setdefault(seq, {})[length] = states
        for name in self.recurrent:
            read, write = self.allocator.states(seq, name)
            assert self.allocator.pool(name).references(write) == 1, "a shared state is written"
            self._check_state(name, read, live, computed)
            self.states[name][write] = text
        self._commit(seq, num_tokens)

    def _check_state(self, name, state, live, computed):
        if not computed:
            assert state == 0
        else:
            wanted = (self.weights, live.salt, tuple(live.text[:computed]))
            assert self.states[name][state] == wanted, "a state comes after another text"

    def _room(self, seq, num_tokens):
        left = super()._room(seq, num_tokens)
        for name in self.recurrent:
            pool = self.allocator.pool(name)
            state = self.allocator.held(seq).states[name]
            needed = state.write in (0, state.read) and (
                state.read == 0 or pool.references(state.read) > 1
            )
            idle = sum(pool.references(one) == 1 for one in pool.kept)
            left[name] = pool.num_free + idle - needed
        return left

    def _after_reserve(self, seq, reservation, taken, before):
        for group in self.groups:
            for page in taken[group.name]:
                self.memory[group.name][page] = [None] * group.page_size
        self._copy(reservation.copies)

    def _copy(self, copies):
        for copy in copies:
            if copy.group in self.memory:
                self.memory[copy.group][copy.target] = list(self.memory[copy.group][copy.source])

    def collect(self, seq, *, in_flight=0):
        super().collect(seq, in_flight=in_flight)
        live = self.live[seq]
        taken = self.taken.get(seq, {})
        for length in sorted(one for one in taken if one <= live.collected):
            del taken[length]
            self._copy(self.index.store_checkpoint(seq, live.text, live.keys, length))
            assert length not in self.allocator.held(seq).pending_checkpoints

    def end(self, seq, *, good=None):
        """Ends a sequence with the states that it has come to; its last step may be unread, and turn out bad."""
        live = self.live[seq]
        if live.computed and live.keys.epoch is not None:
            confirmed = live.collected == live.computed
            copies = self.index.store_checkpoint(
                seq, live.text, live.keys, live.computed, current=True, confirmed=confirmed
            )
            self._copy(copies)
            self.check()
        self.release(seq)
        if good:
            self.good_steps.update(step for step, _ in live.steps)
        if good is not None:
            self.index.confirm(seq, good=good)

    def release(self, seq):
        super().release(seq)
        self.taken.pop(seq, None)

    def fail(self, seq):
        origin = self.allocator.held(seq).origin
        super().fail(seq)
        for one in self.index._states.kept:
            assert one.maker != seq, "a checkpoint of a failed sequence is still kept"
            assert one.key.digest != origin, (
                "the checkpoint that a failed sequence read is still kept"
            )

    def evict(self, name, count):
        pool = self.allocator.pool(name)
        free, idle = pool.num_free, pool.num_idle
        before = self.all_kept(), set(self.checkpoints())
        if self.index.reclaim({name: count}, {}):
            assert pool.num_free >= free + count
            if name in self.recurrent:
                assert pool.num_free == free + count, "more states were given up than asked"
                assert self.all_kept() == before[0], "pages went with states"
        else:
            assert idle < count
            assert (self.all_kept(), set(self.checkpoints())) == before

    def reset(self, *, keep_prefix):
        before = set(self.checkpoints())
        super().reset(keep_prefix=keep_prefix)
        assert set(self.checkpoints()) == (before if keep_prefix else set())

    def clear(self):
        super().clear()
        assert not self.checkpoints(), "checkpoints are kept after a clear"

    # What must hold.

    def check_contents(self, seq):
        super().check_contents(seq)
        live = self.live[seq]
        for name in self.recurrent:
            state = self.allocator.held(seq).states[name].read
            self._check_state(name, state, live, live.computed)

    def check(self):
        super().check()
        kept = self.checkpoints()
        assert len(kept) <= self.index._states.capacity
        for name in self.recurrent:
            holders = [state for seq in self.live for state in self._states_of(seq, name)]
            saved = [one.states[name] for one in kept.values()]
            pool = self.allocator.pool(name)
            assert set(saved) == pool.kept
            for state in {*holders, *saved}:
                assert pool.references(state) == holders.count(state) + saved.count(state)
            assert pool.num_free == pool.num_total - len({*holders, *saved})

    def _states_of(self, seq, name):
        held = self.allocator.held(seq)
        return [
            *held.states[name].owned(),
            *(one[name] for one in held.pending_checkpoints.values()),
        ]


def run_hybrid_program(world, rng, num_operations):
    """Lets a random engine work over recurrent groups, and checks everything after each operation."""
    probes = []
    for _ in range(num_operations):
        operation = rng.choices(
            ("adopt", "step", "collect", "end", "fork", "rare"), (5, 8, 5, 4, 1, 1)
        )[0]
        if operation == "adopt" or not world.live:
            text = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            salt = rng.choice((None, "a"))
            if probes and rng.random() < 0.7:
                salt, before = rng.choice(probes)
                text = before + text * (rng.random() < 0.6)
            probes = [*probes[-3:], (salt, text[:16])]
            if len(world.live) < 5:
                world.adopt(text, salt)
        else:
            _use(world, rng, rng.choice(sorted(world.live)), operation)
        world.check()
        world.check_matches(probes)


def _use(world, rng, seq, operation):
    live = world.live[seq]
    if operation == "step":
        wanted = max(len(live.text), live.computed + 1) if rng.random() < 0.5 else live.computed + 1
        live.text += [rng.randrange(2) for _ in range(wanted - len(live.text))]
        if not world.step(seq, wanted):
            world.release(rng.choice(sorted(world.live)))
        elif rng.random() < 0.8:
            world.collect(seq, in_flight=rng.randrange(2))
    elif operation == "collect":
        world.collect(seq)
    elif operation == "fork":
        world.fork(seq)
    elif operation == "end":
        world.end(seq, good=rng.random() < 0.7)
        if rng.random() < 0.3:
            world.adopt(live.text, live.salt, live.keys)
    else:
        _rare(world, rng, seq)


def _rare(world, rng, seq):
    rare = rng.choices(("evict", "fail", "reset", "clear"), (12, 4, 1, 1))[0]
    if rare == "evict":
        names = [group.name for group in world.groups] + world.recurrent
        world.evict(rng.choice(names), rng.randint(1, 3))
    elif rare == "fail":
        world.fail(seq)
    elif rare == "reset":
        world.reset(keep_prefix=rng.random() < 0.5)
    else:
        world.clear()
