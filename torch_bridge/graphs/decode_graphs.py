"""`DecodeGraphs`: the recorded decode steps of one pool, by number of rows, shared by a cache and its forks."""

import inspect
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from torch_bridge.graphs.call_form import CallForm, form_of
from torch_bridge.graphs.decode_inputs import DecodeInputs
from torch_bridge.graphs.model_state import (
    CHANGED,
    MOVED,
    ModelState,
    why_not_now,
    why_unrecordable,
)
from torch_bridge.graphs.recorded_states import RecordedStates
from torch_bridge.graphs.recorder import Pools, Recorded, Recorder
from torch_bridge.transformers_cache.cache_layers import Running
from torch_bridge.transformers_cache.fingerprint import turns_with_length
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.store import Store
from torch_bridge.transformers_cache.tables import padded

Outputs = Any
"""What a model's forward returns."""


@dataclass
class _Recording:
    """One recorded step: its inputs, its work, and the form of its outputs, in which tensors are results.

    Attributes:
        kept: objects whose memory the graph reads, such as constants of kernels.
    """

    inputs: DecodeInputs
    work: Recorded
    form: pytree.TreeSpec
    leaves: list[Any]
    kept: object


class DecodeGraphs:
    """Records the decode steps of one model on one pool, and replays them.

    Args:
        model: the model.
        store: the pool.
        recorder: makes the recordings; `None` if there can be none.
        why_not: why there can be none.

    Attributes:
        why_not: why the latest decode step was not replayed; `None` if it was, or if there was none.
        why_again: why the recordings were last dropped; `None` if they never were.
        num_replays, num_recordings, seconds: steps replayed, steps recorded, and the time that recording took.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: Store,
        recorder: Recorder | None,
        why_not: str | None = None,
    ) -> None:
        if recorder is not None:
            why_not = _why_never(model)
            recorder = recorder if why_not is None else None
        self.why_not, self.why_again = why_not, None
        self.num_replays = self.num_recordings = 0
        self.seconds = 0.0
        self._model, self._store, self._recorder = model, store, recorder
        self._recordings: dict[tuple[int, CallForm], _Recording] = {}
        self._refused: dict[tuple[int, CallForm], str] = {}
        self._state: ModelState | None = None
        self._forward: Callable[..., Outputs] = model.forward
        self._is_new_text = True
        # A state that a replay has advanced cannot be taken back, so the model is compared before each replay.
        self._has_states = bool(store.layout.state_groups)
        self._names_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._lease_number = -1
        self._pointers: list[int] = []
        self._latest: list[torch.cuda.Stream] = []
        self._passing: set[tuple[int, CallForm]] = set()
        self._tries_left = _MAX_TRIES
        # Replays may still read the inputs when they are freed.
        weakref.finalize(self, _wait, self._latest).atexit = False

    @property
    def can_replay(self) -> bool:
        """Whether there is a recorder."""
        return self._recorder is not None

    def num_bytes(self) -> int:
        """Returns the device memory that the graphs hold."""
        return self._recorder.num_bytes() if self._recorder and self._recordings else 0

    def notice_text(self) -> None:
        """Has the next decode step compare the whole model with its state at the recording.

        Recordings of tensors that were replaced are dropped now. A recording that failed for a passing reason may be
        tried again, some times in all.
        """
        self._is_new_text = True
        why = self._state.why_changed() if self._state is not None else None
        if why is not None:
            self.drop(why)
        if self._passing and self._tries_left:
            self._tries_left -= 1
            for key in self._passing:
                self._refused.pop(key, None)
            self._passing.clear()

    def drop(self, reason: str) -> None:
        """Drops all recordings, so that the next decode steps are recorded again."""
        if self._recordings or self._refused:
            self.why_again = reason
        if self._recordings:
            _wait(self._latest)
        self._recordings.clear()
        self._refused.clear()
        self._passing.clear()
        self._state = None

    def replay(
        self,
        forward: Callable[..., Outputs],
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
    ) -> Outputs | None:
        """Returns the outputs of the current decode step, or `None` if its forward must run.

        Args:
            forward: the forward in whose place this is called. It is recorded, and not what has since been wrapped
                around it, which runs around each replay.
            arguments: the forward's arguments by name.
            sequences: the cache's rows.
            running: holds the current step.
        """
        if self._recorder is None:
            return None
        step = running.step
        assert step is not None
        form = self._form(arguments, step)
        if isinstance(form, str):
            self.why_not = form
            return None
        key = padded(step.num_rows, 1), form
        if forward != self._forward:
            self.drop(CHANGED)
            self._forward = forward
        self._check_memory(step)
        if (self._is_new_text or self._has_states) and self._state is not None:
            self._still_holds()
        recording = self._recordings.get(key)
        if recording is None and key not in self._refused:
            self.why_not = self._why_no_more(form)
            if self.why_not is not None:
                return None
            recording = self._record(key, arguments, sequences, running)
        if recording is None:
            self.why_not = self._refused[key]
            return None
        outputs = self._run(recording, form, arguments, sequences, step)
        if not self._has_states and not self._still_holds():
            # The forward now runs after the replay and writes the same slots again.
            self.why_not = self.why_again
            return None
        self.why_not = None
        self.num_replays += 1
        step.unwritten.clear()
        return outputs

    def _form(self, arguments: Mapping[str, Any], step: Step) -> CallForm | str:
        if not step.attends_pages and self._store.layout.paged_groups:
            return 'attention gathers the pages; call model.set_attn_implementation("jaxkv")'
        if not step.decodes:
            return "a row of the step is padding"
        if self._has_states and not step.num_columns:
            return "the text has one token, from which recurrent layers begin"
        return why_not_now(self._model, self._store.device) or form_of(
            arguments, step.num_rows, self._model.config, needs_positions=self._names_positions
        )

    def _check_memory(self, step: Step) -> None:
        """Drops the recordings if weights or pools have moved."""
        if self._lease_number != self._store.leases_taken:
            self._lease_number = self._store.leases_taken
            if _addresses(step.lease) != self._pointers:
                self.drop("the pool has other addresses, since it was made again or JAX moved it")
        if self._state is not None and not self._state.has_same_memory():
            self.drop(MOVED)

    def _why_no_more(self, form: CallForm) -> str | None:
        """Returns why no further step is recorded, or `None`."""
        known = [known for _, known in (*self._recordings, *self._refused)]
        if len(known) < _MAX_RECORDINGS:
            return None
        names = sorted(
            {name for one in known for name, *_ in set(one.options) ^ set(form.options)}
        ) or ["rows"]
        return (
            f"{len(known)} steps are recorded already, one per value of {', '.join(names)}; keep it the same from step "
            f"to step"
        )

    def _still_holds(self) -> bool:
        """Drops the recordings if the model is another than when they were made; returns whether it is the same."""
        assert self._state is not None
        why = self._state.why_changed()
        if why is None and self._is_new_text and not self._state.has_same_structure():
            why = CHANGED
        self._is_new_text = False
        if why is not None:
            self.drop(why)
        return why is None

    def _run(
        self,
        recording: _Recording,
        form: CallForm,
        arguments: Mapping[str, Any],
        sequences: Sequences,
        step: Step,
    ) -> Outputs:
        self._follow_stream()
        _fill(recording.inputs, arguments, sequences)
        results = iter(recording.work.replay(step.lease))
        rows = step.num_rows
        cache = arguments[form.cache_name]
        # Copies, since the next replay writes to the same memory.
        leaves = [
            next(results)[:rows].clone() if leaf is _TENSOR else cache if leaf is _CACHE else leaf
            for leaf in recording.leaves
        ]
        return pytree.tree_unflatten(leaves, recording.form)

    def _follow_stream(self) -> None:
        """Orders torch's current stream after the previous replay, which used the same memory."""
        if self._store.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._store.device)
        if self._latest and stream != self._latest[0]:
            stream.wait_stream(self._latest[0])
        self._latest[:] = [stream]

    def _record(
        self,
        key: tuple[int, CallForm],
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
    ) -> _Recording | None:
        """Records the current step's forward for a number of rows; keeps the reason if that is impossible."""
        started = time.perf_counter()
        if self._state is not None:
            # It has to be the state of this recording too.
            self._is_new_text = True
            self._still_holds()
        if self._state is None:
            self._state, self._is_new_text = ModelState(self._model), False
        reason, recording = why_unrecordable(self._model), None
        if reason is None:
            try:
                recording = self._record_now(key, arguments, sequences, running)
            except _FAILURES as error:
                reason = f"recording it failed: {type(error).__name__}: {error}"
                # An error that is kept elsewhere must not keep views of the pools.
                traceback.clear_frames(error.__traceback__)
                if isinstance(error, torch.OutOfMemoryError) or _INVALIDATED in str(error):
                    self._passing.add(key)
        if recording is not None and self._state.why_changed() is not None:
            reason, recording = _UNSTABLE, None
            self._tries_left -= 1
            if self._tries_left < 0:
                self._recorder = None
        self.seconds += time.perf_counter() - started
        if recording is None:
            self._refused[key] = str(reason)
            return None
        self._recordings[key] = recording
        self.num_recordings += 1
        return recording

    def _record_now(
        self,
        key: tuple[int, CallForm],
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
    ) -> _Recording:
        num_rows, form = key
        store, ordinary = self._store, running.step
        assert ordinary is not None
        assert self._recorder is not None
        self._pointers = _addresses(ordinary.lease)
        self._lease_number = store.leases_taken
        inputs = DecodeInputs(store.layout, store.allocator, num_rows, store.device)
        _fill(inputs, arguments, sequences)
        inputs.withhold_states()
        forward, cache = self._forward, arguments[form.cache_name]
        options = {name: value for name, _, value in form.options} | {form.cache_name: cache}
        if self._names_positions:
            options["position_ids"] = inputs.positions
        made: list[Any] = []

        def function(pools: Pools) -> list[torch.Tensor]:
            inputs.update_tables()
            leased = dict(pools)
            step = Step(
                sequences,
                leased,  # pyright: ignore[reportArgumentType] - only its items are used
                np.ones((num_rows, 1), bool),
                attends_pages=True,
                fixed=inputs.tables,
            )
            groups, ids = store.layout.state_groups, inputs.tables.states
            states = RecordedStates(groups, leased, ids, cache.layers)
            try:
                with _as_current(running, step), torch.inference_mode(False), torch.no_grad():
                    out = forward(input_ids=inputs.ids, **options)
                    states.write_back()
                step.check_complete()
            finally:
                states.drop()
                # Layers keep the step, which must not keep views of the pools.
                leased.clear()
            leaves, spec = pytree.tree_flatten(out)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            odd = [list(one.shape) for one in tensors if one.ndim < 1 or len(one) != num_rows]
            if odd or not tensors:
                raise RuntimeError(f"its outputs {odd} have no entry per row")
            marks = [
                _TENSOR if isinstance(leaf, torch.Tensor) else _CACHE if leaf is cache else leaf
                for leaf in leaves
            ]
            made[:] = [spec, marks, step.launches]
            return tensors

        work = self._recorder.record(function, ordinary.lease)
        spec, marks, kept = made
        return _Recording(inputs, work, spec, marks, kept)


