"""Renders records as Markdown tables, to print or to insert between a document's markers.

    python -m benchmarks.report ops-paged_attention --columns case,implementation,us
    python -m benchmarks.report --into benchmarks/README.md

A document marks a table by `<!-- record NAME: column, column -->` and `<!-- /record -->`, each on its own line. The
text between the markers is replaced. `column=value` among the columns selects the rows with that value, and is no
column of the table.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, Record, load_record

_MARKED = re.compile(
    r"^(?P<open><!-- record (?P<name>[\w.-]+)(?:: (?P<columns>[^>\n]*?))? -->\n)"
    r"(?:.*?\n)??(?P<close><!-- /record -->)$",
    re.MULTILINE | re.DOTALL,
)


def render(record: Record, columns: Sequence[str] = ()) -> str:
    """Returns the Markdown table of a record, and below it a line with machine, versions, commit and command.

    Args:
        record: the measurement.
        columns: names of the columns, in this order; all columns if empty. `column=value` selects the rows with that
            value.

    Raises:
        ValueError: a column is not in the record, or no row is selected; the message lists the columns or values.
    """
    wanted = dict(name.split("=", 1) for name in columns if "=" in name)
    columns = [name for name in columns if "=" not in name]
    known = list(dict.fromkeys(name for row in record.rows for name in row))
    unknown = [name for name in [*columns, *wanted] if name not in known]
    if unknown:
        raise ValueError(
            f"record {record.name} has no column {unknown[0]!r}; it has {', '.join(known)}"
        )
    rows = [
        row for row in record.rows if all(str(row.get(name)) == wanted[name] for name in wanted)
    ]
    if record.rows and not rows:
        there = {name: sorted({str(row.get(name)) for row in record.rows}) for name in wanted}
        raise ValueError(f"no row of record {record.name} has {wanted}; there are {there}")
    chosen = columns or known
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in chosen]
    lines = [
        _line(chosen),
        _line(["---:" if right else "---" for right in numeric]),
        *(_line([_cell(row.get(name)) for name in chosen]) for row in rows),
    ]
    return "\n".join([*lines, "", _origin(record)])


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # Three significant digits, but no exponent and no fraction where the number is large.
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _origin(record: Record) -> str:
    state = {True: " with changes", False: "", None: ""}[record.dirty]
    driver = "" if record.driver == "none" else f", driver {record.driver}"
    return (
        f"{record.device}{driver}, JAX {record.jax}, commit {record.commit[:10]}{state}, "
        f"{record.date[:10]}: `{record.command}`"
    )


def fill(text: str, folder: Path = RECORDS) -> str:
    """Returns a document with every marked table replaced by the table of its record."""

    def replace(found: re.Match[str]) -> str:
        columns = [name.strip() for name in (found["columns"] or "").split(",") if name.strip()]
        table = render(load_record(folder / f"{found['name']}.json"), columns)
        return f"{found['open']}{table}\n{found['close']}"

    return _MARKED.sub(replace, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints tables, or writes them into a document."""
    parser = argparse.ArgumentParser(description="Turns records into Markdown tables.")
    parser.add_argument("record", nargs="*", help="names of records; all if none are given")
    parser.add_argument("--columns", default="", help="comma-separated; all if not given")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records lie")
    parser.add_argument("--into", type=Path, help="a document whose marked tables are replaced")
    options = parser.parse_args(arguments)
    if options.into is not None:
        options.into.write_text(fill(options.into.read_text(), options.folder))
        return
    names = options.record or sorted(path.stem for path in options.folder.glob("*.json"))
    for name in names:
        record = load_record(options.folder / f"{name}.json")
        print(f"### {name}\n\n{render(record, list(filter(None, options.columns.split(','))))}\n")


if __name__ == "__main__":
    main()
