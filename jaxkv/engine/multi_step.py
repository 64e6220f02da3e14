"""When several decode steps are sent as one program, and as which. Sends nothing.

The host needs about as long to send a step as a GPU needs for that of a small model. Several at once cost it hardly
more than one, at the price that tokens come together, and that a row is computed further in vain after a stop.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.oom_backoff import OomBackoff
from jaxkv.engine.step_plan import Part
from jaxkv.models.protocol import Params
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import Features, union

_LOG = logging.getLogger(__name__)

_STEPS = 4
_SMALL_BYTES = 4 * 2**30
"""Parameters that a GPU reads in about a millisecond, the time that the host takes for a step."""
_FEW_ROWS = 16
_SAMPLES = 8
"""Steps that are sent one by one before it is known whether the device waits for the host."""


class MultiStep:
    """Decides when the decode steps of one engine are sent several at a time.

    Args:
        runner: runs them.
        shapes: padded shapes of single steps.
        oom_backoff: shapes that are not run.
        steps: of each program; 1 sends every step alone. `None` sends several where the device was seen to wait for the
            host: only for models and batches so small that it may, in programs that are compiled already, and where
            that was measured on a GPU, which is greedy requests with full attention in every layer.
    """

    def __init__(
        self, runner: ModelRunner, shapes: StepShapes, oom_backoff: OomBackoff, steps: int | None
    ) -> None:
        self._runner, self._shapes, self._oom_backoff = runner, shapes, oom_backoff
        self._looks = steps is None
        self.most = settle_steps(steps, runner.params, runner.layout)
        """How many steps a program has."""
        self._seen: dict[StepSpec, tuple[int, int]] = {}
        self._given_up: set[StepSpec] = set()

    def looks_at(self, shape: StepSpec) -> bool:
        """Whether steps of a shape are to be noted."""
        return self._looks and self.most > 1 and _is_measured(shape)

    def note(self, shape: StepSpec, *, idle: bool) -> None:
        """Records whether the device had done all that was sent before, when a single step had been sent."""
        seen, waited = self._seen.get(shape, (0, 0))
        if seen >= 8 * _SAMPLES:
            seen, waited = seen // 2, waited // 2
        self._seen[shape] = seen + 1, waited + idle

    def shape(self, parts: Sequence[Part]) -> StepSpec | None:
        """Returns the program that runs several steps of these parts; `None` if they should be sent one by one."""
        features = union([part.sequence.features for part in parts])
        if features.min_tokens:
            return None  # Whether stop ids are blocked is decided on the host, for each token.
        single = self._shapes.choose(
            len(parts),
            len(parts),
            features,
            total_tokens=max(part.sequence.reserved for part in parts),
        )
        if not single.decode or (self._looks and not self._waits(single)):
            return None
        needed = self._runner.fit(_several(single, self.most))
        must_be_there = self._looks or self._runner.programs.is_closed
        if must_be_there and not self._runner.has(needed):
            return None
        avoided = needed in self._given_up or self._oom_backoff.avoids(needed)
        return None if avoided else needed

    def give_up(self, shape: StepSpec, error: Exception) -> None:
        """Sends steps of a shape one by one from now on, since several at once failed though memory sufficed."""
        _LOG.warning("%d steps at once failed, each goes alone from now on: %r", shape.steps, error)
        self._given_up.add(shape)

    def declare(self, needed: Sequence[ProgramSpec]) -> list[StepSpec]:
        """Lists the programs of several steps that go with those of single ones."""
        return declare_multi_steps(needed, self.most, chosen=self._looks)

    def _waits(self, single: StepSpec) -> bool:
        seen, waited = self._seen.get(self._runner.fit(single), (0, 0))
        return seen >= _SAMPLES and 2 * waited > seen


def settle_steps(wish: int | None, params: Params, layout: CacheLayout) -> int:
    """Returns the most steps of a program: what was asked for, or else several for a small model on a GPU.

    Args:
        wish: `EngineConfig.steps_per_launch`.
        params: the model's parameters, or their types.
        layout: the cache's groups.
    """
    if wish is not None:
        return wish
    paged = layout.paged_groups
    if len(paged) != 1 or paged[0].window is not None or layout.state_groups or layout.expands:
        return 1
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return _STEPS if jax.default_backend() == "gpu" and num_bytes <= _SMALL_BYTES else 1


def declare_multi_steps(
    needed: Sequence[ProgramSpec], steps: int, *, chosen: bool
) -> list[StepSpec]:
    """Lists the programs of several steps that go with those of single ones.

    Args:
        needed: programs of single steps, among others.
        steps: of each program.
        chosen: the number was not asked for, so only small batches of greedy requests have such programs.
    """
    return [
        _several(single, steps)
        for single in needed
        if isinstance(single, StepSpec)
        and steps > 1
        and single.decode
        and not single.features.min_tokens
        and (not chosen or _is_measured(single))
    ]


def _is_measured(shape: StepSpec) -> bool:
    """Whether sending several such steps at once was measured to pay on a GPU, and to choose the same tokens."""
    return shape.decode and shape.rows <= _FEW_ROWS and shape.features == Features()


def _several(single: StepSpec, steps: int) -> StepSpec:
    return replace(single, steps=steps)
