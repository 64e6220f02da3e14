"""Writes the charts of runs to a file: one HTML page without outside assets and scripts, or a PNG picture."""

import importlib.util
from collections.abc import Sequence
from html import escape
from pathlib import Path

from jaxkv.bench.plots.charts import Chart
from jaxkv.bench.plots.runs import PlottedRun, rate_charts, timeline_chart
from jaxkv.bench.plots.svg import STYLE, as_svg

SUFFIXES = (".html", ".png")

_PAGE_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --grid: #e3e6ea; --page: #ffffff; --box: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e6ea; --grid: #363b42; --page: #16191d; --box: #1f2329; } }
body { margin: 2rem auto; max-width: 880px; padding: 0 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
pre { background: var(--box); padding: 0.8rem 1rem; overflow-x: auto; font-size: 13px; }
figure { margin: 1.5rem 0; }
"""


def check_plot(path: Path) -> None:
    """Refuses a file that cannot be written in the end, before anything is measured.

    Raises:
        ValueError: its suffix is unknown, its folder does not exist, or matplotlib is needed and not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a plot is a file {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {str(path.parent)!r} of the plot does not exist; make it")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "plots as PNG need matplotlib; run pip install 'jaxkv[plot]', or give a file .html"
        )


def write_plot(path: Path, title: str, runs: Sequence[PlottedRun]) -> None:
    """Writes the charts of one or more runs; a picture of several rates leaves out the timelines.

    Args:
        path: the file, whose suffix is one of `SUFFIXES`.
        title: title of the page.
        runs: what was measured.

    Raises:
        OSError: the file cannot be written.
    """
    across: list[Chart] = [*rate_charts(runs)]
    if path.suffix == ".png":
        # Matplotlib is an extra, and slow to import.
        from jaxkv.bench.plots.png import write_png

        write_png(path, across or [timeline_chart(run) for run in runs])
    else:
        path.write_text(_page(title, across, runs), encoding="utf-8")


def _page(title: str, across: Sequence[Chart], runs: Sequence[PlottedRun]) -> str:
    parts = [_figure(chart) for chart in across]
    for run in runs:
        parts += [f"<pre>{escape(run.summary)}</pre>", _figure(timeline_chart(run))]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title>",
            f"<style>{_PAGE_STYLE}{STYLE}</style></head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def _figure(chart: Chart) -> str:
    return f"<figure>{as_svg(chart)}</figure>"
