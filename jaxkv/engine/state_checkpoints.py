"""When steps keep states of recurrent layers for the prefix index: taken as a step is sent, made good when it was read.

Nothing here may stop a sequence: what finds no room, or fails, is left out.
"""

import logging
from collections.abc import Sequence

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.step_plan import Part
from jaxkv.errors import STEP_FAILURES
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Snapshot
from jaxkv.runner.sequence_runner import SequenceRunner

_LOG = logging.getLogger(__name__)


def room_for_checkpoints(sequence_runner: SequenceRunner, config: EngineConfig) -> int:
    """Returns how many checkpoints a cache has room for beside one state for each sequence that may run.

    There are none without a prefix cache, nor for a model whose prompts are computed whole.
    """
    runner = sequence_runner.runner
    if not config.prefix_cache or runner.model.whole_prompts:
        return 0
    groups = runner.layout.state_groups
    states = min((runner.counts[group.name] - 1 for group in groups), default=0)
    return max(0, states - sequence_runner.max_rows)


class StateCheckpoints:
    """Keeps the checkpoints of one engine's steps.

    Args:
        prefix: the index; `None` if there is none, or nothing recurrent.
        sequence_runner: makes the copies that a checkpoint needs.
    """

    def __init__(self, prefix: PrefixIndex | None, sequence_runner: SequenceRunner) -> None:
        self._prefix = prefix
        self._sequence_runner = sequence_runner

    def take(self, parts: Sequence[Part], shape: StepSpec) -> tuple[Snapshot, ...]:
        """Takes the states that a step of these parts keeps on its way, as many as its program and the cache allow."""
        taken: list[Snapshot] = []
        if self._prefix is None:
            return ()
        for row, (sequence, start, count, _, _) in enumerate(parts):
            keys = sequence.keys
            places = keys.places if keys is not None else ()
            for place in places:
                if keys is None or not start < place <= start + count:
                    continue
                if len(taken) >= shape.snapshots:
                    self._prefix.count_dropped_checkpoint()
                    continue
                states = self._prefix.begin_checkpoint(
                    sequence.number, sequence.tokens, keys, place
                )
                if states is not None:
                    taken.append(Snapshot(row, place, states))
        return tuple(taken)

    def drop(self, snapshots: Sequence[Snapshot], parts: Sequence[Part]) -> None:
        """Gives up what was taken for a step that was not sent."""
        for row, length, _ in snapshots:
            if self._prefix is not None:
                self._prefix.drop_pending_checkpoint(parts[row].sequence.number, length)

    def settle(self, sequence: RequestState, lengths: Sequence[int]) -> None:
        """Makes checkpoints of what a step has kept of a sequence, now that it was read.

        Raises:
            CachePoisoned: a copy failed and cost the cache.
        """
        for length in lengths:
            if sequence.tainted or sequence.keys is None:
                self._prefix_of().drop_pending_checkpoint(sequence.number, length)
            else:
                self._keep(sequence, length)

    def settle_end(self, sequence: RequestState) -> None:
        """Keeps the states that a sequence ends with.

        The step after its last token may be under way: then they count once that step was read, see `confirm`.

        Raises:
            CachePoisoned: a copy failed and cost the cache.
        """
        prefix = self._prefix
        if prefix is None or sequence.keys is None or sequence.tainted:
            return
        # What was sent beyond the last token that was read is of no text.
        if prefix.policy.end_of_generation and sequence.computed <= len(sequence.tokens):
            self._keep(sequence, sequence.computed, current=True)

    def confirm(self, sequence: RequestState, *, finite: bool) -> None:
        """Says how the step went that was under way when a sequence ended."""
        if self._prefix is not None:
            self._prefix.confirm(sequence.number, good=finite)

    def _keep(self, sequence: RequestState, length: int, *, current: bool = False) -> None:
        prefix, keys = self._prefix_of(), sequence.keys
        assert keys is not None, "a sequence without keys keeps nothing"
        confirmed = length <= sequence.collected
        copies = prefix.store_checkpoint(
            sequence.number, sequence.tokens, keys, length, current=current, confirmed=confirmed
        )
        if not copies:
            return
        try:
            self._sequence_runner.copy(copies)
        except STEP_FAILURES as error:
            _LOG.warning("a checkpoint after %d tokens is left out: %r", length, error)
            prefix.withdraw_made(sequence.number)

    def _prefix_of(self) -> PrefixIndex:
        assert self._prefix is not None, "nothing is taken without an index"
        return self._prefix
