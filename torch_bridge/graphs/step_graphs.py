"""`StepGraphs`: the recorded decode steps and prompts of one pool, by size, shared by a cache and its forks."""

import inspect
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_bridge.graphs.call_form import LOGITS_TO_KEEP, CallForm, form_of
from torch_bridge.graphs.model_state import (
    CHANGED,
    MOVED,
    ModelState,
    why_not_now,
    why_unrecordable,
)
from torch_bridge.graphs.recorded_step import (
    MOST_PROMPT_ROWS,
    MOST_PROMPT_TOKENS,
    Outputs,
    RecordedStep,
    StepShape,
    record_step,
)
from torch_bridge.graphs.recorded_sum import RecordedSum
from torch_bridge.graphs.recorder import Pools, Recorder
from torch_bridge.graphs.replay_order import ReplayOrder
from torch_bridge.transformers_cache.cache_layers import Running
from torch_bridge.transformers_cache.fingerprint import KnownModel, turns_with_length
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.store import Store

_Key = tuple[StepShape, CallForm]


class StepGraphs:
    """Records the decode steps and short prompts of one model on one pool, and replays them.

    A decode step is recorded when its shape is first met, and a prompt the second time.

    Args:
        model: the model.
        store: the pool.
        recorder: makes the recordings; `None` if there can be none.
        why_not: why there can be none.

    Attributes:
        known: the model, for its fingerprints.
        why_not: why the latest decode step was not replayed; `None` if it was, or if there was none.
        why_not_prompt: the same of the latest prompt, or forward of several tokens per row.
        why_again: why the recordings were last dropped; `None` if they never were.
        num_replays, num_prompts: decode steps and prompts replayed.
        num_recordings, seconds: steps and prompts recorded, and the time that it took.
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
        self.why_not = self.why_not_prompt = why_not
        self.why_again: str | None = None
        self.num_replays = self.num_prompts = self.num_recordings = 0
        self.seconds = 0.0
        self._model, self._store, self._recorder = model, store, recorder
        self._order = ReplayOrder(store.device)
        self._sum = RecordedSum(recorder, self._order)
        self.known = KnownModel(model, self._sum)
        self._recordings: dict[_Key, RecordedStep] = {}
        self._refused: dict[_Key, str] = {}
        self._met: deque[_Key] = deque(maxlen=_MAX_RECORDINGS)
        self._state: ModelState | None = None
        self._forward: Callable[..., Outputs] = model.forward
        self._is_new_text = True
        # A state that a replay has advanced cannot be taken back, so the model is compared before each replay.
        self._has_states = bool(store.layout.state_groups)
        names = inspect.signature(model.forward).parameters
        self._names_positions = "position_ids" in names
        self._keeps_logits = LOGITS_TO_KEEP in names
        self._lease_number = -1
        self._pointers: list[int] = []
        self._passing: set[_Key] = set()
        self._tries_left = _MAX_TRIES
        # Replays may still read the inputs when they are freed.
        weakref.finalize(self, self._order.wait).atexit = False

    @property
    def can_replay(self) -> bool:
        """Whether there is a recorder."""
        return self._recorder is not None

    def num_bytes(self) -> int:
        """Returns the device memory that the graphs hold."""
        if self._recorder is None or not (self._recordings or self._sum.is_recorded):
            return 0
        return self._recorder.num_bytes()

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
            self._order.wait()
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
        """Returns the outputs of the current step, or `None` if its forward must run.

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
        shape = StepShape.of(step)
        outputs = self._try_replay(forward, arguments, sequences, running, shape)
        why = outputs if isinstance(outputs, str) else None
        if shape.is_prompt:
            self.why_not_prompt = why
            self.num_prompts += why is None
        else:
            self.why_not = why
            self.num_replays += why is None
        if why is not None:
            return None
        step.unwritten.clear()
        return outputs

    def _try_replay(
        self,
        forward: Callable[..., Outputs],
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
        shape: StepShape,
    ) -> Outputs | str:
        """Returns the outputs of a replay, or the reason why there was none."""
        step = running.step
        assert step is not None
        form = self._form(arguments, step, shape)
        if isinstance(form, str):
            return form
        key = shape, form
        if forward != self._forward:
            self.drop(CHANGED)
            self._forward = forward
        self._check_memory(step)
        if self._has_states and self._state is not None:
            self._still_holds()
        recording = self._recordings.get(key)
        if recording is None and key not in self._refused:
            why = self._why_no_more(key)
            if why is not None:
                return why
            recording = self._record(key, arguments, sequences, running)
        if recording is None:
            return self._refused[key]
        self._order.follow()
        outputs = recording.replay(form, arguments, sequences, step)
        if not self._has_states and not self._still_holds():
            # The forward now runs after the replay and writes the same slots again.
            return str(self.why_again)
        return outputs

    def _form(self, arguments: Mapping[str, Any], step: Step, shape: StepShape) -> CallForm | str:
        if not step.attends_pages and self._store.layout.paged_groups:
            return 'attention gathers the pages; call model.set_attn_implementation("jaxkv")'
        columns = 1
        if shape.is_prompt:
            why = self._why_no_prompt(arguments, step)
            if why is not None:
                return why
            arguments = {name: arguments[name] for name in arguments if name != LOGITS_TO_KEEP}
            columns = step.num_tokens if step.packed else step.num_queries
        elif not step.decodes:
            return "a row of the step is padding"
        elif self._has_states and not step.num_columns:
            return "the text has one token, from which recurrent layers begin"
        return why_not_now(self._model, self._store.device) or form_of(
            arguments,
            (1 if step.packed else step.num_rows, columns),
            self._model.config,
            needs_positions=self._names_positions,
        )

    def _why_no_prompt(self, arguments: Mapping[str, Any], step: Step) -> str | None:
        """Returns why a forward of several tokens per row is not one that is recorded, or `None`."""
        if self._has_states:
            return "recurrent layers compute prompts row by row"
        if not (self._keeps_logits and self._names_positions):
            return f"the model's forward takes no {LOGITS_TO_KEEP} or no position_ids"
        rows = len(step.new)
        if step.num_tokens > MOST_PROMPT_TOKENS or rows > MOST_PROMPT_ROWS:
            return (
                f"{step.num_tokens} new tokens in {rows} rows; at most {MOST_PROMPT_TOKENS} in {MOST_PROMPT_ROWS} rows "
                f"are recorded"
            )
        # A packed step asks for the logits after each row's last token.
        wanted = arguments.get(LOGITS_TO_KEEP)
        if not step.packed and (type(wanted) is not int or wanted != 1):
            return f"the call asks for other logits than the last, with {LOGITS_TO_KEEP}={wanted!r}"
        if not step.packed and not step.ends_in_tokens:
            return "a row ends in padding"
        return None

    def _check_memory(self, step: Step) -> None:
        """Drops the recordings if weights or pools have moved."""
        if self._lease_number != self._store.leases_taken:
            self._lease_number = self._store.leases_taken
            if _addresses(step.lease) != self._pointers:
                self.drop("the pool has other addresses, since it was made again or JAX moved it")
        if self._state is not None and not self._state.has_same_memory():
            self.drop(MOVED)

    def _why_no_more(self, key: _Key) -> str | None:
        """Returns why a step is not recorded now, or `None`."""
        shape, form = key
        if shape.is_prompt and key not in self._met:
            self._met.append(key)
            return f"the first prompt of at most {shape.tokens} new tokens is not recorded"
        kinds = (*self._recordings, *self._refused)
        known = [known for other, known in kinds if other.is_prompt == shape.is_prompt]
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

    def _record(
        self,
        key: _Key,
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
    ) -> RecordedStep | None:
        """Records the current step's forward for a number of rows; keeps the reason if that is impossible."""
        started = time.perf_counter()
        if self._state is not None:
            # It has to be the state of this recording too.
            self._is_new_text = True
            self._still_holds()
        if self._state is None:
            self._state, self._is_new_text = ModelState(self._model, self.known), False
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
        key: _Key,
        arguments: Mapping[str, Any],
        sequences: Sequences,
        running: Running,
    ) -> RecordedStep:
        assert running.step is not None
        assert self._recorder is not None
        self._pointers = _addresses(running.step.lease)
        self._lease_number = self._store.leases_taken
        return record_step(
            *key,
            arguments,
            sequences,
            running,
            recorder=self._recorder,
            forward=self._forward,
            names_positions=self._names_positions,
        )


def _why_never(model: PreTrainedModel) -> str | None:
    """Returns why no step of a model can be recorded, or `None`."""
    if turns_with_length(model):
        return "the model's rotary angles depend on the length of the text"
    return None


_MAX_RECORDINGS = 16
_MAX_TRIES = 3
"""Recordings that are tried again after a reason that may pass, or of a model that changes while it runs."""
_INVALIDATED = "previous error during capture"
"""Part of CUDA's message when another thread has broken a capture."""
_UNSTABLE = "a forward replaces attributes of the model's modules, which a replay would not do"
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


def _addresses(pools: Pools) -> list[int]:
    return [view.data_ptr() for view in pools.values()]
