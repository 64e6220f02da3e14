"""Bar charts of groups: one bar per kind in each group, with a gap between two groups."""

from collections.abc import Mapping

from jaxkv.bench.plots.charts import Bars, Span


def grouped_bars(title: str, x_label: str, groups: Mapping[str, Mapping[str, float]]) -> Bars:
    """Returns a bar for each value, labelled with it.

    Args:
        title: title of the chart.
        x_label: label of the axis of values, with their unit.
        groups: name of a group -> kind -> value. A group may lack kinds; kinds are drawn in the order in which they
            first occur.
    """
    kinds = list(dict.fromkeys(kind for values in groups.values() for kind in values))
    spans, row_labels, row = [], [], 0
    for name, values in groups.items():
        ordered = sorted(values, key=kinds.index)
        row_labels.append((row + len(ordered) / 2, name))
        for kind in ordered:
            value = float(values[kind])
            label = f"{value:#.3g}" if value < 100 else f"{value:,.0f}"
            spans.append(Span(row=row, begin=0.0, end=value, kind=kinds.index(kind), label=label))
            row += 1
        row += 1
    return Bars(
        title=title,
        x_label=x_label,
        y_label="",
        kinds=tuple(kinds),
        spans=tuple(spans),
        rows=row - 1,
        row_labels=tuple(row_labels),
    )
