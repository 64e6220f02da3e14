"""One engine on several hosts, which are processes with CPUs of their own here: tokens, refusals, and deaths."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxkv import LLM
from tests.host_process import SMALL, answers

ROOT = Path(__file__).parents[1]
SECONDS = 240
DEATH_SECONDS = 60
"""Longest time from the death of one process to the end of all; the machine of a test may be busy."""

pytestmark = pytest.mark.slow


class Hosts:
    """Processes of one engine.

    Args:
        folder: for their output.
        count: number of processes.
        scenario: see `tests.host_process`.
        devices: devices of each.
    """

    def __init__(self, folder, count, scenario, devices=1):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._files = [(folder / f"out{n}", folder / f"err{n}") for n in range(count)]
        self.processes = []
        for number, (out, err) in enumerate(self._files):
            with out.open("w") as out_file, err.open("w") as err_file:
                self.processes.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "tests.host_process"),
                            *(str(port), str(number), str(count), scenario),
                        ],
                        cwd=ROOT,
                        stdout=out_file,
                        stderr=err_file,
                        env={
                            **os.environ,
                            "JAX_NUM_CPU_DEVICES": str(devices),
                            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                            "TMPDIR": str(folder),
                        },
                    )
                )

    def said(self, number):
        """Returns the facts that a process has said."""
        lines = self._files[number][0].read_text().splitlines()
        found = {}
        for line in lines:
            if line.startswith("{"):
                found |= json.loads(line)
        return found

    def err(self, number):
        return self._files[number][1].read_text()

    def until(self, number, name, seconds=SECONDS):
        """Waits until a process has said something; returns it."""
        latest = time.monotonic() + seconds
        while name not in self.said(number):
            assert time.monotonic() < latest, (self.said(number), self.err(number)[-3000:])
            assert self.processes[number].poll() is None, self.err(number)[-3000:]
            time.sleep(0.05)
        return self.said(number)[name]

    def ended(self, seconds=SECONDS):
        """Waits for the end of all processes; returns their exit codes."""
        latest = time.monotonic() + seconds
        codes = []
        for number, process in enumerate(self.processes):
            try:
                codes.append(process.wait(max(0.1, latest - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"process {number} goes on: {self.err(number)[-3000:]}"
                ) from None
        return codes

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts processes, which end with the test."""
    made = []

    def begin(*arguments, **options):
        made.append(Hosts(tmp_path, *arguments, **options))
        return made[-1]

    yield begin
    for hosts in made:
        hosts.kill()


@pytest.fixture(scope="module")
def wanted():
    """What one process on one device answers."""
    with LLM(**SMALL) as llm:
        return answers(llm)


@pytest.mark.parametrize(("count", "devices"), [(2, 1), (4, 1), (2, 2)])
def test_processes_give_the_answers_of_one_and_end_together(start, wanted, count, devices):
    hosts = start(count, "answers", devices=devices)
    assert hosts.ended() == [0] * count, [hosts.err(n)[-2000:] for n in range(count)]
    said = hosts.said(0)
    assert said["tokens"] == wanted["tokens"]
    assert said["scores"] == pytest.approx(wanted["scores"], abs=2e-3)
    assert said["again"] == wanted["tokens"][0][0]
    assert said["grammar"].isdigit()
    named = "supported in one process only"
    assert [named in text for text in said["refusals"]] == [True] * 5 + [False]
    assert "processes other than process 0 alone" in said["refusals"][5]
    for number in range(1, count):
        assert hosts.said(number)["followed"]
        assert "only follows process 0" in hosts.said(number)["refused"]


@pytest.mark.parametrize(
    ("scenario", "victim", "count"),
    [
        ("killed while it works", 0, 2),
        ("killed while it works", 1, 2),
        ("killed while it works", 2, 4),
        ("killed while it waits", 0, 2),
        ("killed while it waits", 1, 2),
    ],
)
def test_a_process_that_is_killed_ends_the_others_with_an_error_that_names_it(
    start, scenario, victim, count
):
    hosts = start(count, scenario)
    hosts.until(0, "working")
    time.sleep(2)
    killed = time.monotonic()
    os.kill(hosts.processes[victim].pid, signal.SIGKILL)
    codes = hosts.ended(DEATH_SECONDS)
    assert time.monotonic() - killed < DEATH_SECONDS
    for number in {*range(count)} - {victim}:
        assert codes[number] != 0
        # Followers hear of it from process 0, which ends then.
        named = victim if number == 0 else 0
        told = rf"process {named} .*has ended|another task died"
        assert re.search(told, hosts.err(number)), hosts.err(number)


@pytest.mark.parametrize("scenario", ["fails here", "fails there"])
def test_a_step_that_fails_on_one_host_ends_all_and_says_why(start, scenario):
    hosts = start(2, scenario)
    codes = hosts.ended()
    assert 0 not in codes
    assert "no memory for this step" in hosts.err(0)
    assert "no memory for this step" in hosts.err(1) or "process 0 has ended" in hosts.err(1)


@pytest.mark.parametrize(
    ("scenario", "count", "message"),
    [
        ("other options", 2, "was started with other options than process 0"),
        ("host tier", 2, "host_bytes: supported in one process only"),
        ("too few", 3, "so tensor_parallel_size must be 3, got 2"),
    ],
)
def test_options_that_cannot_work_are_refused(start, scenario, count, message):
    hosts = start(count, scenario)
    assert 0 not in hosts.ended()
    assert message in hosts.err(0)


def test_processes_may_have_models_of_their_own(start, wanted):
    hosts = start(2, "one device each")
    assert hosts.ended() == [0, 0]
    assert hosts.said(0)["tokens"] == hosts.said(1)["tokens"] == wanted["tokens"]