def _why_never(model: PreTrainedModel) -> str | None:
    """Returns why no decode step of a model can be recorded, or `None`."""
    if turns_with_length(model):
        return "the model's rotary angles depend on the length of the text"
    return None


_MAX_RECORDINGS = 16
_MAX_TRIES = 3
"""Recordings that are tried again after a reason that may pass, or of a model that changes while it runs."""
_INVALIDATED = "previous error during capture"
"""Part of CUDA's message when another thread has broken a capture."""
_UNSTABLE = "a forward replaces attributes of the model's modules, which a replay would not do"
_TENSOR, _CACHE = object(), object()
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of the model's code inside a recording, where it is given no mask and unknown counts. The ordinary forward
runs next, and raises errors of its own."""


def _wait(latest: list[torch.cuda.Stream]) -> None:
    """Waits for the replays, which are ordered before the stream's; a device-wide wait breaks others' captures."""
    for stream in latest:
        stream.synchronize()


def _fill(inputs: DecodeInputs, arguments: Mapping[str, Any], sequences: Sequences) -> None:
    # A model that takes no positions is given none.
    ids = arguments["input_ids"]
    positions = arguments.get("position_ids")
    inputs.fill(sequences.rows, ids, ids if positions is None else positions)


def _addresses(pools: Pools) -> list[int]:
    return [view.data_ptr() for view in pools.values()]


@contextmanager
def _as_current(running: Running, step: Step) -> Iterator[None]:
    """Makes a recorded step the current one of a cache and of the thread."""
    before, running.step = running.step, step
    step.enter()
    try:
        yield
    finally:
        step.leave()
        running.step = before
