"""`JaxkvCache`: a Transformers cache whose keys, values and recurrent states are stored in jaxkv's pools.

Hooks on the model call it. Before a forward it looks tokens up in the prefix index, reserves pages and states, and
leases the pool to torch. After the forward it returns the lease.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
)

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.errors import CacheLeased
from pallas_kernels.dispatch import Unsupported
from torch_bridge.fused.checked import why_not_fused
from torch_bridge.fused.install import install as install_fused
from torch_bridge.graphs.recorder import recorder_for
from torch_bridge.graphs.replayed_forward import install, is_replayed
from torch_bridge.graphs.step_graphs import StepGraphs
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.attention import attends_pages
from torch_bridge.transformers_cache.cache_layers import Running, layers_of
from torch_bridge.transformers_cache.fingerprint import autocast
from torch_bridge.transformers_cache.forward_call import ForwardCall
from torch_bridge.transformers_cache.lent_states import LentStates
from torch_bridge.transformers_cache.model_layout import LayerPlan, layer_specs, plan_layers
from torch_bridge.transformers_cache.placing import begin_comparison, known_ids, place
from torch_bridge.transformers_cache.sequences import Sequences, Unread
from torch_bridge.transformers_cache.state_layout import can_begin_from_states
from torch_bridge.transformers_cache.step import Step, active
from torch_bridge.transformers_cache.store import Store
from torch_bridge.transformers_cache.watch import watch


@dataclass(frozen=True)
class JaxkvCacheStats:
    """Counters of one cache since it was made; forks have their own. `torch_bridge.generate` reports its tokens itself.

    Attributes:
        tokens_computed: tokens that went through the model, over all rows, without padding.
        tokens_reused: tokens whose keys were found in the prefix index and not computed.
        bytes: size of the pool, which forks share.
        leases_taken: how often the pool was leased to torch, by forks too. It stays 1 while JAX does not use the pool.
        steps_replayed: decode steps that were replayed as a graph, by forks too, as are the following.
        prompts_replayed: prompts, or other forwards of several tokens per row, that were replayed.
        graphs_recorded: how often a decode step or a prompt was recorded.
        graph_bytes: device memory that the graphs hold for temporaries and results.
        graph_seconds: time that the recordings took.
        why_not_replayed: why the latest decode step was not replayed; `None` if it was, or if there was none.
        why_prompt_not_replayed: the same of the latest prompt.
        why_recorded_again: why the graphs were last dropped; `None` if they never were.
        why_not_fused: why small operations of decode steps run one by one where a kernel was tried; `None` if none
            failed. It is the same for all caches.
    """

    tokens_computed: int
    tokens_reused: int
    bytes: int
    leases_taken: int
    steps_replayed: int
    prompts_replayed: int
    graphs_recorded: int
    graph_bytes: int
    graph_seconds: float
    why_not_replayed: str | None
    why_prompt_not_replayed: str | None
    why_recorded_again: str | None
    why_not_fused: str | None


class CacheParts(NamedTuple):
    """What a cache shares with its forks.

    Attributes:
        model: the model.
        plans: the cache needs of its layers.
        store: the pool.
        graphs: the recorded steps.
    """

    model: PreTrainedModel
    plans: tuple[LayerPlan, ...]
    store: Store
    graphs: StepGraphs


class JaxkvCache(Cache):
    """Transformers cache in jaxkv's paged pools, with forks and prefix reuse that copy no pages.

    Pass it as `past_key_values` to the model it was made for. Generated tokens are the same as with Transformers' own
    cache. Pages follow vLLM's PagedAttention. After `reset()`, a prompt that shares a prefix with an earlier one is
    computed from the first page that differs, if the caller needs only the last logits, as `generate` does. With
    recurrent layers it is computed from the longest text of which states were kept: those at the end of a prompt, at
    `reset()` and at `fork()`, of rows without padding. Nothing is reused with Mamba layers of the first version, whose
    scan in Transformers begins at zero, or with rope scaling "dynamic" or "longrope". A cache and its forks belong to
    one thread. Other threads may use the model with caches of their own.

    Cached prefixes are dropped when the model changes. Each forward of a prompt, or of several tokens per row, compares
    a fingerprint of the model with the previous one. The fingerprint covers the bits of all parameters, buffers, other
    tensors and NumPy arrays of its modules; plain attributes, and containers, dataclasses and namespaces of them;
    configs, hooks, replaced functions, the `forward` of the modules' classes, training mode and autocast. Computing it
    reads all weights once. Forwards of one token per row compare nothing.

    Two kinds of change are not noticed. One is a change inside any other object, such as a closure or a global setting.
    The other is a change through `.data`, or of an attribute, that is undone before the next comparison, even if single
    tokens were computed in between. `reset(keep_prefix=False)` drops all prefixes.

    Args:
        model: a causal language model on the CPU or one GPU. The cache's hooks on it are removed with the cache.
        max_tokens: capacity in tokens over all rows, forks and cached prefixes; rounded up to whole pages.
        page_size: tokens per page. Each row fills its own pages. Prefixes match in whole pages, so a prompt shorter
            than a page reuses nothing. Smaller pages match more tokens and make longer page tables.
        max_sequences: rows at once, those of forks included, for models with recurrent layers; there are twice as many
            states. States that rows leave free keep the ends of texts, at most `max_sequences` of them.
        graphs: whether decode steps and short prompts are recorded as CUDA graphs and replayed, where they can be
            (docs/how-to/transformers.md). `stats()` has the reason where they are not. On a CPU there are no graphs.

    Raises:
        Unsupported: the model is not causal, has layers whose state the cache cannot store, or is on several devices.
        ValueError: a size is not a positive integer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_tokens: int = 4096,
        *,
        page_size: int = 16,
        max_sequences: int = 16,
        graphs: bool = True,
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
        # A row of a fork reads one state and writes another; state 0 belongs to no row.
        counts = {
            group.name: -(-max_tokens // page_size)
            if group.unit == "page"
            else 1 + 2 * max_sequences
            for group in layout.groups
        }
        device, keeps = next(model.parameters()).device, can_begin_from_states(layout)
        store = Store(layout, counts, device, keeps_states=keeps)
        self._set_up(model, plans, Sequences(store), model.dtype, _graphs(model, store, graphs))

    def _set_up(
        self,
        model: PreTrainedModel,
        plans: tuple[LayerPlan, ...],
        sequences: Sequences,
        dtype: torch.dtype,
        graphs: StepGraphs,
    ) -> None:
        self._model, self._plans, self._sequences, self._dtype = model, plans, sequences, dtype
        self._graphs = graphs
        self._store = sequences.store
        self._running = Running()
        self._num_computed = self._num_reused = self._reused = 0
        self._comparison: Callable[[], bool] | None = None
        self._opening: tuple[ForwardCall, dict[str, Any]] | None = None
        super().__init__(layers=layers_of(plans, sequences, self._running))
        undo = [watch(model), install_fused(model, self._store.device)]
        if graphs.can_replay:
            undo.append(install(model))
        weakref.finalize(self, _detach, undo, sequences).atexit = False

    @property
    def owner(self) -> CacheOwner:
        """Owner of the pool's JAX arrays. Between forwards, JAX code may read the pool or lease it."""
        return self._store.owner

    @property
    def parts(self) -> CacheParts:
        """What this cache shares with its forks, for `torch_bridge.generate`."""
        self._check_model()
        return CacheParts(self._model, self._plans, self._store, self._graphs)

    @property
    def max_tokens(self) -> int | None:
        """Capacity in tokens, over all rows; `None` for models without attention."""
        return self._store.allocator.max_tokens

    def stats(self) -> JaxkvCacheStats:
        """Returns the counters of computed and reused tokens, the pool's size and its leases."""
        return JaxkvCacheStats(
            tokens_computed=self._num_computed,
            tokens_reused=self._num_reused,
            bytes=self._store.num_bytes,
            leases_taken=self._store.leases_taken,
            steps_replayed=self._graphs.num_replays,
            prompts_replayed=self._graphs.num_prompts,
            graphs_recorded=self._graphs.num_recordings,
            graph_bytes=self._graphs.num_bytes(),
            graph_seconds=self._graphs.seconds,
            why_not_replayed=self._graphs.why_not,
            why_prompt_not_replayed=self._graphs.why_not_prompt,
            why_recorded_again=self._graphs.why_again,
            why_not_fused=why_not_fused(),
        )

    def fork(self) -> "JaxkvCache":
        """Returns an independent copy of this cache's rows; both share pages until one of them writes to a page."""
        self._check_idle("fork()")
        self._graphs.notice_text()
        self._sequences.check()
        self._keep_states()
        child = object.__new__(type(self))
        child._set_up(self._model, self._plans, self._sequences.fork(), self._dtype, self._graphs)
        return child

    def __copy__(self) -> "JaxkvCache":
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> "JaxkvCache":
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a JaxkvCache cannot be pickled: its rows are in a pool on the device, which forks share. Keep the token "
            "ids and compute them again, or use DynamicCache"
        )

    def reset(self, keep_prefix: bool = True) -> None:
        """Drops all rows; the next forward starts a new batch.

        Call it also to recover from a failed forward. The failure also drops the rows of forks and all prefixes.

        Args:
            keep_prefix: keep full pages in the prefix index, for later prompts with the same prefix, until the pages
                are needed or the model changes (the class docstring lists the changes that are noticed). If False, all
                prefixes are dropped, those of forks too.
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
            self._keep_states()
        self._sequences.release()
        if not keep_prefix:
            self._store.index.clear()

    def _keep_states(self) -> None:
        """Keeps the rows' states for texts that continue theirs, unless a lease taken by hand holds the pool."""
        if not self._sequences.has_states or not self._sequences.rows:
            return
        try:
            lease = self._store.borrow()
        except CacheLeased:
            return
        try:
            self._sequences.keep_states(lease)
            self._store.give_back(lease)
        except BaseException as error:
            lease.abandon(f"ended in {error!r}", cause=error)
            raise

    @contextmanager
    def session(self) -> Iterator[Self]:
        """Holds torch's lease of the pool over all forwards inside.

        Using the pool from JAX then raises `CacheLeased`; outside a session it ends torch's lease instead. The session
        holds for forks too.
        """
        self._check_idle("session()")
        with self._store.session():
            yield self

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i a continuation of row `beam_idx[i]`; int64 [rows]."""
        self._check_idle("reorder_cache()")
        self._sequences.reorder([int(index) for index in beam_idx.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times; copies of a row are adjacent."""
        rows = range(len(self._sequences.rows))
        self.reorder_cache(torch.tensor([row for row in rows for _ in range(repeats)]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the given rows: int64 indices, or a bool mask [rows]."""
        numbers = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self.reorder_cache(numbers)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Takes back the last tokens of all rows and frees their pages, as assisted decoding does.

        Pages that forks or cached prefixes share are kept for these and not written.

        Args:
            tokens_to_remove: minus the number of columns to take back, as Transformers gives it; 0 does nothing.

        Raises:
            ValueError: the number is positive, or a row began from a cached prefix of which it lacks pages that the
                window before the last token left needs.
            Unsupported: the model has recurrent layers, whose states cannot be taken back.
        """
        self._check_idle("crop()")
        # Transformers gives a tensor on the device.
        count = -int(tokens_to_remove)
        if count < 0:
            raise ValueError(
                f"crop() takes minus the number of tokens to remove, got {-count}; to keep {-count} tokens, call "
                f"crop({-count} - cache.get_seq_length())"
            )
        if count:
            self._refuse_states()
            self._sequences.crop(count)

    def activate_past_recording(self) -> None:
        """Does nothing, since all pages are kept; Transformers calls it before it needs `crop`.

        Raises:
            Unsupported: the model has recurrent layers, whose states cannot be taken back.
        """
        self._refuse_states()

    def _refuse_states(self) -> None:
        if self._store.layout.state_groups:
            raise Unsupported(
                "JaxkvCache cannot take back tokens of recurrent layers, which assisted decoding needs; use "
                "DynamicCache for it, or fork() before tokens that may be removed"
            )

    def watches(self, model: torch.nn.Module) -> bool:
        """Whether this is the model that the cache was made for."""
        return model is self._model

    def begin(self, call: ForwardCall) -> dict[str, Any]:
        """Prepares a forward and returns its arguments, without the leading columns that the prefix index holds.

        Called by the hooks on the model, as is `end`.
        """
        self._refuse_other_threads()
        around = active()
        if around is not None and around.fixed is not None:
            # Nothing has changed yet. The recording fails, and this forward runs in the ordinary one.
            raise RuntimeError(
                "a forward with a JaxkvCache ran inside another's decode step while that was recorded, which calls the "
                "model several times"
            )
        if self._running.step is not None:
            # The previous forward was interrupted, and its after-hook did not run.
            self._finish(self._running.step, failed=True)
        self._sequences.check()
        self._check_model()
        paged = attends_pages(self._model)
        self._comparison = None
        # Leased first: if that fails, nothing has changed.
        return self._start(call, self._store.borrow(), self._compare, attends_pages=paged)

    def _start(
        self,
        call: ForwardCall,
        lease: Lease,
        compare: Callable[[], None],
        *,
        attends_pages: bool,
    ) -> dict[str, Any]:
        """Places a forward's tokens, makes its step the current one, and returns its arguments."""
        opens = not self._sequences.rows
        try:
            real, left_out, self._reused = place(call, self._model, self._sequences, lease, compare)
        except BaseException:
            # At most whole pages were copied.
            self._store.give_back(lease)
            raise
        try:
            step = Step(self._sequences, lease, real, attends_pages=attends_pages)
            self._states = LentStates(
                self._sequences, lease, self.layers, has_previous=step.num_columns > 0
            )
            if not self._graphs.can_replay:
                self._states.lend()
        except BaseException as error:
            lease.abandon(f"ended in {error!r}", cause=error)
            raise
        self._running.step = step
        # Single tokens compare no fingerprint.
        is_same = autocast() == self._store.autocast
        ids = known_ids(call, self._model) if is_same else None
        self._unread = Unread(ids, call.positions, real, step.num_columns)
        step.enter()
        arguments = call.without_columns(left_out)
        # A copy, since hooks may change what they are given. It refers to this cache, so `_finish` drops it.
        self._opening = (call, dict(arguments)) if opens else None
        return arguments

    def _compare(self) -> None:
        """Begins to compare the model with its last state, and ends that now if `replay` cannot begin the forward anew.

        The device sums the weights meanwhile.
        """
        self._comparison = begin_comparison(self._model, self._graphs.known, self._store)
        self._graphs.notice_text()
        can_wait = self._graphs.can_replay and is_replayed(self._model)
        if not can_wait or self._sequences.has_states:
            self._has_changed()

    def _has_changed(self) -> bool:
        """Ends the comparison that the current forward has begun, if any; returns whether the model has changed."""
        comparison, self._comparison = self._comparison, None
        return comparison is not None and comparison()

    def _begin_again(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begins the current forward anew with all its columns, and returns its arguments.

        What code around the forward has put into the arguments since `begin` stays there.
        """
        step = self._running.step
        assert step is not None
        assert self._opening is not None
        call, begun = self._opening
        self._running.step = None
        step.leave()
        self._sequences.release()
        whole = self._start(call, step.lease, lambda: None, attends_pages=step.attends_pages)
        return {
            name: whole.get(name, given) if given is begun.get(name) else given
            for name, given in arguments.items()
        }

    def replay(self, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> Any:  # noqa: ANN401
        """Returns the output of the current forward if it was replayed, else `None`.

        If the model has changed since the pages that the forward reuses were computed, the output is that of the
        ordinary forward over all columns.

        Args:
            arguments: the forward's arguments by name.
            forward: the forward in whose place this is called.
        """
        step = self._running.step
        if step is None or step.thread != threading.get_ident():
            return None
        if step.fixed is not None:
            # A recording calls the forward, in which another wrapper may call this again.
            return None
        out = self._graphs.replay(forward, arguments, self._sequences, self._running)
        self._states.end_replay(replayed=out is not None)
        if self._has_changed() and self._opening is not None:
            return forward(**self._begin_again(arguments))
        return out

    def end(self, *, failed: bool) -> None:
        """Ends the forward and returns the lease; does nothing if this thread has begun no forward."""
        step = self._running.step
        if step is not None and step.thread == threading.get_ident():
            self._finish(step, failed=failed)

    def _finish(self, step: Step, *, failed: bool) -> None:
        self._running.step = self._opening = None
        step.leave()
        if failed:
            self._states.drop()
            step.lease.abandon("ended in a forward that failed", cause=sys.exception())
            return
        try:
            assert self._comparison is None, "replay ends what begin has begun to compare"
            step.check_complete()
            self._states.take_back()
            self._sequences.commit(self._unread)
            if step.num_queries > 1:
                self._sequences.keep_states(step.lease)
            self._store.give_back(step.lease)
        except BaseException as error:
            step.lease.abandon(f"ended in {error!r}", cause=error)
            raise
        self._num_computed += step.num_tokens
        self._num_reused += self._reused
        self._reused = 0

    def _check_idle(self, verb: str) -> None:
        if self._running.step is not None:
            raise RuntimeError(
                f"{verb} was called during a forward; call it after the forward, or reset() first if that forward was "
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
        """Raises `ValueError` if the model has moved to another device or dtype than the pool's."""
        device, dtype = next(self._model.parameters()).device, self._model.dtype
        if device != self._store.device or dtype != self._dtype:
            raise ValueError(
                f"the cache was made for a model in {self._dtype} on {self._store.device}, which is now in {dtype} on "
                f"{device}; make a new JaxkvCache(model)"
            )


def _detach(undo: list[Callable[[], None]], sequences: Sequences) -> None:
    for one in undo:
        one()
    sequences.release()


def _graphs(model: PreTrainedModel, store: Store, wanted: bool) -> StepGraphs:
    recorder = recorder_for(store.device)
    if not wanted:
        recorder = "the cache was made with graphs=False"
    if isinstance(recorder, str):
        return StepGraphs(model, store, None, recorder)
    return StepGraphs(model, store, recorder)
