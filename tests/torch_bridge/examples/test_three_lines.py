"""The example of three changed lines gives the tokens of the stock model."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_the_example_shows_the_same_tokens_before_and_after():
    done = subprocess.run(
        [sys.executable, "-m", "torch_bridge.examples.three_lines"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ms per token, the same tokens: True" in done.stdout
    assert "steps replayed: 0 (the model is on cpu" in done.stdout
