"""Draws the decode steps of a record of `benchmarks.bridge` as one SVG file, such as the picture of the README.

python -m benchmarks.bridge_plot bridge-graphs docs/images/bridge-steps.svg

A picture has a bar for each of four ways to compute a step, per batch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import RECORDS, Record, load_record
from jaxkv.bench.plots.charts import Bars, Span
from jaxkv.bench.plots.svg import as_svg_file

FORMS = {
    "dynamic, sdpa": "generate, DynamicCache",
    "ours, our kernels, graphs": "generate, JaxkvCache",
    "torch_bridge.generate": "torch_bridge.generate",
    "gpt-fast style, one graph, no host": "gpt-fast style",
}
"""Forms of a record -> their names in the picture."""


def step_chart(record: Record) -> Bars:
    """Returns a bar per form and batch, as long as a decode step.

    Raises:
        ValueError: the record has no row of one of `FORMS`.
    """
    names = list(FORMS)
    if missing := set(names) - {row.get("cache") for row in record.rows}:
        raise ValueError(f"record {record.name} has no row of {sorted(missing)}")
    batches = list(dict.fromkeys((row["batch"], row["context"]) for row in record.rows))
    # An empty row stands between two batches.
    stride = len(names) + 1
    spans = []
    for row in record.rows:
        if row["cache"] not in FORMS:
            continue
        kind, milliseconds = names.index(row["cache"]), float(row["ms_per_step"])
        at = stride * batches.index((row["batch"], row["context"])) + kind
        label = f"{milliseconds:#.3g}"
        spans.append(Span(row=at, begin=0.0, end=milliseconds, kind=kind, label=label))
    return Bars(
        title=f"A decode step of Llama-3.1-8B's shape, rows x prompt tokens, {record.device}",
        x_label="milliseconds per step",
        y_label="",
        kinds=tuple(FORMS.values()),
        spans=tuple(spans),
        rows=stride * len(batches) - 1,
        row_labels=tuple(
            (stride * index + len(names) / 2, f"{batch} x {context}")
            for index, (batch, context) in enumerate(batches)
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the picture of a record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("record", help="name of a record with the forms of the picture")
    parser.add_argument("file", type=Path, help="the SVG file")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records lie")
    given = parser.parse_args(arguments)
    record = load_record(given.folder / f"{given.record}.json")
    given.file.write_text(as_svg_file(step_chart(record)))


if __name__ == "__main__":
    main()
