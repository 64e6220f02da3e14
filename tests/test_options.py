"""How the command line reads numbers and the names of options."""

import argparse

import pytest

from jaxkv.options import size, with_hyphens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-3", -3),
        ("4096", 4096),
        ("8k", 8192),
        ("8K", 8192),
        ("1.5k", 1536),
        ("0.3k", 307),
        ("2m", 2**21),
        ("1GB", 2**30),
        ("1gib", 2**30),
        ("0.5G", 2**29),
        ("512MB", 2**29),
        ("2TiB", 2**41),
        ("100B", 100),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_units_are_powers_of_1024(text, number):
    assert size(text) == number


@pytest.mark.parametrize(
    "text", ["", "x", "k", "8kk", "1.5", "1e3", "8 k", "1,024", "1.k", ".5k", "8ib", "0x10", "٣"]
)
def test_what_is_no_number_is_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match="must be a number such as 4096, 8k or 1GB"
    ):
        size(text)


def test_underscores_in_names_of_options_are_hyphens_and_elsewhere_stay():
    given = ["--max_tokens", "a_b", "--top_p=c_d", "-x_y", "e_f", "--", "--g_h"]
    assert with_hyphens(given) == [
        "--max-tokens",
        "a_b",
        "--top-p=c_d",
        "-x_y",
        "e_f",
        "--",
        "--g_h",
    ]
