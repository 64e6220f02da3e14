"""Which pages and states each sequence holds, over all groups at once. Knows groups and counts, never variants."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxkv.cache.pool import PagePool, state_pool
from jaxkv.cache.spec import CacheLayout, Group


@dataclass(frozen=True)
class PageCopy:
    """A page or in-place state of a group that must be copied before the next step."""

    group: str
    source: int
    target: int


@dataclass(frozen=True)
class Reservation:
    """What one `reserve` took.

    Attributes:
        new_pages: group name -> pages taken, copies of shared pages included.
        new_states: group name -> state taken, if one was. An in-place one holds its last owner's, unless copied.
        copies: what the caller copies on the device, in this order, before the step that writes. If they never run,
            the sequence must be released.
    """

    new_pages: Mapping[str, list[int]]
    new_states: Mapping[str, int]
    copies: tuple[PageCopy, ...]


@dataclass
class _State:
    """The state a sequence reads (0: the zero state, which nobody owns) and the one it writes (0: none yet)."""

    read: int = 0
    write: int = 0

    def owned(self) -> list[int]:
        return sorted({self.read, self.write} - {0})


@dataclass
class _Held:
    """What one sequence holds: one reference for each page, and for each state it owns."""

    computed: int = 0
    reserved: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, _State] = field(default_factory=dict)

    def ids(self, name: str) -> list[int]:
        return self.pages[name] if name in self.pages else self.states[name].owned()


class Accounts:
    """The books of pages and states of all sequences in flight.

    A sequence's life is `open` or `fork`, then `reserve` and `commit` for each step, then `release`.
    Each verb happens in every group, or raises and changes nothing.

    Args:
        layout: the groups.
        counts: pages or states of each group, by name.
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int]) -> None:
        layout.arrays(counts)  # refuses counts that do not fit the layout
        self._layout = layout
        self._pools = {
            g.name: (PagePool if g.unit == "page" else state_pool)(counts[g.name])
            for g in layout.groups
        }
        self._held: dict[int, _Held] = {}

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest sequence that could be held, alone; `None` when nothing is paged."""
        paged = self._layout.paged_groups
        return min((g.page_size * self._pools[g.name].num_total for g in paged), default=None)

    def num_free(self, group_name: str) -> int:
        """Returns the free pages or states of a group."""
        return self._pools[self._layout.group(group_name).name].num_free

    def num_tokens(self, seq: int) -> int:
        """Returns how many tokens of a sequence are computed."""
        return self._find(seq).computed

    def open(self, seq: int) -> None:
        """Begins a sequence that holds nothing yet."""
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already; release it or choose another number")
        self._held[seq] = _Held(
            pages={group.name: [] for group in self._layout.paged_groups},
            states={g.name: _State() for g in self._layout.groups if g.unit == "state"},
        )

    def reserve(self, seq: int, num_tokens: int) -> Reservation:
        """Makes the tokens from the first uncomputed one up to `num_tokens` writable in every group.

        Pages and in-place states that the step would write but another sequence also holds are replaced by copies.
        A recurrent group gets another state to write if the one it reads is shared or the zero state.

        Raises:
            OutOfPages: a group has too few free pages; nothing was taken in any group.
            OutOfStates: likewise for states.
            ValueError: fewer tokens than are computed already.
        """
        held = self._find(seq)
        if num_tokens < held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to reserve"
            )
        counts = {g.name: self._count_needed(held, g, num_tokens) for g in self._layout.groups}
        for name, count in counts.items():
            if count > self._pools[name].num_free:
                raise self._pools[name].exhausted(count, f" of {name!r} for sequence {seq}")
        taken = {name: self._pools[name].take(count) for name, count in counts.items()}
        copies: list[PageCopy] = []
        for group in self._layout.groups:
            if group.unit == "page":
                copies += self._place_pages(held, group, num_tokens, taken[group.name])
            else:
                copies += self._place_state(held, group, taken[group.name])
        held.reserved = max(held.reserved, num_tokens)
        return Reservation(
            {name: ids for name, ids in taken.items() if name in held.pages},
            {name: ids[0] for name, ids in taken.items() if name in held.states and ids},
            tuple(copies),
        )

    def commit(self, seq: int, num_tokens: int) -> None:
        """Records that the tokens up to `num_tokens` are computed, so that the next step reads the states just written.

        Whoever plans a step before the last one is known to have succeeded commits when the last one is dispatched.
        """
        held = self._find(seq)
        if not held.computed <= num_tokens <= held.reserved:
            raise ValueError(
                f"sequence {seq} can commit {held.computed} to {held.reserved} tokens, got {num_tokens}"
            )
        if num_tokens == held.computed:
            return  # nothing was computed, so a state to write has not been written
        held.computed = num_tokens
        for name, state in held.states.items():
            if state.read not in (0, state.write):
                self._pools[name].release([state.read])
            state.read = state.write

    def fork(self, parent: int, child: int) -> None:
        """Begins `child` with the parent's computed tokens; pages and states are shared until one of them writes.

        Raises:
            ValueError: the parent has reserved tokens that are not committed, so a step may be writing its states.
        """
        source = self._find(parent)
        if source.reserved != source.computed:
            raise ValueError(
                f"sequence {parent} has {source.reserved} tokens reserved and {source.computed} computed; "
                f"commit its step before the fork"
            )
        self.open(child)
        held = self._held[child]
        held.computed = held.reserved = source.computed
        for group in self._layout.groups:
            if group.unit == "page":
                held.pages[group.name] = list(source.pages[group.name])
            else:
                held.states[group.name] = _State(read=source.states[group.name].read)
            self._pools[group.name].share(held.ids(group.name))

    def release(self, seq: int) -> None:
        """Ends a sequence and drops everything it holds."""
        held = self._find(seq)
        for name, pool in self._pools.items():
            pool.release(held.ids(name))
        del self._held[seq]

    def page_table(self, seq: int, group_name: str) -> list[int]:
        """Returns the pages of a sequence, first token first."""
        return list(self._find(seq).pages[self._group(group_name, "page").name])

    def pages(self, seq: int, group_name: str) -> Sequence[int]:
        """Returns the pages of a sequence without copying them, for those who read them at once.

        The list is the accounts' own: the caller must not change it, nor keep it beyond the next verb, which may.
        """
        pages = self._find(seq).pages.get(group_name)
        if pages is None:  # Says which is wrong, the name or the kind of group.
            return self.page_table(seq, group_name)
        return pages

    def slots(self, seq: int, group_name: str, start: int, stop: int) -> np.ndarray:
        """Returns the slot (`page * page_size + offset`, int32) of each token from `start` to `stop - 1`."""
        page_size = self._group(group_name, "page").page_size
        pages = self._find(seq).pages[group_name]
        if not 0 <= start <= stop <= len(pages) * page_size:
            raise ValueError(
                f"sequence {seq} has {len(pages)} pages of {page_size} tokens in {group_name!r}, "
                f"which do not hold tokens {start} to {stop}; reserve first"
            )
        index, offset = np.divmod(np.arange(start, stop, dtype=np.int32), np.int32(page_size))
        return np.asarray(pages, np.int32)[index] * np.int32(page_size) + offset

    def states(self, seq: int, group_name: str) -> tuple[int, int]:
        """Returns the state the next step reads (0, the zero state, if fresh) and the one it writes.

        They are the same in groups updated in place.
        """
        state = self._find(seq).states[self._group(group_name, "state").name]
        if not state.write:
            raise ValueError(
                f"sequence {seq} has no state to write in {group_name!r}; reserve first"
            )
        return state.read, state.write

    def check(self) -> None:
        """Raises `ValueError` with the ids if the books contradict themselves."""
        for group in self._layout.groups:
            pool = self._pools[group.name]
            pool.check()
            held = Counter(page for seq in self._held.values() for page in seq.ids(group.name))
            used = pool.num_total - pool.num_free
            wrong = {page: n for page, n in held.items() if pool.references(page) != n}
            if wrong or used != len(held):
                raise ValueError(
                    f"group {group.name!r}: {used} {group.unit}s are taken and sequences hold {len(held)}; "
                    f"these are held another number of times than the pool says: {wrong}"
                )
        for seq, held in self._held.items():
            self._check_sequence(seq, held)

    def _check_sequence(self, seq: int, held: _Held) -> None:
        lacking, shared = {}, {}
        for group in self._layout.paged_groups:
            table = held.pages[group.name]
            if len(table) < group.pages_for(held.reserved):
                lacking[group.name] = table
            if overlap := self._shared_indices(held, group, held.reserved):
                shared[group.name] = [table[index] for index in overlap]
        for name, state in held.states.items():
            pending = state.write and held.reserved > held.computed
            if pending and self._pools[name].references(state.write) > 1:
                shared[name] = [state.write]
        if lacking or shared or held.computed > held.reserved:
            raise ValueError(
                f"sequence {seq} has {held.computed} tokens computed and {held.reserved} reserved, but too few "
                f"pages: {lacking}, or may write what others hold: {shared}"
            )

    def _find(self, seq: int) -> _Held:
        if seq not in self._held:
            raise ValueError(f"sequence {seq} is not open (never opened, or released already)")
        return self._held[seq]

    def _group(self, name: str, unit: str) -> Group:
        group = self._layout.group(name)
        if group.unit != unit:
            raise ValueError(f"group {name!r} holds {group.unit}s, not {unit}s")
        return group

    def _shared_indices(self, held: _Held, group: Group, num_tokens: int) -> list[int]:
        """Positions in the page table that a step up to `num_tokens` would write though another also holds them."""
        if num_tokens == held.computed:
            return []
        table = held.pages[group.name]
        written = range(held.computed // group.page_size, group.pages_for(num_tokens))
        pool = self._pools[group.name]
        return [i for i in written if i < len(table) and pool.references(table[i]) > 1]

    def _count_needed(self, held: _Held, group: Group, num_tokens: int) -> int:
        if group.unit == "page":
            missing = max(0, group.pages_for(num_tokens) - len(held.pages[group.name]))
            return missing + len(self._shared_indices(held, group, num_tokens))
        state = held.states[group.name]
        if state.write not in (0, state.read):
            return 0
        return int(state.read == 0 or self._pools[group.name].references(state.read) > 1)

    def _place_pages(
        self, held: _Held, group: Group, num_tokens: int, taken: list[int]
    ) -> list[PageCopy]:
        table = held.pages[group.name]
        shared = self._shared_indices(held, group, num_tokens)
        copies = []
        for index, page in zip(shared, taken, strict=False):
            copies.append(PageCopy(group.name, table[index], page))
            self._pools[group.name].release([table[index]])
            table[index] = page
        table += taken[len(shared) :]
        return copies

    def _place_state(self, held: _Held, group: Group, taken: list[int]) -> list[PageCopy]:
        state = held.states[group.name]
        source = state.read
        state.write = taken[0] if taken else state.write or source
        if not (taken and group.in_place):
            return []
        state.read = state.write
        if source == 0:
            return []
        self._pools[group.name].release([source])
        return [PageCopy(group.name, source, state.write)]
