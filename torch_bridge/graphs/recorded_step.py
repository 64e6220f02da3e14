"""`RecordedStep`: one recorded forward of a model, a decode step or a packed prompt, with its inputs and outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_bridge.graphs.call_form import LOGITS_TO_KEEP, CallForm
from torch_bridge.graphs.decode_inputs import DecodeInputs
from torch_bridge.graphs.prompt_inputs import PromptInputs
from torch_bridge.graphs.recorded_states import RecordedStates
from torch_bridge.graphs.recorder import Pools, Recorded, Recorder
from torch_bridge.transformers_cache.cache_layers import Running
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.tables import padded

Outputs = Any
"""What a model's forward returns."""

MOST_PROMPT_TOKENS = 512
"""New tokens of a prompt that is recorded, over all rows. With more, the device computes for longer than the host
launches."""
MOST_PROMPT_ROWS = 8
_FEWEST_PROMPT_TOKENS = 64
"""Fewer tokens take as long, since the weights are read."""
_TENSOR, _CACHE = object(), object()


@dataclass(frozen=True)
class StepShape:
    """Sizes that a recording fixes.

    Attributes:
        rows: number of rows, padding included.
        tokens: number of packed new tokens of a prompt, padding included; `None` for a decode step, which has one
            token per row.
    """

    rows: int
    tokens: int | None = None

    @classmethod
    def of(cls, step: Step) -> "StepShape":
        """Returns the shape of the recording that serves a step."""
        if step.num_queries == 1 and not step.packed:
            return cls(padded(step.num_rows, 1))
        return cls(MOST_PROMPT_ROWS, padded(step.num_tokens, _FEWEST_PROMPT_TOKENS))

    @property
    def is_prompt(self) -> bool:
        """Whether rows may have several new tokens."""
        return self.tokens is not None

    def inputs(self, sequences: Sequences) -> DecodeInputs | PromptInputs:
        """Returns inputs of this shape."""
        store = sequences.store
        if self.tokens is None:
            return DecodeInputs(store.layout, store.allocator, self.rows, store.device)
        return PromptInputs(store.layout, store.allocator, self.rows, self.tokens, store.device)


@dataclass
class RecordedStep:
    """One recorded step.

    Attributes:
        shape: its sizes.
        inputs: what it reads.
        work: its device work.
        form: the form of its outputs.
        leaves: the outputs, in which tensors and the cache are marked.
        kept: objects whose memory the work reads, such as constants of kernels.
    """

    shape: StepShape
    inputs: DecodeInputs | PromptInputs
    work: Recorded
    form: pytree.TreeSpec
    leaves: list[Any]
    kept: object

    def replay(
        self, form: CallForm, arguments: Mapping[str, Any], sequences: Sequences, step: Step
    ) -> Outputs:
        """Queues the work for a step on torch's current stream and returns its outputs."""
        _fill(self.inputs, arguments, sequences, step)
        results = iter(self.work.replay(step.lease))
        cache = arguments[form.cache_name]
        leaves = [
            self._result(next(results), step)
            if leaf is _TENSOR
            else cache
            if leaf is _CACHE
            else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.form)

    def _result(self, recorded: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns a copy of an output's rows, since the next replay writes to the same memory."""
        if not self.shape.is_prompt:
            return recorded[: step.num_rows].clone()
        rows = recorded[:, : int((step.new > 0).sum())]
        rows = rows if step.packed else rows.transpose(0, 1)
        return rows.clone(memory_format=torch.contiguous_format)


def record_step(
    shape: StepShape,
    form: CallForm,
    arguments: Mapping[str, Any],
    sequences: Sequences,
    running: Running,
    *,
    recorder: Recorder,
    forward: Callable[..., Outputs],
    names_positions: bool,
) -> RecordedStep:
    """Records the current step's forward.

    Args:
        shape: the sizes to record.
        form: the form of its call.
        arguments: the forward's arguments by name.
        sequences: the cache's rows.
        running: holds the current step.
        recorder: records it.
        forward: the forward.
        names_positions: whether it takes positions.

    Raises:
        RuntimeError: it cannot be recorded, or memory ran out. The model's code may raise other errors.
    """
    store, ordinary = sequences.store, running.step
    assert ordinary is not None
    inputs = shape.inputs(sequences)
    _fill(inputs, arguments, sequences, ordinary)
    cache = arguments[form.cache_name]
    options = {name: value for name, _, value in form.options} | {form.cache_name: cache}
    if names_positions:
        options["position_ids"] = inputs.positions
    if isinstance(inputs, PromptInputs):
        options[LOGITS_TO_KEEP] = inputs.last
    else:
        inputs.withhold_states()
    leading = (1, shape.rows) if shape.is_prompt else (shape.rows,)
    made: list[Any] = []

    def function(pools: Pools) -> list[torch.Tensor]:
        inputs.update_tables()
        leased = dict(pools)
        step = Step(
            sequences,
            leased,  # pyright: ignore[reportArgumentType] - only its items are used
            np.ones(tuple(inputs.ids.shape), bool),
            attends_pages=True,
            fixed=inputs.tables,
            packed=shape.is_prompt,
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
        odd = [list(one.shape) for one in tensors if tuple(one.shape[: len(leading)]) != leading]
        if odd or not tensors:
            raise RuntimeError(f"its outputs {odd} have no entry per row")
        marks = [
            _TENSOR if isinstance(leaf, torch.Tensor) else _CACHE if leaf is cache else leaf
            for leaf in leaves
        ]
        made[:] = [spec, marks, step.launches]
        return tensors

    work = recorder.record(function, ordinary.lease)
    spec, marks, kept = made
    return RecordedStep(shape, inputs, work, spec, marks, kept)


def _fill(
    inputs: DecodeInputs | PromptInputs,
    arguments: Mapping[str, Any],
    sequences: Sequences,
    step: Step,
) -> None:
    # A model that takes no positions is given none.
    ids = arguments["input_ids"]
    positions = arguments.get("position_ids")
    positions = ids if positions is None else positions
    if isinstance(inputs, PromptInputs):
        packed = step.pack_numbers(ids), step.pack_numbers(positions)
        inputs.fill(sequences, step.new, *packed)
    else:
        inputs.fill(sequences.rows, ids, positions)


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
