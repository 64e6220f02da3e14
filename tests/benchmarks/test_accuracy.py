"""The accuracy benchmark compares log-probabilities of the same tokens, in every format of the cache."""

import numpy as np
import pytest

from jaxkv import default_model

pytestmark = pytest.mark.torch
accuracy = pytest.importorskip("benchmarks.accuracy")


def test_errors_are_absolute_and_counted():
    row = accuracy.compare("x", np.array([-1.0, -2.0, -3.5]), np.array([-1.0, -2.5, -3.0]))
    assert (row["tokens"], row["mean error"], row["largest"]) == (3, 0.3333, 0.5)


def test_bfloat16_is_near_float32_and_what_cannot_run_says_why():
    pytest.importorskip("torch")
    rows = accuracy.measure(default_model.path(), count=2, tokens=24)
    assert rows[0]["computed by"] == "Transformers, bfloat16"
    assert {row.get("tokens", 46) for row in rows} == {46}
    # bfloat16 differs, by little.
    assert 0 < rows[0]["mean error"] < 0.1
    assert 0 < rows[1]["mean error"] < 2 * rows[0]["mean error"]
    assert "refused" in rows[-1] or 0 < rows[-1]["mean error"] < 0.5
