"""Draws charts into a PNG file, with matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxkv.bench.plots.charts import PALETTE, Bars, Chart, Lines

_WIDTH, _LINES_HEIGHT = 10.0, 3.4
_LEAST_BARS_HEIGHT, _MOST_BARS_HEIGHT, _ROW = 3.0, 12.0, 0.12


def write_png(path: Path, charts: Sequence[Chart]) -> None:
    """Draws charts of lines in two columns, and charts with bars below one another.

    Args:
        path: path of the file.
        charts: one or more.

    Raises:
        OSError: the file cannot be written.
    """
    columns = 2 if len(charts) > 1 and all(isinstance(chart, Lines) for chart in charts) else 1
    heights = [_height(chart) for chart in charts[::columns]]
    figure = Figure(
        figsize=(_WIDTH * (1 + 0.4 * (columns - 1)), sum(heights)), layout="constrained"
    )
    axes = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for unused in axes.flat[len(charts) :]:
        unused.set_visible(False)
    for place, chart in zip(axes.flat, charts, strict=False):
        _lines(place, chart) if isinstance(chart, Lines) else _bars(place, chart)
        place.set_title(chart.title, loc="left", fontweight="bold")
        place.set_xlabel(chart.x_label)
        place.set_ylabel(chart.y_label)
        place.spines[["top", "right"]].set_visible(False)
        place.set_axisbelow(True)
    figure.savefig(path, dpi=110)


def _height(chart: Chart) -> float:
    if isinstance(chart, Lines):
        return _LINES_HEIGHT
    return min(max(chart.rows * _ROW + 1.2, _LEAST_BARS_HEIGHT), _MOST_BARS_HEIGHT)


def _lines(axes: Axes, chart: Lines) -> None:
    for one in chart.series:
        x, y = zip(*one.points, strict=True)
        axes.plot(x, y, color=PALETTE[one.color], marker="o", markersize=5, label=one.label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd")
    axes.legend(frameon=False)


def _bars(axes: Axes, chart: Bars) -> None:
    # A part of no length, such as a refused request, is still seen.
    least = chart.extent[0] / 800
    for kind in chart.shown_kinds:
        spans = [span for span in chart.spans if span.kind == kind]
        axes.barh(
            [span.row + 0.5 for span in spans],
            [max(span.end - span.begin, least) for span in spans],
            left=[span.begin for span in spans],
            height=0.8,
            color=PALETTE[kind],
        )
    for span in chart.spans:
        if span.label:
            axes.text(span.end, span.row + 0.5, f" {span.label}", va="center")
    axes.set_xlim(0, chart.extent[0] or 1.0)
    axes.set_ylim(chart.rows, 0)
    if chart.row_labels:
        axes.set_yticks(
            [row for row, _ in chart.row_labels], [text for _, text in chart.row_labels]
        )
    axes.grid(axis="x", color="#dddddd")
    handles = [Patch(color=PALETTE[kind], label=chart.kinds[kind]) for kind in chart.shown_kinds]
    axes.legend(handles=handles, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
