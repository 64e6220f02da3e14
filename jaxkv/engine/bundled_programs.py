"""Bundles of an engine's programs: what they depend on, and loading them into a new engine.

A spec has the sizes of a program alone. `plan_facts` and `runner_facts` name all else that the code of a program
depends on, and the options on which it depends which programs there are.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jaxlib._jax import Device

from jaxkv.cache.budget import Budget
from jaxkv.cache.state import Cache
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.engine.routed_experts import ExpertsSpec
from jaxkv.engine.warm_up import WarmUp, warn_of_sums
from jaxkv.errors import BadBundle
from jaxkv.links.values import Values
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Model
from jaxkv.models.tensor_parallel import TensorParallel, has_mailboxes, mesh_of, spans_processes
from jaxkv.offload.programs import SwapSpec
from jaxkv.programs.bundle import Bundle, Facts, facts_of, write_bundle
from jaxkv.programs.fingerprint import environment
from jaxkv.runner.draft_programs import DraftSpec, PutDraftsSpec
from jaxkv.runner.hosts import SPECS
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.weights_checksum import ChecksumSpec
from jaxkv.sampling.processors import LogitsProcessors
from jaxkv.sampling.sample import SamplingState
from jaxkv.step.score import TokenScores
from jaxkv.version import __version__

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parents[1]
_VALUES = Values(
    (
        *SPECS,
        *(DraftSpec, PutDraftsSpec, ChecksumSpec, ExpertsSpec, SwapSpec),
        *(Cache, SamplingState, TokenScores),
    )
)
"""Writes and reads specs, and the pytrees that programs return."""

_PLANNED = ("budget_bytes", "memory_share")
"""Options of the cache that only decide its size, which is a fact of its own."""


def refuse_unbundled(model: Model, processors: LogitsProcessors, engine: EngineConfig) -> None:
    """Raises `BadBundle` for an engine whose programs no bundle holds."""
    if spans_processes(model):
        what = "programs over the devices of several processes"
    elif not isinstance(model, Decoder | TensorParallel):
        what = f"programs of a {type(model).__name__}, whose code is not part of jaxkv,"
    elif processors.processors:
        what = "programs with the code of logits processors"
    elif engine.speculation is not None and engine.speculation.method != "ngram":
        what = "programs of a model or head that drafts"
    else:
        return
    raise BadBundle(
        f"{what} cannot be in a bundle; leave `programs` out, and the store of compiled programs shortens later starts"
    )


def plan_facts(
    model: Model,
    budget: Budget,
    cache: CacheConfig,
    engine: EngineConfig,
    *,
    max_model_len: int,
    lora: LoraConfig | None,
) -> Facts:
    """Returns what is known of an engine before its weights are loaded.

    Args:
        model: the model.
        budget: the groups of the cache and their sizes.
        cache: options of the cache.
        engine: options of the engine.
        max_model_len: longest prompt plus output in tokens.
        lora: room for adapters.
    """
    architecture = facts_of(model.whole if isinstance(model, TensorParallel) else model)
    # The implementation is known once its parameters are; see `runner_facts`.
    del architecture["implementation"]
    options, mesh = facts_of(cache), mesh_of(model)
    return {
        "jaxkv": __version__,
        "jaxkv_sources": _sources(),
        **environment(_devices(model)),
        "mesh": None if mesh is None else facts_of(mesh.shape),
        "mailboxes": has_mailboxes(model),
        "model": architecture,
        "max_model_len": max_model_len,
        "cache": {name: options[name] for name in options if name not in _PLANNED},
        "engine": facts_of(engine),
        "lora": facts_of(lora),
        "groups": facts_of(budget.layout.groups),
        "counts": facts_of(budget.counts),
    }


def runner_facts(runner: ModelRunner) -> Facts:
    """Returns what is known of an engine once its parameters are: their types, and what runs the model."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(runner.param_types)
    return {
        "implementation": runner.implementation.name,
        "params_structure": str(jax.tree.structure(runner.param_types)),
        "params": {
            jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
        },
    }


def budget_of(bundle: Bundle, budget: Budget) -> Budget:
    """Returns a cache's budget with the sizes that a bundle's programs need, if its groups have equal names."""
    counts: Any = bundle.facts.get("counts")
    if not isinstance(counts, Mapping) or counts.keys() != budget.counts.keys():
        return budget
    return replace(budget, counts=dict(counts), budget_bytes=bundle.facts["budget_bytes"])


def load_bundled(bundle: Bundle, runner: ModelRunner) -> WarmUp:
    """Loads all programs of a bundle, which was checked against `plan_facts`, and seals the manifest.

    Raises:
        BadBundle: the bundle was made for other parameters, or is damaged; no program was added.
    """
    start = time.perf_counter()
    bundle.refuse_unless(runner_facts(runner))
    built = bundle.load(
        _devices(runner.model),
        _VALUES,
        lambda spec: jax.tree.structure((spec.lowering(runner).arguments, {})),
    )
    runner.programs.add(built)
    programs = [runner.program(spec) for spec in built]
    runner.programs.seal()
    warm_up = WarmUp(
        programs=len(programs),
        loaded=len(programs),
        seconds=time.perf_counter() - start,
        host_seconds=0.0,
        temp_bytes=max((program.report.temp_bytes for program in programs), default=0),
        sum_bytes=sum(program.report.sum_bytes for program in programs),
    )
    _LOG.info("loaded %s: %s", bundle.folder, warm_up)
    warn_of_sums(warm_up.sum_bytes)
    return warm_up


def save_bundle(folder: Path, facts: Facts, budget: Budget, runner: ModelRunner) -> int:
    """Writes all compiled programs of a runner into a new bundle, and returns their number.

    Args:
        folder: the new folder.
        facts: those of `plan_facts`.
        budget: the budget of its cache.
        runner: the runner.

    Raises:
        BadBundle: this backend cannot serialise a program.
        OSError: the folder exists already, or cannot be written.
    """
    programs = runner.programs.manifest()
    facts = {**facts, **runner_facts(runner), "budget_bytes": budget.budget_bytes}
    write_bundle(folder, facts, programs, _devices(runner.model), _VALUES)
    return len(programs)


def _devices(model: Model) -> Sequence[Device]:
    """Returns the devices that a model's programs run on, in the order of their mesh."""
    mesh = mesh_of(model)
    return jax.devices()[:1] if mesh is None else tuple(mesh.devices.flat)


@cache
def _sources() -> str:
    """Returns a hash of the Python files of jaxkv, of whose functions programs are traces."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
