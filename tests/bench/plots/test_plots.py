"""Charts show each run's figures, and pages stand alone."""

import importlib.util
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.bench.figures import Objectives, Timeline, figures_of
from jaxkv.bench.plots.charts import Bars, Lines, Span, ticks
from jaxkv.bench.plots.page import check_plot, write_plot
from jaxkv.bench.plots.runs import KINDS, MOST_BARS, PlottedRun, rate_charts, timeline_chart
from jaxkv.bench.plots.svg import as_svg, as_svg_file

LINES = [
    Timeline(prompt_tokens=4, arrived=1.0, queued=(0.5, 1.0), tokens=[1.5, 2.0]),
    Timeline(prompt_tokens=4, arrived=0.0, tokens=[0.25, 1.0]),
    Timeline(prompt_tokens=4, arrived=2.0, queued=(2.0, 2.5), tokens=[3.0]),
    Timeline(prompt_tokens=4, arrived=0.75, ended=0.875, failed=True, error="<429> & more"),
]


def plotted(rate, lines=LINES):
    figures = figures_of(lines, Objectives(ttft=300.0))
    return PlottedRun(summary=f"rate <{rate}>", rate=rate, figures=figures, timelines=lines)


def test_a_bar_has_its_parts_at_their_times_in_the_order_of_arrival():
    chart = timeline_chart(plotted(4.0))
    parts = [(span.row, KINDS[span.kind], span.begin, span.end) for span in chart.spans]
    assert parts == [
        (0, "until the first token", 0.0, 0.25),
        (0, "tokens", 0.25, 1.0),
        # Queued before it arrived, in the client; its latencies count from the arrival.
        (1, "queued", 0.5, 1.0),
        (1, "until the first token", 1.0, 1.5),
        (1, "tokens", 1.5, 2.0),
        (2, "failed", 0.75, 0.875),
        # Queued after it arrived, in the engine; a single token has no length.
        (3, "queued", 2.0, 2.5),
        (3, "until the first token", 2.5, 3.0),
    ]
    assert chart.spans[5].note == "failed: <429> & more"
    assert "first token after 500.0 ms" in chart.spans[2].note
    assert chart.rows == 4


def test_of_many_requests_evenly_chosen_ones_are_drawn_and_the_title_says_so():
    lines = [Timeline(prompt_tokens=1, arrived=float(n), tokens=[n + 0.5]) for n in range(1200)]
    chart = timeline_chart(plotted(None, lines))
    assert chart.rows <= MOST_BARS
    assert [span.begin for span in chart.spans[:3]] == [0.0, 3.0, 6.0]
    assert chart.title == "Timeline, all requests at once, 400 of 1200 requests"


def test_lines_show_each_percentile_against_the_rate():
    slow = [replace(one, tokens=[time + 1 for time in one.tokens]) for one in LINES]
    charts = rate_charts([plotted(8.0, slow), plotted(None), plotted(2.0)])
    ttft = charts[0]
    assert ttft.title == "Time to first token (TTFT)"
    assert [one.label for one in ttft.series] == ["p50", "p90", "p99"]
    assert ttft.series[0].points == ((2.0, 500.0), (8.0, 1500.0))
    assert [chart.y_label for chart in charts] == 4 * ["milliseconds"] + [
        "tokens per second",
        "requests per second",
    ]
    assert [one.label for one in charts[-1].series] == ["answered", "met the objectives (goodput)"]
    assert charts[-1].series[1].points[0] == (2.0, pytest.approx(1 / 3))


def test_one_rate_has_no_lines():
    assert rate_charts([plotted(2.0), plotted(None)]) == []


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_reach_the_largest_number(most):
    found = ticks(most)
    assert 3 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] >= most * 0.99
    assert found[-2] < most


def shapes(svg, tag):
    root = ElementTree.fromstring(
        svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    )
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def test_a_picture_has_axes_with_units_a_legend_and_every_point():
    [chart, *_] = rate_charts([plotted(2.0), plotted(8.0)])
    svg = as_svg(chart)
    texts = [text.text for text in shapes(svg, "text")]
    for wanted in (chart.title, chart.x_label, chart.y_label, "p50", "p90", "p99", "0", "8"):
        assert wanted in texts
    assert len(shapes(svg, "circle")) == 6
    places = [line.get("points").split() for line in shapes(svg, "polyline")]
    left, right = (float(pair.split(",")[0]) for pair in places[0])
    assert right - 84 == pytest.approx(4 * (left - 84), rel=0.01)


