"""What sequences hold, as records, and what one more step needs of it. Takes and gives nothing; `accounts` does."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxkv.cache.pool import PagePool
from jaxkv.cache.spec import Group
from jaxkv.cache.windows import first_page


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


@runtime_checkable
class Keeper(Protocol):
    """Keeps pages and states beyond the sequences that filled them; the prefix index is one."""

    def reclaim(self, missing: Mapping[str, int], rewritten: Mapping[str, Collection[int]]) -> bool:
        """Forgets pages and states until each group lacks none, or returns False and forgets nothing.

        Args:
            missing: group name -> pages or states that are too few.
            rewritten: group name -> shared pages about to be copied by a sequence that will write them. To forget one
                that no other sequence holds saves the copy, hence a page.
        """
        ...

    def clear(self) -> None:
        """Forgets every page and state."""
        ...


@dataclass
class State:
    """The state a sequence reads (0: the zero state, which nobody owns) and the one it writes (0: none yet)."""

    read: int = 0
    write: int = 0

    def owned(self) -> list[int]:
        """Returns the states it holds a reference to."""
        return sorted({self.read, self.write} - {0})


@dataclass
class Held:
    """What one sequence holds: one reference for each page, and for each state it owns.

    Attributes:
        computed: tokens that are computed.
        reserved: tokens that are computed or may be written.
        pages: paged group's name -> page table.
        unneeded: paged group's name -> leading positions of the table that hold no page but the id 0.
        states: state group's name -> its state.
        snapshots: number of tokens -> recurrent group's name -> the state that a step keeps after so many tokens.
        origin: name of the checkpoint it began from.
        covered: paged group's name -> tokens whose keys and values lie in pages that others filled: the sequence writes
            none of them, though it may have to compute them for other groups.
        changes: how often pages or states were put in, for whoever keeps a copy of the tables.
    """

    computed: int = 0
    reserved: int = 0
    changes: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    unneeded: dict[str, int] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    snapshots: dict[int, dict[str, int]] = field(default_factory=dict)
    origin: bytes | None = None
    covered: dict[str, int] = field(default_factory=dict)

    def first_written(self, name: str) -> int:
        """Returns the first token that the next step writes to the pages of a group."""
        return max(self.computed, self.covered.get(name, 0))

    def ids(self, name: str) -> list[int]:
        """Returns the pages or states of a group it holds a reference to."""
        if name in self.pages:
            return self.pages[name][self.unneeded[name] :]
        kept = [states[name] for states in self.snapshots.values() if name in states]
        return self.states[name].owned() + kept


def empty(groups: Iterable[Group]) -> Held:
    """Returns the holdings of a sequence that has nothing yet."""
    groups = tuple(groups)
    paged = [group.name for group in groups if group.unit == "page"]
    return Held(
        pages={name: [] for name in paged},
        unneeded=dict.fromkeys(paged, 0),
        states={group.name: State() for group in groups if group.unit == "state"},
    )


def shared_indices(held: Held, group: Group, pool: PagePool, num_tokens: int) -> list[int]:
    """Returns positions in the page table that a step up to `num_tokens` would write though another also holds them."""
    if num_tokens == held.computed:
        return []
    table = held.pages[group.name]
    start = held.first_written(group.name)
    if num_tokens <= start:
        return []
    written = range(start // group.page_size, group.pages_for(num_tokens))
    return [i for i in written if i < len(table) and pool.references(table[i]) > 1]


def count_needed(held: Held, group: Group, pool: PagePool, num_tokens: int, whole: int = 0) -> int:
    """Returns how many pages or states a step up to `num_tokens` takes, copies of shared ones included.

    A group without a window takes pages for `whole` tokens, if those are more.
    """
    if group.unit == "page":
        wanted = max(num_tokens, whole) if group.window is None else num_tokens
        missing = max(0, group.pages_for(wanted) - len(held.pages[group.name]))
        return missing + len(shared_indices(held, group, pool, num_tokens))
    state = held.states[group.name]
    if state.write not in (0, state.read):
        return 0
    return int(state.read == 0 or pool.references(state.read) > 1)


def place_pages(
    held: Held, group: Group, pool: PagePool, num_tokens: int, taken: list[int]
) -> list[PageCopy]:
    """Puts pages that were taken into the table; those replaced by copies are released."""
    table = held.pages[group.name]
    shared = shared_indices(held, group, pool, num_tokens)
    copies = []
    for index, page in zip(shared, taken, strict=False):
        copies.append(PageCopy(group.name, table[index], page))
        pool.release([table[index]])
        table[index] = page
    table += taken[len(shared) :]
    return copies


def drop_unseen(held: Held, group: Group, pool: PagePool, num_tokens: int) -> int:
    """Gives back the pages that no token from position `num_tokens` on sees; returns how many.

    Their positions in the table hold the id 0 from now on, which nobody reads there.
    """
    table, first = held.pages[group.name], held.unneeded[group.name]
    stop = min(first_page(group, num_tokens), len(table))
    if stop <= first:
        return 0
    pool.release(table[first:stop])
    table[first:stop] = [0] * (stop - first)
    held.unneeded[group.name] = stop
    return stop - first


def place_state(held: Held, group: Group, pool: PagePool, taken: list[int]) -> list[PageCopy]:
    """Makes the state that was taken, if any, the one to write; an in-place one that is replaced is released."""
    state = held.states[group.name]
    source = state.read
    state.write = taken[0] if taken else state.write or source
    if not (taken and group.in_place):
        return []
    state.read = state.write
    if source == 0:
        return []
    pool.release([source])
    return [PageCopy(group.name, source, state.write)]


def check_group(group: Group, pool: PagePool, holders: Iterable[Held]) -> None:
    """Raises `ValueError` if a group's references are not those of the sequences and of the keeper's pages."""
    pool.check()
    held = Counter(page for holder in holders for page in holder.ids(group.name))
    num_held = len(held)
    held.update(pool.kept)
    used = pool.num_total - pool.num_free
    wrong = {page: n for page, n in held.items() if pool.references(page) != n}
    if wrong or used != len(held):
        raise ValueError(
            f"group {group.name!r}: {used} {group.unit}s are taken and sequences hold {num_held} "
            f"({len(held) - num_held} more are kept); "
            f"these are held another number of times than the pool says: {wrong}"
        )


def check_sequence(
    seq: int, held: Held, groups: Sequence[Group], pools: Mapping[str, PagePool]
) -> None:
    """Raises `ValueError` if a sequence lacks pages for what it reserved or may write what others hold."""
    lacking, shared = {}, {}
    for group in groups:
        pool = pools[group.name]
        if group.unit == "page":
            table = held.pages[group.name]
            if len(table) < group.pages_for(held.reserved):
                lacking[group.name] = table
            if overlap := shared_indices(held, group, pool, held.reserved):
                shared[group.name] = [table[index] for index in overlap]
            continue
        state = held.states[group.name]
        pending = state.write and held.reserved > held.computed
        if pending and pool.references(state.write) > 1:
            shared[group.name] = [state.write]
    if lacking or shared or held.computed > held.reserved:
        raise ValueError(
            f"sequence {seq} has {held.computed} tokens computed and {held.reserved} reserved, but too few "
            f"pages: {lacking}, or may write what others hold: {shared}"
        )
