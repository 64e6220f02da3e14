"""Decides when several decode steps are sent as one program, and which program that is.

For a small model the host needs about as long to dispatch a step as the GPU needs to run it. A program of several steps
costs the host hardly more than one step. In return its tokens arrive together, and a row that stops early wastes the
remaining steps.

The remaining steps also change the row's recurrent states. So a request that stops before its limit mostly keeps no
checkpoint of its end, and its next turn begins at the checkpoint of its prompt.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.steps.oom_backoff import OomBackoff
from jaxkv.engine.steps.step_plan import Part
from jaxkv.errors import STEP_FAILURES
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Model, Params
from jaxkv.models.tensor_parallel import TensorParallel, has_mailboxes
from jaxkv.programs.audit import GRANULE
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import union
from jaxkv.weights.quantised.weight_forms import bytes_of_types, is_few_bits
from pallas_kernels.peer_sum.api import MOST_BYTES

_LOG = logging.getLogger(__name__)

_STEPS = 4
_SMALL_BYTES = 4 * 2**30
"""Bytes of parameters that a GPU reads in about a millisecond, the time that the host needs to dispatch a step.

The host needs longer for many layers, such as 6 milliseconds for 48 with states and experts.
"""
_SMALL_BYTES_OF_SEVERAL = 150 * 10**6
"""The same per layer and device for several GPUs: 35 microseconds, measured at one row of two shapes on four."""
_MOST_SUM_BYTES = 0.7 * 2**30
"""Most bytes that one such program of several GPUs keeps for XLA's sums, outside of its pool (`audit.sum_bytes`)."""
_FEW_ROWS = 16
"""Most rows of several steps on one GPU. With more, it takes longer for a step of a small model than the host."""
_MORE_ROWS = 64
"""The same for a model of at most half of `_SMALL_BYTES`: 64 rows of 0.6B take a GPU 2.9 ms and the host 2.8 to 3.3."""
_SAMPLES = 8
"""Single steps to measure before deciding whether the device waits for the host."""
_COMPILED_AFTER = 128
"""Single steps that a missing program of several would have replaced, after which a thread compiles it.

They have cost a tenth of a second or two. A short script, which ends before, does not wait for XLA in the end.
"""


@dataclass(frozen=True)
class StepsPerLaunch:
    """The number of decode steps per program, and which steps are sent so.

    Attributes:
        number: decode steps per program; 1 if steps are always sent alone.
        automatic: jaxkv chose the number, so only steps of which measurements showed that it is faster are sent so.
        rows: if it did so, the most rows of such steps. With more rows one GPU takes longer for a step than the host,
            and on several GPUs XLA keeps too much memory for the sums of such a program.
    """

    number: int
    automatic: bool = False
    rows: int = _FEW_ROWS

    @property
    def most_rows(self) -> int | None:
        """Most rows of steps that are sent several at a time; `None` for any number."""
        return self.rows if self.automatic else None

    def suits(self, single: StepSpec) -> bool:
        """Returns whether steps of this shape are sent several at a time, if the device is seen to wait."""
        if self.number == 1 or not single.decode or single.forward_only:
            return False
        if single.features.min_tokens:
            return False  # The host decides for each token whether stop ids are blocked.
        return not self.automatic or single.rows <= self.rows


class MultiStep:
    """Decides when decode steps of one engine are sent several at a time.

    Args:
        runner: runs the programs.
        shapes: padded shapes of single steps.
        oom_backoff: shapes to avoid.
        steps: decode steps per program; 1 sends every step alone. `None` decides by measurement: it sends several steps
            if the device was waiting for the host, `choose_steps` allows it for the model, and on one device the batch
            is small. No step waits for the program: a thread compiles it, unless the engine is strict.

    Attributes:
        chosen: the number of steps per program, and which steps are sent so.
    """

    def __init__(
        self, runner: ModelRunner, shapes: StepShapes, oom_backoff: OomBackoff, steps: int | None
    ) -> None:
        self._runner, self._shapes, self._oom_backoff = runner, shapes, oom_backoff
        self.chosen = choose_steps(steps, runner.model, runner.params, runner.layout)
        self._measured: dict[StepSpec, tuple[int, int]] = {}
        self._sent_singly: set[StepSpec] = set()
        # For each program of several steps that was missing, how often.
        self._missing: Counter[StepSpec] = Counter()

    def measures(self, shape: StepSpec) -> bool:
        """Whether `record` should be called for steps of this shape."""
        # A thread that compiles slows the host.
        is_calm = not self._runner.programs.pending
        return self.chosen.automatic and is_calm and self.chosen.suits(shape)

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

    def shape(self, parts: Sequence[Part], *, shares: bool = False) -> StepSpec | None:
        """Returns the program that runs several steps of these parts; `None` to send them one by one.

        Args:
            parts: the decode parts.
            shares: whether the program should read keys once with which several of them begin, if there is such a one.
        """
        for form in (True, False) if shares else (False,):
            single = self._single(parts, shares=form)
            if single is None:
                return None
            if not self.chosen.automatic or self._device_waits(single):
                needed = self._several(single)
                if needed is not None:
                    return needed
            elif form and self._runs(single):
                # One such step takes less time than several at once that read all keys, or is not measured yet.
                return None
        return None

    def _single(self, parts: Sequence[Part], *, shares: bool) -> StepSpec | None:
        """Returns the program of one form that runs one step of these parts; `None` if several must not be sent."""
        features = union([part.sequence.features for part in parts])
        if features.min_tokens or features.grammar:
            return None  # The host decides for each token whether stop ids are blocked, and which tokens are allowed.
        single = self._shapes.choose(
            len(parts),
            len(parts),
            features,
            total_tokens=max(part.sequence.reserved for part in parts),
            shares=shares,
        )
        return single if single.decode else None

    def _several(self, single: StepSpec) -> StepSpec | None:
        """Returns the program that runs several such steps in the same form; `None` if there is none that may run."""
        needed = self._runner.fit(replace(single, steps=self.chosen.number))
        if needed.shares != single.shares or self.avoids(needed):
            return None
        if not self.chosen.automatic:
            return needed if self._runner.may_run(needed) else None
        if self._runner.has(needed):
            return needed
        self._note_missing(needed)
        return None

    def _note_missing(self, needed: StepSpec) -> None:
        """Counts a step that was sent alone for lack of a program, and in the end lets a thread compile it, once."""
        runner = self._runner
        self._missing[needed] += 1
        may_compile = runner.hosts is None and not runner.programs.is_closed
        if self._missing[needed] == _COMPILED_AFTER and may_compile:
            _LOG.info("compiling %s in the background: the GPU waits for the host", needed.name)
            try:
                runner.compile_in_background([needed], optional=True)
            except STEP_FAILURES as error:
                _LOG.warning("%s could not be compiled: %r", needed.name, error)

    def _runs(self, single: StepSpec) -> bool:
        """Returns whether a program of the same form would run such a step."""
        fitting = self._runner.fit(single)
        runs = fitting.shares == single.shares and self._runner.may_run(fitting)
        return runs and not self._oom_backoff.avoids(fitting)

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
        return declare_multi_steps(needed, self.chosen)

    def _device_waits(self, single: StepSpec) -> bool:
        """Returns whether the device was seen to wait in such steps, or if few were measured, in those of more rows.

        It takes no longer for fewer rows, so it waits for the host in these too.
        """
        fitting = self._runner.fit(single)
        seen, waited = self._measured.get(fitting, (0, 0))
        if seen >= _SAMPLES:
            return 2 * waited > seen
        return any(
            shape.rows > fitting.rows
            and seen >= _SAMPLES
            and 2 * waited > seen
            and replace(shape, tokens=fitting.tokens, rows=fitting.rows) == fitting
            for shape, (seen, waited) in self._measured.items()
        )


