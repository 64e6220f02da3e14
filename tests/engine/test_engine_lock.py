"""Turns: one thread at a time, a borrower alone, and errands of finalizers in between."""

import threading

import pytest

from jaxkv.engine.engine_lock import CLOSED, Turns


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_until_another_ends_its_turn():
    turns, log = Turns(), []

    def wait():
        with turns.turn():
            log.append("second")

    with turns.turn():
        thread = in_thread(wait)
        thread.join(0.1)
        assert thread.is_alive()
        log.append("first")
    thread.join(10)
    assert log == ["first", "second"]


def test_a_turn_ends_when_its_work_fails():
    turns = Turns()
    with pytest.raises(KeyboardInterrupt), turns.turn():
        raise KeyboardInterrupt
    thread = in_thread(lambda: turns.turn().__enter__())
    thread.join(10)
    assert not thread.is_alive()


def test_a_turn_that_an_interrupt_left_behind_locks_nobody_out_for_long():
    """An interrupt between taking the turn and using it: the next call of that thread goes on, and ends it."""
    turns = Turns()
    left_behind = turns.turn()
    left_behind.__enter__()
    with turns.turn():
        pass
    thread = in_thread(lambda: turns.turn().__enter__())
    thread.join(10)
    assert not thread.is_alive()


def test_lent_turns_are_refused_until_they_are_taken_back_and_whoever_waits_is_told():
    turns, told = Turns(), []
    turns.lend()
    assert turns.lent
    with pytest.raises(RuntimeError, match="AsyncLLM serves"):
        turns.lend()
    with pytest.raises(RuntimeError, match="AsyncLLM serves"), turns.turn():
        pass
    in_thread(turns.take_back).join(10)
    assert not turns.lent

    def wait():
        try:
            with turns.turn():
                told.append("turn")
        except RuntimeError:
            told.append("refused")

    with turns.turn():
        thread = in_thread(wait)
        thread.join(0.1)
        turns.lend()
    thread.join(10)
    assert told == ["refused"]


def test_turns_are_not_lent_while_another_thread_has_one():
    turns, begun, end = Turns(), threading.Event(), threading.Event()

    def hold():
        with turns.turn():
            begun.set()
            end.wait(10)

    thread = in_thread(hold)
    begun.wait(10)
    with pytest.raises(RuntimeError, match="another thread"):
        turns.lend()
    end.set()
    thread.join(10)
    turns.lend()


def test_errands_wait_for_the_end_of_a_turn_and_of_each_other():
    turns, log = Turns(), []
    turns.when_free(lambda: log.append("at once"))

    def outer():
        turns.when_free(lambda: log.append("nested"))
        log.append("outer")

    with turns.turn():
        turns.when_free(outer)
        assert log == ["at once"]
    assert log == ["at once", "outer", "nested"]
    turns.lend()
    turns.when_free(lambda: log.append("lent"))
    assert log[-1] == "nested"
    turns.run_errands()
    assert log[-1] == "lent"
    turns.when_free(outer)
    turns.take_back()
    assert log[-2:] == ["outer", "nested"]


def test_turns_that_were_ended_are_refused_and_errands_are_dropped():
    turns, log = Turns(), []

    def wait():
        try:
            with turns.turn():
                log.append("turn")
        except RuntimeError as error:
            log.append(str(error))

    with turns.turn():
        thread = in_thread(wait)
        thread.join(0.1)
        turns.end()
        assert turns.is_over
    thread.join(10)
    assert log == [CLOSED]
    with pytest.raises(RuntimeError, match="was closed"):
        turns.lend()
    turns.when_free(lambda: log.append("errand"))
    assert log == [CLOSED]
