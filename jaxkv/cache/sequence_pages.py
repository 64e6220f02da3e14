"""What one sequence holds: pages and states of every group, and how far its tokens are computed."""

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
    """A page or in-place state of a group that must be copied before the next step."""

    group: str
    source: int
    target: int


class State(NamedTuple):
    """The state a sequence reads (0: the zero state, which nobody owns) and the one it writes (0: none yet)."""

    read: int = 0
    write: int = 0

    def owned(self) -> tuple[int, ...]:
        """Returns the states it holds a reference to."""
        return tuple(sorted({self.read, self.write} - {0}))


class GroupPools:
    """All groups of a cache, each with its pool.

    Attributes:
        groups: every group.
        pools: group's name -> its pool.
        recurrent: groups in which a step reads one state and writes another.
        windowed: paged groups with a window.
    """

    def __init__(self, groups: Sequence[Group], pools: Mapping[str, PagePool]) -> None:
        self.groups = tuple(groups)
        self.pools = pools
        self.recurrent = tuple(g for g in groups if g.unit == "state" and not g.in_place)
        self.windowed = tuple(g for g in groups if g.unit == "page" and g.window is not None)


class SequencePages:
    """The pages and states of one sequence, with one reference to each. Only `PageAllocator` has it; others get a view.

    Its tokens, as half-open ranges:

        [0, computed)          computed by steps that were sent
        [computed, writable)   the next steps may write them in every group
        [writable, reserved)   have pages in groups without a window, and none yet in the others

    Args:
        books: the groups and their pools.

    Attributes:
        computed, writable, reserved: see above.
        pages: paged group's name -> page table.
        unneeded: paged group's name -> leading positions of the table that hold no page but the id 0.
        states: state group's name -> its state.
        snapshots: number of tokens -> recurrent group's name -> the state that a step keeps after so many tokens.
        origin: name of the checkpoint it began from.
        covered: paged group's name -> tokens whose keys and values lie in pages that others filled. The sequence writes
            none of them, though it may have to compute them for other groups.
        changes: how often pages or states were put in; a copy of the tables is up to date while this is the same.
        frees_page_at: with so many tokens computed and read, the next page leaves a window; `None` without windows.
    """

    __slots__ = (
        "_books",
        "_pools",
        "changes",
        "computed",
        "covered",
        "frees_page_at",
        "origin",
        "pages",
        "reserved",
        "snapshots",
        "states",
        "unneeded",
        "writable",
    )

    def __init__(self, books: GroupPools) -> None:
        self._books = books
        self._pools = books.pools
        self.computed = self.writable = self.reserved = self.changes = 0
        paged = [group.name for group in books.groups if group.unit == "page"]
        self.pages: dict[str, tuple[int, ...]] = dict.fromkeys(paged, ())
        self.unneeded = dict.fromkeys(paged, 0)
        self.states = {group.name: State() for group in books.groups if group.unit == "state"}
        self.snapshots: dict[int, Mapping[str, int]] = {}
        self.origin: bytes | None = None
        self.covered: dict[str, int] = {}
        self.frees_page_at = self._next_free()

    def view(self) -> "SequenceView":
        """Returns what it holds, read-only."""
        return SequenceView(
            pages=MappingProxyType(self.pages),
            unneeded=MappingProxyType(self.unneeded),
            states=MappingProxyType(self.states),
            snapshots=MappingProxyType(self.snapshots),
            covered=MappingProxyType(self.covered),
            _of=self,
        )

    def first_written(self, name: str) -> int:
        """Returns the first token that the next step writes to the pages of a group."""
        return max(self.computed, self.covered.get(name, 0))

    def ids(self, name: str) -> tuple[int, ...]:
        """Returns the pages or states of a group it holds a reference to."""
        if name in self.pages:
            return self.pages[name][self.unneeded[name] :]
        pending = (states[name] for states in self.snapshots.values() if name in states)
        return (*self.states[name].owned(), *pending)

    def shared_positions(self, group: Group, num_tokens: int) -> list[int]:
        """Returns positions in the page table that a step up to `num_tokens` writes though another holds them too."""
        if num_tokens == self.computed:
            return []
        pool, table = self._pools[group.name], self.pages[group.name]
        start = self.first_written(group.name)
        if num_tokens <= start:
            return []
        written = range(start // group.page_size, group.pages_for(num_tokens))
        return [i for i in written if i < len(table) and pool.references(table[i]) > 1]

    def shared_pages(self, group: Group, num_tokens: int) -> list[int]:
        """Returns the pages at `shared_positions`."""
        table = self.pages[group.name]
        return [table[index] for index in self.shared_positions(group, num_tokens)]

    def count_needed(self, num_tokens: int, whole: int) -> dict[str, int]:
        """Returns how many pages or states of each group a step up to `num_tokens` takes, with copies of shared ones.

        A group without a window takes pages for `whole` tokens, if those are more.
        """
        return {group.name: self._needed(group, num_tokens, whole) for group in self._books.groups}

    def adopt(self, match: Match) -> None:
        """Shares the pages and states of a match, whose tokens count as computed."""
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
        """Shares all pages of another sequence, and the states that it reads."""
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
        """Puts pages at the end of a table, or makes a state the one to read; their references are the sequence's."""
        if name in self.pages:
            self.pages[name] += tuple(units)
        else:
            (self.states[name],) = (State(read=unit) for unit in units)

    def place(self, num_tokens: int, whole: int, taken: Mapping[str, list[int]]) -> list[PageCopy]:
        """Puts in what was taken for a step up to `num_tokens`, see `count_needed`; returns the copies it needs."""
        copies: list[PageCopy] = []
        for group in self._books.groups:
            if group.unit == "page":
                copies += self._place_pages(group, num_tokens, taken[group.name])
            else:
                copies += self._place_state(group, taken[group.name])
        self.writable = max(self.writable, num_tokens)
        self.reserved = max(self.reserved, num_tokens, whole)
        self.changes += 1
        return copies

    def commit(self, num_tokens: int) -> None:
        """Counts tokens as computed; the next step reads the states that their step writes."""
        self.computed = num_tokens
        for group in self._books.recurrent:
            read, write = self.states[group.name]
            if read == write:
                continue
            if read:
                self._pools[group.name].release([read])
            self.states[group.name] = State(write, write)

    def free_out_of_window(self, num_tokens: int) -> None:
        """Releases the pages that no token from position `num_tokens` on sees; their positions hold the id 0 then."""
        for group in self._books.windowed:
            table, first = self.pages[group.name], self.unneeded[group.name]
            stop = min(first_page(group, num_tokens), len(table))
            if stop > first:
                self._pools[group.name].release(table[first:stop])
                self.pages[group.name] = (*[0] * stop, *table[stop:])
                self.unneeded[group.name] = stop
        self.frees_page_at = self._next_free()

    def release(self) -> None:
        """Releases everything it holds."""
        for name, pool in self._pools.items():
            pool.release(self.ids(name))

    def check(self, seq: int) -> None:
        """Raises `ValueError` if it lacks pages for what it reserved, or may write what others hold.

        Args:
            seq: its number, for the message.
        """
        lacking, shared = {}, {}
        for group in self._books.groups:
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
                f"reserved, but too few pages: {lacking}, or may write what others hold: {shared}"
            )

    def _next_free(self) -> int | None:
        ends = (frees_page_at(group, self.unneeded[group.name]) for group in self._books.windowed)
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
        """Puts pages into the table; those replaced by copies are released."""
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
        """Makes the state that was taken, if any, the one to write; an in-place one that is replaced is released."""
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
    """What one sequence holds, read-only and always up to date; see `SequencePages` for the attributes."""

    pages: Mapping[str, tuple[int, ...]]
    unneeded: Mapping[str, int]
    states: Mapping[str, State]
    snapshots: Mapping[int, Mapping[str, int]]
    covered: Mapping[str, int]
    _of: SequencePages

    @property
    def computed(self) -> int:
        """Tokens that sent steps compute."""
        return self._of.computed

    @property
    def writable(self) -> int:
        """Tokens that are computed or may be written in every group."""
        return self._of.writable

    @property
    def reserved(self) -> int:
        """Tokens that groups without a window have pages for."""
        return self._of.reserved

    @property
    def changes(self) -> int:
        """How often pages or states were put in."""
        return self._of.changes

    @property
    def origin(self) -> bytes | None:
        """Name of the checkpoint it began from."""
        return self._of.origin

    def first_written(self, name: str) -> int:
        """Returns the first token that the next step writes to the pages of a group."""
        return self._of.first_written(name)
