"""The catalogue of a file of prefixes: its pages and checkpoints as tables of tokens, without their bytes.

Page keys depend on a secret of the process, so a file names a page by its tokens. Each row of the table has the tokens
of one full page, and the row of the page before it, its parent. Pages and checkpoints refer to rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxkv.cache.kept_pages.keys import PageKey, page_key
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import CacheLayout
from jaxkv.offload.tier import HostTier

ROOT = -1
"""The row before the first page of a text."""

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint by its tokens.

    Attributes:
        row: its last full page; `ROOT` if its prefix is shorter than a page.
        tail: the tokens after that page as little-endian int32, fewer than a page.
    """

    row: int
    tail: bytes


@dataclass(frozen=True)
class Catalogue:
    """Tables of the pages and checkpoints of some texts.

    The file has the units (pages or states) of each group in a fixed order. Those of a paged group are the pages of
    `pages`, then the tails of the checkpoints that end inside a page, in the order of `checkpoints`. Those of a
    recurrent group are one state per checkpoint.

    Attributes:
        page_size: tokens per row.
        parents: row -> the row before it, or `ROOT`; parents have smaller numbers.
        tokens: row -> its tokens as little-endian int32.
        pages: paged group name -> rows whose page is in the file, ascending.
        checkpoints: the checkpoints.
    """

    page_size: int
    parents: tuple[int, ...]
    tokens: tuple[bytes, ...]
    pages: Mapping[str, tuple[int, ...]]
    checkpoints: tuple[CheckpointEntry, ...]

    def keys(self, root: bytes) -> list[PageKey]:
        """Returns the key of each row, given the digest before the first page."""
        keys: list[PageKey] = []
        for parent, tokens in zip(self.parents, self.tokens, strict=True):
            keys.append(page_key(root if parent == ROOT else keys[parent].digest, tokens))
        return keys

    def depths(self) -> list[int]:
        """Returns the page table position of each row."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, row: int) -> list[int]:
        """Returns the rows from the first page of a text to this one."""
        found = []
        while row != ROOT:
            found.append(row)
            row = self.parents[row]
        return found[::-1]

    def tail_places(self) -> dict[int, int]:
        """Returns checkpoint -> its place among those that end inside a page."""
        inside = [at for at, one in enumerate(self.checkpoints) if one.tail]
        return {at: place for place, at in enumerate(inside)}

    def num_units(self, layout: CacheLayout) -> dict[str, int]:
        """Returns group name -> its number of units."""
        tails = len(self.tail_places())
        return {name: len(rows) + tails for name, rows in self.pages.items()} | {
            group.name: len(self.checkpoints) for group in layout.state_groups
        }

    def num_tokens(self, rows: Iterable[int], checkpoints: Iterable[CheckpointEntry]) -> int:
        """Returns the number of tokens of some rows and checkpoints; those of shared prefixes count once."""
        chosen = set(rows)
        size = _TOKEN_BYTES
        tails = {
            (one.row, one.tail[:end])
            for one in checkpoints
            for end in range(size, len(one.tail) + 1, size)
        }
        if tails:
            starts = {row for row, _ in tails}
            for row in chosen:
                if (parent := self.parents[row]) in starts:
                    page = self.tokens[row]
                    tails -= {(parent, page[:end]) for end in range(size, len(page) + 1, size)}
        return len(chosen) * self.page_size + len(tails)


@dataclass(frozen=True)
class Source:
    """The place of a page or state to save: `unit` is its id on the device, or its handle in the host tier."""

    on_host: bool
    unit: int


@dataclass(frozen=True)
class Collected:
    """A catalogue of an index, and the sources of its units.

    Attributes:
        catalogue: the catalogue.
        sources: group name -> source of each unit, in the order of the catalogue.
    """

    catalogue: Catalogue
    sources: Mapping[str, Sequence[Source]]


def page_size_of(index: PrefixIndex) -> int:
    """Returns the tokens per row of a catalogue.

    Raises:
        ValueError: the groups have pages of several sizes.
    """
    sizes = {group.page_size for group in index.layout.paged_groups}
    if len(sizes) > 1:
        raise ValueError(
            f"prefixes are saved with pages of one size, this cache has pages of {sorted(sizes)} tokens"
        )
    return index.kept_states.kept.page_size


def collect(
    index: PrefixIndex, tier: HostTier | None, texts: Sequence[Sequence[int]] | None = None
) -> Collected:
    """Lists the pages and checkpoints without a salt that an index and its host tier hold.

    Args:
        index: the index.
        tier: its host tier; `None` without one.
        texts: list only the pages and checkpoints of prefixes of these token sequences; `None` for all.

    Raises:
        ValueError: the groups have pages of several sizes.
    """
    table = _Table(index, page_size_of(index))
    host_pages: list[tuple[str, Node]] = []
    host_checkpoints: list[Checkpoint] = []
    for entry in () if tier is None else tier:
        if isinstance(entry.kept, Node):
            host_pages.append((entry.key[0], entry.kept))
        else:
            host_checkpoints.append(entry.kept)
    found: dict[str, dict[bytes, Source]] = {name: {} for name in index.kept_pages.trees}
    for name, node in host_pages:
        table.add_keys([node.key])
        found[name][node.key.digest] = Source(True, node.page)
    # Added after the host's, so that a page that is on both is read from the device.
    for name, tree in index.kept_pages.trees.items():
        table.add_keys(node.key for node in tree)
        found[name] |= {node.key.digest: Source(False, node.page) for node in tree}
    checkpoints = {one.key.digest: (True, one) for one in host_checkpoints}
    checkpoints |= {one.key.digest: (False, one) for one in index.kept_states.kept if one.confirmed}
    if texts is not None:
        table.allow(texts)
        keys = [index.keys() for _ in texts]
        stores = (index.kept_states.kept, *(() if tier is None else (tier,)))
        along = {
            one.key.digest
            for key, text in zip(keys, texts, strict=True)
            for store in stores
            for one in store.along(key, text)
        }
        checkpoints = {digest: one for digest, one in checkpoints.items() if digest in along}
    for _, one in checkpoints.values():
        table.add_keys(one.chain)
    return _assemble(index, table, found, list(checkpoints.values()))


class _Table:
    """Assigns rows to pages. A page gets a row if all pages before it are known too, and the keys have no salt."""

    def __init__(self, index: PrefixIndex, page_size: int) -> None:
        self.page_size = page_size
        self.parents: list[int] = []
        self.tokens: list[bytes] = []
        self._index = index
        self._rows = {index.keys().parent((), page_size, 0): ROOT}
        self._known: dict[bytes, PageKey] = {}
        self._allowed: set[bytes] | None = None

    def add_keys(self, keys: Iterable[PageKey]) -> None:
        """Adds the keys of pages, which contain their tokens, to those that may get rows."""
        self._known |= {key.digest: key for key in keys}

    def allow(self, texts: Sequence[Sequence[int]]) -> None:
        """Restricts rows to the full pages of these texts."""
        chains = (self._index.keys().pages(text, self.page_size, len(text)) for text in texts)
        self._allowed = {key.digest for chain in chains for key in chain}

    def row(self, digest: bytes) -> int | None:
        """Returns the row of a page; assigns rows to it and to the pages before it. `None` if it cannot get one."""
        chain = []
        while digest not in self._rows:
            key = self._known.get(digest)
            if key is None or (self._allowed is not None and digest not in self._allowed):
                return None
            chain.append(key)
            digest = key.parent
        row = self._rows[digest]
        for key in reversed(chain):
            self.parents.append(row)
            self.tokens.append(key.tokens)
            row = self._rows[key.digest] = len(self.parents) - 1
        return row


def _assemble(
    index: PrefixIndex,
    table: _Table,
    found: Mapping[str, Mapping[bytes, Source]],
    checkpoints: Sequence[tuple[bool, Checkpoint]],
) -> Collected:
    """Returns the catalogue and sources of all pages and checkpoints that can get rows."""
    pages: dict[str, tuple[int, ...]] = {}
    sources: dict[str, list[Source]] = {}
    for name, units in found.items():
        at = {row: unit for key, unit in units.items() if (row := table.row(key)) is not None}
        whole = index.kept_pages.rules[name].window is None
        chosen: dict[int, Source] = {}
        for row in sorted(at):
            parent = table.parents[row]
            # Without a window a page is of no use without the pages before it.
            if not whole or parent == ROOT or parent in chosen:
                chosen[row] = at[row]
        pages[name], sources[name] = tuple(chosen), list(chosen.values())
    entries = []
    sources |= {name: [] for name in index.kept_states.groups}
    for on_host, one in checkpoints:
        row = table.row(one.key.parent)
        if row is None:
            continue
        entries.append(CheckpointEntry(row, one.key.tail))
        for name, unit in (*one.states.items(), *one.tails.items()):
            sources[name].append(Source(on_host, unit))
    catalogue = Catalogue(
        table.page_size, tuple(table.parents), tuple(table.tokens), pages, tuple(entries)
    )
    return Collected(catalogue, sources)
