"""The tables of options in the documentation are the options in code, with their defaults."""

import re
from dataclasses import fields

import pytest

from jaxkv import CacheConfig, EngineConfig
from tests.docs.blocks import ROOT


def options_in(page, heading):
    """Returns the options of a table and their defaults, as text."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    [table] = re.findall(rf"^\| {heading} \|.*?\n\n", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", table, re.MULTILINE)
    return {
        name.strip("` "): value.strip('`" ')
        for names, values in rows
        for name, value in zip(names.split(","), values.split(","), strict=True)
    }


@pytest.mark.parametrize(
    ("page", "heading", "config"),
    [("serve.md", "Option", EngineConfig), ("cache.md", "Option of `CacheConfig`", CacheConfig)],
)
def test_the_options_of_a_configuration_are_those_in_its_table_with_their_defaults(
    page, heading, config
):
    assert options_in(page, heading) == {
        field.name: f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        for field in fields(config)
    }
