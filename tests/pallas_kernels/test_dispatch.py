"""No fallback is silent (S1-12): it has a reason, a count, and one line in the log."""

import logging

from pallas_kernels.dispatch import choose, fallbacks


def test_a_fallback_is_logged_once_and_counted_each_time(caplog):
    reasons = {"fast": lambda: "no such unit here", "plain": lambda: None}
    key = ("an_op", "fast", "no such unit here")
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        assert [choose("an_op", reasons, None) for _ in range(3)] == ["plain"] * 3
        assert choose("an_op", reasons, "plain") == "plain"
    assert len(caplog.records) == 1
    assert "no such unit here" in caplog.text
    assert fallbacks()[key] == 3
