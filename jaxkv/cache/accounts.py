"""Which pages and states each sequence holds, over all groups at once. Knows groups and counts, never variants."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxkv.cache.holdings import (
    Held,
    Keeper,
    PageCopy,
    Reservation,
    State,
    check_group,
    check_sequence,
    count_needed,
    drop_unseen,
    empty,
    place_pages,
    place_state,
    shared_indices,
)
from jaxkv.cache.match import Match, check_match
from jaxkv.cache.pool import PagePool, state_pool
from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.cache.windows import lets_go_at, most_ahead

__all__ = ["Accounts", "Match", "PageCopy", "Reservation"]


class Accounts:
    """The books of pages and states of all sequences in flight.

    A sequence's life is `open`, `adopt` or `fork`, then `reserve` and `commit` for each step, then `release`. With
    `let_go` it gives back pages before its windows while it goes on.
    A keeper may hold pages beyond the sequences that filled them, until a `reserve` needs them.
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
        self._recurrent = [g.name for g in layout.groups if g.unit == "state" and not g.in_place]
        self._windowed = [g for g in layout.paged_groups if g.window is not None]
        self._held: dict[int, Held] = {}
        self._keeper: Keeper | None = None

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
        rooms = (most_ahead(g, self._pools[g.name].num_total) for g in self._windowed)
        return min(rooms, default=None)

    def longest(self, *, lets_go: bool) -> int | None:
        """Returns the tokens of the longest sequence that could be held, alone; `None` for no limit.

        Args:
            lets_go: it gives back what its windows have passed, see `let_go`.
        """
        if not lets_go or self.most_ahead is None or self.most_ahead < 1:
            return self.max_tokens
        whole = [g for g in self._layout.paged_groups if g.window is None]
        return min((g.page_size * self._pools[g.name].num_total for g in whole), default=None)

    def num_free(self, group_name: str) -> int:
        """Returns the free pages or states of a group."""
        return self._pools[self._layout.group(group_name).name].num_free

    def num_reclaimable(self, group_name: str) -> int:
        """Returns how many pages or states the keeper alone holds: a `reserve` takes them when free ones run out."""
        return self.pool_of(group_name).num_idle

    def num_tokens(self, seq: int) -> int:
        """Returns how many tokens of a sequence are computed."""
        return self._find(seq).computed

    def open(self, seq: int) -> None:
        """Begins a sequence that holds nothing yet."""
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already; release it or choose another number")
        self._held[seq] = empty(self._layout.groups)

    def adopt(self, seq: int, match: Match) -> None:
        """Begins a sequence whose first tokens are in kept pages, and in a checkpoint's states, which it shares.

        `PrefixIndex.adopt` looks up and adopts in one breath: between the two, a `reserve` could take the pages away.

        Raises:
            ValueError: the match covers another number of tokens than it says, holds a page or state that is not kept,
                or skips tokens of a recurrent group, whose state nobody has.
        """
        check_match(match, self._layout, self._pools)
        self.open(seq)
        held = self._held[seq]
        held.computed = held.reserved = match.num_tokens
        for group in self._layout.paged_groups:
            name, unneeded = group.name, match.unneeded[group.name]
            self._pools[name].share(match.pages[name])
            held.pages[name] = [0] * unneeded + list(match.pages[name])
            held.unneeded[name] = unneeded
        held.origin = match.origin
        held.covered = dict(match.covered)
        for name in self._recurrent if match.num_tokens else ():
            self._pools[name].share([match.states[name]])
            held.states[name].read = match.states[name]

    def reserve(self, seq: int, num_tokens: int, *, whole: int = 0) -> Reservation:
        """Makes the tokens from the first uncomputed one up to `num_tokens` writable in every group.

        Groups without a window take pages for `whole` tokens at once, if those are more, so that a sequence that was
        begun has them; those of a window group can be had again and again, see `let_go`.
        Pages and in-place states that the step would write but another sequence also holds are replaced by copies.
        A recurrent group gets another state to write if the one it reads is shared or the zero state.
        When pages or states are too few, the keeper forgets as many as are missing.

        Raises:
            OutOfPages: a group has too few pages, those the keeper could forget included; nothing was taken or
                forgotten in any group.
            OutOfStates: likewise for states.
            ValueError: fewer tokens than are computed already.
        """
        held = self._find(seq)
        if num_tokens < held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to reserve"
            )
        counts = self._count(held, num_tokens, whole)
        if self._reclaim(held, num_tokens, counts):
            counts = self._count(held, num_tokens, whole)
        for name, count in counts.items():
            if count > self._pools[name].num_free:
                raise self._pools[name].exhausted(count, f" of {name!r} for sequence {seq}")
        taken = {name: self._pools[name].take(count) for name, count in counts.items()}
        copies: list[PageCopy] = []
        for group in self._layout.groups:
            pool = self._pools[group.name]
            if group.unit == "page":
                copies += place_pages(held, group, pool, num_tokens, taken[group.name])
            else:
                copies += place_state(held, group, pool, taken[group.name])
        held.reserved = max(held.reserved, num_tokens)
        held.changes += 1
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
        for name in self._recurrent:  # Those that are updated in place are what they were.
            state = held.states[name]
            if state.read not in (0, state.write):
                self._pools[name].release([state.read])
            state.read = state.write

    def commit_all(self, num_tokens: Iterable[tuple[int, int]]) -> None:
        """Commits one step of many sequences, each with its number of tokens; see `commit`."""
        for seq, count in num_tokens:
            held = self._held.get(seq)
            if held is None or self._recurrent or not held.computed < count <= held.reserved:
                self.commit(seq, count)
            else:
                held.computed = count

    def let_go(self, seq: int, num_tokens: int) -> int | None:
        """Gives back the pages that no token from position `num_tokens` on sees.

        Steps that were sent before may still read them: whoever gets them next must write them in a later step.

        Args:
            seq: whose pages.
            num_tokens: tokens whose steps were read; none of them is computed again.

        Returns:
            With how many tokens it can give back more; `None` if no group has a window.

        Raises:
            ValueError: fewer are computed.
        """
        held = self._find(seq)
        if num_tokens > held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} tokens computed, so what {num_tokens} of them no longer see "
                f"is not known yet"
            )
        for group in self._windowed:
            drop_unseen(held, group, self._pools[group.name], num_tokens)
        return min((lets_go_at(g, held.unneeded[g.name]) for g in self._windowed), default=None)

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
        held.covered, held.origin = dict(source.covered), source.origin
        for group in self._layout.groups:
            if group.unit == "page":
                held.pages[group.name] = list(source.pages[group.name])
                held.unneeded[group.name] = source.unneeded[group.name]
            else:
                held.states[group.name] = State(read=source.states[group.name].read)
            self._pools[group.name].share(held.ids(group.name))

    def is_open(self, seq: int) -> bool:
        """Returns whether a sequence was begun and not released."""
        return seq in self._held

    def release(self, seq: int) -> None:
        """Ends a sequence and drops everything it holds."""
        held = self._find(seq)
        for name, pool in self._pools.items():
            pool.release(held.ids(name))
        del self._held[seq]

    def reset(self, *, keep_prefix: bool) -> None:
        """Ends every sequence; and if the cache is lost or the weights are others, the keeper forgets its pages too."""
        for seq in list(self._held):
            self.release(seq)
        if self._keeper is not None and not keep_prefix:
            self._keeper.clear()

    def attach(self, keeper: Keeper) -> None:
        """Lets one keeper hold pages, and asks it for them when they are short."""
        if self._keeper is not None:
            raise ValueError("these accounts have a keeper already; one index serves all sequences")
        self._keeper = keeper

    def pool(self, group_name: str) -> PagePool:
        """Returns the pool of a paged group, for the keeper: it calls `keep` and `forget` alone."""
        return self._pools[self._group(group_name, "page").name]

    def pool_of(self, group_name: str) -> PagePool:
        """Returns the pool of a group of pages or states, for the keeper and for whoever keeps snapshots."""
        return self._pools[self._layout.group(group_name).name]

    def page_table(self, seq: int, group_name: str) -> list[int]:
        """Returns the pages of a sequence, first token first. Positions that nobody needs any more hold 0."""
        return list(self._find(seq).pages[self._group(group_name, "page").name])

    def pages(self, seq: int, group_name: str) -> Sequence[int]:
        """Returns the pages of a sequence without copying them, for those who read them at once.

        The list is the accounts' own: the caller must not change it, nor keep it beyond the next verb, which may.
        """
        pages = self._find(seq).pages.get(group_name)
        if pages is None:  # Says which is wrong, the name or the kind of group.
            return self.page_table(seq, group_name)
        return pages

    def held(self, seqs: Sequence[int]) -> list[Held]:
        """Returns what sequences hold: the accounts' own records, to be read at once and not changed."""
        try:
            return [self._held[seq] for seq in seqs]
        except KeyError:
            return [self._find(seq) for seq in seqs]  # Says which is not open.

    def num_unneeded(self, seq: int, group_name: str) -> int:
        """Returns how many leading positions of a sequence's page table hold no page."""
        return self._find(seq).unneeded[self._group(group_name, "page").name]

    def slots(self, seq: int, group_name: str, start: int, stop: int) -> np.ndarray:
        """Returns the slot (`page * page_size + offset`, int32) of each token from `start` to `stop - 1`."""
        page_size = self._group(group_name, "page").page_size
        held = self._find(seq)
        pages, first = held.pages[group_name], held.unneeded[group_name] * page_size
        if not first <= start <= stop <= len(pages) * page_size:
            raise ValueError(
                f"sequence {seq} has {len(pages)} pages of {page_size} tokens in {group_name!r}, the first for token "
                f"{first}, which do not hold tokens {start} to {stop}; reserve first"
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
            check_group(group, self._pools[group.name], self._held.values())
        for seq, held in self._held.items():
            check_sequence(seq, held, self._layout.groups, self._pools)

    def _find(self, seq: int) -> Held:
        if seq not in self._held:
            raise ValueError(f"sequence {seq} is not open (never opened, or released already)")
        return self._held[seq]

    def _group(self, name: str, unit: str) -> Group:
        group = self._layout.group(name)
        if group.unit != unit:
            raise ValueError(f"group {name!r} holds {group.unit}s, not {unit}s")
        return group

    def _count(self, held: Held, num_tokens: int, whole: int) -> dict[str, int]:
        """Returns how many pages or states each group would give to a step up to `num_tokens`."""
        return {
            group.name: count_needed(held, group, self._pools[group.name], num_tokens, whole)
            for group in self._layout.groups
        }

    def _reclaim(self, held: Held, num_tokens: int, counts: Mapping[str, int]) -> bool:
        """Asks the keeper for the pages that are missing; returns whether it forgot any."""
        free = {name: pool.num_free for name, pool in self._pools.items()}
        missing = {name: n - free[name] for name, n in counts.items() if n > free[name]}
        keepable = {*held.pages, *self._recurrent}
        if self._keeper is None or not missing or not missing.keys() <= keepable:
            return False
        rewritten = {
            name: [held.pages[name][i] for i in shared_indices(held, group, pool, num_tokens)]
            for name, group, pool in (
                (name, self._layout.group(name), self._pools[name])
                for name in missing.keys() & held.pages.keys()
            )
        }
        return self._keeper.reclaim(missing, rewritten)
