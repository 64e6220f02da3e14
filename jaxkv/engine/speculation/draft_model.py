"""`DraftModel`: drafts by a smaller model with the same vocabulary, which has pages and programs of its own."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request_state import RUNNING, RequestState
from jaxkv.engine.steps.step_plan import Part
from jaxkv.errors import STEP_FAILURES, CachePoisoned, OutOfPages, OutOfStates
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.draft_programs import DraftSpec, PutDraftsSpec
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
        computed: tokens of the request whose keys and values are computed, at least.
        is_followed: the last chain had room for its drafts, so it has also computed the tokens before them.
    """

    number: int
    epoch: int
    params: SamplingParams
    features: Features
    computed: int = 0
    is_followed: bool = False


class DraftModel:
    """Drafts with a smaller model. Prompts are computed when a request first drafts, and later what it lacks.

    After each step that verifies drafts it computes the next ones, from the texts that the verifying model's cache
    keeps on the device. Its errors cost drafts, and no request.

    Args:
        sequence_runner: runs the smaller model, over a cache of its own.
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

    def draft(
        self, sequences: Sequence[RequestState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Computes what it lacks of these requests. It drafts nothing at once: the step sent next is followed."""
        self._drop_ended()
        self._guarded(lambda: self._catch_up([one for one in sequences if self._opened(one)]))
        return [()] * len(sequences)

    def follow(self, parts: Sequence[Part]) -> None:
        """Drafts the tokens behind a step that was sent and verifies drafts; the device need not have run it."""
        rows = [part for part in parts if part.sequence in self._rows]
        if rows:
            self._guarded(lambda: self._chain(rows))

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
        """Gives back the memory of its cache; the next draft makes it again."""
        self._forget()
        self._runner.owner.close()

    def close(self) -> None:
        """Frees its cache, and drops its parameters and programs."""
        self._forget()
        self._runner.close()

    def declare(
        self, sampling: SamplingParams, rows: int
    ) -> tuple[list[ProgramSpec], list[ProgramSpec]]:
        """Lists its programs for up to `rows` requests with such parameters, and those of the verifying model."""
        features = features_for(_drawn_alike(sampling))
        rows = min(rows, self._sequence_runner.max_rows)
        declared = self._shapes.declare_all(features, rows=rows)
        steps = [step for step in declared if isinstance(step, StepSpec)]
        chains = [self._spec(step) for step in steps if step.decode]
        puts = {PutDraftsSpec(chain.step.rows, self._drafts): None for chain in chains}
        # A chunk of one token per row is a decode step.
        return [*steps, *chains], [*puts]

    def compile(self, specs: Sequence[ProgramSpec]) -> None:
        """Compiles programs of the smaller model; in strict mode no others are compiled from then on."""
        self._runner.programs.unseal()
        try:
            self._runner.compile_all(specs)
        finally:
            self._runner.programs.seal()

    def _spec(self, step: StepSpec) -> DraftSpec:
        return DraftSpec(step, self._drafts, self._texts)

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
        """Computes the tokens that the smaller model lacks, in steps of at most its token budget."""
        left: list[tuple[RequestState, _DraftRow, int]] = []
        for sequence in sequences:
            row, known = self._rows[sequence], len(sequence.tokens)
            if sequence.drafts_on_device and row.is_followed:
                row.computed = known
            stop = min(known, self._reserve(row, known))
            if row.computed < stop:
                left.append((sequence, row, stop))
        while left:
            rows: list[Row] = []
            room = self._shapes.token_budget
            for sequence, row, stop in left:
                count = min(stop - row.computed, room)
                if count and len(rows) < self._sequence_runner.max_rows:
                    tokens = sequence.tokens[row.computed : row.computed + count]
                    rows.append(self._row(sequence, row, tokens, row.computed, emits=False))
                    row.computed += count
                    room -= count
            features = union([row.features for _, row, _ in left])
            spec = self._shapes.choose(
                len(rows),
                sum(len(row.tokens) for row in rows),
                features,
                # A chain may have reserved pages behind `stop`, and the tables hold all of them.
                total_tokens=max(self._allocator.held(row.number).writable for _, row, _ in left),
                fresh=all(row.start == 0 for row in rows),
            )
            self._sequence_runner.step(self._runner.fit(spec), rows)
            left = [one for one in left if one[1].computed < one[2]]

    def _chain(self, parts: Sequence[Part]) -> None:
        """Sends the chain of drafts behind a step of these parts, and the program that hands them over."""
        rows: list[Row] = []
        entries: list[int] = []
        capacities: list[int] = []
        for part in parts:
            sequence, row = part.sequence, self._rows[part.sequence]
            # The text has at most this many tokens then; the drafts but the last are computed too.
            ends = part.start + part.count + 1
            capacity = self._reserve(row, ends + self._drafts - 1)
            _, entry = self._verifier.allocator.states(sequence.number, "sampling")
            rows.append(self._row(sequence, row, (0,), 0, emits=True))
            entries.append(entry)
            capacities.append(capacity)
        features = union([self._rows[part.sequence].features for part in parts])
        step = self._shapes.choose(len(rows), len(rows), features, total_tokens=max(capacities))
        spec = self._runner.fit(self._spec(step))
        places = spec.blank_places()
        places[0, : len(rows)], places[1, : len(rows)] = entries, capacities
        packed = self._sequence_runner.packer.pack(spec.step, rows, self._allocator)
        verifier = self._verifier.runner
        choices = verifier.cache.layer(verifier.model.num_layers)
        texts = (choices["token_history"], choices["text_length"])
        drafts = self._runner.run(spec, (*packed, places, *texts))
        verifier.run(PutDraftsSpec(spec.step.rows, self._drafts), (places, drafts))
        for part, capacity in zip(parts, capacities, strict=True):
            row, known = self._rows[part.sequence], len(part.sequence.tokens)
            ends = part.start + part.count + 1
            row.is_followed = known > self._drafts and capacity >= ends + self._drafts - 1
            if row.is_followed:
                row.computed = max(row.computed, known)

    @staticmethod
    def _row(
        sequence: RequestState, row: _DraftRow, tokens: Sequence[int], start: int, *, emits: bool
    ) -> Row:
        seed = sequence.request.seed
        return Row(row.number, tokens, start, row.params, seed=seed, emits=emits)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs what needs the smaller model; if it fails, its cache is made anew, and in the end it drafts no more."""
        try:
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
