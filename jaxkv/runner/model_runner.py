"""The device's side of the engine: parameters, the one live cache, and the compiled programs that update it.

It runs what it is given. Which sequences, how many tokens and when to stop are decided by its callers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.page_allocator import PageAllocator, PageCopy
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.errors import STEP_FAILURES
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.programs.manifest import Program, Programs
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.buckets import bucket, power_of_two_buckets
from jaxkv.runner.cache_programs import Admission, AdmitSpec, CopySpec, copy_batches, pack_copies
from jaxkv.runner.packer import Packer
from jaxkv.runner.program_specs import ScoreSpec, StepSpec, present
from jaxkv.runner.rows import Columns, Row


class Executor:
    """Runs packed steps over one cache.

    Args:
        model: what to compute.
        params: its parameters, on the device.
        layout: the cache's groups.
        counts: how many pages or states each group has.
        max_tokens: longest sequence.
        max_rows: most rows of a step.
        programs: where compiled programs are kept.
        host_bytes: memory of the host for prefixes that the cache gave up; an engine uses it.

    Attributes:
        implementation: what runs the ops of all layers, and why not something better.
        before_update: called before each program that updates the cache, to read what it may overwrite.

    Raises:
        Unsupported: the model insists on an implementation that cannot run it here, or the cache is fp8 and would be
            updated by XLA.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        layout: CacheLayout,
        counts: Mapping[str, int],
        *,
        max_tokens: int,
        max_rows: int,
        programs: Programs,
        host_bytes: int = 0,
    ) -> None:
        self.implementation = choose_implementation(model, params, layout, counts)
        self.model = model.running(self.implementation.name)
        self.params = params
        self.layout = layout
        self.programs = programs
        self.host_bytes = host_bytes
        self.before_update: Callable[[], None] | None = None
        self.max_rows = max_rows
        self.length_buckets = power_of_two_buckets(16, max_tokens)
        self.owner = CacheOwner(layout, counts)
        self.allocator = PageAllocator(layout, counts)
        self.packer = Packer(layout, counts, model.vocab_size)
        self._admission = Admission(layout, counts, model)
        self._numbers = count()
        self._biased: set[tuple[int, int]] = set()
        # Those that this executor has used; several executors may share `programs`.
        self._known: dict[ProgramSpec, Program] = {}
        self._refused: dict[ProgramSpec, Exception] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Pages or states of each group."""
        return self.owner.counts

    @property
    def cache(self) -> Cache:
        """The live cache; the next program that updates it takes its arrays away."""
        return self.owner.handle().cache

    def close(self) -> None:
        """Frees the cache, and lets go of the parameters and the programs; nothing can be run afterwards."""
        self.owner.close()
        self.params = ()
        self._known.clear()
        # The tracebacks of these errors refer to the parameters.
        self._refused.clear()
        self.programs.clear()

    def new_number(self) -> int:
        """Returns a number for a sequence that the page allocator does not know yet."""
        return next(self._numbers)

    @contextmanager
    def reserved(self, num_tokens: int) -> Iterator[int]:
        """Holds pages and states for a new sequence and yields its number; gives them back whatever happens.

        Raises:
            OutOfPages: too few are free; nothing was taken (`OutOfStates` likewise).
        """
        sequence = self.new_number()
        self.allocator.open(sequence)
        try:
            reservation = self.allocator.reserve(sequence, num_tokens)
            assert not reservation.copies, "a sequence that shares nothing needs no copies"
            yield sequence
        finally:
            self.allocator.release(sequence)

    def fit[S: ProgramSpec](self, spec: S) -> S:
        """Returns the program to use: if this one is not compiled, the cheapest compiled one that serves as well.

        Unless strict, only one that takes hardly longer; where there is none, the program itself, which is compiled
        when it is first run.
        """
        if spec in self._known:
            return spec
        able = [known for known in self._known if known.serves(spec)]
        if not self.programs.strict:
            able = [known for known in able if known.costs_like(spec)]
        found = min(able, key=lambda known: known.order_of_cost, default=spec)
        assert isinstance(found, type(spec)), "a program serves only for others of its kind"
        return found

    def has(self, spec: ProgramSpec) -> bool:
        """Returns whether a program is compiled."""
        return spec in self._known

    def step(self, shape: StepSpec, rows: Columns | Sequence[Row]) -> Array:
        """Dispatches one step and returns its packed tokens, which may not be computed yet.

        A program of several steps returns those of each, along a first axis. Get them with `read`, and name them with
        `jaxkv.runner.sampled_rows.unpack_sampled`.
        """
        return self._run(self.program(shape), self.packer.pack(shape, rows, self.allocator))

    def refusal(self, spec: StepSpec) -> Exception | None:
        """Returns why the program could not be had when it was asked for last; `None` if it could, or was not."""
        return self._refused.get(spec) if self._refused else None

    def score(self, spec: ScoreSpec, rows: Sequence[Row]) -> Array:
        """Returns, for each packed token, the log-probability of the token packed after it."""
        packed = self.packer.pack(spec.step, rows, self.allocator)
        return self._run(self.program(spec), packed)

    def admit(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> None:
        """Gives rows that penalties may concern clean entries in the sampling group; `tokens` are whole prompts.

        Args:
            rows: who gets an entry.
            generated: per row, what it has generated already, if any of them has.
        """
        spec = self.fit(self.admit_spec(rows, generated))
        entries = [self.allocator.states(row.sequence, "sampling")[1] for row in rows]
        arrays = self._admission.pack(spec, rows, generated, entries)
        self._run(self.program(spec), arrays)
        for row, entry in zip(rows, entries, strict=True):
            self._note_bias(entry, biased=bool(row.params.logit_bias))

    def admit_spec(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> AdmitSpec:
        """Returns the program that `admit` runs."""
        count = bucket(len(rows), power_of_two_buckets(1, self.max_rows))
        outputs = max((len(tokens) for tokens in generated), default=0)
        longest = max(outputs, *(len(row.tokens) for row in rows))
        return AdmitSpec(count, bucket(longest, self.length_buckets), returning=outputs > 0)

    def score_spec(self, row: Row) -> ScoreSpec:
        """Returns the program that scores one text, or a part of it."""
        length = bucket(row.start + len(row.tokens), self.length_buckets)
        tokens = bucket(len(row.tokens), self.length_buckets)
        groups = self.layout.paged_groups
        widths = tuple(group.pages_for(length) for group in groups)
        fresh = row.start == 0 and tokens <= self.layout.expands
        return ScoreSpec(StepSpec(tokens, 1, widths, fresh=fresh))

    def is_biased(self, entry: int) -> bool:
        """Whether an entry of the sampling group holds a bias, which programs with penalties would add for anybody."""
        return (self.owner.rebuilds, entry) in self._biased

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Makes the copies that reservations ask for, in order."""
        for batch in copy_batches(copies):
            ids = pack_copies(self.layout, self.owner.counts, batch)
            self._run(self.program(CopySpec()), (ids,))
            for copy in batch:
                if copy.group == "sampling":
                    self._note_bias(copy.target, biased=self.is_biased(copy.source))

    def look(self, spec: ProgramSpec, *arrays: np.ndarray) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program that only reads the cache, without parameters."""
        return self.program(spec)(self.owner.handle().cache, *arrays)

    def update(self, spec: ProgramSpec, *arguments: Any) -> Any:  # noqa: ANN401 - the program's own types
        """Dispatches a program that updates the cache, without parameters.

        Raises:
            CachePoisoned: it failed after the donation.
        """
        program = self.program(spec)
        self._flush()
        return self.owner.run(lambda cache: program(cache, *arguments))

    def _flush(self) -> None:
        if self.before_update is not None:
            self.before_update()

    def _note_bias(self, entry: int, *, biased: bool) -> None:
        # A new cache is clean, so what was noted of the one before it does not count.
        note = self._biased.add if biased else self._biased.discard
        note((self.owner.rebuilds, entry))

    def read(self, out: Any) -> Any:  # noqa: ANN401 - a pytree of device arrays, as NumPy
        """Waits for a step's output and returns it as NumPy.

        A step that ran out of memory, say, is heard of only here; its cache is lost with it.
        """
        try:
            return jax.device_get(out)
        except jax.errors.JaxRuntimeError as error:
            self.owner.poison(f"a step failed while it ran: {error}", cause=error)
            raise

    def program(self, spec: ProgramSpec) -> Program:
        """Returns the compiled form of a program.

        Raises:
            ProgramRefused: as `Programs.get`.
        """
        program = self._known.get(spec)
        if program is None:
            try:
                program = self.programs.get(spec, lambda: spec.lowering(self))
            except STEP_FAILURES as error:
                self._refused[spec] = error
                raise
            self._known[spec] = program
            self._refused.pop(spec, None)
        return program

    def compile_all(
        self, needed: Sequence[ProgramSpec], *, progress: bool = False
    ) -> list[Program]:
        """Returns the compiled forms of many programs, which are compiled side by side.

        Args:
            needed: which.
            progress: show a bar on stderr.
        """
        builds = {spec: partial(spec.lowering, self) for spec in needed}
        self.programs.get_all(builds, progress=progress)
        return [self.program(spec) for spec in builds]

    def _run(self, program: Program, arrays: Sequence[np.ndarray]) -> Any:  # noqa: ANN401 - the program's own output
        self._flush()
        return self.owner.run(lambda cache: program(self.params, cache, *present(arrays)))
