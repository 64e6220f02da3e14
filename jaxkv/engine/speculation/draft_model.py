"""`DraftModel`: drafts by a smaller model or a head of the same vocabulary, with pages and programs of its own."""

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request_state import RUNNING, RequestState
from jaxkv.engine.speculation.hidden_pages import HiddenPages
from jaxkv.engine.steps.step_plan import Part
from jaxkv.errors import STEP_FAILURES, CachePoisoned, OutOfPages, OutOfStates
from jaxkv.models.draft_heads.head import AHEAD, DraftHead
from jaxkv.models.draft_heads.load import joined
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.draft_programs import CatchUpSpec, DraftSpec, HiddenPool, PutDraftsSpec
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import Features, union
from jaxkv.sampling.fields import features_for

_LOG = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""Failures of the smaller model's programs after which it drafts no more."""


@dataclass(slots=True)
class _DraftRow:
    """What the smaller model has of one request.

    Attributes:
        number: its number in the smaller model's page allocator.
        epoch: the request's epoch when it was opened.
        params: the sampling parameters that drafts are drawn with.
        features: what they need.
        computed: positions of the request whose keys and values are computed, at least.
        is_followed: all tokens before the last chain were computed, and it had room for its drafts, so the tokens
            before these are computed too.
    """

    number: int
    epoch: int
    params: SamplingParams
    features: Features
    computed: int = 0
    is_followed: bool = False


