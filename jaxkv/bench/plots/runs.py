"""The charts of measured runs: latency and throughput against the request rate, and a timeline of each run."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.bench.figures import Figures, Timeline
from jaxkv.bench.plots.charts import Bars, Lines, Series, Span

KINDS = ("queued", "until the first token", "tokens", "failed")
"""Parts of a request's bar."""
_QUEUED, _FIRST, _TOKENS, _FAILED = range(4)
MOST_BARS = 500
"""Requests of a timeline; of more, evenly chosen ones are drawn."""

_LATENCIES = {
    "ttft_ms": "Time to first token (TTFT)",
    "tpot_ms": "Time per output token (TPOT)",
    "itl_ms": "Inter-token latency (ITL)",
    "e2e_ms": "End-to-end latency (E2EL)",
}


@dataclass(frozen=True, kw_only=True)
class PlottedRun:
    """A measured run.

    Attributes:
        summary: its settings and figures as text.
        rate: requests per second; `None` for all at once.
        figures: figures of its requests.
        timelines: timelines of its requests.
    """

    summary: str
    rate: float | None
    figures: Figures
    timelines: Sequence[Timeline]

    @property
    def pace(self) -> str:
        """Describes the rate."""
        return "all requests at once" if self.rate is None else f"{self.rate:g} requests/s"


def rate_charts(runs: Sequence[PlottedRun]) -> list[Lines]:
    """Returns each latency and the throughput against the rate; none for fewer than two runs with a rate."""
    rated = [(one.rate, one.figures) for one in runs if one.rate is not None]
    rated.sort(key=lambda one: one[0])
    if len(rated) < 2:
        return []
    charts = []
    for name, title in _LATENCIES.items():
        spreads = [(rate, spread) for rate, one in rated if (spread := getattr(one, name))]
        series = tuple(
            Series(
                label=label,
                points=tuple((rate, getattr(spread, label)) for rate, spread in spreads),
                color=color,
            )
            for color, label in enumerate(("p50", "p90", "p99"))
        )
        if spreads:
            charts.append(_against_rate(title, "milliseconds", series))
    tokens = Series(
        label="output tokens",
        points=tuple((rate, one.output_tokens_per_second) for rate, one in rated),
        color=0,
    )
    charts.append(_against_rate("Output throughput", "tokens per second", (tokens,)))
    answered = Series(
        label="answered",
        points=tuple((rate, one.requests_per_second) for rate, one in rated),
        color=0,
    )
    served = [answered]
    if rated[0][1].goodput_per_second is not None:
        met = tuple((rate, one.goodput_per_second or 0.0) for rate, one in rated)
        served.append(Series(label="met the objectives (goodput)", points=met, color=2))
    charts.append(_against_rate("Requests", "requests per second", tuple(served)))
    return charts


def _against_rate(title: str, y_label: str, series: tuple[Series, ...]) -> Lines:
    return Lines(
        title=title, x_label="request rate, requests per second", y_label=y_label, series=series
    )


def timeline_chart(run: PlottedRun) -> Bars:
    """Returns a bar for each request, in the order in which they were due."""
    lines = sorted(run.timelines, key=_due)
    step = max(1, -(-len(lines) // MOST_BARS))
    shown = lines[::step]
    spans = [span for row, one in enumerate(shown) for span in _spans(row, one)]
    of = "" if step == 1 else f", {len(shown)} of {len(lines)} requests"
    return Bars(
        title=f"Timeline, {run.pace}{of}",
        x_label="seconds from the start of the run",
        y_label="request, in the order of arrival",
        kinds=KINDS,
        spans=tuple(spans),
        rows=len(shown),
    )


def _due(one: Timeline) -> float:
    return one.arrived if one.queued is None else min(one.queued[0], one.arrived)


def _spans(row: int, one: Timeline) -> list[Span]:
    end = max(one.end, *one.tokens, one.arrived) if one.tokens else max(one.end, one.arrived)
    waited = one.arrived if one.queued is None else one.queued[1]
    marks = [(_QUEUED, _due(one), waited)]
    if one.good:
        marks += [(_FIRST, waited, one.tokens[0]), (_TOKENS, one.tokens[0], end)]
        note = (
            f"{one.prompt_tokens} prompt tokens, {one.output_tokens} output tokens; first token after "
            f"{one.ttft * 1e3:.1f} ms, end after {one.e2e * 1e3:.1f} ms"
        )
    else:
        marks.append((_FAILED, waited, end))
        note = f"failed: {one.error}"
    return [
        Span(row=row, begin=begin, end=finish, kind=kind, note=note)
        for kind, begin, finish in marks
        if finish > begin or kind == _FAILED
    ]
