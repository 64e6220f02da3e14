"""A Transformers cache whose keys, values and states live in our pools: `JaxkvCache`.

It watches the model's forward. Before it, tokens are looked up in the prefix index, places are reserved and the pool is
leased; after it, the pool is given back.
"""

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from torch_bridge.transformers_cache.attention import attends_pages
from torch_bridge.transformers_cache.cache_layers import PagedLayer, Running
from torch_bridge.transformers_cache.forward_call import ForwardCall
from torch_bridge.transformers_cache.model_layout import LayerPlan, layer_specs, plan_layers
from torch_bridge.transformers_cache.placing import place
from torch_bridge.transformers_cache.sequences import Sequences, Unread
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.store import Store
from torch_bridge.transformers_cache.watch import watch


@dataclass(frozen=True)
class JaxkvCacheStats:
    """What a cache has done since it was made; its forks count for themselves.

    Attributes:
        tokens_computed: real tokens that went through the model, over all rows.
        tokens_reused: tokens that were found in the cache instead.
        bytes: of the pool, which forks share.
        leases_taken: how often the pool was lent to torch, forks included; once, as long as JAX does not use it.
    """

    tokens_computed: int
    tokens_reused: int
    bytes: int
    leases_taken: int


class JaxkvCache(Cache):
    """Keys, values and states of a Transformers model in jaxkv's pools: paged, forked and reused without copies.

    Pass it as `past_key_values` to the model it was made for. After `reset()`, a prompt that begins like an earlier one
    is computed from where they differ, when the caller asks for the last logits alone, as `generate` does. Tokens are
    those of Transformers' own cache. One thread uses a cache and its forks; others may use the model with caches of
    their own. Nothing is reused for models with recurrent layers, or with rope scaling "dynamic" or "longrope".

    Kept prefixes are forgotten when the model has changed. Each forward of a prompt, or of several tokens per row,
    compares the model with the one before: the bits of all parameters, buffers, other tensors and NumPy arrays of its
    modules, their plain attributes, containers, dataclasses and namespaces of such, configs, hooks, replaced functions,
    the `forward` of their classes, training mode and autocast. It reads all weights once for that; forwards of one
    token per row compare nothing. Two changes are not noticed: one inside an object that is none of these, such as a
    closure or a global setting; and one through `.data` or of an attribute that is undone before the next comparison,
    though tokens were computed one by one under it. `reset(keep_prefix=False)` forgets all
    prefixes.

    Args:
        model: on the CPU or one GPU. The hooks on it go with the cache.
        max_tokens: tokens that fit, over all rows, forks and kept prefixes; rounded up to whole pages.
        page_size: tokens per page. Each row fills its own pages. Prefixes are found again by whole pages, so a prompt
            shorter than a page reuses nothing; smaller pages find more, and make longer page tables.
        max_sequences: rows and forks at once, for models with recurrent layers.

    Raises:
        Unsupported: the model is not causal, remembers something that the cache does not know, or lies on several
            devices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_tokens: int = 4096,
        *,
        page_size: int = 16,
        max_sequences: int = 16,
    ) -> None:
        for name, size in {
            "max_tokens": max_tokens,
            "page_size": page_size,
            "max_sequences": max_sequences,
        }.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
        plans = plan_layers(model, page_size=page_size)
        attends_pages(model)
        layout = group_layers(layer_specs(plans))
        # A row of a fork reads one state and writes another; state 0 is nobody's.
        counts = {
            group.name: -(-max_tokens // page_size)
            if group.unit == "page"
            else 1 + 2 * max_sequences
            for group in layout.groups
        }
        store = Store(layout, counts, next(model.parameters()).device)
        self._set_up(model, plans, Sequences(store), model.dtype)

    def _set_up(
        self,
        model: PreTrainedModel,
        plans: tuple[LayerPlan, ...],
        sequences: Sequences,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._plans, self._sequences, self._dtype = model, plans, sequences, dtype
        self._store = sequences.store
        self._running = Running()
        self._num_computed = self._num_reused = 0
        layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin] = [
            LinearAttentionLayer()
            if not any(spec.arrays[0].role == "key" for spec in plan.specs)
            else PagedLayer(index, plan.window, sequences, self._running)
            for index, plan in enumerate(plans)
        ]
        super().__init__(layers=layers)
        hooks = watch(model, self)
        weakref.finalize(self, _take_leave, hooks, sequences).atexit = False

    @property
    def owner(self) -> CacheOwner:
        """Who holds the pool in JAX; between forwards anyone may read it, or lease it."""
        return self._store.owner

    @property
    def max_tokens(self) -> int | None:
        """Tokens that fit, over all rows; `None` for models without attention."""
        return self._store.allocator.max_tokens

    def stats(self) -> JaxkvCacheStats:
        """Returns what was computed, what was reused and what it takes."""
        return JaxkvCacheStats(
            tokens_computed=self._num_computed,
            tokens_reused=self._num_reused,
            bytes=self._store.num_bytes,
            leases_taken=self._store.leases_taken,
        )

    def fork(self) -> "JaxkvCache":
        """Returns a cache that goes on from here by itself; both share pages until one of them writes."""
        self._check_idle("fork()")
        child = object.__new__(type(self))
        child._set_up(self._model, self._plans, self._sequences.fork(), self._dtype)
        return child

    def __copy__(self) -> "JaxkvCache":
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> "JaxkvCache":
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a JaxkvCache cannot be pickled: its rows lie in a pool on the device, which forks share. Keep the token "
            "ids and compute them again, or use DynamicCache"
        )

    def reset(self, keep_prefix: bool = True) -> None:
        """Forgets the rows, so that the next forward begins anew.

        It is also the way back after a failure, which costs forks their rows and the index its prefixes.

        Args:
            keep_prefix: full pages can be found again by prompts that begin alike, until their room is needed or the
                model changes; the class says which changes are noticed. Otherwise all prefixes are forgotten, those of
                forks too.
        """
        if self._running.step is not None:
            self._finish(self._running.step, failed=True)
        if self.owner.poisoned:
            self._store.index.clear()
            self._sequences.release()
            self.owner.rebuild()
            return
        if keep_prefix and self._sequences.rebuilds == self.owner.rebuilds:
            self._sequences.publish()
        self._sequences.release()
        if not keep_prefix:
            self._store.index.clear()

    @contextmanager
    def session(self) -> Iterator[Self]:
        """Keeps JAX from the pool over all forwards inside: using it then is an error, not the end of torch's lease.

        Forks take part.
        """
        self._check_idle("session()")
        with self._store.session():
            yield self

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i go on from row `beam_idx[i]`: int64 [rows]."""
        self._check_idle("reorder_cache()")
        self._sequences.reorder([int(index) for index in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes `repeats` neighbouring rows of each row."""
        rows = range(len(self._sequences.rows))
        self.reorder_cache(torch.tensor([row for row in rows for _ in range(repeats)]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows, by numbers or by a mask."""
        numbers = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.reorder_cache(numbers)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses: pages are not given back before a row ends, so tokens cannot be taken back."""
        raise NotImplementedError(
            f"JaxkvCache cannot take tokens back (crop({tokens_to_remove})), so assisted decoding needs DynamicCache; "
            f"fork() before tokens that may be dropped"
        )

    def begin(self, call: ForwardCall) -> dict[str, Any]:
        """Makes ready for a forward and returns its arguments, without the columns that need not be computed.

        For the hooks on the model, as `end` is.
        """
        self._refuse_other_threads()
        if self._running.step is not None:
            # An interrupt ended the forward before this one without a word to its hooks.
            self._finish(self._running.step, failed=True)
        self._sequences.check()
        self._check_model()
        paged = attends_pages(self._model)
        # Leased first: if that fails, nothing has changed.
        lease = self._store.borrow()
        try:
            real, left_out, reused = place(call, self._model, self._sequences, lease)
        except BaseException:
            # At most whole pages were copied.
            self._store.give_back(lease)
            raise
        try:
            step = Step(self._sequences, lease, real, attends_pages=paged)
            step.bind_states(self.layers)
        except BaseException as error:
            lease.abandon(f"ended in {error!r}", cause=error)
            raise
        self._running.step = step
        self._num_reused += reused
        self._unread = Unread(call.ids, call.positions, real, step.num_columns)
        step.enter()
        return call.without_columns(left_out)

    def end(self, *, failed: bool) -> None:
        """Gives the pool back after a forward, if this thread has begun it."""
        step = self._running.step
        if step is not None and step.thread == threading.get_ident():
            self._finish(step, failed=failed)

    def _finish(self, step: Step, *, failed: bool) -> None:
        self._running.step = None
        step.leave()
        if failed:
            step.lease.abandon("ended in a forward that failed", cause=sys.exception())
            return
        try:
            step.check_complete()
            step.keep_states(self.layers)
            self._store.give_back(step.lease)
        except BaseException as error:
            step.lease.abandon(f"ended in {error!r}", cause=error)
            raise
        self._sequences.commit(self._unread)
        self._num_computed += step.num_tokens

    def _check_idle(self, verb: str) -> None:
        if self._running.step is not None:
            raise RuntimeError(
                f"{verb} was called while a forward is on its way; call it after, or reset() first if that forward was "
                f"interrupted"
            )

    def _refuse_other_threads(self) -> None:
        step = self._running.step
        if step is not None and step.thread != threading.get_ident():
            raise RuntimeError(
                "another thread is in a forward with this cache, or was interrupted there; one thread uses a cache and "
                "its forks, so give this one its own JaxkvCache(model), or reset() after an interrupt"
            )

    def _check_model(self) -> None:
        """Raises `ValueError` if the model was changed so that it cannot use the pool any more."""
        device, dtype = next(self._model.parameters()).device, self._model.dtype
        if device != self._store.device or dtype != self._dtype:
            raise ValueError(
                f"the cache was made for a model in {self._dtype} on {self._store.device}, which is now in {dtype} on "
                f"{device}; make a new JaxkvCache(model)"
            )


def _take_leave(hooks: tuple[Any, ...], sequences: Sequences) -> None:
    for hook in hooks:
        hook.remove()
    sequences.release()
