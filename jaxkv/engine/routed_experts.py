"""Reads the experts that routers chose for a request's tokens out of its pages, when it ends."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Int

from jaxkv.cache.state import Cache
from jaxkv.engine.request_state import RequestState
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.buckets import bucket
from jaxkv.runner.program_specs import Runner
from jaxkv.runner.sequence_runner import SequenceRunner

_GROUP = "experts"
_UNREAD = 8
"""Most results that stay on the device; older ones have long been copied to the host."""


@dataclass(frozen=True)
class ExpertsSpec(ProgramSpec[Runner]):
    """The program that gathers pages of chosen experts; it only reads the cache.

    Attributes:
        pages: number of pages.
    """

    pages: int

    @property
    def kind(self) -> str:
        """Always "experts"."""
        return "experts"

    @property
    def name(self) -> str:
        """The kind and the number of pages."""
        return f"experts_{self.pages}"

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `experts = run(cache, page ids)`, int16 `[pages * page_size, layers, top_k]`."""
        [layer] = runner.layout.group(_GROUP).layers

        def run(
            cache: Cache, ids: Int[Array, " pages"]
        ) -> Int[Array, "tokens expert_layers top_k"]:
            pages = cache.layer(layer)["experts"].at[ids].get(mode="clip")
            return pages.reshape(-1, *pages.shape[2:])

        ids = np.zeros(self.pages, np.int32)
        return Lowering(run, (runner.cache, ids), cache_argument=None)


class RoutedExperts:
    """Reads the experts of requests that end, without waiting for the device.

    Args:
        sequence_runner: holds the pages and runs the program.
    """

    def __init__(self, sequence_runner: SequenceRunner) -> None:
        self._sequence_runner = sequence_runner
        self._group = sequence_runner.runner.layout.group(_GROUP)
        self._unread: deque[RequestState] = deque()

    def read(self, request: RequestState) -> None:
        """Sets `routed_experts` of a request that still holds its pages.

        The last generated token was never computed for this request, so it has no experts. The steps in flight come
        before the read on the device, and those that reuse the pages come after it.
        """
        pages = self._sequence_runner.allocator.pages(request.number, _GROUP)
        used = self._group.pages_for(len(request.tokens) - 1)
        spec = self._spec(len(request.tokens) - 1)
        ids = np.zeros(spec.pages, np.int32)
        ids[:used] = pages[:used]
        found = self._sequence_runner.runner.run_read_only(spec, ids)
        found.copy_to_host_async()
        request.routed_experts = found
        self._unread.append(request)
        if len(self._unread) > _UNREAD:
            self._unread.popleft().experts_on_host()

    def declare(self, longest: int) -> list[ExpertsSpec]:
        """Returns the programs that requests of up to `longest` tokens need."""
        widths = self._sequence_runner.length_buckets
        most = bucket(longest, widths)
        return list({self._spec(width): None for width in widths if width <= most})

    def _spec(self, tokens: int) -> ExpertsSpec:
        width = bucket(tokens, self._sequence_runner.length_buckets)
        return ExpertsSpec(self._group.pages_for(width))


def open_experts(sequence_runner: SequenceRunner) -> RoutedExperts | None:
    """Returns the reader of a cache that keeps the chosen experts; `None` if it does not."""
    kept = any(group.name == _GROUP for group in sequence_runner.runner.layout.groups)
    return RoutedExperts(sequence_runner) if kept else None
