"""JSON schemas of Python functions. Truth is Transformers."""

from typing import Any, Literal, Optional, Union

import pytest

from jaxkv.text.tool_schema import tool_schema


def plain(city: str, days: int = 3) -> str:
    """Returns the weather,
    as a text.

    Args:
        city: Name of the city,
            such as Zürich.

        days: how many
    """


def kinds(
    a: float,
    b: bool | None,
    c: list[str],
    d: dict[str, int],
    e: Literal["x", "y"],
    f: Literal[1, "z", None],
    g: int | str,
    h: Union[list[int], dict, None],  # noqa: UP007
    i: tuple[int, str],
    j: Any,
    k: Optional[int] = None,  # noqa: UP045
    m: list = (),
    n: dict = None,  # noqa: RUF013
    o: bytes = b"",
) -> dict[str, list[float]]:
    """Does nothing.

    Args:
        a: a
        b: b (choices: [true, false])
        c: c
        d: d
        e: e
        f: f
        g: g: with a colon
        h: h
        i: i
        j: j
        k: k
        m: m
        n: n
        o: o (Choices: [" one ", "two"])

    Returns:
        Much.

    Raises:
        ValueError: never.
    """


def nothing():
    """Takes nothing."""


class Owner:
    def method(self, x: int):
        """Does it.

        Args:
            x: a number
        """


@pytest.mark.torch
@pytest.mark.parametrize("tool", [plain, kinds, nothing, Owner().method, Owner.method])
def test_the_schema_is_that_of_transformers(tool):
    from transformers.utils import get_json_schema

    assert tool_schema(tool) == get_json_schema(tool)


def test_a_schema_is_passed_on():
    schema = {"type": "function", "function": {"name": "f"}}
    assert tool_schema(schema) == schema


def undocumented(x: int):
    pass


def undescribed(x: int):
    """Does it."""


def untyped(x):
    """Does it.

    Args:
        x: a number
    """


def odd(x: tuple[int, ...]):
    """Does it.

    Args:
        x: numbers
    """


def choosy(x: str):
    """Does it.

    Args:
        x: one (choices: a, b)
    """


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("f", "must be a JSON schema .* or a Python function, got str"),
        (undocumented, "undocumented has no docstring"),
        (undescribed, "undescribed has no description of x"),
        (untyped, "argument x of the tool untyped has no type hint"),
        (odd, r"odd has the type hint tuple\[int, \.\.\.\], which has no JSON schema"),
        (choosy, "the choices of x of the tool choosy are no JSON list: a, b"),
    ],
)
def test_what_has_no_schema_is_refused(tool, reason):
    with pytest.raises(ValueError, match=reason):
        tool_schema(tool)
