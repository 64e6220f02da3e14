"""`Sampler`: jaxkv's sampler on logits in torch; the sampled tokens stay on the device for the next step."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import torch

from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import sampling
from jaxkv.config.sampling import MAX_BIAS_ENTRIES
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.in_flight import InFlightStep
from jaxkv.engine.steps.step_plan import Part
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.features import Features
from torch_bridge.batching.given_logits import LOGITS, GivenLogits
from torch_bridge.sharing.dlpack import from_torch, jax_device, to_torch


@dataclass(frozen=True)
class SamplerKind:
    """What a sampler is compiled for.

    Attributes:
        vocab_size: width of the logits.
        features: sampling features of all requests together, so that a mix of requests needs no other program.
        max_rows: rows of the program; a step may have fewer.
        max_tokens: longest sequence, whose tokens penalties count.
    """

    vocab_size: int
    features: Features
    max_rows: int
    max_tokens: int


class Sampler:
    """Samples the next token of each row; penalties' counts live in a small cache of JAX of its own.

    The programs are those of the engine, for a model whose logits are given. So a token depends only on the logits, the
    request's parameters, its seed and the position.

    Args:
        kind: sizes and features.
        device: torch's device of the logits.
    """

    def __init__(self, kind: SamplerKind, device: torch.device) -> None:
        self._features, self._device = kind.features, device
        model = GivenLogits(kind.vocab_size, kind.max_rows)
        self._spec = StepSpec(kind.max_rows, kind.max_rows, (), kind.features, decode=True)
        penalties = kind.features.penalties
        biases = MAX_BIAS_ENTRIES if penalties else 0
        spec = sampling(kind.vocab_size, penalties=penalties, bias_entries=biases)
        layout = group_layers([LayerSpec(model.num_layers, spec)])
        entries = kind.max_rows + 1
        with torch.inference_mode(False):
            self._logits = torch.zeros(model.max_rows, kind.vocab_size, device=device)
            self._last = torch.zeros(entries, dtype=torch.int64, device=device)
        with jax.default_device(jax_device(device)):
            params = {LOGITS: from_torch(self._logits)}
            runner = ModelRunner(model, params, layout, {"sampling": entries}, Programs())
        self._runner = SequenceRunner(runner, max_tokens=kind.max_tokens, max_rows=kind.max_rows)
        self._known: dict[int, tuple[RequestState, int]] = {}
        self._copied: jax.Array | None = None

    def admit(self, sequences: Sequence[RequestState]) -> None:
        """Gives each request that has none an entry, and takes those of requests that ended or were preempted."""
        allocator = self._runner.allocator
        for number, (state, epoch) in list(self._known.items()):
            if state.epoch != epoch:
                allocator.release(number)
                del self._known[number]
        for state in sequences:
            if state.number in self._known:
                continue
            allocator.open(state.number)
            allocator.reserve(state.number, 1)
            self._known[state.number] = state, state.epoch
            if self._features.needs_admission:
                request = state.request
                row = Row(state.number, request.prompt, 0, request.params)
                with jax.default_device(jax_device(self._device)):
                    self._runner.admit([row], [state.token_ids] if state.generated else ())

    def last_tokens(self, parts: Sequence[Part]) -> torch.Tensor:
        """Returns the one new token of each row, int64 [rows, 1], also if the host has not read it yet."""
        known = [0 if part.carry else part.sequence.tokens[part.start] for part in parts]
        carry = [part.carry for part in parts]
        columns = np.array([known, self._entries(parts), carry], np.int64)
        tokens, entries, carried = uploaded(columns, self._device)
        return torch.where(carried > 0, self._last[entries], tokens)[:, None]

    def sample(self, parts: Sequence[Part], logits: Sequence[torch.Tensor]) -> InFlightStep:
        """Queues the sampling of one token per row. The host does not wait.

        Args:
            parts: the rows.
            logits: tensors [some rows, vocab_size], which together have the rows' logits in order.
        """
        first = 0
        for one in logits:
            self._logits[first : first + len(one)].copy_(one)
            first += len(one)
        assert first == len(parts), "each row has logits"
        runner = self._runner.runner
        # Imported anew, so that the program runs after torch's writes. Torch's later work runs after `to_torch` below.
        runner.params = {LOGITS: from_torch(self._logits)}
        with jax.default_device(jax_device(self._device)):
            out = self._runner.step(self._spec, self._rows(parts))
        entries = uploaded(np.array(self._entries(parts), np.int64), self._device)
        self._last[entries] = to_torch(out)[: len(parts), 0].long()
        # JAX may reuse the memory of an array that is dropped, and torch's copy is still queued. The next program here
        # runs after that copy, so the array is kept until it is sent.
        self._copied = out
        step = InFlightStep(
            parts=tuple(parts),
            epochs=tuple(part.sequence.epoch for part in parts),
            shape=self._spec,
            out=out,
        )
        step.start_copy_to_host()
        return step

    def read(self, step: InFlightStep) -> np.ndarray:
        """Waits for a step's tokens, and returns them as `InFlightStep.unpack` takes them."""
        return self._runner.runner.read(step.out)

    def _rows(self, parts: Sequence[Part]) -> StepRows:
        ones = [1] * len(parts)
        generated: list[int] = []
        if self._features.min_tokens:
            generated = [part.sequence.generated + part.sequence.pending for part in parts]
        return StepRows(
            sequences=[part.sequence.number for part in parts],
            tokens=[0] * len(parts),
            lens=ones,
            starts=[part.start + part.count - 1 for part in parts],
            emits=[part.emits > 0 for part in parts],
            carry=[False] * len(parts),
            generated=generated,
            sampling=[part.sequence.request for part in parts],
        )

    def _entries(self, parts: Sequence[Part]) -> list[int]:
        allocator = self._runner.allocator
        return [allocator.states(part.sequence.number, "sampling")[1] for part in parts]


def uploaded(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns the numbers on the device. The host does not wait."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
