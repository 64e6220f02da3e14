"""Runs steps of sequences: allocates their pages, packs their rows, and initializes their sampling entries."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np
from jaxtyping import Array

from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.runner.buckets import bucket, power_of_two_buckets
from jaxkv.runner.cache_programs import Admission, AdmitSpec, CopySpec, copy_batches, pack_copies
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.packer import Packer
from jaxkv.runner.program_specs import ScoreSpec, StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.sampling.features import Features
from jaxkv.step.score import TokenScores


class SequenceRunner:
    """The host side of one cache: the page allocator, and programs on rows of sequences.

    Its callers decide which sequences run, with how many tokens.

    Args:
        runner: runs the programs.
        max_tokens: longest sequence.
        max_rows: most rows of a step.

    Attributes:
        runner: runs the programs.
        max_rows: most rows of a step.
        allocator: allocates pages and states.
        packer: packs rows.
        length_buckets: padded lengths of prompts and texts, ascending.
    """

    def __init__(self, runner: ModelRunner, *, max_tokens: int, max_rows: int) -> None:
        self.runner = runner
        self.max_rows = max_rows
        self.length_buckets = power_of_two_buckets(16, max_tokens)
        self.allocator = PageAllocator(runner.layout, runner.counts)
        self.packer = Packer(runner.packed_layout, runner.model.vocab_size)
        self._admission = Admission(runner.layout, runner.counts, runner.model, runner.processors)
        self._numbers = count()
        self._biased: set[tuple[int, int]] = set()

    @property
    def keeps_texts(self) -> bool:
        """Whether the cache keeps the text of every sequence, for drafts; so each sequence is admitted."""
        return self.runner.layout.kept_drafts > 0

    def new_number(self) -> int:
        """Returns an unused sequence number."""
        return next(self._numbers)

    @contextmanager
    def reserved(self, num_tokens: int) -> Iterator[int]:
        """Reserves pages and states for a new sequence and yields its number; releases them at the end.

        Raises:
            OutOfPages, OutOfStates: too few are free; none was taken.
        """
        sequence = self.new_number()
        self.allocator.open(sequence)
        try:
            reservation = self.allocator.reserve(sequence, num_tokens)
            assert not reservation.copies, "a new sequence shares no page, so it needs no copy"
            yield sequence
        finally:
            self.allocator.release(sequence)

    def shares_keys(self, sequences: Sequence[int], starts: Sequence[int]) -> bool:
        """Returns whether a decode step of these sequences should read the keys once with which several begin.

        Args:
            sequences: their numbers in the allocator.
            starts: the position of each one's new token.
        """
        return self.packer.shared_rows(sequences, starts, self.allocator) is not None

    def step(self, shape: StepSpec, rows: StepRows | Sequence[Row]) -> Array:
        """Dispatches one step and returns its packed tokens, which may not be computed yet.

        A program of several steps returns those of all steps, along a first axis. `ModelRunner.read` waits for them,
        and `jaxkv.runner.sampled_rows.unpack_sampled` unpacks them.
        """
        return self.runner.run(shape, self.packer.pack(shape, rows, self.allocator))

    def forward(
        self, shape: StepSpec, sampler: SampleSpec, rows: StepRows
    ) -> tuple[Array, tuple[np.ndarray, np.ndarray]]:
        """Dispatches the first program of a step in two; returns the rows' hidden states, and what `sample` takes.

        Args:
            shape: the spec of the first program.
            sampler: the spec of the second one, or of another with the same rows and features.
            rows: the rows.
        """
        # First, because nothing may fail after the dispatch.
        arrays = self.packer.pack_sampling(sampler, rows, self.allocator)
        return self.step(shape, rows), arrays

    def sample(
        self,
        sampler: SampleSpec,
        arrays: tuple[np.ndarray, np.ndarray],
        masks: Sequence[np.ndarray | None],
    ) -> Array:
        """Dispatches the second program of the last step; returns its packed tokens, as `step` does.

        Args:
            sampler: the spec of the program.
            arrays: what `forward` returned beside the hidden states, which the runner has.
            masks: see `StepRows.masks`.
        """
        ints, floats = arrays
        packed = self.packer.pack_masks(sampler, masks)
        return self.runner.run(sampler, (ints, packed, floats))

    def score(self, spec: ScoreSpec, rows: Sequence[Row]) -> TokenScores:
        """Returns the scores of the packed tokens, on the device."""
        return self.runner.run(spec, self.packer.pack(spec.step, rows, self.allocator))

    def admit(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> None:
        """Initializes the entries of some rows in the sampling group, which penalties, biases and processors read.

        Args:
            rows: the rows; their `tokens` are whole prompts.
            generated: per row, its generated tokens; empty if no row has any.
        """
        spec = self.runner.fit(self.admit_spec(rows, generated))
        entries = [self.allocator.states(row.sequence, "sampling")[1] for row in rows]
        arrays = self._admission.pack(spec, rows, generated, entries)
        self.runner.run(spec, arrays)
        for row, entry in zip(rows, entries, strict=True):
            self._note_bias(entry, biased=bool(row.params.logit_bias))

    def admit_spec(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> AdmitSpec:
        """Returns the program that `admit` needs for these rows."""
        count = bucket(len(rows), power_of_two_buckets(1, self.max_rows))
        outputs = max((len(tokens) for tokens in generated), default=0)
        longest = max(outputs, *(len(row.tokens) for row in rows))
        return AdmitSpec(count, bucket(longest, self.length_buckets), returning=outputs > 0)

    def score_spec(self, row: Row, top: int = 0) -> ScoreSpec:
        """Returns the program that scores one text, or a part of it, and reports `top` most likely tokens."""
        length = bucket(row.start + len(row.tokens), self.length_buckets)
        tokens = bucket(len(row.tokens), self.length_buckets)
        groups = self.runner.layout.paged_groups
        widths = tuple(group.pages_for(length) for group in groups)
        fresh = row.start == 0 and tokens <= self.runner.layout.expands
        features = Features(lora=row.adapter_slot > 0)
        return ScoreSpec(StepSpec(tokens, 1, widths, features, fresh=fresh), top)

    def is_biased(self, entry: int) -> bool:
        """Whether an entry of the sampling group holds a logit bias; programs with penalties add it to any row."""
        return (self.runner.owner.rebuilds, entry) in self._biased

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Makes the copies that reservations need, in order."""
        for batch in copy_batches(copies):
            ids = pack_copies(self.runner.layout, self.runner.owner.counts, batch)
            self.runner.run(CopySpec(), (ids,))
            for copy in batch:
                if copy.group == "sampling":
                    self._note_bias(copy.target, biased=self.is_biased(copy.source))

    def _note_bias(self, entry: int, *, biased: bool) -> None:
        # A rebuilt cache has no biases, so notes of the cache before it are ignored.
        note = self._biased.add if biased else self._biased.discard
        note((self.runner.owner.rebuilds, entry))
