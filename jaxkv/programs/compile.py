"""How a description becomes a compiled and audited program: traced here, then found on disk, or lowered and compiled.

Tracing and lowering are Python and go on in the caller's thread. XLA compiles outside of Python's lock, so that part
of many programs runs side by side.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxkv.programs.audit import AuditReport, audit
from jaxkv.programs.fingerprint import name_traced, one_device
from jaxkv.programs.jax_cache import MIN_COMPILE_SECONDS
from jaxkv.programs.lowering import Lowering, argument_types, trace
from jaxkv.programs.store import Place, Stored, open_store

_LOG = logging.getLogger(__name__)

# Otherwise XLA lets kernels read whole pieces of the packed array through fusions that no command buffer takes, and a
# step of 64 rows falls apart into some 30 of them. A copy of a piece is one node, for all layers.
_COMPILER_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}

# Not the CPU's: XLA may write one down without some of its functions. JAX's own cache serves them, and they lower fast.
_KEPT_ON = ("gpu",)


@dataclass(frozen=True)
class Built:
    """A program that can be called.

    Attributes:
        compiled: what JAX made of it.
        report: what the audit found.
        seconds: that it took, over all threads.
        host_seconds: of those, in the thread that traced and lowered it.
        loaded: it was compiled by an earlier process.
    """

    compiled: jax.stages.Compiled
    report: AuditReport
    seconds: float
    host_seconds: float
    loaded: bool


def begin(name: str, lowering: Lowering) -> Callable[[], Built]:
    """Traces a program, and lowers it if it is not on disk; returns the rest of the work, for any thread.

    Raises:
        ProgramRefused: the cache does not come back as it went in, or weights are closed over.
        ValueError: the arguments are not typed arrays.
    """
    start = time.perf_counter()
    options = {**_COMPILER_OPTIONS, **(lowering.compiler_options or {})}
    traced = trace(name, lowering)
    place = _find_place(name, lowering, traced, options)
    lowered = None if place is not None and place.is_filled else traced.lower()
    host_seconds = time.perf_counter() - start

    def finish() -> Built:
        start = time.perf_counter()
        stored = place.load(traced) if place is not None and lowered is None else None
        loaded, hits = stored is not None, _EVENTS.hits_of_thread()
        if stored is None:
            compiled = (lowered or traced.lower()).compile(compiler_options=options)
            stored = Stored(compiled, audit(compiled, cache_argument=lowering.cache_argument))
            loaded = _EVENTS.hits_of_thread() > hits
        else:
            _EVENTS.compiles += 1
        seconds = host_seconds + time.perf_counter() - start
        if place is not None and not place.is_filled and seconds >= MIN_COMPILE_SECONDS:
            place.save(stored)
        told = "out of a cache" if loaded else "compiled"
        _LOG.debug("%s: %.2f s in Python, %s, %.2f s in all", name, host_seconds, told, seconds)
        return Built(stored.compiled, stored.report, seconds, host_seconds, loaded)

    return finish


def _find_place(
    name: str, lowering: Lowering, traced: jax.stages.Traced, options: Mapping[str, Any]
) -> Place | None:
    """Returns where a program is kept on disk, or `None` if it cannot be."""
    specs, store = argument_types(lowering), open_store()
    device = one_device(specs)
    if store is None or device is None or device.platform not in _KEPT_ON:
        return None
    return store.place(name_traced(name, traced, specs, device, options), device)


class _Events:
    """Counts what JAX reports of its compiler, from the import of this module on."""

    def __init__(self) -> None:
        self.compiles = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def hits_of_thread(self) -> int:
        """Returns how often JAX's cache has answered this thread."""
        return getattr(self._thread, "hits", 0)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        self.compiles += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_: object) -> None:
        self._thread.hits = self.hits_of_thread() + (event == "/jax/compilation_cache/cache_hits")


_EVENTS = _Events()


def compile_count() -> int:
    """Returns how often this process has compiled anything, or loaded it from disk."""
    return _EVENTS.compiles
