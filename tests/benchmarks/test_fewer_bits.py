"""The benchmark of fewer bits scores texts that the package's model was not trained on."""

import sysconfig
from pathlib import Path

import pytest

from benchmarks import fewer_bits


@pytest.mark.slow
def test_a_row_has_the_perplexity_of_held_out_windows():
    source = Path(sysconfig.get_paths()["stdlib"])
    row = fewer_bits.measure(None, "bfloat16", "int8", source, count=2, tokens=32)
    assert (row["weights"], row["dtype"], row["tokens"]) == ("int8", "bfloat16", 2 * 31)
    # The model knows more than that 4096 tokens are equally likely, and less than everything.
    assert 1.5 < row["perplexity"] < 400
    assert row["bytes of rounded weights"] == 3661824
