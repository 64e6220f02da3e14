"""The engine's lock: one thread at a time, exclusive use by a borrower, and deferred work of finalizers."""

import threading

import pytest

from jaxkv.engine.engine_lock import CLOSED, EngineLock


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_until_another_ends_its_turn():
    lock, log = EngineLock(), []

    def wait():
        with lock.held():
            log.append("second")

    with lock.held():
        thread = in_thread(wait)
        thread.join(0.1)
        assert thread.is_alive()
        log.append("first")
    thread.join(10)
    assert log == ["first", "second"]


def test_a_turn_ends_when_its_work_fails():
    lock = EngineLock()
    with pytest.raises(KeyboardInterrupt), lock.held():
        raise KeyboardInterrupt
    thread = in_thread(lambda: lock.held().__enter__())
    thread.join(10)
    assert not thread.is_alive()


def test_a_turn_that_an_interrupt_left_behind_locks_nobody_out_for_long():
    """An interrupt between taking the turn and using it: the next call of that thread goes on, and ends it."""
    lock = EngineLock()
    left_behind = lock.held()
    left_behind.__enter__()
    with lock.held():
        pass
    thread = in_thread(lambda: lock.held().__enter__())
    thread.join(10)
    assert not thread.is_alive()


def test_a_lent_lock_refuses_callers_until_it_is_taken_back():
    lock, told = EngineLock(), []
    lock.lend()
    assert lock.lent
    with pytest.raises(RuntimeError, match="AsyncLLM serves"):
        lock.lend()
    with pytest.raises(RuntimeError, match="AsyncLLM serves"), lock.held():
        pass
    in_thread(lock.take_back).join(10)
    assert not lock.lent

    def wait():
        try:
            with lock.held():
                told.append("turn")
        except RuntimeError:
            told.append("refused")

    with lock.held():
        thread = in_thread(wait)
        thread.join(0.1)
        lock.lend()
    thread.join(10)
    assert told == ["refused"]


def test_a_lock_that_is_not_free_is_not_waited_for():
    lock, found = EngineLock(), []

    def look():
        with lock.held_if_free() as is_free:
            found.append(is_free)

    with lock.held():
        look()
        in_thread(look).join(10)
    look()
    lock.lend()
    look()
    lock.take_back()
    with lock.held_if_free():
        in_thread(look).join(10)
    lock.close()
    look()
    assert found == [False, False, True, False, False, False]


def test_the_lock_is_not_lent_while_another_thread_holds_it():
    lock, begun, end = EngineLock(), threading.Event(), threading.Event()

    def hold():
        with lock.held():
            begun.set()
            end.wait(10)

    thread = in_thread(hold)
    begun.wait(10)
    with pytest.raises(RuntimeError, match="another thread"):
        lock.lend()
    end.set()
    thread.join(10)
    lock.lend()


def test_errands_wait_for_the_end_of_a_turn_and_of_each_other():
    lock, log = EngineLock(), []
    lock.defer(lambda: log.append("at once"))

    def outer():
        lock.defer(lambda: log.append("nested"))
        log.append("outer")

    with lock.held():
        lock.defer(outer)
        assert log == ["at once"]
    assert log == ["at once", "outer", "nested"]
    lock.lend()
    lock.defer(lambda: log.append("lent"))
    assert log[-1] == "nested"
    lock.run_deferred()
    assert log[-1] == "lent"
    lock.defer(outer)
    lock.take_back()
    assert log[-2:] == ["outer", "nested"]


def test_an_ended_lock_refuses_callers_and_drops_deferred_work():
    lock, log = EngineLock(), []

    def wait():
        try:
            with lock.held():
                log.append("turn")
        except RuntimeError as error:
            log.append(str(error))

    with lock.held():
        thread = in_thread(wait)
        thread.join(0.1)
        lock.close()
        assert lock.is_closed
    thread.join(10)
    assert log == [CLOSED]
    with pytest.raises(RuntimeError, match="was closed"):
        lock.lend()
    lock.defer(lambda: log.append("errand"))
    assert log == [CLOSED]
