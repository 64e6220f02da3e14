"""An engine to be measured: of a model directory, or of a known shape with random weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxkv import default_model
from jaxkv.bench.figures import Timeline
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.llm import LLM
from jaxkv.models.registry import build_model, load_config, resolve_dtype
from jaxkv.plan import free_bytes, plan_cache, resolve_length
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model and engine to measure.

    Attributes:
        shape: a name of `SHAPES`, with random weights; `None` for a directory.
        model: a model directory; `None` for the small model inside the package, if `shape` is `None` too.
        dtype: to compute in; "auto" is the checkpoint's own, and bfloat16 for a shape.
        max_model_len: longest prompt plus output.
        cache: size of the cache, and sequences at once.
        engine: how to serve.
        implementation: of the ops; `None` for the best that can run.
    """

    shape: str | None = None
    model: str | Path | None = None
    dtype: str = "auto"
    max_model_len: int
    cache: CacheConfig
    engine: EngineConfig = EngineConfig()
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Refuses an unknown shape, and a shape together with a directory."""
        if self.shape is not None and self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        if self.shape is not None and self.model is not None:
            raise ValueError("give a shape with random weights or a model directory, not both")

    @property
    def name(self) -> str:
        """What to call the model."""
        return self.shape or (Path(self.model).name if self.model else "default model")

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports; reads its config.json alone."""
        config = (
            SHAPES[self.shape] if self.shape else load_config(self.model or default_model.path())
        )
        return build_model(config).max_positions

    def build(self) -> Engine:
        """Returns the engine, with its weights on the device; nothing is compiled for it yet."""
        if self.shape is not None:
            return self._random()
        llm = LLM(
            self.model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            cache=self.cache,
            engine=self.engine,
            implementation=self.implementation,
            progress=False,
        )
        return llm.engine

    def _random(self) -> Engine:
        assert self.shape is not None, "only shapes have random weights"
        enable_compile_cache()
        model = replace(build_model(SHAPES[self.shape]), implementation=self.implementation)
        dtype = resolve_dtype(self.dtype, "bfloat16")
        length = resolve_length(self.max_model_len, model.max_positions)
        # One program for each shape of a leaf: one for all would take 40 seconds to compile.
        params = jax.block_until_ready(model.init_params(jax.random.key(0), dtype))
        room = free_bytes(self.cache.memory_share)
        layout, budget = plan_cache(
            model, self.cache, dtype=dtype, max_model_len=length, free_bytes=room
        )
        sequence_runner = SequenceRunner(
            ModelRunner(model, params, layout, budget.counts, Programs()),
            max_tokens=length,
            max_rows=self.cache.max_sequences,
        )
        return Engine(sequence_runner, None, self.engine, host_bytes=self.cache.host_bytes)


def serve(engine: Engine, requests: Sequence[Request], due: Sequence[float]) -> list[Timeline]:
    """Serves requests as they come due, and returns when their tokens came.

    A request that comes due while a step is under way has arrived all the same: its time to the first token counts
    from when it was due.

    Args:
        engine: serves them; it has no other user meanwhile.
        requests: in the order in which they come.
        due: seconds from the start at which each comes, ascending.

    Raises:
        ValueError: a request can never be served.
    """
    for request in requests:
        engine.check(request)
    timelines = [
        Timeline(prompt_tokens=len(one.prompt), arrived=at)
        for one, at in zip(requests, due, strict=True)
    ]
    open_: list[tuple[RequestState, Timeline]] = []
    start, begun = time.perf_counter(), 0
    while begun < len(requests) or open_:
        now = time.perf_counter() - start
        while begun < len(requests) and due[begun] <= now:
            [sample] = engine.add([requests[begun]])
            open_.append((sample, timelines[begun]))
            begun += 1
        if not open_:
            time.sleep(due[begun] - now)
            continue
        engine.step()
        open_ = _note(open_, time.perf_counter() - start)
    return timelines


def _note(
    open_: list[tuple[RequestState, Timeline]], now: float
) -> list[tuple[RequestState, Timeline]]:
    """Notes the tokens that came in a step, and returns who goes on."""
    goes_on = []
    for sample, timeline in open_:
        new = sample.generated - len(timeline.tokens)
        if new:
            timeline.tokens += [now] * new
        if sample.status != FINISHED:
            goes_on.append((sample, timeline))
        else:
            timeline.cached_tokens = sample.cached or 0
            timeline.failed = sample.reason == "error"
    return goes_on
