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

from jaxkv.cache.accounts import Accounts, PageCopy
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.engine.fields import StepShape
from jaxkv.engine.host_programs import SWAP_IN, SWAP_OUT, swap_lowering
from jaxkv.engine.packer import Packer
from jaxkv.engine.programs import Lowering, Program, ProgramKey, Programs
from jaxkv.engine.recovery import STEP_FAILURES
from jaxkv.engine.results import pack_sampled
from jaxkv.engine.rows import Columns, Row
from jaxkv.engine.shapes import Declared, Shapes, costs_alike, serves
from jaxkv.engine.side_programs import COPY, Admission, copy_batches, pack_copies, run_copies
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.step.burst import decode_burst
from jaxkv.step.loop import Generated, generate_loop
from jaxkv.step.score import score_tokens
from jaxkv.step.step import step


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
        self.shapes = Shapes(layout, max_tokens=max_tokens, max_rows=max_rows)
        self.owner = CacheOwner(layout, counts)
        self.accounts = Accounts(layout, counts)
        self.packer = Packer(layout, counts, model.vocab_size)
        self._admission = Admission(layout, counts, model.num_layers, model.vocab_size)
        self._numbers = count()
        self._biased: set[tuple[int, int]] = set()
        self._known: dict[Declared, Program] = {}
        self._refused: dict[Declared, Exception] = {}

    def new_number(self) -> int:
        """Returns a number for a sequence that the accounts do not know yet."""
        return next(self._numbers)

    @contextmanager
    def reserved(self, num_tokens: int) -> Iterator[int]:
        """Holds pages and states for a new sequence and yields its number; gives them back whatever happens.

        Raises:
            OutOfPages: too few are free; nothing was taken (`OutOfStates` likewise).
        """
        sequence = self.new_number()
        self.accounts.open(sequence)
        try:
            reservation = self.accounts.reserve(sequence, num_tokens)
            assert not reservation.copies, "a sequence that shares nothing needs no copies"
            yield sequence
        finally:
            self.accounts.release(sequence)

    def fit(self, declared: Declared) -> Declared:
        """Returns the program to use: if this one is not compiled, the smallest compiled one that serves as well.

        Unless strict, only one that takes hardly longer; where there is none, the program itself, which is compiled
        when it is first run.
        """
        if declared in self._known:
            return declared
        able = [known for known in self._known if serves(known, declared)]
        if not self.programs.strict:
            able = [known for known in able if costs_alike(known, declared)]
        sizes = {
            known: (known.shape.tokens, known.shape.rows, not known.shape.fresh) for known in able
        }
        return min(able, key=sizes.__getitem__, default=declared)

    def has(self, declared: Declared) -> bool:
        """Whether a program is compiled."""
        return declared in self._known

    def step(self, shape: StepShape, rows: Columns | Sequence[Row]) -> Array:
        """Dispatches one step and returns its packed tokens, which may not be computed yet.

        A program of several steps returns those of each, along a first axis. Get them with `read`, and name them with
        `jaxkv.engine.results.unpack_sampled`.
        """
        program = self.step_program(shape)
        return self._run(program, self.packer.pack(shape, rows, self.accounts))

    def refusal(self, shape: StepShape) -> Exception | None:
        """Returns why the program of a step could not be had when it was asked for last, if it was and could not."""
        return self._refused.get(_step(shape)) if self._refused else None

    def step_program(self, shape: StepShape) -> Program:
        """Returns the compiled step of a shape."""
        return self.program(_step(shape))

    def loop(self, declared: Declared, rows: Sequence[Row]) -> Generated:
        """Generates until every row has stopped, in one executable."""
        packed = self.packer.pack(declared.shape, rows, self.accounts)
        return self._run(self.program(declared), packed)

    def score(self, declared: Declared, rows: Sequence[Row]) -> Array:
        """Returns, for each packed token, the log-probability of the token packed after it."""
        packed = self.packer.pack(declared.shape, rows, self.accounts)
        return self._run(self.program(declared), packed)

    def admit(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> None:
        """Gives rows that penalties may concern clean entries in the sampling group; `tokens` are whole prompts.

        Args:
            rows: who gets an entry.
            generated: per row, what it has generated already, if any of them has.
        """
        declared = self.fit(self.shapes.admit(rows, generated))
        entries = [self.accounts.states(row.sequence, "sampling")[1] for row in rows]
        arrays = self._admission.pack(declared, rows, generated, entries)
        self._run(self.program(declared), arrays)
        for row, entry in zip(rows, entries, strict=True):
            self._note_bias(entry, biased=bool(row.params.logit_bias))

    def is_biased(self, entry: int) -> bool:
        """Whether an entry of the sampling group holds a bias, which programs with penalties would add for anybody."""
        return (self.owner.rebuilds, entry) in self._biased

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Makes the copies that reservations ask for, in order."""
        for batch in copy_batches(copies):
            ids = pack_copies(self.layout, self.owner.counts, batch)
            self._run(self.program(COPY), (ids,))
            for copy in batch:
                if copy.group == "sampling":
                    self._note_bias(copy.target, biased=self.is_biased(copy.source))

    def look(self, declared: Declared, *arrays: np.ndarray) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program that only reads the cache, without parameters."""
        return self.program(declared)(self.owner.handle().cache, *arrays)

    def update(self, declared: Declared, *arguments: Any) -> Any:  # noqa: ANN401 - the program's own types
        """Dispatches a program that updates the cache, without parameters.

        Raises:
            CachePoisoned: it failed after the donation.
        """
        program = self.program(declared)
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

    def program(self, declared: Declared) -> Program:
        """Returns the compiled form of a program."""
        program = self._known.get(declared)
        if program is None:
            try:
                program = self.programs.get(
                    key_of(self.layout, declared), lambda: self._lowering(declared)
                )
            except STEP_FAILURES as error:
                self._refused[declared] = error
                raise
            self._known[declared] = program
            self._refused.pop(declared, None)
        return program

    def compile_all(self, needed: Sequence[Declared], *, progress: bool = False) -> list[Program]:
        """Returns the compiled forms of many programs, which are compiled side by side.

        Args:
            needed: which.
            progress: show a bar on stderr.
        """
        keys = {declared: key_of(self.layout, declared) for declared in needed}
        builds = {key: partial(self._lowering, declared) for declared, key in keys.items()}
        self.programs.get_all(builds, progress=progress)
        return [self.program(declared) for declared in keys]

    def _lowering(self, declared: Declared) -> Lowering:
        if declared.kind in (SWAP_OUT, SWAP_IN):
            cache = self.owner.handle().cache
            return swap_lowering(self.layout, self.owner.counts, declared, cache)
        if declared.kind in ("admit", "readmit"):
            run, arrays = self._admission.run, self._admission.blank(declared)
        elif declared.kind == "copy":
            run = run_copies(self.layout)
            arrays = (pack_copies(self.layout, self.owner.counts, ()),)
        else:
            run, arrays = self._function(declared), self.packer.blank(declared.shape)
        cache = self.owner.handle().cache
        return Lowering(run, (self.params, cache, *_present(arrays)), cache_argument=1)

    def _function(self, declared: Declared) -> Callable[..., tuple[Cache, Any]]:
        """Returns what a program computes: unpack, then the step, the loop or the scores."""
        page_sizes = tuple(group.page_size for group in self.layout.paged_groups)

        def run(params: Params, cache: Cache, *packed: Array) -> tuple[Cache, Any]:
            batch, limits = self.packer.unpack(declared.shape, *packed)
            if declared.kind == "score":
                return score_tokens(self.model, params, cache, batch)
            if limits is not None:
                return generate_loop(
                    self.model,
                    params,
                    cache,
                    batch,
                    limits,
                    page_sizes=page_sizes,
                    max_tokens=declared.width,
                )
            if declared.shape.steps > 1:
                cache, several = decode_burst(
                    self.model,
                    params,
                    cache,
                    batch,
                    self.packer.left(declared.shape, packed[0]),
                    page_sizes=page_sizes,
                    steps=declared.shape.steps,
                )
                return cache, jax.vmap(pack_sampled)(several)
            cache, sampled = step(self.model, params, cache, batch)
            return cache, pack_sampled(sampled)

        return run

    def _run(self, program: Program, arrays: Sequence[np.ndarray]) -> Any:  # noqa: ANN401 - the program's own output
        self._flush()
        return self.owner.run(lambda cache: program(self.params, cache, *_present(arrays)))


def _step(shape: StepShape) -> Declared:
    return Declared("decode" if shape.decode else "prefill", shape)


def _present(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Leaves out empty arrays: a transfer of nothing still costs one."""
    return [array for array in arrays if array.size]


def key_of(layout: CacheLayout, declared: Declared) -> ProgramKey:
    """Returns the key that a program is compiled under."""
    shape = declared.shape
    extra = (("width", declared.width),) if declared.width else ()
    extra += (("snapshots", shape.snapshots),) if shape.snapshots else ()
    extra += (("fresh", 1),) if shape.fresh else ()
    extra += (("steps", shape.steps),) if shape.steps > 1 else ()
    if not shape.table_widths:
        return ProgramKey(declared.kind, shape.tokens, shape.rows, 0, shape.features, extra)
    groups = zip(layout.paged_groups, shape.table_widths, strict=True)
    extra += tuple((f"{group.name}_width", width) for group, width in groups)
    widest = max(shape.table_widths, default=0)
    return ProgramKey(declared.kind, shape.tokens, shape.rows, widest, shape.features, extra)
