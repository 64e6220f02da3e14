"""`jaxkv serve` on two hosts, which are processes with a CPU each here: answers, and the end of one and of both."""

import os
import re
import signal
import socket

import pytest

from tests.serve.real_server import RealServer, alive, kill, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(tmp_path):
    """The server that leads, which is ready, and the one that follows."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    servers = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        options = ["--tensor-parallel-size", "2", "--coordinator-address", address]
        options += ["--num-processes", "2", "--process-id", str(number)]
        servers.append(RealServer(folder, *options, environment={"JAX_NUM_CPU_DEVICES": "1"}))
    try:
        servers[0].wait_ready()
        yield servers
    finally:
        for server in servers:
            server.close()


def test_two_hosts_answer_and_end_together(hosts):
    leader, follower = hosts
    reply = leader.complete("def add(", max_tokens=6).json()
    assert reply["usage"]["completion_tokens"] == 6
    assert "serving" not in follower.out
    os.kill(leader.pid, signal.SIGTERM)
    assert [server.wait_end() for server in hosts] == [0, 0]


def test_a_follower_that_is_killed_ends_the_server_though_no_request_runs(hosts):
    leader, follower = hosts
    engine = leader.engine_pid
    kill(follower.engine_pid)
    assert [server.wait_end() for server in hosts] == [1, 1]
    wait_for(lambda: not alive(engine))
    assert "process 1 " in leader.err
    assert "has ended, without a word" in leader.err


def test_a_leader_that_is_killed_ends_the_follower(hosts):
    leader, follower = hosts
    kill(leader.engine_pid)
    assert 0 not in [server.wait_end() for server in hosts]
    # JAX ends it too, when the coordinator is gone, and may be faster.
    assert re.search("process 0 has ended without a word|another task died", follower.err)
