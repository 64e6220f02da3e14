"""Measures a server: asks for its model, draws prompts for it, sends them at each rate, and computes the figures."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxkv.bench.client.completion import Answer, Api, Prompt, complete, status_error
from jaxkv.bench.client.data_file import Entry, chosen_entries, load_entries
from jaxkv.bench.client.http_exchange import (
    ExchangeFailed,
    Server,
    exchange,
    open_idle,
    server_at,
)
from jaxkv.bench.client.load import Clock, Load
from jaxkv.bench.client.prompts import (
    SAMPLE_WORDS,
    TokenCounts,
    drawn_ids,
    drawn_texts,
    token_counts,
    words,
)
from jaxkv.bench.figures import Figures, Objectives, Timeline, figures_of
from jaxkv.bench.workload import LENGTHS, Workload, arrivals

_SECONDS_TO_ANSWER = 30.0
"""Most seconds for the list of models."""
_SHARE_OF_TEXTS = 0.9
"""Share of the longest sequence that texts may fill together with their outputs, since their tokens are estimated."""
_SAMPLE_CHARACTERS = 600
_SECONDS_BETWEEN_STATUS = 0.5
_LATE_MS = 20.0
"""A client that is later than this is reported."""
_NO_FIGURES = "jaxkv: interrupted before a request had ended; there are no figures"


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """A load test: the server, the requests to send to it and their times.

    Attributes:
        base_url: address of the server, such as "http://127.0.0.1:8000".
        api_key: sent as a bearer token; `None` for none.
        model: name of the model; `None` takes the server's only model.
        endpoint: "completions" or "chat".
        workload: the requests; of a data file its number of requests and seed alone are used.
        given: fields of the workload that the user gave; the others make room for the server's longest sequence.
        data_file: prompts from a file, see `load_entries`; `None` draws them.
        vocab_size: prompts are token ids below this; `None` for texts.
        rates: requests per second of each run, as a Poisson process; `None` sends all at once.
        burstiness: see `arrivals`.
        max_concurrency: most requests at once; `None` for all.
        warm_up: requests that are sent before, all at once, and not measured.
        open_connections: connections that are opened before each run; requests beyond them open their own.
        ignore_eos: generate on after the end of text.
        timeout: most seconds of a request.
        objectives: for the goodput.
    """

    base_url: str
    api_key: str | None = None
    model: str | None = None
    endpoint: str = "completions"
    workload: Workload = Workload()
    given: frozenset[str] = frozenset()
    data_file: Path | None = None
    vocab_size: int | None = None
    rates: Sequence[float | None] = (None,)
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warm_up: int = 0
    open_connections: int = 0
    ignore_eos: bool = False
    timeout: float = 600.0
    objectives: Objectives | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurement of one rate.

    Attributes:
        about: settings, as JSON.
        figures: figures of the requests that ended.
        timelines: timelines of these requests, in the order in which they ended.
        asked: number of requests that were to be sent.
        interrupted: whether Ctrl-C ended the run, so that the figures are partial.
        uncounted: requests whose answers had no count of tokens; each of their events counts as a token.
        late_ms: 99th percentile of the milliseconds by which the client itself was late to send.
    """

    about: dict[str, Any]
    figures: Figures
    timelines: Sequence[Timeline]
    asked: int
    interrupted: bool
    uncounted: int
    late_ms: float

    @property
    def rate(self) -> float | None:
        """Requests per second; `None` for all at once."""
        return self.about["request_rate"]

    def as_dict(self) -> dict[str, Any]:
        """Returns settings and figures in one dictionary that JSON can hold."""
        names = ("interrupted", "uncounted", "late_ms")
        more = {name: getattr(self, name) for name in names}
        return {**self.about, **more, **asdict(self.figures)}

    def __str__(self) -> str:
        pace = "all at once" if self.rate is None else f"{self.rate:g} requests/s"
        lines = ["{model} at {base_url}, {endpoint}, {pace}".format(**self.about, pace=pace)]
        if self.interrupted:
            ended = len(self.timelines)
            lines.append(f"PARTIAL: interrupted after {ended} of {self.asked} requests had ended")
        if self.uncounted:
            lines.append(
                f"{self.uncounted} answers had no count of tokens; each of their events counts as a token"
            )
        if self.late_ms > _LATE_MS:
            lines.append(
                f"the client was a bottleneck: it sent 1% of the requests {self.late_ms:.1f} ms late or more"
            )
        return "\n".join([*lines, str(self.figures)])


