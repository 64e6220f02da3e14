"""A picture of an engine for people who look at it: page map, prefix tree, requests and programs. It has no text."""

import time
from dataclasses import dataclass
from itertools import islice

from jaxkv.cache.page_map import GroupMap, TreeSummary, page_map, tree_summaries
from jaxkv.engine.engine import Engine
from jaxkv.engine.request_state import RequestState

MOST_REQUESTS = 256
"""Most requests of a picture; running ones come first."""

MOST_PROGRAMS = 256
"""Most programs of a picture; the slowest to compile come first."""


@dataclass(frozen=True, kw_only=True)
class RequestLine:
    """One request in the engine.

    Attributes:
        number: its number, which the page map names too.
        status: "running" or "waiting".
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that the prefix cache held.
        computed_tokens: tokens whose keys, values and states were computed by dispatched steps.
        generated_tokens: generated tokens that the host has read.
        preemptions: how often it lost its pages.
    """

    number: int
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class ProgramLine:
    """One compiled program.

    Attributes:
        name: the shapes that it serves.
        seconds: time to compile it, or to load it from disk.
        loaded: whether an earlier process compiled it.
    """

    name: str
    seconds: float
    loaded: bool


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The holders of an engine's pages and states, its prefix trees, requests and programs.

    Attributes:
        maps: holders of the pages or states of each group.
        trees: the prefix cache of each paged group; empty if it is off.
        checkpoints: number of checkpoints of recurrent states.
        requests: at most `MOST_REQUESTS` requests.
        program_list: at most `MOST_PROGRAMS` programs.
        picture_seconds: time that it took to draw the picture, which the steps waited.
    """

    maps: tuple[GroupMap, ...]
    trees: tuple[TreeSummary, ...]
    checkpoints: int
    requests: tuple[RequestLine, ...]
    program_list: tuple[ProgramLine, ...]
    picture_seconds: float


def draw(engine: Engine) -> Picture:
    """Returns a picture of an engine between two steps. It changes nothing."""
    began = time.perf_counter()
    prefix, scheduler = engine.prefix, engine.scheduler
    maps = page_map(engine.runner.layout, engine.sequence_runner.allocator, prefix)
    queued = [*scheduler.running, *islice(scheduler.waiting, MOST_REQUESTS)][:MOST_REQUESTS]
    programs = sorted(engine.runner.programs.manifest(), key=lambda one: -one.seconds)
    return Picture(
        maps=maps,
        trees=() if prefix is None else tree_summaries(prefix),
        checkpoints=0 if prefix is None else prefix.num_checkpoints,
        requests=tuple(_line(request) for request in queued),
        program_list=tuple(
            ProgramLine(name=str(one.spec), seconds=one.seconds, loaded=one.loaded)
            for one in programs[:MOST_PROGRAMS]
        ),
        picture_seconds=time.perf_counter() - began,
    )


def _line(request: RequestState) -> RequestLine:
    return RequestLine(
        number=request.number,
        status=request.status,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached or 0,
        computed_tokens=request.computed,
        generated_tokens=request.generated,
        preemptions=request.preemptions,
    )
