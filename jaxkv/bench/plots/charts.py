"""Charts as data: lines over a number, and bars over time. `svg.py` and `png.py` draw them."""

import math
from dataclasses import dataclass

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc3311")
"""Colours that stay apart for most eyes (Okabe and Ito's, with a darker red)."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart.

    Attributes:
        label: in the legend.
        points: x and y, in the order of x.
        color: index of `PALETTE`.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    color: int


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines over one axis; both axes begin at 0. Labels of axes have the unit."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]

    @property
    def extent(self) -> tuple[float, float]:
        """The largest x and y."""
        points = [point for one in self.series for point in one.points]
        return max(x for x, _ in points), max(y for _, y in points)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a bar.

    Attributes:
        row: number of the bar, 0 is on top.
        begin, end: on the time axis.
        kind: index of the chart's `kinds`, and of `PALETTE`.
        note: is shown where the mouse points.
        label: is written behind the part.
    """

    row: int
    begin: float
    end: float
    kind: int
    note: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of coloured parts over time, one on top of the other.

    Attributes:
        title, x_label, y_label: texts; labels of axes have the unit.
        kinds: names of the parts, in the legend.
        spans: the parts.
        rows: number of bars.
        row_labels: places on the axis of rows, and their names; without any, rows are numbered.
    """

    title: str
    x_label: str
    y_label: str
    kinds: tuple[str, ...]
    spans: tuple[Span, ...]
    rows: int
    row_labels: tuple[tuple[float, str], ...] = ()

    @property
    def extent(self) -> tuple[float, float]:
        """The latest end, and the number of rows."""
        return max(span.end for span in self.spans), float(self.rows)

    @property
    def shown_kinds(self) -> list[int]:
        """The kinds that some part has, for the legend."""
        return sorted({span.kind for span in self.spans})


type Chart = Lines | Bars


def ticks(most: float, about: int = 6) -> list[float]:
    """Returns `about` round numbers, more or less, from 0 up to at least `most`, which is above 0."""
    step = most / about
    unit = 10.0 ** math.floor(math.log10(step))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= step * 0.999)
    return [step * index for index in range(math.ceil(most / step * 0.999) + 1)]
