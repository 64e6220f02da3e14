"""What a leader tells its followers, and when it gives up: sockets of this process, and runners of plain Python."""

import socket
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.errors import HostLost, ProgramRefused
from jaxkv.links.channel import Channel
from jaxkv.runner import hosts as module
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.hosts import VALUES, Follower, Leader, mirrored, refuse_on_hosts
from jaxkv.runner.program_specs import ScoreSpec, StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.sampling.features import Features
from jaxkv.step.text_drafter import NgramLookup

STEP = StepSpec(8, 8, (4, 2), Features(filters=True), decode=True)


@dataclass
class Runner:
    """Notes its calls; `outer` calls `inner`, as a run may compile first."""

    hosts: object
    calls: list
    fails: str = ""

    @mirrored
    def run_told(self, spec, arrays):
        self._note("run_told", spec, arrays)
        self.compiled(spec)
        return len(self.calls)

    @mirrored
    def compiled(self, spec):
        self._note("compiled", spec)

    def _note(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self.fails:
            raise ProgramRefused("strict") if name == "compiled" else MemoryError("no room")


@pytest.fixture
def pair(monkeypatch):
    """A leader and a follower that have agreed, and the thread in which the follower follows."""
    monkeypatch.setattr(module, "_skip_shutdown", lambda: None)
    monkeypatch.setattr(module, "_WORD_SECONDS", 0.2)
    one, other = socket.socketpair()
    leader, follower = Leader([Channel(one, VALUES)]), Follower(Channel(other, VALUES))
    agreed = []
    thread = threading.Thread(target=lambda: agreed.append(follower.agree("same", 5)))
    thread.start()
    assert leader.agree("same", 7) == 5
    thread.join()
    assert agreed == [5]
    yield leader, follower
    leader.close()
    follower.close()


class Following:
    """A follower in a thread.

    Attributes:
        runner: its runner.
        error: what has ended it; `None` for the end in order.
    """

    def __init__(self, follower, fails=""):
        self.runner, self.error = Runner(follower, [], fails), None
        self._thread = threading.Thread(target=self._follow, args=(follower,))
        self._thread.start()

    def _follow(self, follower):
        try:
            follower.follow(self.runner)
        except BaseException as error:
            self.error = error

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize(
    "spec",
    [
        STEP,
        replace(STEP, drafts=4, drafter=NgramLookup(4, 2)),
        ScoreSpec(STEP, 3),
        CopySpec(),
        AdmitSpec(2, 16, returning=True),
        SampleSpec(4, Features(grammar=True), 2),
    ],
)
def test_a_follower_repeats_each_outer_call_once_with_equal_arguments(pair, spec):
    leader, follower = pair
    following = Following(follower)
    runner = Runner(leader, [])
    array = np.arange(6, dtype=np.int32)
    assert runner.run_told(spec, [array, np.zeros(0, np.float32)]) == 2
    runner.compiled(spec)
    leader.close()
    assert following.join() is None
    for calls in (runner.calls, following.runner.calls):
        assert [call[:2] for call in calls] == [
            ("run_told", spec),
            ("compiled", spec),
            ("compiled", spec),
        ]
    [sent, empty] = following.runner.calls[0][2]
    np.testing.assert_array_equal(sent, array)
    assert (empty.shape, empty.dtype) == ((0,), np.float32)


def test_on_one_host_nothing_is_told():
    runner = Runner(None, [])
    assert runner.run_told(object(), [object()]) == 2


def test_a_refused_program_ends_nobody(pair):
    leader, follower = pair
    following = Following(follower, fails="compiled")
    runner = Runner(leader, [], fails="compiled")
    with pytest.raises(ProgramRefused):
        runner.compiled(STEP)
    runner.fails = ""
    runner.compiled(STEP)
    leader.close()
    assert following.join() is None
    assert len(following.runner.calls) == 2


def test_what_cannot_be_sent_is_refused_before_anybody_runs_it(pair):
    leader, follower = pair
    following = Following(follower)
    runner = Runner(leader, [])
    with pytest.raises(ValueError, match="of type object cannot be sent"):
        runner.run_told(STEP, [object()])
    leader.close()
    assert following.join() is None
    assert runner.calls == following.runner.calls == []


def test_an_error_here_ends_the_followers_and_every_later_call(pair):
    leader, follower = pair
    following = Following(follower)
    runner = Runner(leader, [], fails="run_told")
    with pytest.raises(HostLost, match=r"a call failed on process 0, .*no room"):
        runner.run_told(STEP, [])
    assert isinstance(following.join(), HostLost)
    runner.fails = ""
    with pytest.raises(HostLost, match="no room"):
        runner.run_told(STEP, [])


def test_an_error_there_is_told_by_the_next_call(pair):
    leader, follower = pair
    following = Following(follower, fails="run_told")
    runner = Runner(leader, [])
    runner.run_told(STEP, [])
    assert isinstance(following.join(), MemoryError)
    time.sleep(0.5)
    with pytest.raises(HostLost, match=r"process 0 .* has ended: MemoryError: no room"):
        runner.compiled(STEP)


def test_a_process_that_waits_for_a_lost_one_is_ended(pair, monkeypatch):
    leader, follower = pair
    ended = threading.Event()
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(module, "end_process", lambda why: ended.set())
    with leader.waiting():
        follower.close()
        assert ended.wait(20)


def test_other_options_are_refused_on_both_sides(monkeypatch):
    one, other = socket.socketpair()
    leader, follower = Leader([Channel(one, VALUES)]), Follower(Channel(other, VALUES))
    errors = []

    def agree():
        try:
            follower.agree("max_num_seqs=8", 5)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=agree)
    thread.start()
    with pytest.raises(ValueError, match="max_num_seqs=8; process 0 has max_num_seqs=4"):
        leader.agree("max_num_seqs=4", 7)
    thread.join()
    assert "other options" in errors[0]
    leader.close()
    follower.close()


def test_options_that_need_more_than_packed_arrays_are_refused_by_name():
    refuse_on_hosts(CacheConfig(), None)
    with pytest.raises(ValueError, match="host_bytes: supported in one process only"):
        refuse_on_hosts(CacheConfig(host_bytes=1), None)
    with pytest.raises(ValueError, match="routed_experts, lora: supported"):
        refuse_on_hosts(CacheConfig(routed_experts=True), LoraConfig())