class DraftModel:
    """Drafts with a smaller model or a head. Prompts are computed when a request first drafts, and what it lacks later.

    After each step that verifies drafts it computes the next ones, from the texts that the verifying model's cache
    keeps on the device. Its errors cost drafts, and no request.

    A head reads the hidden states that the verifying model keeps in pages beside its keys and values, so those of
    cached prefixes are there too. Its position t has token t + 1, so it computes one position less than a text has
    tokens.

    Args:
        sequence_runner: runs the smaller model or the head, over a cache of its own.
        verifier: runs the verifying model.
        drafts: drafts of a row.
        shapes: padded shapes of its steps.
    """

    def __init__(
        self,
        sequence_runner: SequenceRunner,
        verifier: SequenceRunner,
        drafts: int,
        shapes: StepShapes,
    ) -> None:
        self._sequence_runner, self._runner = sequence_runner, sequence_runner.runner
        self._allocator = sequence_runner.allocator
        self._verifier, self._drafts, self._shapes = verifier, drafts, shapes
        self._rows: dict[RequestState, _DraftRow] = {}
        self._failures = 0
        arrays = verifier.runner.layout.arrays(verifier.runner.counts)
        [[sequences, most_tokens]] = [one.shape for one in arrays if one.role == "token_history"]
        self._texts = sequences, most_tokens
        model = self._runner.model
        self._head = model if isinstance(model, DraftHead) else None
        self._hidden = None if self._head is None else HiddenPages(verifier, drafts)
        self._ahead = 0 if self._head is None else AHEAD
        # The arrays of the verifying model that the head has; `None` while it has none.
        self._joined: list[Any] | None = None
        self._refuse_other_dtypes()
        self._join()

    def draft(
        self, sequences: Sequence[RequestState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Computes what it lacks of these requests. It drafts nothing at once: the step sent next is followed.

        Drafts behind the step sent last stay on the device, see `has_drafts`.
        """
        self._drop_ended()
        self._guarded(lambda: self._catch_up([one for one in sequences if self._opened(one)]))
        return [()] * len(sequences)

    def follow(self, parts: Sequence[Part]) -> None:
        """Drafts the tokens behind a step that was sent and verifies drafts; the device need not have run it."""
        rows = [part for part in parts if part.sequence in self._rows]
        if rows:
            self._guarded(lambda: self._chain(rows))

    def has_drafts(self, sequence: RequestState) -> bool:
        """Returns whether the last chain left drafts of the tokens behind the last one of a request."""
        row = self._rows.get(sequence)
        # `_catch_up` has compared both.
        return row is not None and row.is_followed and sequence.drafts_on_device

    def cache_lost(self) -> None:
        """Drafts no more if a program of the smaller model has failed on the device.

        Its drafts then were an error that the verifying model's cache took over, which would be lost again and again.
        """
        owner = self._runner.owner
        if owner.poisoned:
            return
        try:
            jax.block_until_ready(owner.handle().cache.arrays)
        except jax.errors.JaxRuntimeError as error:
            self._failures = _MOST_FAILURES + 1
            _LOG.warning("the draft model failed on the device and drafts no more: %r", error)
            self._forget()
            owner.poison(f"the draft model failed on the device: {error}", cause=error)

    def release(self) -> None:
        """Gives back the memory of its cache; the next draft makes it again. A head drops what it shares."""
        self._forget()
        self._runner.owner.close()
        self.drop_shared()

    def drop_shared(self) -> None:
        """Drops the parameters that a head has from the verifying model; the next draft takes those of that time."""
        if self._head is not None:
            self._runner.params = joined(self._head, self._runner.params, None)
            self._joined = None

    def close(self) -> None:
        """Frees its cache, and drops its parameters and programs."""
        self._forget()
        self._runner.close()
        self._joined = None

    def declare(
        self, sampling: SamplingParams, rows: int
    ) -> tuple[list[ProgramSpec], list[ProgramSpec]]:
        """Lists its programs for up to `rows` requests with such parameters, and those of the verifying model."""
        features = features_for(_drawn_alike(sampling))
        rows = min(rows, self._sequence_runner.max_rows)
        declared = self._shapes.declare_all(Features(), rows=rows)
        steps = [step for step in declared if isinstance(step, StepSpec)]
        chains = [self._spec(replace(step, features=features)) for step in steps if step.decode]
        puts = {PutDraftsSpec(chain.step.rows, self._drafts): None for chain in chains}
        # A chunk of one token per row is a decode step.
        return [*map(self._catch_up_spec, steps), *chains], [*puts]

    def compile(self, specs: Sequence[ProgramSpec]) -> None:
        """Compiles programs of the smaller model; in strict mode no others are compiled from then on."""
        self._runner.programs.unseal()
        try:
            self._runner.compile_all(specs)
        finally:
            self._runner.programs.seal()

    @property
    def _pool(self) -> HiddenPool | None:
        return None if self._hidden is None else self._hidden.pool

    def _spec(self, step: StepSpec) -> DraftSpec:
        return DraftSpec(step, self._drafts, self._texts, self._pool)

    def _catch_up_spec(self, step: StepSpec) -> CatchUpSpec:
        return CatchUpSpec(step, self._pool)

    def _join(self) -> None:
        """Gives a head the parameters that it shares with the verifying model, if these are new."""
        if self._head is None:
            return
        verifier, before = self._verifier.runner, self._joined
        found: Any = verifier.params
        theirs = [found[name] for name in self._head.shared]
        if before is None or any(map(operator.is_not, theirs, before)):
            params = joined(self._head, self._runner.params, verifier.params)
            self._runner.update_params(params, verifier.weight_version)
            self._joined = theirs

    def _refuse_other_dtypes(self) -> None:
        """Raises `ValueError` if a head was loaded in another dtype than the parameters that it is to share."""
        declared: Any = self._runner.params
        given: Any = self._verifier.runner.params
        for name in () if self._head is None else self._head.shared:
            ours, theirs = declared[name].dtype, given[name].dtype
            if ours != theirs:
                raise ValueError(
                    f"a head that drafts shares {name!r} with the model, whose parameters are {theirs} while dtype is "
                    f"{ours}; give dtype={str(theirs)!r}"
                )

    def _opened(self, sequence: RequestState) -> bool:
        """Opens a request if there is room for it; returns whether it is open."""
        if sequence in self._rows:
            return True
        if self._failures > _MOST_FAILURES or len(self._rows) >= self._sequence_runner.max_rows:
            return False
        if self._runner.owner.poisoned:
            self._runner.owner.rebuild()
        params = _drawn_alike(sequence.request.params)
        row = _DraftRow(
            self._sequence_runner.new_number(), sequence.epoch, params, features_for(params)
        )
        self._allocator.open(row.number)
        self._rows[sequence] = row
        return True

    def _drop_ended(self) -> None:
        """Releases the pages of requests that have ended or lost theirs."""
        for sequence, row in list(self._rows.items()):
            if sequence.status != RUNNING or sequence.epoch != row.epoch:
                self._allocator.release(row.number)
                del self._rows[sequence]

    def _reserve(self, row: _DraftRow, num_tokens: int) -> int:
        """Reserves pages for a row's first tokens; returns for how many it has some."""
        try:
            reservation = self._allocator.reserve(row.number, min(num_tokens, self._texts[1]))
        except (OutOfPages, OutOfStates):
            pass
        else:
            assert not reservation.copies, "these sequences share no page"
        return self._allocator.held(row.number).writable

    def _catch_up(self, sequences: Sequence[RequestState]) -> None:
        """Computes the positions that the smaller model lacks, in steps of at most its token budget."""
        left: list[tuple[RequestState, _DraftRow, int]] = []
        for sequence in sequences:
            row, known = self._rows[sequence], len(sequence.tokens) - self._ahead
            row.is_followed = row.is_followed and sequence.drafts_on_device
            if row.is_followed:
                row.computed = known
            stop = min(known, self._reserve(row, known))
            if row.computed < stop:
                left.append((sequence, row, stop))
        while left:
            rows: list[Row] = []
            slots: list[np.ndarray] = []
            room = self._shapes.token_budget
            for sequence, row, stop in left:
                count = min(stop - row.computed, room)
                if count and len(rows) < self._sequence_runner.max_rows:
                    begin = row.computed + self._ahead
                    tokens = sequence.tokens[begin : begin + count]
                    rows.append(self._row(sequence, row, tokens, row.computed, emits=False))
                    if self._hidden is not None:
                        slots.append(self._hidden.slots(sequence, row.computed, count))
                    row.computed += count
                    room -= count
            spec = self._shapes.choose(
                len(rows),
                sum(len(row.tokens) for row in rows),
                # Nothing is sampled.
                Features(),
                # A chain may have reserved pages behind `stop`, and the tables hold all of them.
                total_tokens=max(self._allocator.held(row.number).writable for _, row, _ in left),
                fresh=all(row.start == 0 for row in rows),
            )
            self._run_catch_up(self._runner.fit(self._catch_up_spec(spec)), rows, slots)
            left = [one for one in left if one[1].computed < one[2]]

    def _run_catch_up(
        self, spec: CatchUpSpec, rows: Sequence[Row], slots: Sequence[np.ndarray]
    ) -> None:
        arrays: list[np.ndarray | jax.Array] = [
            *self._sequence_runner.packer.pack(spec.step, rows, self._allocator)
        ]
        if self._hidden is not None:
            packed, found = spec.blank_slots(), np.concatenate(slots)
            packed[: len(found)] = found
            arrays += [packed, self._hidden.array]
        self._runner.run(spec, arrays)

    def _chain(self, parts: Sequence[Part]) -> None:
        """Sends the chain of drafts behind a step of these parts, and the program that hands them over."""
        rows: list[Row] = []
        places: list[list[int]] = []
        for part in parts:
            sequence, row = part.sequence, self._rows[part.sequence]
            capacity = self._reserve(row, self._end_of_chain(part))
            _, entry = self._verifier.allocator.states(sequence.number, "sampling")
            rows.append(self._row(sequence, row, (0,), 0, emits=True))
            hidden = [] if self._hidden is None else self._hidden.end_of_text(sequence)
            places.append([entry, capacity, *hidden])
        features = union([self._rows[part.sequence].features for part in parts])
        most = max(capacity for _, capacity, *_ in places)
        step = self._shapes.choose(len(rows), len(rows), features, total_tokens=most)
        spec = self._runner.fit(self._spec(step))
        columns = spec.blank_places()
        columns[:, : len(rows)] = np.transpose(places)
        packed = self._sequence_runner.packer.pack(spec.step, rows, self._allocator)
        verifier = self._verifier.runner
        choices = verifier.cache.layer(verifier.model.num_layers)
        arrays = [*packed, columns, choices["token_history"], choices["text_length"]]
        if self._hidden is not None:
            arrays.append(self._hidden.array)
        drafts = self._runner.run(spec, arrays)
        verifier.run(PutDraftsSpec(spec.step.rows, self._drafts), (columns[:2], drafts))
        for part, (_, capacity, *_) in zip(parts, places, strict=True):
            row, known = self._rows[part.sequence], len(part.sequence.tokens) - self._ahead
            begun = row.is_followed or row.computed >= known
            fits = known > self._drafts and capacity >= self._end_of_chain(part)
            row.is_followed = begun and fits
            if row.is_followed:
                row.computed = max(row.computed, known)

    def _end_of_chain(self, part: Part) -> int:
        """Returns the positions that a chain behind a part computes at most: the text's, and the drafts' but the last.

        The text has at most `start + count + 1` tokens then.
        """
        return part.start + part.count + 1 - self._ahead + self._drafts - 1

    @staticmethod
    def _row(
        sequence: RequestState, row: _DraftRow, tokens: Sequence[int], start: int, *, emits: bool
    ) -> Row:
        seed = sequence.request.seed
        return Row(row.number, tokens, start, row.params, seed=seed, emits=emits)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs what needs the smaller model; if it fails, its cache is made anew, and in the end it drafts no more."""
        try:
            self._join()
            act()
        except (*STEP_FAILURES, CachePoisoned) as error:
            self._failures += 1
            _LOG.warning("the draft model failed, for the %d. time: %r", self._failures, error)
            self._forget()
            self._runner.owner.poison(f"the draft model failed: {error}", cause=error)

    def _forget(self) -> None:
        for row in self._rows.values():
            self._allocator.release(row.number)
        self._rows.clear()


def _drawn_alike(params: SamplingParams) -> SamplingParams:
    """Returns the parameters for drafts: those of the distribution. Penalties and masks are left to the verifier."""
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )
