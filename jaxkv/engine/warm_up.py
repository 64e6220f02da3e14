"""Which programs serving will need, and compiling them before the first request."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.models.protocol import Model
from jaxkv.offload.programs import declare_swaps
from jaxkv.programs.costs import note_costs
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.buckets import bucket
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.sampling.fields import features_for, features_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """What compiling some programs took.

    Attributes:
        programs: how many.
        loaded: those that an earlier process compiled.
        seconds: wall time.
        host_seconds: of that, in the one thread that traces and lowers.
        temp_bytes: the most memory that one of them uses besides its arguments.
    """

    programs: int
    loaded: int
    seconds: float
    host_seconds: float
    temp_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.programs} programs in {self.seconds:.1f} s ({self.host_seconds:.1f} s of tracing and lowering), "
            f"{self.loaded} of them from disk; up to {self.temp_bytes / 2**20:,.1f} MiB of temporary memory"
        )


def compile_all(
    runner: ModelRunner, needed: Sequence[ProgramSpec], *, progress: bool = False
) -> WarmUp:
    """Compiles programs side by side, or loads them from disk; then the manifest is sealed.

    Args:
        runner: will run them.
        needed: which; those that are compiled already cost nothing.
        progress: show a bar on stderr.

    Raises:
        ProgramRefused: one does not update its cache in place; the good ones are kept.
    """
    start = time.perf_counter()
    known = set(runner.programs.manifest())
    runner.programs.unseal()
    try:
        made = runner.compile_all(needed, progress=progress)
    finally:
        runner.programs.seal()
    new = [program for program in made if program not in known]
    params = jax.tree.leaves(runner.params)
    note_costs(cost_identity(runner.model, str(params[0].dtype)), new)
    told = WarmUp(
        programs=len(new),
        loaded=sum(program.loaded for program in new),
        seconds=time.perf_counter() - start,
        host_seconds=sum(program.host_seconds for program in new),
        temp_bytes=max((program.report.temp_bytes for program in made), default=0),
    )
    _LOG.info("warmed up: %s", told)
    return told


def cost_identity(model: Model, dtype: str) -> str:
    """Returns what the costs of a model's programs are noted under: the model, its parameters' dtype, the device.

    Args:
        model: insists on the implementation that runs it.
        dtype: of its parameters.
    """
    return f"{model!r} {dtype} {jax.devices()[0].device_kind}"


def declare_served(engine: Engine, request: Request, count: int) -> list[ProgramSpec]:
    """Lists every program that up to `count` requests like this one, or shorter, can need on the engine.

    Requests that choose their tokens in another way, and mixtures of several ways, need others.

    Args:
        engine: serves them.
        request: an example with the longest prompt and the most tokens.
        count: requests at once.
    """
    held, rows = request.tokens_held, min(count, engine.shapes.decode_rows[-1])
    returns = _may_return(engine, held, rows)
    needed: list[ProgramSpec] = [
        *engine.shapes.declare_all(
            features_of([request.row(0)]),
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
    if features_for(request.params).penalties:
        needed += _admissions(engine, request, returns=returns)
    return needed


def _may_return(engine: Engine, held: int, rows: int) -> bool:
    """Whether some may come back with what they have generated: when a cache is lost, or pages run out.

    Whole texts are counted, where windows hold less: that may declare programs in vain, and never one too few.
    """
    if engine.config.most_rebuilds:
        return True
    groups = engine.runner.layout.paged_groups
    counts = engine.runner.owner.counts
    return any(rows * group.pages_for(held) > counts[group.name] for group in groups)


def _admissions(engine: Engine, request: Request, *, returns: bool) -> list[AdmitSpec]:
    """Lists what gives one sequence its entry: when it is new, and when it comes back with what it has generated."""
    widths = engine.sequence_runner.length_buckets
    longest = bucket(max(len(request.prompt), request.max_tokens), widths)
    prompt = bucket(len(request.prompt), widths)
    new = [AdmitSpec(1, width) for width in widths if width <= prompt]
    back = [AdmitSpec(1, width, returning=True) for width in widths if width <= longest]
    return new + back if returns else new
