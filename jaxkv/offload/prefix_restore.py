"""Restores the prefixes of a file to the cache: selects those that fit, and allocates their pages and states.

Like a swap-in from the host, a restore consists of sequences in the page allocator that compute nothing. They hold the
pages and states to fill, and the cached pages of the same prefixes, so that none of these is evicted to make room. When
all bytes are written, the prefix index takes the pages and states over. Until then, a release of the sequences frees
everything.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxkv.cache.kept_pages.keys import PageKey, hash_parts
from jaxkv.cache.kept_states.checkpoints import Checkpoint, CheckpointKey
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.errors import OutOfPages, OutOfStates
from jaxkv.offload.entries import Move
from jaxkv.offload.prefix_catalogue import ROOT, Catalogue


@dataclass
class Selection:
    """The pages and checkpoints of a catalogue to restore.

    Attributes:
        pages: paged group name -> rows of the catalogue, parents first.
        checkpoints: positions in `Catalogue.checkpoints`; the most shared come first.
    """

    pages: dict[str, list[int]]
    checkpoints: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Number of pages of all groups, without the tails of checkpoints."""
        return sum(map(len, self.pages.values()))


@contextmanager
def begin_restore(
    index: PrefixIndex, catalogue: Catalogue, new_number: Callable[[], int]
) -> Iterator["Restore"]:
    """Yields a restore, and at the end of the block releases what it still holds.

    Args:
        index: gets the pages and checkpoints.
        catalogue: the contents of the file.
        new_number: returns an unused sequence number.
    """
    restore = Restore(index, catalogue, new_number)
    try:
        restore.choose()
        yield restore
    finally:
        restore.release()


