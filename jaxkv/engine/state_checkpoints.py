"""State checkpoints of recurrent layers, made from the engine's steps for the prefix index.

A pending checkpoint is allocated when its step is dispatched, and is kept when the step was collected. A checkpoint for
which there is no room, or whose copy fails, is left out: it never stops its request.
"""

import logging
from collections.abc import Sequence

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.step_plan import Part
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import PendingCheckpoint
from jaxkv.runner.sequence_runner import SequenceRunner

_LOG = logging.getLogger(__name__)


def room_for_checkpoints(sequence_runner: SequenceRunner, config: EngineConfig) -> int:
    """Returns how many state checkpoints fit in the cache beside one state for each running sequence.

    Returns 0 without a prefix cache, and for a model that needs whole prompts.
    """
    runner = sequence_runner.runner
    if not config.prefix_cache or runner.model.whole_prompts:
        return 0
    groups = runner.layout.state_groups
    states = min((runner.counts[group.name] - 1 for group in groups), default=0)
    return max(0, states - sequence_runner.max_rows)


class StateCheckpoints:
    """Makes the state checkpoints of one engine.

    Args:
        prefix: the prefix index; `None` to make none.
        sequence_runner: makes the page copies that a checkpoint needs.
    """

    def __init__(self, prefix: PrefixIndex | None, sequence_runner: SequenceRunner) -> None:
        self._prefix = prefix
        self._sequence_runner = sequence_runner

    def take_pending(self, parts: Sequence[Part], shape: StepSpec) -> tuple[PendingCheckpoint, ...]:
        """Allocates pending checkpoints for a step, as many as its program and the cache have room for."""
        taken: list[PendingCheckpoint] = []
        if self._prefix is None:
            return ()
        for row, (sequence, start, count, *_) in enumerate(parts):
            keys = sequence.keys
            places = keys.places if keys is not None else ()
            for place in places:
                if keys is None or not start < place <= start + count:
                    continue
                if len(taken) >= shape.pending_checkpoints:
                    self._prefix.count_dropped_checkpoint()
                    continue
                states = self._prefix.begin_checkpoint(
                    sequence.number, sequence.tokens, keys, place
                )
                if states is not None:
                    taken.append(PendingCheckpoint(row, place, states))
        return tuple(taken)

    def drop_pending(
        self, pending_checkpoints: Sequence[PendingCheckpoint], parts: Sequence[Part]
    ) -> None:
        """Releases the pending checkpoints of a step that was not dispatched."""
        for row, length, _ in pending_checkpoints:
            if self._prefix is not None:
                self._prefix.drop_pending_checkpoint(parts[row].sequence.number, length)

    def keep_collected(self, sequence: RequestState, lengths: Sequence[int]) -> None:
        """Keeps the pending checkpoints of a request after their step was collected.

        Args:
            sequence: the request.
            lengths: tokens before each checkpoint.

        Raises:
            CachePoisoned: a copy failed and lost the cache.
        """
        for length in lengths:
            if sequence.tainted or sequence.keys is None:
                self._prefix_of().drop_pending_checkpoint(sequence.number, length)
            else:
                self._keep(sequence, length)

    def keep_end_of_request(self, sequence: RequestState) -> None:
        """Keeps the final states of a request as a checkpoint.

        If the step after its last token is in flight, the checkpoint stays unconfirmed until `confirm`.

        Raises:
            CachePoisoned: a copy failed and lost the cache.
        """
        prefix = self._prefix
        if prefix is None or sequence.keys is None or sequence.tainted:
            return
        # If more tokens were dispatched than the text has, the states are not those of the text.
        if prefix.policy.end_of_generation and sequence.computed <= len(sequence.tokens):
            self._keep(sequence, sequence.computed, current=True)

    def confirm(self, sequence: RequestState, *, finite: bool) -> None:
        """Confirms or removes the checkpoint of an ended request, after its last step in flight was collected.

        Args:
            sequence: the request.
            finite: the logits of that step were finite.
        """
        if self._prefix is not None:
            self._prefix.confirm(sequence.number, good=finite)

    def _keep(self, sequence: RequestState, length: int, *, current: bool = False) -> None:
        prefix, keys = self._prefix_of(), sequence.keys
        assert keys is not None, "only a sequence with page keys has checkpoints"
        confirmed = length <= sequence.collected
        copies = prefix.store_checkpoint(
            sequence.number, sequence.tokens, keys, length, current=current, confirmed=confirmed
        )
        if not copies:
            return
        try:
            self._sequence_runner.copy(copies)
        except STEP_FAILURES as error:
            _LOG.warning(
                "the copy for a state checkpoint after %d tokens failed; the checkpoint is dropped: %r",
                length,
                error,
            )
            prefix.withdraw_made(sequence.number)

    def _prefix_of(self) -> PrefixIndex:
        assert self._prefix is not None, "checkpoints need a prefix index"
        return self._prefix
