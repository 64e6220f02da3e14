"""The picture of the bridge's decode steps is that of the record."""

from dataclasses import replace

import pytest

from benchmarks.bridge_plot import FORMS, main, step_chart
from benchmarks.record import RECORDS, load_record
from tests.docs.blocks import ROOT


def test_the_picture_in_the_documentation_shows_the_record(tmp_path):
    main(["bridge-graphs", str(tmp_path / "steps.svg")])
    drawn = (ROOT / "docs" / "images" / "bridge-steps.svg").read_text()
    assert drawn == (tmp_path / "steps.svg").read_text()


def test_each_form_of_a_batch_is_a_bar_as_long_as_its_step():
    record = load_record(RECORDS / "bridge-graphs.json")
    chart = step_chart(record)
    first = {row["cache"]: row["ms_per_step"] for row in record.rows if row["batch"] == 1}
    assert [span.end for span in chart.spans[:4]] == [first[form] for form in FORMS]
    assert [span.row for span in chart.spans] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert [label for _, label in chart.row_labels] == ["1 x 1024", "8 x 1024", "32 x 2048"]


def test_a_record_without_a_form_is_refused():
    record = load_record(RECORDS / "bridge-graphs.json")
    rows = [row for row in record.rows if row["cache"] != "torch_bridge.generate"]
    with pytest.raises(ValueError, match=r"no row of \['torch_bridge\.generate'\]"):
        step_chart(replace(record, rows=rows))
