"""Reports: Markdown tables from records, and documents whose marked tables are replaced."""

import pytest

from benchmarks.record import Record, save_record
from benchmarks.report import fill, main, render

ROWS = [
    {"case": "a|b", "us": 1234.56, "share": 0.98765, "calls": 12, "host_bound": False},
    {"case": "c", "us": None, "share": None, "calls": None, "refused": "no\nGPU"},
]


def record(**changes):
    fields = {
        "name": "some-op",
        "device": "NVIDIA H200",
        "platform": "gpu",
        "driver": "580.1",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-11-21T10:00:00+00:00",
        "command": "python -m benchmarks.ops x",
        "rows": ROWS,
    }
    return Record(**(fields | changes))


def test_a_table_holds_every_column_and_its_origin():
    assert render(record()).splitlines() == [
        "| case | us | share | calls | host_bound | refused |",
        "| --- | ---: | ---: | ---: | --- | --- |",
        "| a\\|b | 1235 | 0.988 | 12 | no | - |",
        "| c | - | - | - | - | no GPU |",
        "",
        "NVIDIA H200, driver 580.1, JAX 0.11.2, commit 0123456789, 2026-11-21: `python -m benchmarks.ops x`",
    ]


def test_columns_are_chosen_in_order():
    assert render(record(), ["us", "case"]).splitlines()[:3] == [
        "| us | case |",
        "| ---: | --- |",
        "| 1235 | a\\|b |",
    ]


def test_an_unknown_column_is_named_beside_the_known_ones():
    with pytest.raises(ValueError, match=r"no column 'gb'; it has case, us"):
        render(record(), ["gb"])


def test_rows_are_chosen_by_a_value():
    assert render(record(), ["us", "case=c"]).splitlines()[:3] == ["| us |", "| ---: |", "| - |"]
    with pytest.raises(ValueError, match=r"no row .* has {'case': 'd'}; .*'a|b', 'c'"):
        render(record(), ["us", "case=d"])
    with pytest.raises(ValueError, match="no column 'gb'"):
        render(record(), ["us", "gb=d"])


def test_changes_and_a_missing_driver_are_told():
    text = render(record(dirty=True, driver="none", device="Some CPU"))
    assert text.splitlines()[-1].startswith(
        "Some CPU, JAX 0.11.2, commit 0123456789 with changes, 2026"
    )


def test_a_documents_tables_follow_their_records(tmp_path):
    save_record("some-op", ROWS, folder=tmp_path)
    text = (
        "before\n<!-- record some-op: case, us -->\nold\n\nold\n<!-- /record -->\nbetween\n"
        "<!-- record some-op -->\n<!-- /record -->\nafter\n"
    )
    filled = fill(text, tmp_path)
    assert "old" not in filled
    for kept in (
        "before\n",
        "\nbetween\n",
        "\nafter\n",
        "| a\\|b | 1235 |\n",
        "| a\\|b | 1235 | 0.988 |",
    ):
        assert kept in filled
    assert fill(filled, tmp_path) == filled


def test_a_document_without_markers_stays_as_it_is():
    assert fill("# Nothing\n") == "# Nothing\n"


def test_the_command_prints_and_writes(tmp_path, capsys):
    save_record("some-op", ROWS, folder=tmp_path)
    main(["--folder", str(tmp_path), "--columns", "case,us"])
    assert "### some-op\n\n| case | us |" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("<!-- record some-op: calls -->\n<!-- /record -->\n")
    main(["--folder", str(tmp_path), "--into", str(page)])
    assert "| calls |" in page.read_text()
    assert capsys.readouterr().out == ""