async def measure_server(
    test: LoadTest,
    *,
    report: Callable[[Run], None],
    note: Callable[[str], None],
    status: Callable[[str], None],
    clock: Clock = time.monotonic,
) -> bool:
    """Runs all rates one after another and reports each; returns whether all of them came to their end.

    A cancelled run is reported with the requests that had ended, and the rates behind it are left out.

    Args:
        test: what to send where.
        report: takes each run.
        note: takes a line for the user.
        status: takes a status line, "" to remove it.
        clock: the clock of all measured times.

    Raises:
        ValueError: the server does not answer, has no such model, or no request ended with a token.
    """
    server = server_at(test.base_url, test.api_key)
    try:
        return await _measure(server, test, report, note, status, clock)
    finally:
        server.close()


async def _measure(
    server: Server,
    test: LoadTest,
    report: Callable[[Run], None],
    note: Callable[[str], None],
    status: Callable[[str], None],
    clock: Clock,
) -> bool:
    api, longest = await _find_api(server, test)
    test = _fitted(test, longest, note)
    draw = await _drawing(api, test)
    for index, rate in enumerate(test.rates):
        # Other prompts for each rate: with the same ones a server's prefix cache would answer.
        prompts = draw(test.workload.seed + index)
        bodies = [api.body(prompt, output) for prompt, output in prompts]
        warm_up = min(test.warm_up, len(bodies)) if index == 0 else 0
        if warm_up:
            status(f"warming up with {warm_up} requests")
            warmed, _ = await _send(api, bodies[:warm_up], [0.0] * warm_up, None, status, clock)
            if warmed.interrupted:
                note(_NO_FIGURES)
                return False
        due = arrivals(len(bodies), rate, test.workload.seed, test.burstiness)
        await _open_connections(server, test)
        load, answers = await _send(api, bodies, due, test.max_concurrency, status, clock)
        if load.interrupted and not any(timeline.good for timeline in load.ended):
            note(_NO_FIGURES)
            return False
        report(
            Run(
                about=_about(test, api, rate),
                figures=figures_of(load.ended, test.objectives),
                timelines=load.ended,
                asked=len(bodies),
                interrupted=load.interrupted,
                uncounted=sum(one.timeline.good and not one.counted for one in answers),
                late_ms=float(np.percentile(load.lags, 99)) * 1e3,
            )
        )
        if load.interrupted:
            return False
    return True


async def _open_connections(server: Server, test: LoadTest) -> None:
    try:
        await open_idle(server, test.open_connections)
    except ExchangeFailed as error:
        raise ValueError(
            f"{test.base_url} takes no {test.open_connections} connections: {error}"
        ) from error


async def _send(
    api: Api,
    bodies: Sequence[bytes],
    due: Sequence[float],
    max_concurrency: int | None,
    status: Callable[[str], None],
    clock: Clock,
) -> tuple[Load, list[Answer]]:
    load, answers = Load(clock), []

    async def send(index: int, timeline: Timeline, clock: Clock) -> None:
        answers.append(await complete(api, bodies[index], timeline, clock))

    async def show() -> None:
        while True:
            status(f"{len(load.ended)} of {len(bodies)} requests ended, {load.running} running")
            await asyncio.sleep(_SECONDS_BETWEEN_STATUS)

    shown = asyncio.create_task(show())
    try:
        await load.run(send, due, max_concurrency)
    finally:
        shown.cancel()
        status("")
    return load, answers


