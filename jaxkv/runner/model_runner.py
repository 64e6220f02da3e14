"""The device's side of inference: parameters, the one live cache, and the compiled programs that update it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.errors import STEP_FAILURES
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.programs.manifest import Program, Programs
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.program_specs import StepSpec, present


class ModelRunner:
    """Runs programs over one cache. It knows packed arrays, and neither sequences nor pages.

    Args:
        model: what to compute.
        params: its parameters, on the device.
        layout: the cache's groups.
        counts: how many pages or states each group has.
        programs: the compiled programs; several runners may share them.

    Attributes:
        implementation: what runs the ops of all layers, and why not something better.
        owner: of the cache.
        packed_layout: lays out the packed arrays of steps.

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
        programs: Programs,
    ) -> None:
        self.implementation = choose_implementation(model, params, layout, counts)
        self.model = model.running(self.implementation.name)
        self.params = params
        self.layout = layout
        self.programs = programs
        self.owner = CacheOwner(layout, counts)
        self.packed_layout = PackedLayout(layout, counts)
        # Those that this runner has used.
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

    def refusal(self, spec: StepSpec) -> Exception | None:
        """Returns why the program could not be had when it was asked for last; `None` if it could, or was not."""
        return self._refused.get(spec) if self._refused else None

    def run(self, spec: ProgramSpec, arrays: Sequence[np.ndarray]) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program of the parameters, the cache, which it updates, and host arrays; returns its output.

        Raises:
            ProgramRefused: there is no such program and none may be compiled; nothing was changed.
            CachePoisoned: it failed after the cache's donation.
        """
        program = self.program(spec)
        return self.owner.run(lambda cache: program(self.params, cache, *present(arrays)))

    def look(self, spec: ProgramSpec, *arrays: np.ndarray) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program that only reads the cache, without parameters."""
        return self.program(spec)(self.owner.handle().cache, *arrays)

    def update(self, spec: ProgramSpec, *arguments: Any) -> Any:  # noqa: ANN401 - the program's own types
        """Dispatches a program that updates the cache, without parameters.

        Raises:
            CachePoisoned: it failed after the cache's donation.
        """
        program = self.program(spec)
        return self.owner.run(lambda cache: program(cache, *arguments))

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
