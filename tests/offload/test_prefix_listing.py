"""A file of prefixes is listed without a model, and a damaged one is refused with the reason."""

import re

import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.offload.prefix_listing import list_prefixes
from tests.offload.test_prefix_file import CATALOGUE, LAYOUT, PAGE, PAGED, rewrite, save


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "prefixes")
    return tmp_path / "prefixes"


def test_a_file_is_listed_with_its_pages_and_checkpoints(path):
    listing = list_prefixes(path)
    assert (listing.model, listing.weights, listing.page_size) == ("a model", "some weights", PAGE)
    assert (listing.num_rows, listing.ends, listing.deepest) == (4, 3, 2)
    assert listing.checkpoints == (2 * PAGE, 2 * PAGE + 1, 3)
    assert listing.tails == (False, True, True)
    assert listing.num_bytes == path.stat().st_size
    groups = {group.name: group for group in listing.groups}
    units = CATALOGUE.num_units(LAYOUT)
    assert {name: group.num_units for name, group in groups.items()} == units
    assert [groups[name].depths for name in PAGED] == [(0, 1, 1, 0), (0, 1), (1,), ()]
    for group in LAYOUT.groups:
        if group.name in groups:
            assert groups[group.name].unit == group.unit
            per_unit = group.bytes_per_unit // len(group.layers)
            assert groups[group.name].num_bytes % (per_unit * units[group.name]) == 0


def first(name, value):
    """Returns a change of a table's first number."""

    def change(tensors, metadata):
        del metadata
        tensors[name] = tensors[name].copy()
        tensors[name].flat[0] = value

    return change


def without(name):
    return lambda tensors, metadata: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors, metadata: metadata.update(format="other"), "has format 'other'"),
        (lambda tensors, metadata: metadata.update(tables_crc32="0"), "wrong CRC"),
        (lambda tensors, metadata: metadata.update(layout="["), "incomplete or contradict"),
        (lambda tensors, metadata: metadata.update(layout="3"), "incomplete or contradict"),
        (lambda tensors, metadata: metadata.pop("page_size"), "incomplete or contradict"),
        (without("parents"), "damaged"),
        (first("parents", 3), "row 0 has the parent 3"),
        (first("parents", -2), "row 0 has the parent -2"),
        (first("checkpoint_rows", 99), "incomplete or contradict"),
        (first("checkpoint_rows", -2), "incomplete or contradict"),
        (first(f"rows.{PAGED[0]}", 99), "incomplete or contradict"),
        (first(f"rows.{PAGED[0]}", -1), "incomplete or contradict"),
        (
            lambda tensors, metadata: tensors.update({f"{PAGED[0]}.crc32": np.zeros(1, "<u4")}),
            "has 1 pages and 6 entries",
        ),
    ],
)
def test_a_damaged_file_is_refused(path, change, problem):
    rewrite(path, change)
    with pytest.raises(BadCheckpoint, match=re.escape(problem)):
        list_prefixes(path)


def test_a_file_that_was_cut_off_is_refused(path):
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match="damaged"):
        list_prefixes(path)
    path.write_text("text")
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        list_prefixes(path)
    with pytest.raises(FileNotFoundError):
        list_prefixes(path.with_name("missing"))