class Restore:
    """One restore of a catalogue to a prefix index; see `begin_restore`.

    Call `choose` and `take_places`, write the bytes of `moves` to the cache, then call `land`.

    Attributes:
        selection: the pages and checkpoints that fit and are not cached yet.
        present: pages and checkpoints of the catalogue that are cached already.
    """

    def __init__(
        self, index: PrefixIndex, catalogue: Catalogue, new_number: Callable[[], int]
    ) -> None:
        self._index = index
        self._allocator = index.allocator
        self._trees = index.kept_pages.trees
        self._rules = index.kept_pages.rules
        self._states = index.kept_states
        self._catalogue = catalogue
        self._new_number = new_number
        self._root = index.keys().parent((), catalogue.page_size, 0)
        self._keys = catalogue.keys(self._root)
        self._depths = catalogue.depths()
        self._checkpoint_keys = [self._checkpoint_key(at) for at in range(self._num_checkpoints)]
        self._open: list[int] = []
        self._places: dict[str, dict[int, int]] = {name: {} for name in self._rules}
        self._units: dict[int, Mapping[str, int]] = {}
        self.present = 0
        self.selection = Selection({})

    @property
    def _num_checkpoints(self) -> int:
        return len(self._catalogue.checkpoints)

    def choose(self) -> None:
        """Holds the cached part of the catalogue, so that it is not evicted, and selects what fits beside it."""
        self.present = self._hold_present()
        self.selection = self._select()

    def take_places(self) -> None:
        """Allocates the selected pages and checkpoints; unused ones of the index are evicted to make room."""
        chosen = self.selection
        number = self._open_sequence()
        counts = {name: len(rows) for name, rows in chosen.pages.items() if rows}
        for name, pages in self._allocator.place(number, counts).items():
            self._places[name] = dict(zip(chosen.pages[name], pages, strict=True))
        for at in tuple(chosen.checkpoints):
            units = self._take_units(at)
            if units is None:
                chosen.checkpoints.remove(at)
            else:
                self._units[at] = units

    def moves(self, name: str) -> list[Move]:
        """Returns the pages or states to write in one group.

        The handle of a move is the position among the group's units in the catalogue, see `Catalogue`.
        """
        catalogue, found = self._catalogue, []
        if name in self._rules:
            at = {row: place for place, row in enumerate(catalogue.pages[name])}
            found += [Move(name, page, at[row]) for row, page in self._places[name].items()]
        tails = catalogue.tail_places()
        for place, units in self._units.items():
            if name in units:
                handle = len(catalogue.pages[name]) + tails[place] if name in self._rules else place
                found.append(Move(name, units[name], handle))
        return found

    def handles(self, name: str) -> list[int]:
        """Returns the handles that `moves` will have for the selection, before `take_places`."""
        catalogue, chosen = self._catalogue, self.selection
        if name not in self._rules:
            return list(chosen.checkpoints)
        at = {row: place for place, row in enumerate(catalogue.pages[name])}
        tails, first = catalogue.tail_places(), len(catalogue.pages[name])
        pages = [at[row] for row in chosen.pages[name]]
        return pages + [first + tails[place] for place in chosen.checkpoints if place in tails]

    def land(self) -> Selection:
        """Passes the written pages and checkpoints to the index; returns those that it has added."""
        tick = self._index.advance()
        landed = Selection({name: [] for name in self._rules})
        for name, places in self._places.items():
            tree, pool = self._trees[name], self._allocator.pool(name)
            for row, page in places.items():
                key, depth = self._keys[row], self._depths[row]
                follows = depth == 0 or tree.named(key.parent) is not None
                if (follows or self._rules[name].window is not None) and tree.add(
                    key, page, depth, tick
                ):
                    pool.keep(page)
                    landed.pages[name].append(row)
        # The most shared last, so that it is evicted last.
        for at, units in reversed(self._units.items()):
            if self._land_checkpoint(at, units, tick):
                landed.checkpoints.append(at)
        return landed

    def release(self) -> None:
        """Releases all pages and states that the index has not taken over; a second call does nothing."""
        while self._open:
            self._allocator.release_if_open(self._open.pop())

    def _open_sequence(self) -> int:
        number = self._new_number()
        self._allocator.open(number)
        self._open.append(number)
        return number

    def _checkpoint_key(self, at: int) -> CheckpointKey:
        one = self._catalogue.checkpoints[at]
        parent = self._root if one.row == ROOT else self._keys[one.row].digest
        return CheckpointKey(
            parent, one.tail, hash_parts("checkpoint", parent, one.tail), self._length(at)
        )

    def _length(self, at: int) -> int:
        one = self._catalogue.checkpoints[at]
        full = 0 if one.row == ROOT else self._depths[one.row] + 1
        return full * self._catalogue.page_size + len(one.tail) // 4

    def _hold_present(self) -> int:
        """Holds the cached pages and checkpoints of the catalogue; returns their number."""
        number, count = self._open_sequence(), 0
        for name, tree in self._trees.items():
            nodes = (tree.find(self._keys[row]) for row in self._catalogue.pages[name])
            pages = [node.page for node in nodes if node is not None]
            self._allocator.hold(number, name, pages)
            count += len(pages)
        for key in self._checkpoint_keys:
            one = self._states.kept.find(key)
            if one is not None:
                number, count = self._open_sequence(), count + 1
                for name, unit in (*one.states.items(), *one.tails.items()):
                    self._allocator.hold(number, name, [unit])
        return count

    def _select(self) -> Selection:
        """Returns what fits: prefixes that more texts share first, and each text to its end before the next."""
        catalogue, chosen = self._catalogue, Selection({name: [] for name in self._rules})
        budget = _Budget(self._index)
        there: dict[str, set[int]] = {
            name: {row for row in rows if self._trees[name].find(self._keys[row]) is not None}
            for name, rows in catalogue.pages.items()
        }
        missing = {name: set(rows) - there[name] for name, rows in catalogue.pages.items()}
        seen = self._rows_in_windows()

        def take_page(name: str, row: int) -> None:
            parent = catalogue.parents[row]
            follows = self._rules[name].window is not None or parent == ROOT
            if row in missing[name] and (follows or parent in there[name]):
                if budget.take({name: 1}):
                    chosen.pages[name].append(row)
                    there[name].add(row)
                missing[name].discard(row)

        for row, at in self._in_order():
            if at is None:
                for name in missing:
                    if name not in seen or row in seen[name]:
                        take_page(name, row)
            elif self._states.kept.find(self._checkpoint_keys[at]) is None and all(
                row in there[name] for name, row in self._anchor_rows(at)
            ):
                units = dict.fromkeys(self._states.groups, 1)
                units |= dict.fromkeys(self._rules, 1) if catalogue.checkpoints[at].tail else {}
                if budget.take(units, checkpoints=1):
                    chosen.checkpoints.append(at)
        # In groups with a window, pages that no window sees come last.
        for name in seen:
            for row in sorted(missing[name]):
                take_page(name, row)
        return chosen

    def _in_order(self) -> Iterator[tuple[int, int | None]]:
        """Yields (row, `None`) for each row and (its row, checkpoint) for each checkpoint; the most shared come first.

        A row comes after its parent, a checkpoint after its row.
        """
        catalogue = self._catalogue
        children, ends = self._children(), self._num_ends()
        checkpoints: dict[int, list[int]] = {}
        for at, one in enumerate(catalogue.checkpoints):
            checkpoints.setdefault(one.row, []).append(at)
        yield from ((ROOT, at) for at in checkpoints.get(ROOT, ()))
        queue = [(-ends[row], 0, row) for row in children.get(ROOT, ())]
        heapq.heapify(queue)
        while queue:
            _, depth, row = heapq.heappop(queue)
            yield row, None
            yield from ((row, at) for at in checkpoints.get(row, ()))
            for child in children.get(row, ()):
                heapq.heappush(queue, (-ends[child], depth - 1, child))

    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(self._catalogue.parents):
            children.setdefault(parent, []).append(row)
        return children

    def _num_ends(self) -> list[int]:
        """Returns, for each row, how many texts and checkpoints of the catalogue have it on their path."""
        parents, children = self._catalogue.parents, self._children()
        ends = [0 if row in children else 1 for row in range(len(parents))]
        for one in self._catalogue.checkpoints:
            if one.row != ROOT:
                ends[one.row] += 1
        for row in reversed(range(len(parents))):
            if parents[row] != ROOT:
                ends[parents[row]] += ends[row]
        return ends

    def _rows_in_windows(self) -> dict[str, set[int]]:
        """Returns window group name -> rows that a hit can need, see below.

        A hit can end where a text ends, where two texts part, or at a checkpoint. It needs the rows that the window
        sees from there.
        """
        catalogue, children = self._catalogue, self._children()
        size = catalogue.page_size
        ends = [row for row in range(len(catalogue.parents)) if len(children.get(row, ())) != 1]
        ends += [one.row for one in catalogue.checkpoints if one.row != ROOT]
        seen: dict[str, set[int]] = {}
        for name, rule in self._rules.items():
            if rule.window is None:
                continue
            seen[name] = set()
            for end in ends:
                row, depth = end, self._depths[end]
                # A hit ends at least a token before the end of a prompt.
                first = rule.needs((depth + 1) * size - 1).start
                while row != ROOT and depth >= first:
                    seen[name].add(row)
                    row, depth = catalogue.parents[row], depth - 1
        return seen

    def _anchor_rows(self, at: int) -> list[tuple[str, int]]:
        """Returns (group, row) of the full pages that a hit on a checkpoint needs, see `CheckpointPages.anchors`."""
        found, one = [], self._catalogue.checkpoints[at]
        for name, rule in self._rules.items():
            row, depth = one.row, self._length(at) // self._catalogue.page_size - 1
            first = depth if rule.window is None else rule.needs(self._length(at)).start
            while row != ROOT and depth >= first:
                found.append((name, row))
                row, depth = self._catalogue.parents[row], depth - 1
        return found

    def _take_units(self, at: int) -> Mapping[str, int] | None:
        """Allocates the states and tails of a checkpoint; returns group name -> id, `None` if there is no room."""
        names = list(self._states.groups)
        names += self._rules if self._catalogue.checkpoints[at].tail else ()
        try:
            taken = self._allocator.place(self._open_sequence(), dict.fromkeys(names, 1))
        except (OutOfPages, OutOfStates):
            return None
        return {name: units[0] for name, units in taken.items()}

    def _land_checkpoint(self, at: int, units: Mapping[str, int], tick: int) -> bool:
        key = self._checkpoint_keys[at]
        anchors = tuple((name, self._keys[row].digest) for name, row in self._anchor_rows(at))
        whole = all(self._trees[name].named(digest) is not None for name, digest in anchors)
        if self._states.kept.find(key) is not None or not (whole and self._states.has_room(key)):
            return False
        chain: list[PageKey] = [
            self._keys[row] for row in self._catalogue.path(self._catalogue.checkpoints[at].row)
        ]
        groups = self._states.groups
        self._states.restore(
            Checkpoint(
                key,
                {name: units[name] for name in groups},
                {name: unit for name, unit in units.items() if name not in groups},
                anchors,
                tuple(chain),
                self._open[0],
                tick,
            ),
            tick,
        )
        return True


class _Budget:
    """The numbers of pages and states that can be allocated: free ones, and those that only the index holds.

    Args:
        index: the index; sequences already hold what must not be evicted.
    """

    def __init__(self, index: PrefixIndex) -> None:
        allocator = index.allocator
        names = (*index.kept_pages.rules, *index.kept_states.groups)
        self._room = {
            name: allocator.num_free(name) + allocator.num_reclaimable(name) for name in names
        }
        self._checkpoints = index.kept_states.num_spare()

    def take(self, counts: Mapping[str, int], *, checkpoints: int = 0) -> bool:
        """Subtracts pages and states of several groups, or nothing if one group has too few; returns whether it did."""
        if checkpoints > self._checkpoints or any(
            self._room[name] < count for name, count in counts.items()
        ):
            return False
        self._checkpoints -= checkpoints
        for name, count in counts.items():
            self._room[name] -= count
        return True
