"""Draws a chart as SVG: text that stands alone in a page, coloured by the page's style sheet."""

from html import escape

from jaxkv.bench.plots.charts import PALETTE, Bars, Chart, Lines, ticks

_WIDTH, _LINES_HEIGHT = 880, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 56, 48
_LEAST_ROWS_HEIGHT, _MOST_ROWS_HEIGHT, _ROW = 140, 1000, 12

STYLE = "\n".join(
    [
        "svg { display: block; max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }",
        "svg text { fill: var(--text); }",
        "svg .title { font-size: 15px; font-weight: 600; }",
        "svg .grid { stroke: var(--grid); }",
        "svg .axis { stroke: var(--text); }",
        "svg .line { fill: none; stroke-width: 2; }",
        *(
            f"svg .c{index} {{ fill: {color}; }} svg .line.c{index} {{ fill: none; stroke: {color}; }}"
            for index, color in enumerate(PALETTE)
        ),
    ]
)
"""The style sheet; a page sets the colours `--text` and `--grid`."""

_COLORS = "svg { background: #fff; --text: #1b1f24; --grid: #e3e6ea; }"
_LABEL_ROOM = 1.05
"""Length of the axis, in longest bars with a label behind them."""


def as_svg_file(chart: Chart) -> str:
    """Returns a chart as the text of an SVG file, with its style sheet and a white background."""
    drawn = as_svg(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    opening, rest = drawn.split("\n", 1)
    return f"{opening}\n<style>{_COLORS}\n{STYLE}</style>\n{rest}\n"


def as_svg(chart: Chart) -> str:
    """Returns a chart as one `svg` element."""
    inner = _LINES_HEIGHT
    if isinstance(chart, Bars):
        inner = min(max(chart.rows * _ROW, _LEAST_ROWS_HEIGHT), _MOST_ROWS_HEIGHT)
    frame = _Frame(chart, inner)
    parts = frame.axes()
    parts += _lines(chart, frame) if isinstance(chart, Lines) else _bars(chart, frame)
    height = _TOP + inner + _BOTTOM
    return "\n".join(
        [
            f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
            f'aria-label="{escape(chart.title)}">',
            *parts,
            "</svg>",
        ]
    )


class _Frame:
    """Places numbers of a chart's axes on the picture."""

    def __init__(self, chart: Chart, inner: int) -> None:
        self._chart = chart
        self._inner = inner
        most_x, most_y = chart.extent
        # A chart of nothing but zeros has an axis too.
        self._x_ticks = ticks(most_x or 1.0)
        self._y_ticks = ticks(most_y or 1.0, 5)
        self._x_end = self._x_ticks[-1] if isinstance(chart, Lines) else (most_x or 1.0)
        if isinstance(chart, Bars) and any(span.label for span in chart.spans):
            self._x_end *= _LABEL_ROOM
        self._y_end = self._y_ticks[-1] if isinstance(chart, Lines) else most_y

    def x(self, number: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * number / self._x_end, 2)

    def y(self, number: float) -> float:
        """Lines grow upwards, rows of bars downwards."""
        share = number / self._y_end
        return round(
            _TOP + self._inner * (1 - share if isinstance(self._chart, Lines) else share), 2
        )

    def axes(self) -> list[str]:
        chart, bottom, right = self._chart, _TOP + self._inner, _WIDTH - _RIGHT
        parts = [f'<text class="title" x="{_LEFT}" y="20">{escape(chart.title)}</text>']
        for tick in self._x_ticks:
            if tick <= self._x_end:
                x = self.x(tick)
                parts += [
                    f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}"/>',
                    f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:,.10g}</text>',
                ]
        if isinstance(chart, Bars) and chart.row_labels:
            parts += [
                f'<text x="{_LEFT - 8}" y="{self.y(row) + 4}" text-anchor="end">{escape(label)}</text>'
                for row, label in chart.row_labels
            ]
        else:
            parts += self._numbered(right)
        middle = _TOP + self._inner / 2
        return [
            *parts,
            f'<line class="axis" x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{bottom}"/>',
            f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
            f'<text x="{(_LEFT + right) / 2}" y="{bottom + 38}" text-anchor="middle">{escape(chart.x_label)}</text>',
            f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>',
        ]

    def _numbered(self, right: int) -> list[str]:
        """Returns the horizontal grid, with its numbers."""
        parts = []
        for tick in self._y_ticks:
            if tick <= self._y_end and (tick == int(tick) or isinstance(self._chart, Lines)):
                y = self.y(tick)
                parts += [
                    f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>',
                    f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:,.10g}</text>',
                ]
        return parts


def _legend(labels: list[tuple[int, str]]) -> list[str]:
    parts, x = [], _LEFT
    for color, label in labels:
        parts += [
            f'<rect class="c{color}" x="{x}" y="32" width="12" height="12" rx="2"/>',
            f'<text x="{x + 18}" y="42">{escape(label)}</text>',
        ]
        x += 42 + 7 * len(label)
    return parts


def _lines(chart: Lines, frame: _Frame) -> list[str]:
    parts = _legend([(one.color, one.label) for one in chart.series])
    for one in chart.series:
        places = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in one.points)
        parts.append(f'<polyline class="line c{one.color}" points="{places}"/>')
        parts += [
            f'<circle class="c{one.color}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="4">'
            f"<title>{escape(one.label)} at {x:g}: {y:,.4g}</title></circle>"
            for x, y in one.points
        ]
    return parts


def _bars(chart: Bars, frame: _Frame) -> list[str]:
    parts = _legend([(kind, chart.kinds[kind]) for kind in chart.shown_kinds])
    for span in chart.spans:
        x, y = frame.x(span.begin), frame.y(span.row + 0.1)
        # A part of no length, such as a refused request, is still seen.
        width = max(round(frame.x(span.end) - x, 2), 1.0)
        height = round(frame.y(span.row + 0.9) - y, 2)
        parts.append(
            f'<rect class="c{span.kind}" x="{x}" y="{y}" width="{width}" height="{height}">'
            f"<title>{escape(span.note)}</title></rect>"
        )
        if span.label:
            middle = frame.y(span.row + 0.5) + 4
            parts.append(
                f'<text x="{round(x + width + 4, 2)}" y="{middle}">{escape(span.label)}</text>'
            )
    return parts
