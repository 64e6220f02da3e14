"""Saves an engine's cached prefixes to a file, and loads them into the prefix cache of another engine.

LMCache's disk backend and the file backend of SGLang's HiCache do the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

import jax
import numpy as np

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import Group
from jaxkv.engine.engine import Engine
from jaxkv.engine.host_tier.host_cache import HostCache
from jaxkv.offload.prefix_catalogue import Source, collect, page_size_of
from jaxkv.offload.prefix_file import Identity, PrefixFile, Unit, open_file, save_file
from jaxkv.offload.prefix_restore import Restore, begin_restore
from jaxkv.offload.programs import SwapSpec, bucket_of, pad_ids, unit_bytes, unit_places
from jaxkv.offload.transfers import units_at_once
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.weights_checksum import weights_checksum


@dataclass(frozen=True, kw_only=True)
class PrefixCounts:
    """The numbers of a save or of a load.

    Attributes:
        tokens: tokens of the saved or loaded prefixes; those of shared prefixes count once.
        pages: full pages of all groups.
        checkpoints: state checkpoints of recurrent layers.
        num_bytes: bytes of the saved file, or of the loaded pages and states.
        present: pages and checkpoints that were not loaded, since the cache had them already.
        left_out: pages and checkpoints of the file that the cache had no room for.
    """

    tokens: int
    pages: int
    checkpoints: int
    num_bytes: int
    present: int = 0
    left_out: int = 0


def save_prefixes(
    engine: Engine, path: str | Path, texts: Sequence[Sequence[int]] | None = None
) -> PrefixCounts:
    """Writes an engine's cached prefixes without a salt, on the device and on the host, to a file.

    Args:
        engine: has the prefix cache.
        path: as for `jaxkv.offload.prefix_file.save_file`.
        texts: save only the prefixes of these token sequences; `None` for everything.

    Raises:
        ValueError: the prefix cache is off, or `path` exists and is no regular file.
        ProgramRefused: strict mode has no program that reads pages; see `LLM.warm_up`.
        OSError: the file cannot be written.
    """
    index, host = _index_of(engine), _open_host(engine)
    if host is not None:
        host.transfers.flush()
    collected = collect(index, None if host is None else host.tier, texts)
    catalogue, runner = collected.catalogue, engine.runner

    def units(name: str) -> Iterator[Unit]:
        return _read(runner, host, runner.layout.group(name), collected.sources[name])

    num_bytes = save_file(path, _identity(runner, index), catalogue, units)
    return PrefixCounts(
        tokens=catalogue.num_tokens(range(len(catalogue.parents)), catalogue.checkpoints),
        pages=sum(map(len, catalogue.pages.values())),
        checkpoints=len(catalogue.checkpoints),
        num_bytes=num_bytes,
    )


def load_prefixes(engine: Engine, path: str | Path) -> PrefixCounts:
    """Loads the prefixes of a file that fit into an engine's prefix cache.

    They take free pages. If these are too few, cached pages that no sequence holds are evicted, least recently used
    first. Prefixes that more texts share come first.

    Args:
        engine: has the prefix cache.
        path: a file of `save_prefixes`.

    Raises:
        BadCheckpoint: the file is damaged, or was saved with another model, other weights or another cache layout;
            nothing was changed.
        ValueError: the prefix cache is off.
        ProgramRefused: strict mode has no program that writes pages; see `LLM.warm_up`.
        CachePoisoned: writing a page cost the cache.
        FileNotFoundError: there is no such file.
    """
    index, runner = _index_of(engine), engine.runner
    groups = (*runner.layout.paged_groups, *runner.layout.state_groups)
    with (
        open_file(path, _identity(runner, index)) as file,
        begin_restore(index, file.catalogue, engine.sequence_runner.new_number) as restore,
    ):
        # The checks that may fail come first, because `take_places` evicts.
        for group in groups:
            handles = restore.handles(group.name)
            file.check(group, handles)
            for size in {bucket_of(len(part)) for part in _parts(group, handles)}:
                runner.program(SwapSpec(False, group.index, size))
        restore.take_places()
        num_bytes = sum(_write(runner, file, restore, group) for group in groups)
        landed, catalogue = restore.land(), file.catalogue
        checkpoints = [catalogue.checkpoints[at] for at in landed.checkpoints]
        rows = {row for pages in landed.pages.values() for row in pages}
        whole = sum(map(len, catalogue.pages.values())) + len(catalogue.checkpoints)
        taken = landed.num_pages + len(checkpoints)
        return PrefixCounts(
            tokens=catalogue.num_tokens(rows, checkpoints),
            pages=landed.num_pages,
            checkpoints=len(checkpoints),
            num_bytes=num_bytes,
            present=restore.present,
            left_out=whole - taken - restore.present,
        )


def _index_of(engine: Engine) -> PrefixIndex:
    engine.runner.refuse_hosts("prefixes in files")
    if engine.prefix is None:
        raise ValueError(
            "the prefix cache is off; make the LLM with EngineConfig(prefix_cache=True)"
        )
    return engine.prefix


def _open_host(engine: Engine) -> HostCache | None:
    host = engine.host
    return None if host is None or host.disabled else host


def _identity(runner: ModelRunner, index: PrefixIndex) -> Identity:
    return Identity(
        repr(runner.model),
        lambda: weights_checksum(runner),
        runner.layout,
        page_size_of(index),
        runner.model.vocab_size,
    )


def _parts[T](group: Group, units: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Cuts units of a group into runs of the programs."""
    return batched(units, units_at_once(unit_bytes(group)))


def _read(
    runner: ModelRunner, host: HostCache | None, group: Group, sources: Sequence[Source]
) -> Iterator[Unit]:
    """Yields the units of a group, read in runs of the programs."""
    for part in _parts(group, sources):
        found: dict[Source, Unit] = {}
        away = [source for source in part if source.on_host]
        if away:
            assert host is not None, "only a host tier has units on the host"
            units = host.transfers.read(group.name, [source.unit for source in away])
            found |= zip(away, units, strict=True)
        near = [source for source in part if not source.on_host]
        if near:
            size = bucket_of(len(near))
            ids = pad_ids([one.unit for one in near], size, runner.counts[group.name])
            read = runner.run_read_only(SwapSpec(True, group.index, size), ids)[: len(near)]
            found |= zip(near, jax.device_get(read), strict=True)
        yield from (found[source] for source in part)


def _write(runner: ModelRunner, file: PrefixFile, restore: Restore, group: Group) -> int:
    """Writes the units of a group to the cache; returns their bytes."""
    moves = restore.moves(group.name)
    places = unit_places(group, runner.cache)
    for part in _parts(group, moves):
        size = bucket_of(len(part))
        ids: np.ndarray = pad_ids([one.unit for one in part], size, runner.counts[group.name])
        units = [file.read(group, one.handle) for one in part]
        # Wait here, so that a failed copy raises before the cache is donated.
        placed = jax.block_until_ready(jax.device_put(units, [places] * len(units)))
        padded = (*placed, *placed[-1:] * (size - len(placed)))
        runner.update(SwapSpec(False, group.index, size), ids, padded)
    return len(moves) * unit_bytes(group)
