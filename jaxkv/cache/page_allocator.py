"""Allocates pages and states to sequences, in all groups at once.

A group is a set of layers with equal cache specs (`Group` in `jaxkv.cache.spec`). In a paged group a sequence has a
table of pages, in a group of states one state. A page or state is an id of the group's pool. It stands for memory in
each layer of the group. Ids have reference counts, because sequences and the prefix cache share them.
"""

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
    """The result of one `PageAllocator.reserve`.

    Attributes:
        new_states: group name -> id of the state taken, where one was. An in-place state still holds its last owner's
            values unless it is the target of a copy.
        copies: copies to make on the device, in this order, before the step that writes. If they are not made, the
            sequence must be released.
    """

    new_states: Mapping[str, int]
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True)
class AllocatorView:
    """A read-only view of all pages and states.

    Attributes:
        sequences: sequence number -> pages and states of an open sequence; always current.
        references: group name -> page or state id -> number of references; as of the call.
        kept: group name -> pages or states that the prefix owner holds; as of the call.
    """

    sequences: Mapping[int, SequenceView]
    references: Mapping[str, Mapping[int, int]]
    kept: Mapping[str, frozenset[int]]


@runtime_checkable
class PrefixOwner(Protocol):
    """Holds pages and states after the sequences that filled them have ended; `PrefixIndex` implements it."""

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Frees the missing pages and states, or returns False and frees nothing if it holds too few.

        Args:
            missing: group name -> number of pages or states to free.
            rewritten: group name -> shared pages that a sequence is about to copy before writing. If only the owner
                shares such a page, dropping the owner's reference makes the copy unnecessary, which gains a page.
        """
        ...


class PageAllocator:
    """Allocates pages and states to all sequences in flight.

    A sequence begins with `open`, `adopt` or `fork`. Each step calls `reserve` and `commit`. `release` ends it.
    `free_out_of_window` frees pages that its windows have passed while it runs. `take_back` and `truncate` take tokens
    back, with their pages kept or released.
    A prefix owner may hold pages after the sequences that filled them have ended; `reserve` reclaims them when needed.
    Each method acts on all groups, or raises and changes nothing.

    Args:
        layout: the groups.
        counts: group name -> number of pages or states.

    Raises:
        ValueError: `counts` does not name exactly the groups of the layout, or has one below 1.
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int]) -> None:
        layout.arrays(counts)  # Raises if the counts do not fit the layout.
        self._layout = layout
        self._pools = {
            g.name: (PagePool if g.unit == "page" else state_pool)(counts[g.name])
            for g in layout.groups
        }
        self._groups = GroupPools(layout.groups, self._pools)
        self._in_place = frozenset(group.name for group in layout.in_place_groups)
        self._held: dict[int, SequencePages] = {}
        self._views: dict[int, SequenceView] = {}
        self._prefix_owner: PrefixOwner | None = None

    @property
    def max_tokens(self) -> int | None:
        """Length of the longest sequence that fits with all its pages if it runs alone; `None` if no group is paged."""
        paged = self._layout.paged_groups
        return min((g.page_size * self._pools[g.name].num_total for g in paged), default=None)

    @property
    def most_ahead(self) -> int | None:
        """Tokens that a sequence that runs alone can write before it frees pages out of its windows.

        `None` if no group has a window. Less than 1 if a pool is smaller than its window; then no sequence can be
        longer than `max_tokens`.
        """
        each = (most_ahead(g, self._pools[g.name].num_total) for g in self._groups.windowed)
        return min(each, default=None)

    def longest(self, *, frees_out_of_window: bool) -> int | None:
        """Returns the length in tokens of the longest sequence that fits if it runs alone; `None` for no limit.

        Args:
            frees_out_of_window: whether the sequence calls `free_out_of_window`.
        """
        if not frees_out_of_window or self.most_ahead is None or self.most_ahead < 1:
            return self.max_tokens
        whole = [g for g in self._layout.paged_groups if g.window is None]
        return min((g.page_size * self._pools[g.name].num_total for g in whole), default=None)

    @property
    def has_windows(self) -> bool:
        """Whether a group has a window, so that `free_out_of_window` can free pages."""
        return bool(self._groups.windowed)

    def num_free(self, group_name: str) -> int:
        """Returns the number of free pages or states of a group."""
        return self.pool(group_name).num_free

    def num_reclaimable(self, group_name: str) -> int:
        """Returns the number of pages or states that only the prefix owner holds, which `reserve` can reclaim."""
        return self.pool(group_name).num_idle

    def num_tokens(self, seq: int) -> int:
        """Returns the number of computed tokens of a sequence."""
        return self._find(seq).computed

    # The life of a sequence.

    def open(self, seq: int) -> None:
        """Begins a sequence that holds no page and no state.

        Raises:
            ValueError: the number belongs to an open sequence.
        """
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already; release it or choose another number")
        held = SequencePages(self._groups)
        self._held[seq], self._views[seq] = held, held.view()

    def adopt(self, seq: int, match: Match) -> None:
        """Begins a sequence that shares the pages and states of a cached prefix.

        Use `PrefixIndex.adopt`, which looks up and adopts in one call: a `reserve` between the two could reclaim the
        pages.

        Raises:
            ValueError: the match's pages do not cover its tokens, a page or state of it is not cached, or it skips
                tokens of a recurrent group without a cached state.
        """
        check_match(match, self._layout, self._pools)
        self.open(seq)
        self._held[seq].adopt(match)

    def reserve(self, seq: int, num_tokens: int, *, whole: int = 0) -> Reservation:
        """Makes the tokens from the first uncomputed one up to `num_tokens` writable in every group.

        Groups without a window take pages for `whole` tokens if that is more, so that a sequence has the pages of its
        whole prompt once it begins. Window groups take pages step by step, because `free_out_of_window` frees others.
        A page or in-place state that the step writes and another sequence shares is replaced by a copy.
        A recurrent group takes a new state to write if the one it reads is shared or the zero state.
        When pages or states are too few, the prefix owner frees the missing number.

        Args:
            seq: number of the sequence.
            num_tokens: tokens, from the first one of the sequence, that the step may write.
            whole: tokens for which groups without a window take pages now.

        Raises:
            OutOfPages: a group has too few pages, reclaimable ones included; nothing is taken or reclaimed anywhere.
            OutOfStates: likewise for states.
            ValueError: `num_tokens` is less than the number of computed tokens.
        """
        held = self._find(seq)
        if num_tokens < held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to reserve; reserve at least "
                f"the computed ones"
            )
        counts = held.count_needed(num_tokens, whole)
        missing = self._missing(counts)
        if missing:
            rewritten = self._rewritten(held, missing, num_tokens)
            may_gain = any(rewritten.values()) or self._groups.recurrent
            if self._reclaim(missing, rewritten) and may_gain:
                # What the owner has dropped may have one holder now, which needs no copy of it.
                counts = held.count_needed(num_tokens, whole)
        taken = self._take(seq, counts)
        copies = held.place(num_tokens, whole, taken)
        return Reservation(
            {name: ids[0] for name, ids in taken.items() if name in held.states and ids},
            tuple(copies),
        )

    def extend(self, seq: int, num_tokens: int) -> bool:
        """Does what `reserve` does, in less time, if no page or state has to be taken; returns whether it did."""
        held = self._find(seq)
        return num_tokens >= held.computed and held.extend(num_tokens)

    def commit(self, seq: int, num_tokens: int) -> None:
        """Records that tokens up to `num_tokens` are computed; the next step reads the states that their step wrote.

        To plan a step before the previous one is collected, commit when the previous one is dispatched.

        Raises:
            ValueError: `num_tokens` is less than the computed or more than the writable tokens.
        """
        held = self._find(seq)
        if not held.computed <= num_tokens <= held.writable:
            raise ValueError(
                f"sequence {seq} can commit {held.computed} to {held.writable} tokens, got {num_tokens}; "
                f"reserve them first"
            )
        if num_tokens != held.computed:  # An empty step writes no state.
            held.commit(num_tokens)

    def commit_all(self, num_tokens: Iterable[tuple[int, int]]) -> None:
        """Commits one step of many sequences, given as (sequence, tokens); see `commit`."""
        find, recurrent = self._held.get, bool(self._groups.recurrent)
        for seq, count in num_tokens:
            held = find(seq)
            if held is None or recurrent or not held.computed < count <= held.writable:
                self.commit(seq, count)
            else:
                held.computed = count

    def take_back(self, seq: int, num_tokens: int) -> None:
        """Counts the tokens from `num_tokens` on as not computed: rejected drafts. Their pages stay, see `truncate`.

        The next step of the sequence writes other tokens into their slots. A step in flight may write the sequence if
        `num_tokens` is past all that it can write. A step that verifies drafts leaves the rejected ones out of
        recurrent states itself.

        Raises:
            ValueError: fewer tokens are computed, or the sequence has freed pages that the window before the next token
                needs.
        """
        held = self._find(seq)
        if not 0 <= num_tokens <= held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to keep; keep 0 to all of them"
            )
        if held.lacks(num_tokens):
            raise ValueError(
                f"sequence {seq} cannot go back from {held.computed} to {num_tokens} tokens: it has freed pages that "
                f"it would need; compute it again from its beginning"
            )
        held.take_back(num_tokens)

    def commit_states(self, seq: int) -> None:
        """Records that a step without tokens of a sequence wrote its states, as padding does in models of torch."""
        held = self._find(seq)
        held.commit(held.computed)

    def free_out_of_window(self, seq: int, num_tokens: int) -> None:
        """Releases the pages that no token from position `num_tokens` on sees.

        In-flight steps may still read them. This is safe because programs run in order on the device, so any write to
        these pages comes from a later step.

        Args:
            seq: number of the sequence.
            num_tokens: tokens whose steps are collected; none of them will be computed again.

        Raises:
            ValueError: fewer tokens are computed.
        """
        held = self._find(seq)
        if num_tokens > held.computed:
            raise ValueError(
                f"sequence {seq} has {held.computed} computed tokens, got {num_tokens}; free pages only for computed "
                f"tokens"
            )
        if held.frees_page_at is not None and num_tokens >= held.frees_page_at:
            held.free_out_of_window(num_tokens)

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Takes back the last tokens of sequences, and releases the pages that hold no other token.

        The last page that is left may be shared; `reserve` replaces it by a copy before a step writes it. Tokens that
        are only reserved are taken back too. No in-flight step may write the sequences.

        Args:
            lengths: sequence -> number of computed tokens that are left.

        Raises:
            ValueError: more tokens are left than were computed, a sequence has a state, or the window before its next
                token has pages that the sequence has freed or never held.
        """
        for seq, num_tokens in lengths.items():
            held = self._find(seq)
            if not 0 <= num_tokens <= held.computed:
                raise ValueError(
                    f"sequence {seq} has {held.computed} computed tokens, got {num_tokens} to keep; keep 0 to all of "
                    f"them"
                )
            if num_tokens < held.computed and any(held.ids(name) for name in held.states):
                raise ValueError(
                    f"sequence {seq} has a state after {held.computed} tokens, which cannot be taken back; fork it "
                    f"before tokens that may be removed"
                )
            if lacking := held.lacks(num_tokens):
                raise ValueError(
                    f"sequence {seq} lacks pages of {', '.join(lacking)} that the window before token {num_tokens} "
                    f"needs; compute it again from its beginning"
                )
        for seq, num_tokens in lengths.items():
            self._held[seq].truncate(num_tokens)

    def fork(self, parent: int, child: int) -> None:
        """Begins `child` with the parent's computed tokens; both share pages and states until one of them writes.

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
        """Returns whether a sequence has begun and is not released."""
        return seq in self._held

    @property
    def open_sequences(self) -> frozenset[int]:
        """Numbers of all sequences that have begun and are not released."""
        return frozenset(self._held)

    def release(self, seq: int) -> None:
        """Ends a sequence and drops all its references."""
        self._find(seq).release()
        del self._held[seq], self._views[seq]

    def release_if_open(self, seq: int) -> None:
        """Ends a sequence and releases everything it holds, if it is open."""
        if seq in self._held:
            self.release(seq)

    # Sequences that run no step: each holds the pages and states of one swap-in from the host.

    def hold(self, seq: int, group_name: str, units: Sequence[int]) -> None:
        """Shares held pages or a held state: pages are appended to the table, the state becomes the one to read."""
        held = self._find(seq)
        self.pool(group_name).share(units)
        held.append(group_name, units)

    def place(self, seq: int, counts: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Takes free pages and states: pages are appended to the tables, states become the ones to read.

        Args:
            seq: number of the sequence that gets them.
            counts: group name -> number to take; at most 1 in a group of states.

        Returns:
            Group name -> ids of the pages or of the state taken.

        Raises:
            OutOfPages: a group has too few pages, reclaimable ones included. Nothing is taken or reclaimed.
            OutOfStates: likewise for states.
        """
        held = self._find(seq)
        missing = self._missing(counts)
        if missing:
            self._reclaim(missing, {})
        taken = self._take(seq, counts)
        for name, units in taken.items():
            held.append(name, units)
        return taken

    # Pending checkpoints: states that a step writes in the middle of its tokens.

    def take_pending_checkpoint(self, seq: int, num_tokens: int) -> Mapping[str, int] | None:
        """Takes a free state of each recurrent group for a sequence's checkpoint after `num_tokens` tokens.

        The states belong to the sequence and are released with it.

        Returns:
            Recurrent group name -> state id; `None`, and nothing is taken, if a group has no free state.

        Raises:
            ValueError: the sequence has a pending checkpoint of this length already.
        """
        held = self._find(seq)
        if num_tokens in held.pending_checkpoints:
            raise ValueError(
                f"sequence {seq} has a pending checkpoint after {num_tokens} tokens already; drop or keep it first"
            )
        pools = {group.name: self._pools[group.name] for group in self._groups.recurrent}
        if not all(pool.num_free for pool in pools.values()):
            return None
        states = MappingProxyType({name: pool.take(1)[0] for name, pool in pools.items()})
        held.pending_checkpoints[num_tokens] = states
        return states

    def drop_pending_checkpoint(self, seq: int, num_tokens: int) -> None:
        """Releases the states of a pending checkpoint."""
        for name, state in self._find(seq).pending_checkpoints.pop(num_tokens).items():
            self._pools[name].release([state])

    def keep_pending_checkpoint(self, seq: int, num_tokens: int) -> Mapping[str, int]:
        """Moves a pending checkpoint from its sequence to the prefix owner; returns group name -> state id."""
        states = self._find(seq).pending_checkpoints.pop(num_tokens)
        for name, state in states.items():
            self._pools[name].keep(state)
            self._pools[name].release([state])
        return states

    def keep_current_states(self, seq: int) -> Mapping[str, int] | None:
        """Adds the prefix owner's reference to the states that a sequence reads next.

        Returns:
            Recurrent group name -> state id; `None` if one is the zero state or the prefix owner holds one already.
        """
        held = self._find(seq)
        states = {group.name: held.states[group.name].read for group in self._groups.recurrent}
        if any(not state or state in self._pools[name].kept for name, state in states.items()):
            return None
        for name, state in states.items():
            self._pools[name].keep(state)
        return states

    # Read access, and the prefix owner.

    def attach(self, owner: PrefixOwner) -> None:
        """Sets the prefix owner, from which `reserve` and `place` reclaim pages and states.

        Raises:
            ValueError: there is a prefix owner already.
        """
        if self._prefix_owner is not None:
            raise ValueError(
                "this allocator has a prefix owner already; one index serves all sequences"
            )
        self._prefix_owner = owner

    def pool(self, group_name: str) -> PagePool:
        """Returns the pool of a group. Only the prefix owner may change it, with `keep` and `release_kept`."""
        pool = self._pools.get(group_name)
        if pool is None:
            self._layout.group(group_name)  # Raises and lists the groups.
            raise AssertionError("every group has a pool")
        return pool

    def held(self, seq: int) -> SequenceView:
        """Returns a read-only view of a sequence's pages and states, always current."""
        self._find(seq)
        return self._views[seq]

    def held_by(self, seqs: Sequence[int]) -> list[SequenceView]:
        """Returns the views of several sequences; see `held`."""
        try:
            return [self._views[seq] for seq in seqs]
        except KeyError:
            return [
                self.held(seq) for seq in seqs
            ]  # Raises and names the sequence that is not open.

    def view(self) -> AllocatorView:
        """Returns a read-only view of all sequences, references and cached pages."""
        return AllocatorView(
            sequences=MappingProxyType(self._views),
            references={name: pool.taken() for name, pool in self._pools.items()},
            kept={name: frozenset(pool.kept) for name, pool in self._pools.items()},
        )

    def pages(self, seq: int, group_name: str) -> tuple[int, ...]:
        """Returns the page ids of a sequence in table order. Positions out of its window hold 0."""
        pages = self._find(seq).pages.get(group_name)
        if pages is None:
            # Raises with the reason: an unknown group, or a group of states.
            self._group(group_name, "page")
            raise AssertionError("every paged group has a table")
        return pages

    def states(self, seq: int, group_name: str) -> tuple[int, int]:
        """Returns the ids of the state that the next step reads (0, the zero state, at the beginning) and writes.

        Both are equal in groups that are updated in place.
        """
        state = self._find(seq).states[self._group(group_name, "state").name]
        if not state.write:
            raise ValueError(
                f"sequence {seq} has no state to write in {group_name!r}; reserve first"
            )
        return state

    def check(self) -> None:
        """Raises `ValueError` with the ids if pools, sequences and prefix owner contradict each other."""
        for group in self._layout.groups:
            self._check_group(group)
        for seq, held in self._held.items():
            held.check(seq)

    def _check_group(self, group: Group) -> None:
        """Raises `ValueError` if the references of a group differ from those of its sequences and the prefix owner."""
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
                f"group {group.name!r}: the counted and the actual references of these {group.unit}s differ: {wrong}"
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
        """Returns group name -> how many more pages or states are wanted than are free, for groups with too few."""
        pools = self._pools
        return {
            name: count - free
            for name, count in counts.items()
            if count > (free := pools[name].num_free)
        }

    def _reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, list[int]]) -> bool:
        """Lets the prefix owner free what is missing; returns whether it did."""
        if self._prefix_owner is None or missing.keys() & self._in_place:
            return False
        return self._prefix_owner.reclaim(missing, rewritten)

    def _rewritten(
        self, held: SequencePages, missing: Mapping[str, int], num_tokens: int
    ) -> dict[str, list[int]]:
        """Returns group name -> the shared pages that a step up to `num_tokens` would copy."""
        return {
            group.name: held.shared_pages(group, num_tokens)
            for group in self._groups.groups
            if group.name in missing and group.unit == "page"
        }

    def _take(self, seq: int, counts: Mapping[str, int]) -> dict[str, list[int]]:
        """Takes `counts` pages or states of each group, or raises and takes none."""
        for name, count in counts.items():
            if count > self._pools[name].num_free:
                raise self._pools[name].exhausted(count, f" of {name!r} for sequence {seq}")
        return {name: self._pools[name].take(count) for name, count in counts.items()}
