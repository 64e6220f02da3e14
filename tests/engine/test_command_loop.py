"""An engine that serves commands of other threads, and the time of its steps."""

import contextlib
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from jaxkv.engine.command_loop import CommandLoop, StepTimer
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock


class FakeEngine(Engine):
    """An engine with a number of steps to do; each calls `within`."""

    def __init__(self, within):
        self.left, self.checks = 0, 0
        self.runner = SimpleNamespace(programs=self)
        self._within = within

    @property
    def has_work(self):
        return self.left > 0

    @contextlib.contextmanager
    def watched(self, callback):
        self.callback = callback
        yield

    def step(self):
        self.left -= 1
        self._within(self)

    def check_if_idle(self):
        self.checks += 1


def loop_of(within):
    engine = FakeEngine(within)
    loop = CommandLoop(engine, EngineLock(), lambda: None)
    return engine, loop


def give(engine, steps):
    engine.left += steps


def test_only_a_step_is_timed_and_not_its_compilation():
    seen = []

    def within(engine):
        seen.append(loop.step_began is not None)
        engine.callback("program")
        seen.append((loop.step_began, loop.compiling))
        engine.callback("")
        seen.append((loop.step_began is not None, loop.compiling))

        loop.end()

    engine, loop = loop_of(within)
    loop.put(lambda: give(engine, 1))
    loop.run()
    seen.append(loop.step_began)
    assert seen == [True, (None, "program"), (True, ""), None]


def test_a_compilation_between_two_steps_starts_no_clock():
    engine, loop = loop_of(lambda engine: None)
    seen = []

    def compile_something():
        engine.callback("program")
        engine.callback("")
        seen.append(loop.step_began)

    loop.put(compile_something)
    loop.end()
    loop.run()
    assert seen == [None]


def test_a_command_that_fails_keeps_no_other_from_running():
    """Neither those that waited for a step with it, nor those that are left at the end."""
    _, loop = loop_of(lambda engine: None)
    ran = []

    def fail(name):
        ran.append(name)
        raise OSError(name)

    for name in ("a", "b"):
        loop.put_later(partial(fail, name))
    loop.put(partial(fail, "c"))
    loop.put(partial(ran.append, "d"))
    with pytest.raises(OSError, match="a"):
        loop.run()
    assert ran == ["a"]
    loop.run_left()
    assert ran == ["a", "b", "c", "d"]


def test_a_failed_step_is_not_timed_on():
    def fail(engine):
        raise KeyError("a mistake")

    engine, loop = loop_of(fail)
    loop.put(lambda: give(engine, 1))
    with pytest.raises(KeyError):
        loop.run()
    assert loop.step_began is None


def test_a_hung_step_grows_old():
    timer = StepTimer(1.0, now=0.0)
    assert timer.seconds(None, 1.0) == 0
    assert timer.seconds(1.5, 2.0) == 0.5
    assert timer.seconds(1.5, 3.0) == 1.5
    assert timer.seconds(1.5, 4.5) == 3.0


def test_each_step_is_timed_from_its_own_beginning():
    timer = StepTimer(1.0, now=0.0)
    timer.seconds(0.0, 1.0)
    timer.seconds(0.0, 2.0)
    assert timer.seconds(2.75, 3.0) == 0.25
    assert timer.seconds(None, 4.0) == 0
    assert timer.seconds(4.0, 5.0) == 1.0


@pytest.mark.parametrize("began", [1.0, 1.5])
def test_a_suspended_process_does_not_look_hung(began):
    timer = StepTimer(1.0, now=0.0)
    timer.seconds(1.0, 1.0)
    assert timer.seconds(began, 3600.0) <= 2.0
    assert timer.seconds(began, 3601.0) <= 3.0


def test_what_waits_for_a_step_does_not_wait_for_ever_when_no_work_is_left():
    _, loop = loop_of(lambda engine: None)
    seen = []

    def put_off():
        loop.put_later(lambda: seen.append("later"))
        loop.put_later(loop.end)

    loop.put(put_off)
    ended = threading.Thread(target=loop.run, daemon=True)
    ended.start()
    ended.join(30)
    assert seen == ["later"]


def test_what_waited_for_a_step_at_the_end_is_run_then_for_a_caller_to_be_told():
    engine, loop = loop_of(lambda engine: None)
    seen = []

    def put_off():
        loop.put_later(lambda: seen.append("later"))
        loop.end()

    loop.put(lambda: give(engine, 1))
    loop.put(put_off)
    loop.run()
    assert not seen
    loop.run_left()
    assert seen == ["later"]


def test_books_are_checked_when_results_are_read_and_no_work_is_left():
    """So neither the last tokens nor a command that has come wait for the check."""
    engine, seen = FakeEngine(lambda engine: None), []
    loop = CommandLoop(engine, EngineLock(), lambda: seen.append(engine.checks))
    engine.check_if_idle = lambda: (seen.append("check"), loop.end())
    loop.put(lambda: give(engine, 2))
    loop.run()
    assert seen == [0, 0, "check"]


class Inlet:
    """Brings a list of events, one for each `receive`, and notes whether it was waited for."""

    def __init__(self, *events):
        self.waited = []
        self.wakes = 0
        self._events = list(events)

    def receive(self, *, wait):
        self.waited.append(wait)
        self._events.pop(0)()

    def wake(self):
        self.wakes += 1


def test_an_inlet_is_read_between_two_steps_and_waited_for_only_without_work():
    engine = FakeEngine(lambda engine: None)
    inlet = Inlet(
        lambda: None,
        lambda: give(engine, 2),
        lambda: None,
        lambda: loop.put(lambda: give(engine, 1)),
        lambda: None,
        lambda: None,
        lambda: loop.end(),
    )
    loop = CommandLoop(engine, EngineLock(), lambda: None, inlet)
    loop.run()
    # Without work, then waited for; before a step; with a command; before its step; and without work again.
    assert inlet.waited == [False, True, False, False, False, False, True]
    assert inlet.wakes == 2
    # Books are checked before each wait alone: a request that has arrived comes first.
    assert engine.checks == 2


def test_what_an_inlet_puts_off_comes_when_no_work_is_left():
    engine, seen = FakeEngine(lambda engine: None), []

    def put_off():
        loop.put_later(lambda: seen.append("later"))
        loop.put_later(loop.end)

    inlet = Inlet(put_off, lambda: None)
    loop = CommandLoop(engine, EngineLock(), lambda: None, inlet)
    loop.run()
    assert seen == ["later"]
    assert inlet.waited == [False, False]
