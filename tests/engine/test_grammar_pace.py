"""Requests with a grammar leave out steps exactly while second programs would cost the other requests time."""

import pytest

from jaxkv.engine.grammar_pace import GrammarPace


def play(pace, steps, *, device, host, second):
    """Plays steps whose device and host take so many ms, the host `second` more in a step with two programs.

    Returns how long a step takes on average in the last half.
    """
    took, has_second = [], True
    for _ in range(steps):
        busy = host + second * has_second
        pace.note_wait(max(0.0, device - busy) / 1e3)
        if has_second:
            pace.note_cost(second / 1e3)
        took.append(max(device, busy))
        has_second = not (pace.leaves_out and has_second)
    return sum(took[steps // 2 :]) / len(took[steps // 2 :])


@pytest.mark.parametrize(("device", "host", "second"), [(7, 2.5, 1.5), (20, 3, 6)])
def test_a_host_with_time_to_spare_leaves_out_nothing(device, host, second):
    pace = GrammarPace()
    assert play(pace, 200, device=device, host=host, second=second) == device
    assert not pace.leaves_out


def test_where_the_device_waits_steps_are_left_out_and_take_hardly_longer_than_without_grammars():
    pace = GrammarPace()
    assert play(pace, 200, device=3, host=2.2, second=1.5) <= 1.15 * 3
    assert pace.leaves_out


def test_it_does_not_change_its_mind_to_and_fro():
    for tenths in range(20, 60):
        pace, changes = GrammarPace(), 0
        for _ in range(20):
            before = pace.leaves_out
            play(pace, 32, device=tenths / 10, host=2.2, second=1.5)
            changes += pace.leaves_out != before
        assert changes <= 1, f"a device that takes {tenths / 10} ms"


def test_it_notices_when_the_device_has_more_to_do_and_again_when_it_has_less():
    pace = GrammarPace()
    play(pace, 200, device=3, host=2.2, second=1.5)
    play(pace, 200, device=9, host=2.2, second=1.5)
    assert not pace.leaves_out
    play(pace, 200, device=3, host=2.2, second=1.5)
    assert pace.leaves_out
