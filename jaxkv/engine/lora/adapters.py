"""`Adapters`: the low-rank adapters that requests of an engine may name."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxkv.config.lora import LoraConfig, check_adapter_name
from jaxkv.engine.lora.loaded_adapter import AdapterVersion, LoadedAdapter
from jaxkv.memory import named_exhaustion
from jaxkv.runner.adapter_stacks import AdapterStacks
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.weights.lora import read_adapters
from jaxkv.weights.lora_leaves import LeafFactors
from jaxkv.wording import clip, listed


class Adapters:
    """The adapters of one engine by name; each has a place of its own in the stacks on the device.

    Args:
        stacks: the factors on the device; `None` if requests may name no adapter.
    """

    def __init__(self, stacks: AdapterStacks | None) -> None:
        self._stacks = stacks
        self._loaded: dict[str, LoadedAdapter] = {}
        self._last_versions: dict[str, WeightVersion] = {}

    @property
    def config(self) -> LoraConfig | None:
        """How many adapters of which rank; `None` if requests may name none."""
        return None if self._stacks is None else self._stacks.config

    @property
    def versions(self) -> dict[str, WeightVersion]:
        """Name -> version of each loaded adapter, in the order in which the names were first loaded."""
        return {name: one.version.version for name, one in self._loaded.items()}

    def of(self, name: str | None) -> LoadedAdapter | None:
        """Returns the adapter of a name; `None` for no name.

        Raises:
            ValueError: no adapter of this name is loaded.
        """
        if name is None:
            return None
        self._require()
        found = self._loaded.get(name)
        if found is None:
            known = listed([repr(one) for one in self._loaded]) or "none"
            raise ValueError(
                f"no adapter {clip(repr(name))} is loaded; loaded are: {known}. Load it by LLM.add_lora(name, path)"
            )
        return found

    def check(self, adapter: LoadedAdapter | None) -> None:
        """Raises `ValueError` if an adapter was removed or replaced since a request was made with it."""
        if adapter is not None and self._loaded.get(adapter.version.name) is not adapter:
            raise ValueError(
                f"the adapter {adapter.version.name!r}, version {adapter.version.version!r}, was removed or replaced "
                "before the request began; send the request again"
            )

    def read(self, path: str | os.PathLike[str]) -> Mapping[str, LeafFactors]:
        """Returns the factors in a folder as `add` takes them; any thread may call it.

        Raises:
            BadCheckpoint: a file is missing or damaged, or the adapter does not fit.
            ValueError: this engine takes no adapters.
        """
        return self._require().leaves.factors(read_adapters(Path(path)), Path(path))

    def add(
        self,
        name: str,
        factors: Mapping[str, LeafFactors],
        version: WeightVersion | None,
        in_use: Sequence[LoadedAdapter],
    ) -> WeightVersion:
        """Loads an adapter, in the place of one of the same name if there is one. Prefixes of that are not used again.

        Args:
            name: its name.
            factors: from `read`.
            version: its version; the number of the last one of this name plus 1 if not given, and 0 for the first.
            in_use: the adapter of each request that has one and has not ended.

        Returns:
            The version.

        Raises:
            ValueError: the name or version is not valid, requests use the adapter of this name, or there is no room.
            OutOfMemory: there is no memory to copy the factors; the adapter of this name was removed.
        """
        stacks = self._require()
        check_adapter_name(name)
        made = AdapterVersion(name, self._next_version(name, version))
        old = self._loaded.get(name)
        if old is not None:
            _refuse_in_use(old, in_use, "replaced; or load the new one under another name")
        slot = self._free_slot() if old is None else old.slot
        # Until all is written, no request may name it.
        self._loaded.pop(name, None)
        with named_exhaustion(f"loading the adapter {name!r}"):
            stacks.write(slot, factors)
        self._loaded[name] = LoadedAdapter(made, slot)
        self._last_versions[name] = made.version
        return made.version

    def remove(self, name: str, in_use: Sequence[LoadedAdapter]) -> None:
        """Removes an adapter; its place is free for another.

        Args:
            name: its name.
            in_use: the adapter of each request that has one and has not ended.

        Raises:
            ValueError: no such adapter is loaded, or requests use it.
        """
        adapter = self.of(name)
        assert adapter is not None, "a name was given"
        _refuse_in_use(adapter, in_use, "removed")
        del self._loaded[name]

    def _require(self) -> AdapterStacks:
        if self._stacks is None:
            raise ValueError(
                "requests can name no adapter, because there is no room for any; make the LLM with enable_lora=True or "
                "lora=LoraConfig(...)"
            )
        return self._stacks

    def _free_slot(self) -> int:
        taken = {one.slot for one in self._loaded.values()}
        most = self._require().config.max_adapters
        free = [slot for slot in range(1, most + 1) if slot not in taken]
        if not free:
            raise ValueError(
                f"{len(taken)} adapters are loaded and there is room for {most}; remove one by LLM.remove_lora, or "
                "give a larger LoraConfig(max_adapters=...), or max_loras"
            )
        return free[0]

    def _next_version(self, name: str, version: WeightVersion | None) -> WeightVersion:
        if version is None:
            last = self._last_versions.get(name, -1)
            if isinstance(last, int):
                return last + 1
        if isinstance(version, bool) or not isinstance(version, int | str):
            raise ValueError(
                f"version must be an int or a str, got {version!r}; the last one of {name!r} was "
                f"{self._last_versions.get(name)!r}"
            )
        return version


def _refuse_in_use(adapter: LoadedAdapter, in_use: Sequence[LoadedAdapter], what: str) -> None:
    count = sum(one is adapter for one in in_use)
    if count:
        raise ValueError(
            f"{count} requests use the adapter {adapter.version.name!r}; wait until they have ended, or abort them, "
            f"before it is {what}"
        )
