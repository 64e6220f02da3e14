"""The pictures that compare jaxkv with other engines are those of the records."""

from benchmarks.grouped_bars import grouped_bars
from benchmarks.peer_plots import charts, decode_chart, main
from tests.docs.blocks import ROOT


def test_the_pictures_in_the_documentation_show_the_records(tmp_path):
    main([str(tmp_path)])
    for name in charts():
        drawn = (ROOT / "docs" / "images" / name).read_text()
        assert drawn == (tmp_path / name).read_text(), f"draw it again: {name}"


def test_each_batch_has_a_bar_of_ours_and_of_the_floor_which_is_the_shorter_one():
    chart = decode_chart("llama-3.1-8b")
    ours, floor = (
        [span.end for span in chart.spans if span.kind == chart.kinds.index(kind)]
        for kind in ("jaxkv", "floor")
    )
    assert [label for _, label in chart.row_labels] == [f"batch {size}" for size in (1, 8, 64, 256)]
    assert len(ours) == len(floor) == 4
    assert all(least < found for least, found in zip(floor, ours, strict=True))


def test_a_group_may_lack_a_kind_and_a_gap_stands_between_groups():
    chart = grouped_bars("t", "ms", {"one": {"a": 1.0, "b": 2000.0}, "two": {"b": 3.0}})
    assert [(span.row, span.kind, span.label) for span in chart.spans] == [
        (0, 0, "1.00"),
        (1, 1, "2,000"),
        (3, 1, "3.00"),
    ]
    assert (chart.kinds, chart.rows) == (("a", "b"), 4)
