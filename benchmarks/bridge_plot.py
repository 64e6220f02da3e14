"""Draws the decode steps of a record of `benchmarks.bridge` as one SVG file, such as the picture of the README.

python -m benchmarks.bridge_plot bridge-graphs docs/images/bridge-steps.svg

A picture has a bar for each of four ways to compute a step, per batch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.grouped_bars import grouped_bars
from benchmarks.record import RECORDS, Record, load_record
from jaxkv.bench.plots.charts import Bars
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
    if missing := set(FORMS) - {row.get("cache") for row in record.rows}:
        raise ValueError(f"record {record.name} has no row of {sorted(missing)}")
    groups: dict[str, dict[str, float]] = {}
    for row in record.rows:
        if row["cache"] in FORMS:
            group = groups.setdefault(f"{row['batch']} x {row['context']}", {})
            group[FORMS[row["cache"]]] = row["ms_per_step"]
    title = f"A decode step of Llama-3.1-8B's shape, rows x prompt tokens, {record.device}"
    return grouped_bars(title, "milliseconds per step", groups)


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