def choose_steps(
    requested: int | None, model: Model, params: Params, layout: CacheLayout
) -> StepsPerLaunch:
    """Returns the decode steps per program: `requested`, or if that is `None`, several for a small model on GPUs.

    A model is small if a step of one row reads few bytes, see `bytes_of_one_row`. Latents that prompts expand (MLA) are
    left out, since a GPU did not wait in steps of DeepSeek-V2-Lite. Windows and states on several devices are left out,
    since they were not measured.

    Args:
        requested: `EngineConfig.steps_per_launch`.
        model: the model.
        params: its parameters, or their types; with shardings if several devices divide them.
        layout: the cache's groups.
    """
    if requested is not None:
        return StepsPerLaunch(requested)
    if jax.default_backend() != "gpu" or not _allows_several(model, layout):
        return StepsPerLaunch(1, automatic=True)
    small, read = _SMALL_BYTES, bytes_of_one_row(model, params)
    rows = _MORE_ROWS if read <= small // 2 else _FEW_ROWS
    if isinstance(model, TensorParallel):
        layers = len(layout.paged_groups[0].layers)
        small = model.count * layers * _SMALL_BYTES_OF_SEVERAL
        # Of the embeddings and of two products per layer, in 16 bits: signals and two copies, in pieces of `GRANULE`.
        pieces = int(_MOST_SUM_BYTES / (2 * layers + 1) / GRANULE) - 1
        rows = max(0, pieces * GRANULE // (2 * 2 * model.config.hidden_size))
        if has_mailboxes(model):
            # Sums by way of mailboxes keep nothing for a program.
            rows = max(rows, MOST_BYTES // (2 * model.config.hidden_size))
    number = _STEPS if read <= small else 1
    return StepsPerLaunch(number, automatic=True, rows=rows)


def bytes_of_one_row(model: Model, params: Params) -> int:
    """Returns the bytes of parameters that a decode step of one row reads.

    Of a decoder's experts it counts those that a token uses; with `batch_invariant` all, since XLA reads all where a
    model has an op without a rule for our kernels. Of embeddings it counts only a table that makes the logits too.
    Of other models, and of decoders that several devices divide, it counts all parameters: on each device.

    Args:
        model: the model.
        params: its parameters, or their types.
    """
    if not isinstance(model, Decoder):
        return bytes_of_types(params)
    declared, mixture = model.leaf_declarations(), model.config.mixture
    paths, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_few_bits)
    read = 0
    for path, weight in paths:
        name, size = jax.tree_util.keystr(path, simple=True, separator="."), bytes_of_types(weight)
        is_experts = name in declared and declared[name].is_experts
        if mixture is not None and is_experts and not model.batch_invariant:
            size = size * mixture.top_k // mixture.experts
        is_looked_up = name == "layer_embed" or (
            name == "embed" and not model.config.tie_embeddings
        )
        read += 0 if is_looked_up else size
    return read


def _allows_several(model: Model, layout: CacheLayout) -> bool:
    """Whether several steps may be chosen for such layers: without MLA, and on several devices with full attention."""
    if layout.expands:
        return False
    windows = [group.window for group in layout.paged_groups]
    return not isinstance(model, TensorParallel) or (windows == [None] and not layout.state_groups)


def declare_multi_steps(needed: Sequence[ProgramSpec], chosen: StepsPerLaunch) -> list[StepSpec]:
    """Lists the programs of several steps for the given programs of single steps.

    Args:
        needed: programs, of which decode steps are used and others skipped.
        chosen: the number of steps per program, and which steps are sent so.
    """
    return [
        replace(single, steps=chosen.number)
        for single in needed
        if isinstance(single, StepSpec) and chosen.suits(single)
    ]
