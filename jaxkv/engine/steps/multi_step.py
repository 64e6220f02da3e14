"""Decides when several decode steps are sent as one program, and which program that is.

For a small model the host needs about as long to dispatch a step as the GPU needs to run it. A program of several steps
costs the host hardly more than one step. In return its tokens arrive together, and a row that stops early wastes the
remaining steps.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.steps.oom_backoff import OomBackoff
from jaxkv.engine.steps.step_plan import Part
from jaxkv.models.protocol import Params
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import Features, union
from jaxkv.weights.quantised.weight_forms import bytes_of_types

_LOG = logging.getLogger(__name__)

_STEPS = 4
_SMALL_BYTES = 4 * 2**30
"""Bytes of parameters that a GPU reads in about a millisecond, the time that the host needs to dispatch a step."""
_SMALL_BYTES_OF_SEVERAL = 12 * 2**30
"""The same for each of several GPUs: the host needs about three milliseconds to dispatch a step to two."""
_FEW_ROWS = 16
_SAMPLES = 8
"""Single steps to measure before deciding whether the device waits for the host."""


class MultiStep:
    """Decides when decode steps of one engine are sent several at a time.

    Args:
        runner: runs the programs.
        shapes: padded shapes of single steps.
        oom_backoff: shapes to avoid.
        steps: decode steps per program; 1 sends every step alone. `None` decides by measurement: it sends several steps
            if the device was waiting for the host, the model and the batch are small, the requests are greedy, all
            layers have full attention, and the program is compiled already.

    Attributes:
        most: decode steps per program; 1 if steps are always sent alone.
    """

    def __init__(
        self, runner: ModelRunner, shapes: StepShapes, oom_backoff: OomBackoff, steps: int | None
    ) -> None:
        self._runner, self._shapes, self._oom_backoff = runner, shapes, oom_backoff
        self._automatic = steps is None
        self.most = choose_num_steps(steps, runner.params, runner.layout)
        self._measured: dict[StepSpec, tuple[int, int]] = {}
        self._sent_singly: set[StepSpec] = set()

    def measures(self, shape: StepSpec) -> bool:
        """Whether `record` should be called for steps of this shape."""
        return self._automatic and self.most > 1 and _benefits(shape)

    def record(self, shape: StepSpec, *, idle: bool) -> None:
        """Records a measurement of a single step.

        Args:
            shape: the shape of the step.
            idle: the device had finished the step before when this one was dispatched.
        """
        seen, waited = self._measured.get(shape, (0, 0))
        if seen >= 8 * _SAMPLES:
            seen, waited = seen // 2, waited // 2
        self._measured[shape] = seen + 1, waited + idle

    def shape(self, parts: Sequence[Part]) -> StepSpec | None:
        """Returns the program that runs several steps of these parts; `None` to send them one by one."""
        features = union([part.sequence.features for part in parts])
        if features.min_tokens or features.grammar:
            return None  # The host decides for each token whether stop ids are blocked, and which tokens are allowed.
        single = self._shapes.choose(
            len(parts),
            len(parts),
            features,
            total_tokens=max(part.sequence.reserved for part in parts),
        )
        if not single.decode or (self._automatic and not self._device_waits(single)):
            return None
        needed = self._runner.fit(_several(single, self.most))
        must_be_compiled = self._automatic or self._runner.programs.is_closed
        if must_be_compiled and not self._runner.has(needed):
            return None
        return None if self.avoids(needed) else needed

    def avoids(self, shape: StepSpec) -> bool:
        """Whether steps of this shape are sent with one token per row, because its program failed."""
        return shape in self._sent_singly or self._oom_backoff.avoids(shape)

    def send_singly(self, shape: StepSpec, error: Exception) -> None:
        """Sends such steps with one token per row from now on, after the program failed with another error than OOM."""
        _LOG.warning(
            "the program %s failed; such steps are sent with one token per row from now on: %r",
            shape.name,
            error,
        )
        self._sent_singly.add(shape)

    def declare(self, needed: Sequence[ProgramSpec]) -> list[StepSpec]:
        """Lists the programs of several steps for the given programs of single steps."""
        return declare_multi_steps(needed, self.most, automatic=self._automatic)

    def _device_waits(self, single: StepSpec) -> bool:
        seen, waited = self._measured.get(self._runner.fit(single), (0, 0))
        return seen >= _SAMPLES and 2 * waited > seen


def choose_num_steps(requested: int | None, params: Params, layout: CacheLayout) -> int:
    """Returns the decode steps per program: `requested`, or if that is `None`, several for a small model on GPUs.

    Args:
        requested: `EngineConfig.steps_per_launch`.
        params: the model's parameters, or their types; with shardings if several devices divide them.
        layout: the cache's groups.
    """
    if requested is not None:
        return requested
    paged = layout.paged_groups
    if len(paged) != 1 or paged[0].window is not None or layout.state_groups or layout.expands:
        return 1
    places = [leaf.sharding for leaf in jax.tree.leaves(params)]
    several = any(place is not None and place.num_devices > 1 for place in places)
    small = bytes_of_types(params) <= (_SMALL_BYTES_OF_SEVERAL if several else _SMALL_BYTES)
    return _STEPS if jax.default_backend() == "gpu" and small else 1


def declare_multi_steps(
    needed: Sequence[ProgramSpec], steps: int, *, automatic: bool
) -> list[StepSpec]:
    """Lists the programs of several steps for the given programs of single steps.

    Args:
        needed: programs, of which decode steps are used and others skipped.
        steps: decode steps per program.
        automatic: `steps` was chosen automatically, so only small batches of greedy requests have such programs.
    """
    return [
        _several(single, steps)
        for single in needed
        if isinstance(single, StepSpec)
        and steps > 1
        and single.decode
        and not (single.features.min_tokens or single.forward_only)
        and (not automatic or _benefits(single))
    ]


def _benefits(shape: StepSpec) -> bool:
    """Whether measurements on a GPU showed that several such steps in one program are faster, with the same tokens."""
    few = shape.decode and shape.rows <= _FEW_ROWS
    return few and not shape.forward_only and shape.features == Features()


def _several(single: StepSpec, steps: int) -> StepSpec:
    return replace(single, steps=steps)