def test_bars_lie_inside_the_picture_in_proportion_to_time():
    svg = as_svg(timeline_chart(plotted(4.0)))
    bars = [one for one in shapes(svg, "rect") if one.get("rx") is None]
    assert len(bars) == 8
    # The first takes 0.25 of 3 seconds, and the axis is 776 wide.
    assert float(bars[0].get("width")) == pytest.approx(776 * 0.25 / 3, abs=0.1)
    for bar in bars:
        assert float(bar.get("x")) + float(bar.get("width")) <= 880
        assert float(bar.get("height")) > 1


NAMED = Bars(
    title="t",
    x_label="x",
    y_label="y",
    kinds=("a", "b"),
    spans=(
        Span(row=0, begin=0.0, end=40.0, kind=0, label="<40>"),
        Span(row=1, begin=0.0, end=10.0, kind=1, label="10"),
    ),
    rows=2,
    row_labels=((1.0, "both"),),
)


def test_bars_with_names_and_values_show_them_inside_the_picture_and_no_numbers_of_rows():
    drawn = as_svg_file(NAMED)
    texts = {text.text: text for text in ElementTree.fromstring(drawn).iter() if text.text}
    assert float(texts["<40>"].get("x")) + 4 * 7 < 880
    assert float(texts["<40>"].get("x")) - float(texts["10"].get("x")) > 500
    assert "both" in texts
    assert {"0.5", "1"}.isdisjoint(texts)
    assert "background: #fff" in drawn


def test_a_chart_of_zeros_has_an_axis():
    zeros = [Timeline(prompt_tokens=1, arrived=0.0, tokens=[0.0]), *LINES[:1]]
    assert isinstance(timeline_chart(plotted(1.0, zeros)), Bars)
    flat = Lines(
        title="t",
        x_label="x",
        y_label="y",
        series=rate_charts([plotted(1.0), plotted(2.0)])[0].series,
    )
    still = replace(flat, series=tuple(replace(one, points=((1.0, 0.0),)) for one in flat.series))
    assert "<circle" in as_svg(still)


def test_a_page_stands_alone_and_escapes_what_servers_say(tmp_path):
    page = tmp_path / "out.html"
    write_plot(page, "bench <serve>", [plotted(2.0), plotted(8.0)])
    text = page.read_text()
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", text)
    assert "bench &lt;serve&gt;" in text
    assert "rate &lt;2.0&gt;" in text
    assert "&lt;429&gt; &amp; more" in text
    assert "<429>" not in text
    # Six charts against the rate, and a timeline of each run.
    assert text.count("<svg ") == 8


def test_a_picture_in_png_is_drawn_for_a_run_and_for_rates(tmp_path):
    pytest.importorskip("matplotlib")
    for name, runs in (("run", [plotted(2.0)]), ("rates", [plotted(2.0), plotted(8.0)])):
        picture = tmp_path / f"{name}.png"
        write_plot(picture, "title", runs)
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
        assert (width, height) == ((1100, 330) if name == "run" else (1540, 1122))


def test_names_and_values_of_bars_are_drawn_in_png_too(tmp_path):
    pytest.importorskip("matplotlib")
    from jaxkv.bench.plots.png import write_png

    for name, chart in (("with", NAMED), ("without", replace(NAMED, row_labels=()))):
        write_png(tmp_path / f"{name}.png", [chart])
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_a_plot_that_cannot_be_made_is_refused_before_anything_runs(tmp_path, monkeypatch):
    check_plot(tmp_path / "x.html")
    with pytest.raises(ValueError, match=r"a plot is a file .html or .png"):
        check_plot(tmp_path / "x.svg")
    with pytest.raises(ValueError, match="does not exist"):
        check_plot(tmp_path / "missing" / "x.html")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'jaxkv\[plot\]', or give a file .html"):
        check_plot(tmp_path / "x.png")
