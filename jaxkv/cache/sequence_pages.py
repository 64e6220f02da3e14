"""The pages and states of one sequence in every group, and the number of its computed tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jaxkv.cache.match import Match
from jaxkv.cache.pool import PagePool
from jaxkv.cache.spec import Group
from jaxkv.cache.windows import first_page, frees_page_at


@dataclass(frozen=True)
class PageCopy:
    """A copy of a page or in-place state, from id `source` to id `target`, to make before the next step."""

    group: str
    source: int
    target: int


class State(NamedTuple):
    """The id of the state that a sequence reads (0: the zero state, not counted) and of the one it writes (0: none)."""

    read: int = 0
    write: int = 0

    def owned(self) -> tuple[int, ...]:
        """Returns the state ids that the sequence holds a reference to."""
        return tuple(sorted({self.read, self.write} - {0}))


class GroupPools:
    """The groups of a cache and their pools.

    Attributes:
        groups: every group.
        pools: group name -> its pool.
        recurrent: groups of states in which a step reads one state and writes another.
        windowed: paged groups with a window.
    """

    def __init__(self, groups: Sequence[Group], pools: Mapping[str, PagePool]) -> None:
        self.groups = tuple(groups)
        self.pools = pools
        self.recurrent = tuple(g for g in groups if g.unit == "state" and not g.in_place)
        self.windowed = tuple(g for g in groups if g.unit == "page" and g.window is not None)


class SequencePages:
    """The pages and states of one sequence, with one reference to each. Other modules get a `SequenceView`.

    Its tokens, as half-open ranges:

        [0, computed)          computed by dispatched steps
        [computed, writable)   have pages in every group; the next steps may write them
        [writable, reserved)   have pages in groups without a window only

    Args:
        groups: the groups and their pools.

    Attributes:
        computed, writable, reserved: ends of the ranges above, in tokens.
        pages: paged group name -> page table.
        unneeded: paged group name -> leading table positions that are out of the window and hold the id 0.
        states: state group name -> its state ids.
        pending_checkpoints: length in tokens -> recurrent group name -> id of the state that a step writes there.
        origin: digest of the checkpoint that the sequence began from; `None` if there is none.
        covered: paged group name -> leading tokens whose pages come from the prefix cache. The sequence never writes
            these pages, even if it computes some of the tokens again for other groups.
        changes: number of additions and removals of pages or states. A copy of the tables is current while this is the
            same.
        frees_page_at: number of collected tokens at which the next page leaves a window; `None` without windows.
    """

    __slots__ = (
        "_groups",
        "_pools",
        "changes",
        "computed",
        "covered",
        "frees_page_at",
        "origin",
        "pages",
        "pending_checkpoints",
        "reserved",
        "states",
        "unneeded",
        "writable",
    )

    def __init__(self, groups: GroupPools) -> None:
        self._groups = groups
        self._pools = groups.pools
        self.computed = self.writable = self.reserved = self.changes = 0
        paged = [group.name for group in groups.groups if group.unit == "page"]
        self.pages: dict[str, tuple[int, ...]] = dict.fromkeys(paged, ())
        self.unneeded = dict.fromkeys(paged, 0)
        self.states = {group.name: State() for group in groups.groups if group.unit == "state"}
        self.pending_checkpoints: dict[int, Mapping[str, int]] = {}
        self.origin: bytes | None = None
        self.covered: dict[str, int] = {}
        self.frees_page_at = self._next_free()

    def view(self) -> "SequenceView":
        """Returns a read-only view, always current."""
        return SequenceView(
            pages=MappingProxyType(self.pages),
            unneeded=MappingProxyType(self.unneeded),
            states=MappingProxyType(self.states),
            pending_checkpoints=MappingProxyType(self.pending_checkpoints),
            covered=MappingProxyType(self.covered),
            _of=self,
        )

    def first_written(self, name: str) -> int:
        """Returns the position of the first token that the next step writes to the pages of a group."""
        return max(self.computed, self.covered.get(name, 0))

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids of a group's pages or states to which the sequence holds a reference."""
        if name in self.pages:
            return self.pages[name][self.unneeded[name] :]
        pending = (states[name] for states in self.pending_checkpoints.values() if name in states)
        return (*self.states[name].owned(), *pending)

    def shared_positions(self, group: Group, num_tokens: int) -> list[int]:
        """Returns the table positions of shared pages that a step up to `num_tokens` would write."""
        if num_tokens == self.computed:
            return []
        pool, table = self._pools[group.name], self.pages[group.name]
        start = self.first_written(group.name)
        if num_tokens <= start:
            return []
        written = range(start // group.page_size, group.pages_for(num_tokens))
        return [i for i in written if i < len(table) and pool.references(table[i]) > 1]

    def shared_pages(self, group: Group, num_tokens: int) -> list[int]:
        """Returns the page ids at `shared_positions`."""
        table = self.pages[group.name]
        return [table[index] for index in self.shared_positions(group, num_tokens)]

    def count_needed(self, num_tokens: int, whole: int) -> dict[str, int]:
        """Returns group name -> pages or states to take for a step up to `num_tokens`, copies of shared ones included.

        A group without a window takes pages for `whole` tokens, if that is more.
        """
        return {group.name: self._needed(group, num_tokens, whole) for group in self._groups.groups}

    def adopt(self, match: Match) -> None:
        """Shares the pages and states of a match, and counts its tokens as computed."""
        self.computed = self.writable = self.reserved = match.num_tokens
        for name in self.pages:
            self._pools[name].share(match.pages[name])
            self.pages[name] = (*[0] * match.unneeded[name], *match.pages[name])
            self.unneeded[name] = match.unneeded[name]
        self.origin = match.origin
        self.covered.update(match.covered)
        for name, state in match.states.items():
            self._pools[name].share([state])
            self.states[name] = State(read=state)
        self.frees_page_at = self._next_free()

    def fork(self, source: "SequencePages") -> None:
        """Shares all pages of another sequence and the states that it reads next."""
        self.computed = self.writable = self.reserved = source.computed
        self.pages.update(source.pages)
        self.unneeded.update(source.unneeded)
        self.covered.update(source.covered)
        self.origin, self.frees_page_at = source.origin, source.frees_page_at
        for name, state in source.states.items():
            self.states[name] = State(read=state.read)
        for name, pool in self._pools.items():
            pool.share(self.ids(name))

    def append(self, name: str, units: Iterable[int]) -> None:
        """Appends pages to a table, or sets the state to read; their references pass to the sequence."""
        if name in self.pages:
            self.pages[name] += tuple(units)
        else:
            (self.states[name],) = (State(read=unit) for unit in units)

    def place(self, num_tokens: int, whole: int, taken: Mapping[str, list[int]]) -> list[PageCopy]:
        """Adds the ids taken for a step up to `num_tokens`, see `count_needed`; returns the copies to make."""
        copies: list[PageCopy] = []
        for group in self._groups.groups:
            if group.unit == "page":
                copies += self._place_pages(group, num_tokens, taken[group.name])
            else:
                copies += self._place_state(group, taken[group.name])
        self.writable = max(self.writable, num_tokens)
        self.reserved = max(self.reserved, num_tokens, whole)
        self.changes += 1
        return copies

    def extend(self, num_tokens: int) -> bool:
        """Makes tokens up to `num_tokens` writable if that takes no page and no state; returns whether it did."""
        if self.states or any(self._needed(group, num_tokens, 0) for group in self._groups.groups):
            return False
        self.writable = max(self.writable, num_tokens)
        self.reserved = max(self.reserved, num_tokens)
        return True

    def commit(self, num_tokens: int) -> None:
        """Counts tokens as computed; the next step reads the states that their step writes."""
        self.computed = num_tokens
        for group in self._groups.recurrent:
            read, write = self.states[group.name]
            if read == write:
                continue
            if read:
                self._pools[group.name].release([read])
            self.states[group.name] = State(write, write)

    def free_out_of_window(self, num_tokens: int) -> None:
        """Releases the pages that no token from position `num_tokens` on sees, and sets their table positions to 0."""
        for group in self._groups.windowed:
            table, first = self.pages[group.name], self.unneeded[group.name]
            stop = min(first_page(group, num_tokens), len(table))
            if stop > first:
                self._pools[group.name].release(table[first:stop])
                self.pages[group.name] = (*[0] * stop, *table[stop:])
                self.unneeded[group.name] = stop
        self.frees_page_at = self._next_free()

    def lacks(self, num_tokens: int) -> list[str]:
        """Returns the groups whose windows before token `num_tokens` need a page that the sequence does not hold."""
        return [
            group.name
            for group in self._groups.windowed
            if first_page(group, num_tokens) < self.unneeded[group.name]
        ]

    def take_back(self, num_tokens: int) -> None:
        """Ends the computed tokens at `num_tokens`; the pages past it stay, and stay writable unless one is shared."""
        self.computed = num_tokens
        paged = [group for group in self._groups.groups if group.unit == "page"]
        if any(self.shared_positions(group, self.writable) for group in paged):
            self.writable = num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Ends all ranges at `num_tokens` and releases the pages past it; the sequence must lack no page (`lacks`)."""
        for group in self._groups.groups:
            if group.unit != "page":
                continue
            table, stop = self.pages[group.name], group.pages_for(num_tokens)
            self._pools[group.name].release(table[stop:])
            self.pages[group.name] = table[:stop]
        self.covered.update({name: min(end, num_tokens) for name, end in self.covered.items()})
        self.computed = self.writable = self.reserved = num_tokens
        self.changes += 1

    def release(self) -> None:
        """Drops the references to all pages and states."""
        for name, pool in self._pools.items():
            pool.release(self.ids(name))

    def check(self, seq: int) -> None:
        """Checks the sequence.

        Args:
            seq: its number, for the message.

        Raises:
            ValueError: pages are missing for reserved tokens, or a page or state that it may write is shared.
        """
        lacking, shared = {}, {}
        for group in self._groups.groups:
            name = group.name
            if group.unit == "page":
                wanted = self.writable if group.window is not None else self.reserved
                if len(self.pages[name]) < group.pages_for(wanted):
                    lacking[name] = self.pages[name]
                if overlap := self.shared_pages(group, self.writable):
                    shared[name] = overlap
                continue
            written = self.states[name].write if self.writable > self.computed else 0
            if written and self._pools[name].references(written) > 1:
                shared[name] = [written]
        if lacking or shared or not self.computed <= self.writable <= self.reserved:
            raise ValueError(
                f"sequence {seq} has {self.computed} tokens computed, {self.writable} writable and {self.reserved} "
                f"reserved, but too few pages: {lacking}, or may write shared ones: {shared}"
            )

    def _next_free(self) -> int | None:
        ends = (frees_page_at(group, self.unneeded[group.name]) for group in self._groups.windowed)
        return min(ends, default=None)

    def _needed(self, group: Group, num_tokens: int, whole: int) -> int:
        if group.unit == "page":
            wanted = max(num_tokens, whole) if group.window is None else num_tokens
            missing = max(0, group.pages_for(wanted) - len(self.pages[group.name]))
            return missing + len(self.shared_positions(group, num_tokens))
        state = self.states[group.name]
        if state.write not in (0, state.read):
            return 0
        return int(state.read == 0 or self._pools[group.name].references(state.read) > 1)

    def _place_pages(self, group: Group, num_tokens: int, taken: list[int]) -> list[PageCopy]:
        """Puts the taken pages into the table: first as copies of shared pages, which are released, then at the end."""
        table = list(self.pages[group.name])
        shared = self.shared_positions(group, num_tokens)
        copies = []
        for index, page in zip(shared, taken, strict=False):
            copies.append(PageCopy(group.name, table[index], page))
            self._pools[group.name].release([table[index]])
            table[index] = page
        self.pages[group.name] = (*table, *taken[len(shared) :])
        return copies

    def _place_state(self, group: Group, taken: list[int]) -> list[PageCopy]:
        """Sets the state to write, to the taken one if any. A replaced in-place state is copied and released."""
        name, source = group.name, self.states[group.name].read
        write = taken[0] if taken else self.states[name].write or source
        if not (taken and group.in_place):
            self.states[name] = State(source, write)
            return []
        self.states[name] = State(write, write)
        if source == 0:
            return []
        self._pools[name].release([source])
        return [PageCopy(name, source, write)]


@dataclass(frozen=True, eq=False)
class SequenceView:
    """A read-only view of one sequence, always current; `SequencePages` documents the attributes."""

    pages: Mapping[str, tuple[int, ...]]
    unneeded: Mapping[str, int]
    states: Mapping[str, State]
    pending_checkpoints: Mapping[int, Mapping[str, int]]
    covered: Mapping[str, int]
    _of: SequencePages

    @property
    def computed(self) -> int:
        """Tokens that dispatched steps compute."""
        return self._of.computed

    @property
    def writable(self) -> int:
        """Tokens that are computed or writable."""
        return self._of.writable

    @property
    def reserved(self) -> int:
        """Tokens with pages in the groups without a window."""
        return self._of.reserved

    @property
    def changes(self) -> int:
        """Number of additions and removals of pages or states."""
        return self._of.changes

    @property
    def origin(self) -> bytes | None:
        """Digest of the checkpoint that the sequence began from; `None` if there is none."""
        return self._of.origin

    def first_written(self, name: str) -> int:
        """Returns the position of the first token that the next step writes to the pages of a group."""
        return self._of.first_written(name)

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns the ids of a group's pages or states to which the sequence holds a reference."""
        return self._of.ids(name)
