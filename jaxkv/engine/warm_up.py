"""Warm-up: lists the programs that serving will need, and compiles them before the first request."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.speculation.draft_model import DraftModel
from jaxkv.memory import outside_bytes
from jaxkv.models.protocol import Model, Params
from jaxkv.offload.programs import declare_swaps
from jaxkv.programs.costs import record_costs
from jaxkv.programs.manifest import Program
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.buckets import bucket
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.weights_checksum import ChecksumSpec
from jaxkv.sampling.fields import features_for, features_of
from jaxkv.weights.quantised.weight_forms import has_few_bits, plain_leaves, weight_forms

_LOG = logging.getLogger(__name__)
_DRIVER_BYTES = 2 * 2**30
"""What the driver and CUDA graphs take outside of JAX's pool, roughly."""
_MOST_PADDED = 4
"""Most tokens of a program for each token of a step that it computes while the step's own program is compiled."""


@dataclass(frozen=True)
class WarmUp:
    """Statistics of a warm-up.

    Attributes:
        programs: number of programs that were compiled or loaded.
        loaded: number of these that were loaded from disk.
        seconds: wall time.
        host_seconds: seconds of tracing and lowering, which run in one thread.
        temp_bytes: the largest temporary memory of one program.
        sum_bytes: bytes on each GPU that sums over several GPUs keep outside of JAX's pool once all these programs have
            run.
        pending: number of further programs, which a thread compiles while these serve.
    """

    programs: int
    loaded: int
    seconds: float
    host_seconds: float
    temp_bytes: int
    sum_bytes: int = 0
    pending: int = 0

    def __str__(self) -> str:
        outside = (
            f"; {self.sum_bytes / 2**30:,.1f} GiB outside of JAX's pool for sums over the GPUs"
        )
        later = f"; {self.pending} more are compiled in the background"
        return (
            f"{self.programs} programs in {self.seconds:.1f} s ({self.host_seconds:.1f} s of tracing and lowering), "
            f"{self.loaded} of them from disk; up to {self.temp_bytes / 2**20:,.1f} MiB of temporary memory"
            f"{outside if self.sum_bytes else ''}{later if self.pending else ''}"
        )


def compile_all(
    runner: ModelRunner,
    needed: Sequence[ProgramSpec],
    *,
    progress: bool = False,
    background: bool = False,
) -> WarmUp:
    """Compiles programs in parallel, or loads them from disk, and then seals the manifest.

    Args:
        runner: runs the programs.
        needed: their specs; programs that are compiled already are skipped.
        progress: show a progress bar on stderr.
        background: return as soon as some of them can serve for all, and let a thread compile the others. Where several
            processes compute the model, all are compiled first.

    Raises:
        ProgramRefused: a program does not update the cache in place; the other programs are kept.
    """
    start = time.perf_counter()
    known = set(runner.programs.manifest())
    first, later = needed, []
    if background and runner.hosts is None:
        first, later = divide(needed, [program.spec for program in known])
    identity = cost_identity(runner.model, runner.params)
    runner.programs.unseal()
    try:
        compiled = runner.compile_all(first, progress=progress)
        sums = sum(program.report.sum_bytes for program in compiled)
        if later:
            runner.compile_in_background(later, _Later(identity, sums).note)
    finally:
        runner.programs.seal()
    new = [program for program in compiled if program not in known]
    record_costs(identity, new)
    warm_up = WarmUp(
        programs=len(new),
        loaded=sum(program.loaded for program in new),
        seconds=time.perf_counter() - start,
        host_seconds=sum(program.host_seconds for program in new),
        temp_bytes=max((program.report.temp_bytes for program in compiled), default=0),
        sum_bytes=sums,
        pending=runner.programs.pending,
    )
    _LOG.info("warmed up: %s", warm_up)
    warn_of_sums(warm_up.sum_bytes)
    return warm_up


def divide(
    needed: Sequence[ProgramSpec], known: Sequence[ProgramSpec]
) -> tuple[list[ProgramSpec], list[ProgramSpec]]:
    """Divides programs into a few that can serve for all, with up to `_MOST_PADDED` times the tokens, and the others.

    An engine sends several steps at once and verifies drafts only if it has the program, so these can come later too.

    Args:
        needed: the programs.
        known: those that are compiled already.

    Returns:
        The few, the largest first, and the others, each in this order.
    """
    first, later = [], []
    # Rows that a step in two programs computes are sampled by programs of this warm-up.
    serving = [
        one
        for one in known
        if one in needed or not (isinstance(one, StepSpec) and one.forward_only)
    ]
    for spec in sorted(needed, key=lambda one: one.order_of_cost, reverse=True):
        if spec in known:
            continue
        if _may_come_later(spec, serving):
            later.append(spec)
        else:
            first.append(spec)
            serving.append(spec)
    return first, later


def _may_come_later(spec: ProgramSpec, serving: Sequence[ProgramSpec]) -> bool:
    if not isinstance(spec, StepSpec):
        return isinstance(spec, SampleSpec) and any(one.serves(spec) for one in serving)
    if spec.steps > 1 or spec.drafts:
        return True
    return any(
        isinstance(one, StepSpec) and one.serves(spec) and one.tokens <= _MOST_PADDED * spec.tokens
        for one in serving
    )


