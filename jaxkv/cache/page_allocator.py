"""Allocates pages and states to sequences, in all groups at once. Knows groups and counts, no variant of a cache."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from jaxkv.cache.match import Match, check_match
from jaxkv.cache.pool import PagePool, state_pool
from jaxkv.cache.sequence_pages import GroupPools, PageCopy, SequencePages, SequenceView
from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.cache.windows import most_ahead

__all__ = ["Match", "PageAllocator", "PageCopy", "Reservation", "SequenceView"]


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


@dataclass(frozen=True)
class AllocatorView:
    """Who holds what, read-only.

    Attributes:
        sequences: number -> what an open sequence holds; always up to date.
        references: group's name -> page or state -> how many hold it; of the moment of the call.
        kept: group's name -> pages or states that the prefix owner holds; of the moment of the call.
    """

    sequences: Mapping[int, SequenceView]
    references: Mapping[str, Mapping[int, int]]
    kept: Mapping[str, frozenset[int]]


@runtime_checkable
class PrefixOwner(Protocol):
    """Keeps pages and states beyond the sequences that filled them; the prefix index is one."""

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Forgets pages and states until each group lacks none, or returns False and forgets nothing.

        Args:
            missing: group name -> pages or states that are too few.
            rewritten: group name -> shared pages about to be copied by a sequence that will write them. To forget one
                that no other sequence holds saves the copy, hence a page.
        """
        ...