async def _find_api(server: Server, test: LoadTest) -> tuple[Api, int | None]:
    """Returns the endpoint, with the server's model if none was given, and the longest sequence if the server tells."""
    api = Api(
        server=server,
        model=test.model or "",
        endpoint=test.endpoint,
        temperature=test.workload.temperature,
        ignore_eos=test.ignore_eos,
        timeout=test.timeout,
    )
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS_TO_ANSWER):
            sent = await exchange(server, "/v1/models", None, lambda _, part: body.extend(part))
    except TimeoutError:
        raise ValueError(
            f"{test.base_url} did not answer within {_SECONDS_TO_ANSWER:g} s"
        ) from None
    except ExchangeFailed as error:
        raise ValueError(
            f"{test.base_url} does not answer: {error}; start a server or give its address with --base-url"
        ) from error
    if sent.status == HTTPStatus.UNAUTHORIZED:
        raise ValueError(
            f"{test.base_url} answered {status_error(sent)}; give the key with --api-key or in JAXKV_API_KEY"
        )
    if sent.status != HTTPStatus.OK:
        if test.model:
            return api, None
        raise ValueError(
            f"{test.base_url}/v1/models answered {status_error(sent)}; name the model with --model"
        )
    try:
        models = msgspec.json.decode(bytes(body), type=_Models).data
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{test.base_url}/v1/models is no list of models ({error}); is it an OpenAI-compatible server?"
        ) from error
    names = [model.id for model in models]
    if test.model is None and len(names) != 1:
        raise ValueError(
            f"{test.base_url} serves {len(names)} models: {', '.join(names)}; choose with --model"
        )
    chosen = test.model or names[0]
    longest = next((model.max_model_len for model in models if model.id == chosen), None)
    return replace(api, model=chosen), longest


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def _fitted(test: LoadTest, longest: int | None, note: Callable[[str], None]) -> LoadTest:
    """Returns the test with lengths that the user did not give clipped to the server's longest sequence."""
    workload = test.workload
    if longest is None or test.data_file is not None:
        return test
    limit = longest if test.vocab_size is not None else int(longest * _SHARE_OF_TEXTS)
    free = [name for name in LENGTHS if name not in test.given]
    clipped = workload.clipped(max(2, limit), *free)
    if clipped == workload:
        return test
    prompt, output = clipped.prompt_tokens[1], clipped.output_tokens[1]
    note(
        f"jaxkv: prompts have up to {prompt:,} tokens and outputs up to {output:,}, because the server's "
        f"max_model_len is {longest:,}; --prompt-tokens and --output-tokens change them"
    )
    return replace(test, workload=clipped)


type _Draw = Callable[[int], Sequence[tuple[Prompt, int]]]
"""Returns the prompts of a seed, each with its number of output tokens."""


async def _drawing(api: Api, test: LoadTest) -> _Draw:
    workload, ids_below = test.workload, test.vocab_size
    if test.data_file is not None:
        entries = load_entries(test.data_file)
        outputs = workload.output_tokens if "output_tokens" in test.given else None
        is_counted = outputs is None and any(entry.output_tokens is None for entry in entries)
        counts = await _count_tokens(api, _sample(entries)) if is_counted else TokenCounts(0.0, 1.0)
        return lambda seed: chosen_entries(
            entries,
            counts,
            requests=workload.requests if "requests" in test.given else None,
            output_tokens=outputs,
            seed=seed,
        )
    if ids_below is not None:
        return lambda seed: drawn_ids(replace(workload, seed=seed), ids_below)
    sample = words(np.random.default_rng(workload.seed), SAMPLE_WORDS)
    counts = await _count_tokens(api, sample)
    return lambda seed: drawn_texts(replace(workload, seed=seed), counts)


def _sample(entries: Sequence[Entry]) -> str:
    """Returns a text of a file, long enough to count its tokens."""
    text = "\n".join(f"{entry.text}\n{entry.answer}" for entry in entries[:20])
    return text[:_SAMPLE_CHARACTERS]


async def _count_tokens(api: Api, text: str) -> TokenCounts:
    """Asks the server to count the tokens of a text, once and twice, by generating one token for each."""
    once, twice = [await _prompt_tokens(api, prompt) for prompt in (text, f"{text} {text}")]
    return token_counts(text, once, twice)


async def _prompt_tokens(api: Api, prompt: str) -> int:
    timeline = Timeline(prompt_tokens=0, arrived=0.0)
    answer = await complete(api, api.body(prompt, 1), timeline, time.monotonic)
    if timeline.failed:
        raise ValueError(f"the server failed the first request: {timeline.error}")
    if not answer.counted:
        raise ValueError(
            "the server sends no counts of tokens (stream_options.include_usage), so the lengths of prompts cannot be "
            "planned; send token ids with --vocab-size"
        )
    return timeline.prompt_tokens


def _about(test: LoadTest, api: Api, rate: float | None) -> dict[str, Any]:
    return {
        "model": api.model,
        "base_url": test.base_url,
        "endpoint": test.endpoint,
        "request_rate": rate,
        "burstiness": test.burstiness,
        "max_concurrency": test.max_concurrency,
        "ignore_eos": test.ignore_eos,
        "warm_up": test.warm_up,
        "open_connections": test.open_connections,
        "vocab_size": test.vocab_size,
        "timeout": test.timeout,
        "data_file": None if test.data_file is None else test.data_file.name,
        "objectives": None if test.objectives is None else asdict(test.objectives),
        "workload": asdict(test.workload),
    }
