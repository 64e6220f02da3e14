"""A change that some replicas have made and others not ends the others; the rest of a group without processes."""

import threading
import time
from concurrent.futures import Future

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import ReplicaLost
from jaxkv.replicas import group as module
from jaxkv.replicas.group import Job, ReplicaGroup
from jaxkv.replicas.messages import Facts
from jaxkv.replicas.replica import Replica
from jaxkv.text.prompts import TokenizedPrompt

FACTS = Facts(
    eos_ids=(0,),
    max_model_len=64,
    vocab_size=99,
    max_sequences=4,
    block=16,
    cache_tokens=640,
    repeats_bits=False,
)


class FakeReplica(Replica):
    """A replica without a process; `outcome` is what its calls give."""

    failure = None
    made = ()

    def __init__(self, number, count, options, environment):
        self.name, self.num_open = f"replica {number} of {count}", 0
        self.outcome, self.loaded, self.calls = None, Future(), []
        if options.get("fails") == number:
            self.loaded.set_exception(ValueError("no such model"))
        else:
            self.loaded.set_result(FACTS)
        FakeReplica.made.append(self)

    def call(self, operation, arguments, **options):
        if isinstance(self.outcome, ReplicaLost | KeyboardInterrupt):
            raise self.outcome
        self.calls.append(operation)
        result = Future()
        if isinstance(self.outcome, Exception):
            result.set_exception(self.outcome)
        else:
            result.set_result(self.outcome)
        return result

    def close(self):
        self.failure = ReplicaLost(f"{self.name} was closed")


@pytest.fixture
def make(monkeypatch):
    """Makes groups of fake replicas."""
    monkeypatch.setattr(module, "Replica", FakeReplica)
    monkeypatch.setattr(FakeReplica, "made", [])
    return lambda **options: ReplicaGroup(3, {"tensor_parallel_size": 1, **options})


def test_a_change_that_all_make_returns_its_result(make):
    group = make()
    for replica in group.replicas:
        replica.outcome = 7
    assert group.settle(group.all("update_weights")) == 7


def test_a_change_that_all_refuse_ends_none(make):
    group = make()
    for replica in group.replicas:
        replica.outcome = ValueError("wrong shape")
    with pytest.raises(ValueError, match="wrong shape"):
        group.settle(group.all("update_weights"))
    assert len(group.live) == 3


def test_a_replica_that_fails_where_others_do_not_is_ended_and_named(make, caplog):
    group = make()
    group.replicas[1].outcome = MemoryError("no room")
    assert group.settle(group.all("update_weights")) is None
    assert [replica.name for replica in group.live] == ["replica 0 of 3", "replica 2 of 3"]
    assert "replica 1 of 3 is ended, since a change failed there" in caplog.text


def test_a_replica_that_is_lost_meanwhile_keeps_a_change_from_no_other(make):
    group = make()
    group.replicas[1].outcome = ReplicaLost("replica 1 of 3 has ended")
    group.change("update_weights")
    assert [replica.calls for replica in group.replicas] == [
        ["update_weights"],
        [],
        ["update_weights"],
    ]
    for replica in group.replicas:
        replica.outcome = ReplicaLost(f"{replica.name} has ended")
    with pytest.raises(ReplicaLost):
        group.change("update_weights")


def test_an_interrupted_change_ends_the_replicas_that_it_has_not_reached(make):
    group = make()
    group.replicas[1].outcome = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        group.change("update_weights")
    assert [replica.name for replica in group.live] == ["replica 0 of 3"]


def test_two_changes_of_two_threads_reach_all_replicas_in_one_order(make, monkeypatch):
    group, reached = make(), threading.Event()
    first, second = group.replicas[:2]

    def slow(operation, arguments, **options):
        reached.set()
        if operation == "update_weights":
            time.sleep(0.3)
        return FakeReplica.call(second, operation, arguments)

    monkeypatch.setattr(second, "call", slow)
    thread = threading.Thread(target=group.change, args=("update_weights",))
    thread.start()
    assert reached.wait(10)
    group.change("load_lora")
    thread.join()
    assert first.calls == second.calls == ["update_weights", "load_lora"]


def test_a_replica_that_cannot_load_the_model_ends_all(make):
    with pytest.raises(ValueError, match="no such model"):
        make(fails=2)
    assert all(replica.failure is not None for replica in FakeReplica.made)
    assert len(FakeReplica.made) == 3


def test_without_a_replica_every_call_says_which_one_was_last(make):
    group = make()
    group.close()
    with pytest.raises(ReplicaLost, match="replica 2 of 3 was closed"):
        group.all("stats")


def test_a_prompt_goes_to_the_replica_that_has_loaded_its_prefix_from_a_file(make):
    group, ids = make(), tuple(range(64))
    group.note(group.replicas[2], ids)
    job = Job(prompt=TokenizedPrompt(ids), sampling=SamplingParams(seed=0))
    group.begin("generate", job)
    assert [replica.calls for replica in group.replicas] == [[], [], ["generate"]]