class PageAllocator:
    """Allocates pages and states to all sequences in flight.

    A sequence's life is `open`, `adopt` or `fork`, then `reserve` and `commit` for each step, then `release`. With
    `free_out_of_window` it gives back pages before its windows while it goes on.
    A prefix owner may hold pages beyond the sequences that filled them, until a `reserve` needs them.
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
        self._books = GroupPools(layout.groups, self._pools)
        self._held: dict[int, SequencePages] = {}
        self._views: dict[int, SequenceView] = {}
        self._prefix_owner: PrefixOwner | None = None

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest sequence that could be held whole, alone; `None` when nothing is paged."""
        paged = self._layout.paged_groups
        return min((g.page_size * self._pools[g.name].num_total for g in paged), default=None)

    @property
    def most_ahead(self) -> int | None:
        """Tokens that a sequence could write, alone, before it gives back what they push out of its windows.

        `None` if no group has a window; less than 1 if a pool is too small for its window, so that no sequence can be
        longer than `max_tokens`.
        """
        rooms = (most_ahead(g, self._pools[g.name].num_total) for g in self._books.windowed)
        return min(rooms, default=None)

    def longest(self, *, frees_out_of_window: bool) -> int | None:
        """Returns the tokens of the longest sequence that could be held, alone; `None` for no limit.

        Args:
            frees_out_of_window: it gives back what its windows have passed, see `free_out_of_window`.
        """
        if not frees_out_of_window or self.most_ahead is None or self.most_ahead < 1:
            return self.max_tokens
        whole = [g for g in self._layout.paged_groups if g.window is None]
        return min((g.page_size * self._pools[g.name].num_total for g in whole), default=None)

    @property
    def has_windows(self) -> bool:
        """Whether `free_out_of_window` may ever free anything."""
        return bool(self._books.windowed)

    def num_free(self, group_name: str) -> int:
        """Returns the free pages or states of a group."""
        return self.pool(group_name).num_free

    def num_reclaimable(self, group_name: str) -> int:
        """Returns how many pages or states the prefix owner alone holds; `reserve` takes them when none is free."""
        return self.pool(group_name).num_idle

    def num_tokens(self, seq: int) -> int:
        """Returns how many tokens of a sequence are computed."""
        return self._find(seq).computed

    # A sequence from its begin to its end.

    def open(self, seq: int) -> None:
        """Begins a sequence that holds nothing yet."""
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already; release it or choose another number")
        held = SequencePages(self._books)
        self._held[seq], self._views[seq] = held, held.view()

    def adopt(self, seq: int, match: Match) -> None:
        """Begins a sequence whose first tokens are in kept pages, and in a checkpoint's states, which it shares.

        `PrefixIndex.adopt` looks up and adopts in one call: between the two, a `reserve` could take the pages away.

        Raises:
            ValueError: the match covers another number of tokens than it says, holds a page or state that is not kept,
                or skips tokens of a recurrent group, whose state nobody has.
        """
        check_match(match, self._layout, self._pools)
        self.open(seq)
        self._held[seq].adopt(match)

    def reserve(self, seq: int, num_tokens: int, *, whole: int = 0) -> Reservation:
        """Makes the tokens from the first uncomputed one up to `num_tokens` writable in every group.

        Groups without a window take pages for `whole` tokens at once, if those are more, so that a sequence that was
        begun has them; those of a window group can be had again and again, see `free_out_of_window`.
        Pages and in-place states that the step would write but another sequence also holds are replaced by copies.
        A recurrent group gets another state to write if the one it reads is shared or the zero state.
        When pages or states are too few, the prefix owner forgets as many as are missing.

        Raises:
            OutOfPages: a group has too few pages, those the prefix owner could forget included; nothing was taken or
                forgotten in any group.
            OutOfStates: likewise for states.
            ValueError: fewer tokens than are computed already.
        """
        held = self._find(seq)
        if num_tokens < held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to reserve"
            )
        counts = held.count_needed(num_tokens, whole)
        missing = self._missing(counts)
        if missing and self._reclaim(missing, self._rewritten(held, missing, num_tokens)):
            counts = held.count_needed(num_tokens, whole)
        taken = self._take(seq, counts)
        copies = held.place(num_tokens, whole, taken)
        return Reservation(
            {name: ids for name, ids in taken.items() if name in held.pages},
            {name: ids[0] for name, ids in taken.items() if name in held.states and ids},
            tuple(copies),
        )

    def commit(self, seq: int, num_tokens: int) -> None:
        """Records that the tokens up to `num_tokens` are computed, so that the next step reads the states just written.

        To plan a step before the last one is known to have succeeded, commit when the last one is dispatched.
        """
        held = self._find(seq)
        if not held.computed <= num_tokens <= held.writable:
            raise ValueError(
                f"sequence {seq} can commit {held.computed} to {held.writable} tokens, got {num_tokens}"
            )
        if num_tokens != held.computed:  # Else nothing was computed, and no state was written.
            held.commit(num_tokens)

    def commit_all(self, num_tokens: Iterable[tuple[int, int]]) -> None:
        """Commits one step of many sequences, each with its number of tokens; see `commit`."""
        recurrent = bool(self._books.recurrent)
        for seq, count in num_tokens:
            held = self._held.get(seq)
            if held is None or recurrent or not held.computed < count <= held.writable:
                self.commit(seq, count)
            else:
                held.computed = count

    def free_out_of_window(self, seq: int, num_tokens: int) -> None:
        """Releases the pages that no token from position `num_tokens` on sees.

        Steps that were sent before may still read them: a later step must write them first.

        Args:
            seq: whose pages.
            num_tokens: tokens whose steps were read; none of them is computed again.

        Raises:
            ValueError: fewer are computed.
        """
        held = self._find(seq)
        if num_tokens > held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} tokens computed, so what {num_tokens} of them no longer see "
                f"is not known yet"
            )
        if held.frees_page_at is not None and num_tokens >= held.frees_page_at:
            held.free_out_of_window(num_tokens)

    def fork(self, parent: int, child: int) -> None:
        """Begins `child` with the parent's computed tokens; pages and states are shared until one of them writes.

        Raises:
            ValueError: the parent has writable tokens that are not committed, so a step may be writing its states.
        """
        source = self._find(parent)
        if source.writable != source.computed:
            raise ValueError(
                f"sequence {parent} has {source.writable} tokens writable and {source.computed} computed; "
                f"commit its step before the fork"
            )
        self.open(child)
        self._held[child].fork(source)

    def is_open(self, seq: int) -> bool:
        """Returns whether a sequence was begun and not released."""
        return seq in self._held

    @property
    def open_sequences(self) -> frozenset[int]:
        """Numbers of all sequences that were begun and not released."""
        return frozenset(self._held)

    def release(self, seq: int) -> None:
        """Ends a sequence and drops everything it holds."""
        self._find(seq).release()
        del self._held[seq], self._views[seq]

    # Sequences that compute nothing: they hold what comes back from the host.

    def hold(self, seq: int, group_name: str, units: Sequence[int]) -> None:
        """Shares pages or a state that others hold: pages at the end of the table, a state as the one to read."""
        held = self._find(seq)
        self.pool(group_name).share(units)
        held.append(group_name, units)

    def place(self, seq: int, counts: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Takes free pages and states: pages at the end of the tables, states as those to read.

        Args:
            seq: whose they become.
            counts: group name -> how many; of a group of states, at most one.

        Returns:
            Group name -> the pages or the state taken.

        Raises:
            OutOfPages, OutOfStates: as `reserve` does; nothing was taken or forgotten.
        """
        held = self._find(seq)
        missing = self._missing(counts)
        if missing:
            self._reclaim(missing, {})
        taken = self._take(seq, counts)
        for name, units in taken.items():
            held.append(name, units)
        return taken

    # States that a step writes beside those of its rows, for checkpoints.

    def take_snapshot(self, seq: int, num_tokens: int) -> Mapping[str, int] | None:
        """Takes a state of every recurrent group for what a sequence is after `num_tokens`; `None` if one lacks any.

        The states belong to the sequence, and are released with it.

        Raises:
            ValueError: the sequence has a snapshot of this length already.
        """
        held = self._find(seq)
        if num_tokens in held.snapshots:
            raise ValueError(f"sequence {seq} has a snapshot after {num_tokens} tokens already")
        pools = {group.name: self._pools[group.name] for group in self._books.recurrent}
        if not all(pool.num_free for pool in pools.values()):
            return None
        states = MappingProxyType({name: pool.take(1)[0] for name, pool in pools.items()})
        held.snapshots[num_tokens] = states
        return states

    def drop_snapshot(self, seq: int, num_tokens: int) -> None:
        """Releases the states of a snapshot."""
        for name, state in self._find(seq).snapshots.pop(num_tokens).items():
            self._pools[name].release([state])

    def keep_snapshot(self, seq: int, num_tokens: int) -> Mapping[str, int]:
        """Passes a snapshot from its sequence to the prefix owner, and returns its states."""
        states = self._find(seq).snapshots.pop(num_tokens)
        for name, state in states.items():
            self._pools[name].keep(state)
            self._pools[name].release([state])
        return states

    def keep_states(self, seq: int) -> Mapping[str, int] | None:
        """Lets the prefix owner hold the states that a sequence reads next.

        Returns:
            The states; `None` if there are none, or the prefix owner holds one already.
        """
        held = self._find(seq)
        states = {group.name: held.states[group.name].read for group in self._books.recurrent}
        if any(not state or state in self._pools[name].kept for name, state in states.items()):
            return None
        for name, state in states.items():
            self._pools[name].keep(state)
        return states

    # What is held.

    def attach(self, owner: PrefixOwner) -> None:
        """Lets one prefix owner hold pages, and asks it for them when they are short."""
        if self._prefix_owner is not None:
            raise ValueError(
                "this allocator has a prefix owner already; one index serves all sequences"
            )
        self._prefix_owner = owner

    def pool(self, group_name: str) -> PagePool:
        """Returns the pool of a group. The prefix owner keeps and forgets in it, everyone else only reads."""
        return self._pools[self._layout.group(group_name).name]

    def held(self, seq: int) -> SequenceView:
        """Returns what a sequence holds, read-only and always up to date."""
        self._find(seq)
        return self._views[seq]

    def held_by(self, seqs: Sequence[int]) -> list[SequenceView]:
        """Returns what each of some sequences holds; see `held`."""
        try:
            return [self._views[seq] for seq in seqs]
        except KeyError:
            return [self.held(seq) for seq in seqs]  # Raises, and names the one that is not open.

    def view(self) -> AllocatorView:
        """Returns who holds what in all groups, read-only."""
        return AllocatorView(
            sequences=MappingProxyType(self._views),
            references={name: pool.taken() for name, pool in self._pools.items()},
            kept={name: frozenset(pool.kept) for name, pool in self._pools.items()},
        )

    def pages(self, seq: int, group_name: str) -> tuple[int, ...]:
        """Returns the page table of a sequence, first token first. Positions out of its window hold 0."""
        pages = self._find(seq).pages.get(group_name)
        if pages is None:
            self._group(
                group_name, "page"
            )  # Raises, and names what is wrong: the name or the unit.
            raise AssertionError("every paged group has a table")
        return pages

    def states(self, seq: int, group_name: str) -> tuple[int, int]:
        """Returns the state the next step reads (0, the zero state, if fresh) and the one it writes.

        They are the same in groups updated in place.
        """
        state = self._find(seq).states[self._group(group_name, "state").name]
        if not state.write:
            raise ValueError(
                f"sequence {seq} has no state to write in {group_name!r}; reserve first"
            )
        return state

    def check(self) -> None:
        """Raises `ValueError` with the ids if the records contradict each other."""
        for group in self._layout.groups:
            self._check_group(group)
        for seq, held in self._held.items():
            held.check(seq)

    def _check_group(self, group: Group) -> None:
        """Raises `ValueError` if references are not those of the sequences and of the prefix owner."""
        pool = self._pools[group.name]
        pool.check()
        held = Counter(unit for one in self._held.values() for unit in one.ids(group.name))
        held.update(pool.kept)
        counted = pool.taken()
        if held != counted:
            wrong = {
                unit: (counted.get(unit, 0), held[unit])
                for unit in sorted(held.keys() | counted.keys())
                if counted.get(unit, 0) != held[unit]
            }
            raise ValueError(
                f"group {group.name!r}: for these {group.unit}s the references counted and those held differ: {wrong}"
            )

    def _find(self, seq: int) -> SequencePages:
        held = self._held.get(seq)
        if held is None:
            raise ValueError(f"sequence {seq} is not open (never opened, or released already)")
        return held

    def _group(self, name: str, unit: str) -> Group:
        group = self._layout.group(name)
        if group.unit != unit:
            raise ValueError(f"group {name!r} holds {group.unit}s, not {unit}s")
        return group

    def _missing(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Returns, by group, how many more pages or states are wanted than are free."""
        free = {name: self._pools[name].num_free for name in counts}
        return {name: count - free[name] for name, count in counts.items() if count > free[name]}

    def _reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, list[int]]) -> bool:
        """Asks the prefix owner for what is missing; returns whether it forgot any."""
        in_place = {group.name for group in self._layout.in_place_groups}
        if self._prefix_owner is None or missing.keys() & in_place:
            return False
        return self._prefix_owner.reclaim(missing, rewritten)

    def _rewritten(
        self, held: SequencePages, missing: Mapping[str, int], num_tokens: int
    ) -> dict[str, list[int]]:
        """Returns, by group, the shared pages that a step up to `num_tokens` would copy."""
        groups = [group for group in self._layout.paged_groups if group.name in missing]
        return {group.name: held.shared_pages(group, num_tokens) for group in groups}

    def _take(self, seq: int, counts: Mapping[str, int]) -> dict[str, list[int]]:
        """Takes so many pages or states of each group, or raises and takes none."""
        for name, count in counts.items():
            if count > self._pools[name].num_free:
                raise self._pools[name].exhausted(count, f" of {name!r} for sequence {seq}")
        return {name: self._pools[name].take(count) for name, count in counts.items()}