class _Later:
    """Notes the programs of the background: their costs, and what their sums over several GPUs keep.

    Args:
        identity: see `cost_identity`.
        kept: `WarmUp.sum_bytes` of the programs before.
    """

    def __init__(self, identity: str, kept: int) -> None:
        self._identity, self._kept, self._has_warned = identity, kept, False
        self._lock = threading.Lock()

    def note(self, program: Program) -> None:
        """Notes a program; several threads may at once."""
        with self._lock:
            record_costs(self._identity, [program])
            self._kept += program.report.sum_bytes
            if program.report.sum_bytes and not self._has_warned:
                self._has_warned = warn_of_sums(self._kept)


def warn_of_sums(kept: int) -> bool:
    """Warns if sums over several GPUs need more memory outside of JAX's pool than there is; returns whether it did.

    Args:
        kept: `WarmUp.sum_bytes`.
    """
    room = outside_bytes() if kept else None
    is_short = room is not None and kept + _DRIVER_BYTES > room
    if room is not None and is_short:
        _LOG.warning(
            "sums over the GPUs will keep %.1f GiB of each GPU outside of JAX's pool once all programs have run, where "
            "%.1f GiB are; lower XLA_PYTHON_CLIENT_MEM_FRACTION, or compile fewer programs with a smaller "
            "token_budget, max_num_seqs or steps_per_launch=1",
            kept / 2**30,
            room / 2**30,
        )
    return is_short


def cost_identity(model: Model, params: Params) -> str:
    """Returns the key for recorded compilation costs: the model, the form of its parameters and the device.

    Args:
        model: the model, with its implementation resolved.
        params: its parameters, or their types.
    """
    plain = plain_leaves(params)
    forms = [str(plain[0].dtype)] if plain else []
    if has_few_bits(params):
        forms += sorted(weight_forms(params))
    return f"{model!r} {' '.join(forms)} {jax.devices()[0].device_kind}"


def declare_served(engine: Engine, request: Request, count: int) -> list[ProgramSpec]:
    """Lists every program that an engine can need for up to `count` requests like this one, or shorter.

    Requests with other sampling features, or a mixture of features, need other programs.

    Args:
        engine: serves the requests.
        request: an example with the longest prompt and the largest `max_tokens`.
        count: number of concurrent requests.
    """
    held, rows = request.tokens_held, min(count, engine.shapes.decode_rows[-1])
    features = features_of([request.row(0)])
    # Tokens that a grammar forces are computed in chunks, like those of a request that returns.
    returns = features.grammar or _may_return(engine, held, rows)
    needed: list[ProgramSpec] = [
        *engine.shapes.declare_all(
            features,
            rows=rows,
            new_tokens=rows * (1 + (held if returns else len(request.prompt))),
            total_tokens=held,
        )
    ]
    needed += engine.multi_step.declare(needed)
    if engine.prefix is not None or count > 1:
        needed.append(CopySpec())
    if engine.host is not None:
        needed += declare_swaps(engine.runner.layout)
    if engine.experts is not None:
        needed += engine.experts.declare(held)
    drafter = None if engine.speculation is None else engine.speculation.drafter
    if isinstance(drafter, DraftModel):
        needed += drafter.declare(request.params, rows)[1]
    if features_for(request.params).needs_admission or engine.sequence_runner.keeps_texts:
        needed += _admissions(engine, request, returns=returns)
    return needed


def compile_drafter(engine: Engine, request: Request, count: int) -> None:
    """Compiles the programs of a smaller model that drafts, if there is one, for up to `count` requests like this."""
    drafter = None if engine.speculation is None else engine.speculation.drafter
    if isinstance(drafter, DraftModel):
        drafter.compile(drafter.declare(request.params, count)[0])


def declare_saved_prefixes(engine: Engine) -> list[ProgramSpec]:
    """Lists every program that saving and loading prefixes can need."""
    return [*declare_swaps(engine.runner.layout), ChecksumSpec()]


def _may_return(engine: Engine, held: int, rows: int) -> bool:
    """Whether requests may be computed again with generated tokens: after a lost cache or a preemption.

    It counts pages for whole texts. With sliding windows that is too many: it may list a program that is not needed,
    but it never misses one.
    """
    if engine.config.most_rebuilds:
        return True
    groups = engine.runner.layout.paged_groups
    counts = engine.runner.owner.counts
    return any(rows * group.pages_for(held) > counts[group.name] for group in groups)


def _admissions(engine: Engine, request: Request, *, returns: bool) -> list[AdmitSpec]:
    """Lists the programs that clear one entry of the sampling group, for new and for returning requests."""
    widths = engine.sequence_runner.length_buckets
    longest = bucket(max(len(request.prompt), request.max_tokens), widths)
    prompt = bucket(len(request.prompt), widths)
    new = [AdmitSpec(1, width) for width in widths if width <= prompt]
    back = [AdmitSpec(1, width, returning=True) for width in widths if width <= longest]
    return new + back if returns else new
