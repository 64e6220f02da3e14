"""Leases: torch views of a cache's buffers for one step, with checks that no view outlives the lease.

JAX owns the memory. A lease starts and ends with a program to which all buffers are donated and which copies nothing.
The donation invalidates the previous arrays. On the device the first program waits for JAX's readers, the last one for
torch's writers.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import jax
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.state import Cache
from jaxkv.errors import CachePoisoned
from torch_bridge.errors import LeaseLeaked
from torch_bridge.sharing.dlpack import as_bytes, fence, to_torch_all, torch_device
from torch_bridge.sharing.exchange import moved, pass_on

_OURS = ("torch_bridge", "torch", "transformers", "contextlib")


@runtime_checkable
class Leasable(Protocol):
    """An object whose cache has an owner, such as `JaxkvCache`."""

    @property
    def owner(self) -> CacheOwner:
        """The owner of the live cache."""
        ...


def lease(cache: CacheOwner | Leasable, *, write: bool = True) -> "Lease":
    """Leases every buffer of a cache to torch; use the lease as a context manager, or end it explicitly.

    ```python
    with lease(owner) as views:
        views["layer0.key"][page, offset] = keys
        views.commit()
    ```

    Args:
        cache: the owner of the buffers, or a `JaxkvCache`.
        write: whether torch may write. A write lease must end with `commit`; if it ends otherwise, the cache is
            poisoned, since torch's writes are in it already. A read lease ends with `release`, or with its context,
            also after an exception.

    Raises:
        CacheLeased: the cache is leased already.
        CachePoisoned: the cache is lost.
        LeaseLeaked: a view of a buffer exists already, such as a NumPy array on the CPU.
    """
    return Lease(cache if isinstance(cache, CacheOwner) else cache.owner, write=write)


class Lease(Mapping[str, torch.Tensor]):
    """Torch views of a cache's buffers by name, such as "layer3.key", with the shapes and dtypes of the JAX arrays.

    8-bit floats are uint8, since torch has few operations for them; `view(torch.float8_e4m3fn)` reinterprets them. Work
    on streams other than torch's current one must be waited for before the lease ends.

    Args:
        owner: the cache's owner.
        write: whether torch may write.

    Attributes:
        where: file and line of the call that took the lease.
        device: device of all buffers.
    """

    _open = False

    def __init__(self, owner: CacheOwner, *, write: bool) -> None:
        self.where = _calling_line()
        self._owner = owner
        self._write = write
        cache = owner.take(borrower=f"torch, at {self.where}")
        self._epoch = owner.epoch
        self._keys = cache.keys
        self._names = tuple(f"layer{layer}.{role}" for layer, role in cache.keys)
        self._arrays: tuple[jax.Array, ...] = ()
        self._views: dict[str, torch.Tensor] = {}
        self._storages: tuple[StorageWeakRef, ...] = ()
        try:
            self._acquire(cache)
        except BaseException as error:
            self._views.clear()
            if owner.borrower and owner.epoch == self._epoch:
                owner.poison(f"lending it to torch at {self.where} failed: {error!r}", cause=error)
            raise
        self._open = True

    def _acquire(self, cache: Cache) -> None:
        self.device = torch_device(cache.arrays[0])
        pointers = [array.unsafe_buffer_pointer() for array in cache.arrays]
        try:
            arrays = pass_on(cache.arrays, fence(self.device))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if "external reference" not in str(error):
                raise
            # On a GPU the donation is refused before the program runs, and the buffers stay valid.
            self._owner.put(cache)
            raise LeaseLeaked(self._held_elsewhere(())) from error
        self._arrays, held = arrays, moved(self._names, arrays, pointers)
        if held:
            # On the CPU XLA copied buffers that it could not donate: the copies are valid, but the foreign view no
            # longer shares their memory.
            self._arrays = ()
            self._owner.put(Cache(arrays=arrays, keys=cache.keys))
            raise LeaseLeaked(self._held_elsewhere(held))
        views = map(as_bytes, to_torch_all(arrays))
        self._views = dict(zip(self._names, views, strict=True))
        self._storages = tuple(
            StorageWeakRef(view.untyped_storage()) for view in self._views.values()
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        # The open lease of a forward is asked for two views per layer.
        found = self._views.get(name)
        if found is not None and self._open:
            return found
        self._check_open()
        if name in self._names and not self._views:
            raise ValueError(
                f"the lease taken at {self.where} dropped its views when it was ended, but some are still referenced; "
                f"delete those references, then end the lease again"
            )
        raise KeyError(f"the cache has no {name!r}; it has {', '.join(self._names)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def is_open(self) -> bool:
        """Whether the lease was neither committed, nor released, nor abandoned."""
        return self._open

    @property
    def is_current(self) -> bool:
        """Whether the lease is open and the cache was neither replaced nor lost meanwhile."""
        return self._open and self._is_ours()

    def array(self, name: str) -> jax.Array:
        """Returns a buffer as a JAX array, for programs that only read it.

        A program sees torch's writes if another of its arguments was imported from torch after them. Do not keep a
        reference to the array, and do not donate it.
        """
        self._check_open()
        return self._arrays[self._names.index(name)]

    def commit(self) -> None:
        """Ends a write lease; torch's writes become the cache's new value. The host does not wait.

        Raises:
            LeaseLeaked: a view, or a tensor that shares its memory, still exists. The lease stays open: delete the
                tensor and commit again.
            CachePoisoned: the cache was replaced or lost while it was leased.
            ValueError: the lease is a read lease, or has ended.
        """
        self._check_open()
        self._check_ours()
        if not self._write:
            raise ValueError(
                "this lease only reads; end it with release(), or take it with write=True"
            )
        self._give_back()

    def release(self) -> None:
        """Ends a read lease.

        Raises:
            LeaseLeaked: as in `commit`.
            CachePoisoned: torch wrote through the lease, so the cache is lost.
            ValueError: the lease is a write lease, or has ended.
        """
        self._check_open()
        self._check_ours()
        if self._write:
            raise ValueError(
                "this lease may have been written to; end it with commit() or abandon()"
            )
        written = [name for name, view in self._views.items() if view._version]
        if written:
            self.abandon(f"was written to ({', '.join(written)}), though it only reads")
            raise CachePoisoned(
                f"torch wrote to {', '.join(written)} through the lease taken at {self.where} with write=False, so the "
                f"cache is lost; rebuild it, and take the lease with write=True"
            )
        self._give_back()

    def abandon(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends the lease and declares the cache lost."""
        if not self._open:
            return
        self._open = False
        self._views.clear()
        if self.device.type == "cuda":
            # Wait: torch's queued writes are not ordered before JAX's next use of this memory.
            torch.cuda.synchronize(self.device)
        self._arrays = ()
        if self._is_ours():
            self._owner.poison(f"the lease taken at {self.where} {reason}", cause=cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._open:
            return
        if not self._write:
            try:
                self.release()
            except (LeaseLeaked, CachePoisoned):
                # The exception that is already propagating takes precedence. Views in its traceback keep the lease
                # open.
                if error is None:
                    raise
            return
        self.abandon(
            "ended without commit()" if error is None else f"ended in {error!r}", cause=error
        )
        if error is None:
            raise CachePoisoned(
                f"the lease taken at {self.where} ended without commit(), and torch's writes are in the cache already; "
                f"rebuild the cache, and call commit() at the end of the lease"
            )

    # Bound as a default, since module globals may be cleared at interpreter exit.
    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self._open or is_ending():
            return
        if not self._write:
            with suppress(LeaseLeaked, CachePoisoned):
                self.release()
        self.abandon(
            "was dropped without commit()" if self._write else "was dropped before its views"
        )

    def _give_back(self) -> None:
        # Import the fence before the views are dropped: it covers torch's queued work on their memory.
        token = fence(self.device)
        leaked = self._drop_views()
        if leaked:
            raise LeaseLeaked(
                f"tensors outlive the lease taken at {self.where}: {', '.join(leaked)}. Drop every view, slice and "
                f"NumPy array made from them, then end the lease again; clone tensors that must be kept"
            )
        pointers = [array.unsafe_buffer_pointer() for array in self._arrays]
        arrays, self._arrays = self._arrays, ()
        try:
            arrays = pass_on(arrays, token)
        except BaseException as error:
            self._arrays = arrays
            self.abandon(f"could not be ended: {error!r}", cause=error)
            raise
        held = moved(self._names, arrays, pointers)
        self._open = False
        self._owner.put(Cache(arrays=arrays, keys=self._keys))
        if held:
            raise LeaseLeaked(
                f"XLA copied {', '.join(held)} when the lease taken at {self.where} ended, because a reference to the "
                f"memory exists elsewhere; the cache is valid, in new memory. Drop that reference"
            )

    def _drop_views(self) -> list[str]:
        """Drops the views, and returns the names of those whose storage is still referenced."""
        self._views.clear()
        if all(storage.expired() for storage in self._storages):
            return []
        gc.collect()
        pairs = zip(self._names, self._storages, strict=True)
        return [name for name, storage in pairs if not storage.expired()]

    def _held_elsewhere(self, names: tuple[str, ...] | list[str]) -> str:
        which = f"of {', '.join(names)} " if names else ""
        return (
            f"the cache cannot be leased at {self.where}: there is a view {which}made outside of a lease, such as a "
            f"NumPy array or a DLPack tensor; drop it, and copy data that must be kept"
        )

    def _is_ours(self) -> bool:
        return bool(self._owner.borrower) and self._owner.epoch == self._epoch

    def _check_ours(self) -> None:
        if not self._is_ours():
            self.abandon("was overtaken")
            raise CachePoisoned(
                f"the cache was replaced or lost while it was leased at {self.where}, and torch's writes with it; "
                f"compute the sequences again"
            )

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"the lease taken at {self.where} has ended; take a new one")


def _calling_line() -> str:
    """Returns file and line of the innermost caller outside of the bridge and the frameworks."""
    frame = sys._getframe(1)
    last = frame
    while frame is not None:
        last = frame
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            break
        frame = frame.f_back
    return f"{last.f_code.co_filename}:{last.f_lineno}"
