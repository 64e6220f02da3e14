"""The engine that a benchmark measures, of a model or of random weights, and its serving loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxkv.bench.figures import Timeline
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.llm import LLM
from jaxkv.models.registry import build_model, load_config, resolve_dtype, rules_for
from jaxkv.models.tensor_parallel import over_devices
from jaxkv.plan import free_bytes, model_for, plan_cache, resolve_length
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.weights.hub import resolve_model
from jaxkv.weights.load import check_quantization, expected_shapes


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model and engine to measure.

    Attributes:
        shape: a name of `SHAPES`, with random weights; `None` for a directory.
        model: a model directory or a name on the Hugging Face Hub; `None` for the small model inside the package, if
            `shape` is `None` too.
        revision: revision of a model on the hub.
        dtype: dtype name to compute in; "auto" is the checkpoint's own, and bfloat16 for a shape.
        max_model_len: longest prompt plus output, in tokens.
        cache: options of the cache.
        engine: options of the engine.
        implementation: family of implementations of the ops; `None` for the best.
        ignore_config_keys: keys of the directory's config.json to ignore, see `LLM`.
        quantization: "fp8", "int8" or "int4" for weights rounded to it, see `LLM`; those of a shape are drawn in it.
        tensor_parallel_size: devices that compute the model together, see `LLM`.
        load_format: "dummy" for random weights of the directory's model, see `LLM`.
    """

    shape: str | None = None
    model: str | Path | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int
    cache: CacheConfig
    engine: EngineConfig = EngineConfig()
    implementation: str | None = None
    ignore_config_keys: tuple[str, ...] = ()
    quantization: str | None = None
    tensor_parallel_size: int = 1
    load_format: str = "auto"

    def __post_init__(self) -> None:
        """Raises `ValueError` for an unknown shape, and for a shape with a directory or `load_format`."""
        if self.shape is not None and self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")
        if self.shape is not None and (self.model is not None or self.revision is not None):
            raise ValueError("give a shape with random weights or a model, not both")
        if self.shape is not None and self.load_format != "auto":
            raise ValueError("a shape has random weights; load_format is for a model")

    @property
    def name(self) -> str:
        """Name of the model in results."""
        return self.shape or (Path(self.model).name if self.model else "default model")

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens; of a directory only config.json is read."""
        if self.shape:
            return build_model(SHAPES[self.shape]).max_positions
        # `LLM` will warn.
        directory = resolve_model(self.model, self.revision)
        return build_model(
            load_config(directory, ignore_config_keys=self.ignore_config_keys, warn=False)
        ).max_positions

    def build(self) -> Engine:
        """Returns the engine with its weights on the device; its programs are not compiled yet."""
        if self.shape is not None:
            return self._random()
        llm = LLM(
            self.model,
            revision=self.revision,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            cache=self.cache,
            engine=self.engine,
            implementation=self.implementation,
            progress=False,
            ignore_config_keys=self.ignore_config_keys,
            quantization=self.quantization,
            tensor_parallel_size=self.tensor_parallel_size,
            load_format=self.load_format,
        )
        return llm.engine

    def _random(self) -> Engine:
        assert self.shape is not None, "only shapes have random weights"
        enable_compile_cache()
        whole = replace(build_model(SHAPES[self.shape]), implementation=self.implementation)
        dtype = resolve_dtype(self.dtype, "bfloat16")
        length = resolve_length(self.max_model_len, whole.max_positions)
        check_quantization(self.quantization, None)
        types = expected_shapes(
            whole,
            rules_for(whole.config),
            dtype=dtype,
            scheme=None,
            quantization=self.quantization,
        )
        divided = over_devices(whole, self.tensor_parallel_size, types)
        model = model_for(divided or whole, self.cache, self.engine)
        # This compiles one program per shape of a leaf; one program for all leaves would take 40 s to compile.
        params = jax.block_until_ready(model.init_params_like(jax.random.key(0), types))
        room = free_bytes(self.cache.memory_share)
        layout, budget = plan_cache(
            model,
            self.cache,
            dtype=dtype,
            max_model_len=length,
            free_bytes=room,
            speculation=self.engine.speculation,
        )
        sequence_runner = SequenceRunner(
            ModelRunner(model, params, layout, budget.counts, Programs()),
            max_tokens=length,
            max_rows=self.cache.max_sequences,
        )
        return Engine(sequence_runner, None, self.engine, host_bytes=self.cache.host_bytes)


def serve(engine: Engine, requests: Sequence[Request], due: Sequence[float]) -> list[Timeline]:
    """Serves requests as they come due, and returns the times of their tokens.

    A request that comes due during a step is added after the step, but its time to the first token counts from when it
    was due.

    Args:
        engine: the engine, without other callers.
        requests: the requests, in the order in which they come due.
        due: seconds from the start at which each request comes due, ascending.

    Raises:
        ValueError: a request can never be served.
    """
    for request in requests:
        engine.check(request)
    timelines = [
        Timeline(prompt_tokens=len(one.prompt), arrived=at)
        for one, at in zip(requests, due, strict=True)
    ]
    running: list[tuple[RequestState, Timeline]] = []
    # The engine's clock.
    start, added = time.monotonic(), 0
    while added < len(requests) or running:
        now = time.monotonic() - start
        while added < len(requests) and due[added] <= now:
            [sample] = engine.add([requests[added]])
            running.append((sample, timelines[added]))
            added += 1
        if not running:
            time.sleep(due[added] - now)
            continue
        engine.step()
        running = _record_tokens(running, start, time.monotonic() - start)
    return timelines


def _record_tokens(
    running: list[tuple[RequestState, Timeline]], start: float, now: float
) -> list[tuple[RequestState, Timeline]]:
    """Records the time of the tokens of a step, and returns the requests that have not ended."""
    still_running = []
    for sample, timeline in running:
        new = sample.generated - len(timeline.tokens)
        if new:
            timeline.tokens += [now] * new
        if sample.status != FINISHED:
            still_running.append((sample, timeline))
        else:
            timeline.cached_tokens = sample.cached or 0
            timeline.failed = sample.reason == "error"
            if sample.admitted is not None:
                timeline.queued = (timeline.arrived, sample.admitted - start)
    return still_running
