"""`jaxkv serve` with the small model and real faults: each ends or recovers as promised, and nothing is left behind."""

import asyncio
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jaxkv.serve import exit_codes
from tests.serve.real_server import RealServer, alive, kill, real_server, wait_for

CONNECTIONS = 10_000
PROMPTS = ["def add(", "import os\n", "class Node:\n    ", "for i in range("]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def beginning(server, pool, **fields):
    """Returns futures of the texts of streams that have begun."""
    begun = [threading.Event() for _ in PROMPTS]

    def read(prompt, event):
        texts = []
        for text in server.stream(prompt, **fields):
            texts.append(text)
            event.set()
        return texts

    futures = [pool.submit(read, *given) for given in zip(PROMPTS, begun, strict=True)]
    for event in begun:
        assert event.wait(120)
    return futures


def test_streams_and_whole_replies_have_the_same_text(server):
    for prompt in PROMPTS[:2]:
        whole = server.complete(prompt).json()["choices"][0]["text"]
        assert "".join(server.stream(prompt)) == whole


# Clients leave a stand-in of the engine in tests/serve/http/test_clients_that_leave.py, and a process aborts what they
# left in test_engine_program.py.
@pytest.mark.slow
def test_a_client_that_goes_frees_its_place_at_once(server):
    with httpx.Client(timeout=120) as client:
        given = {"model": "default", "prompt": "def ", "max_tokens": 400, "stream": True}
        for _ in range(12):
            with client.stream("POST", f"{server.url}/v1/completions", json=given) as reply:
                next(reply.iter_lines())
    # There is room for 8 at once; the last one would wait for the others to end.
    assert server.complete("import ").status_code == 200


@pytest.mark.slow
def test_requests_name_the_logits_processors_of_the_command(tmp_path):
    place = "mine=tests.sampling.processors:allowed_range"
    with real_server(tmp_path, "--logits-processor", place) as server:
        given = {"return_token_ids": True, "ignore_eos": True}
        calls = {"mine": {"low": 100, "high": 120}}
        reply = server.complete("def ", **given, logits_processors=calls).json()
        assert all(100 <= token < 120 for token in reply["choices"][0]["token_ids"])
        free = server.complete("def ", **given).json()
        assert not all(100 <= token < 120 for token in free["choices"][0]["token_ids"])
        for wrong in ({"other": {}}, {"mine": {"top": 1}}, {"mine": {"low": "a"}}, {"mine": 3}):
            reply = server.complete("def ", logits_processors=wrong)
            assert reply.status_code == 400, reply.text


def test_the_server_listens_to_this_machine_alone_and_says_so(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert server.status("/health") == server.status("/ready") == 200
    assert "serving default at" in server.out


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("whose", ["pid", "engine_pid"])
def test_a_process_that_is_killed_under_load_takes_the_other_along_and_a_new_server_starts(
    whose, tmp_path
):
    with ThreadPoolExecutor() as pool:
        with real_server(tmp_path) as first:
            wanted = first.complete(PROMPTS[0]).json()["choices"][0]["text"]
            streams = beginning(first, pool, max_tokens=500)
            pids = [first.pid, first.engine_pid]
            kill(getattr(first, whose))
            for stream in streams:
                assert stream.result()[-1] in ("error", "cut")
            code = first.wait_end()
            assert code == (-signal.SIGKILL if whose == "pid" else exit_codes.FAILED)
            wait_for(lambda: not any(map(alive, pids)))
        with real_server(tmp_path, port=first.port) as second:
            assert second.url == first.url
            assert second.complete(PROMPTS[0]).json()["choices"][0]["text"] == wanted


@slow
def test_a_suspended_engine_is_not_ready_and_goes_on_afterwards(tmp_path):
    with ThreadPoolExecutor() as pool, real_server(tmp_path, "--hang-seconds", "2") as running:
        wanted = ["".join(running.stream(prompt, max_tokens=400)) for prompt in PROMPTS]
        streams = beginning(running, pool, max_tokens=400)
        engine = running.engine_pid
        kill(engine, signal.SIGSTOP)
        wait_for(lambda: running.status("/ready") == 503)
        assert running.status("/health") == 503
        kill(engine, signal.SIGCONT)
        wait_for(lambda: running.status("/ready") == 200)
        assert ["".join(stream.result()) for stream in streams] == wanted


@slow
def test_a_suspended_http_process_loses_no_token(tmp_path):
    with ThreadPoolExecutor() as pool, real_server(tmp_path, "--hang-seconds", "2") as running:
        wanted = ["".join(running.stream(prompt, max_tokens=400)) for prompt in PROMPTS]
        streams = beginning(running, pool, max_tokens=400)
        kill(running.pid, signal.SIGSTOP)
        threading.Event().wait(8)
        kill(running.pid, signal.SIGCONT)
        assert ["".join(stream.result()) for stream in streams] == wanted


@slow
def test_a_parent_that_is_killed_while_the_model_loads_leaves_no_process(tmp_path):
    running = RealServer(tmp_path)
    try:
        wait_for(lambda: os.path.exists(f"/proc/{running.pid}/task/{running.pid}/children"))
        wait_for(lambda: children(running.pid))
        engine = running.engine_pid
        kill(running.pid)
        wait_for(lambda: not alive(engine))
    finally:
        running.close()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read()


@slow
@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ("hung step", exit_codes.HUNG, "Current thread 0x"),
        ("broken device", exit_codes.DEVICE_BROKEN, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("no memory, ever", exit_codes.OUT_OF_MEMORY, "RESOURCE_EXHAUSTED"),
    ],
)
def test_an_engine_that_cannot_go_on_ends_the_server_with_its_code(fault, code, word, tmp_path):
    with ThreadPoolExecutor() as pool:
        with real_server(tmp_path, "--hang-seconds", "3", fault=fault) as running:
            streams = [
                pool.submit(list, running.stream(prompt, max_tokens=400)) for prompt in PROMPTS
            ]
            for stream in streams:
                assert stream.result()[-1] in ("error", "cut", "status 503")
            assert running.wait_end() == code
        assert word in running.err
        assert not any(prompt.strip() in running.err for prompt in PROMPTS)


@slow
def test_requests_beyond_the_queue_are_refused_and_all_others_end(tmp_path):
    options = ["--max-sequences", "2", "--max-waiting", "6"]
    with (
        ThreadPoolExecutor(80) as pool,
        real_server(tmp_path, *options, fault="slow steps") as running,
    ):
        wanted = running.complete(PROMPTS[0], max_tokens=40).json()["choices"][0]["text"]
        replies = list(pool.map(lambda _: running.complete(PROMPTS[0], max_tokens=40), range(80)))
        refused = [reply for reply in replies if reply.status_code == 429]
        served = [reply for reply in replies if reply.status_code == 200]
        assert len(refused) + len(served) == len(replies)
        assert len(served) >= 8
        assert len(refused) >= 40
        assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
        assert {reply.json()["choices"][0]["text"] for reply in served} == {wanted}
        assert running.status("/ready") == 200


@slow
def test_a_cache_folder_that_cannot_be_made_and_a_log_that_nobody_reads_end_nothing(tmp_path):
    variables = {"JAXKV_COMPILE_CACHE": "/proc/no-such-folder", "JAXKV_LOG": "info"}
    with real_server(tmp_path, environment=variables) as running:
        assert running.complete("def ").status_code == 200
        assert "/proc/no-such-folder" in running.err
    reading, writing = os.pipe()
    os.close(reading)
    with real_server(tmp_path, environment=variables, log=writing) as running:
        os.close(writing)
        assert running.complete("def ").status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_end() == exit_codes.OK


@slow
def test_a_request_that_the_memory_has_no_room_for_fails_alone(tmp_path):
    with real_server(tmp_path) as running:
        wanted = running.complete("def ").json()["choices"][0]["text"]
        fields = Path(f"/proc/{running.pid}/statm").read_text().split()
        used = int(fields[0]) * resource.getpagesize()
        before = resource.prlimit(running.pid, resource.RLIMIT_AS)
        resource.prlimit(running.pid, resource.RLIMIT_AS, (used + 2**23, before[1]))
        refused = running.complete([7] * 2_000_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
        assert int(refused.headers["retry-after"]) > 0
        assert running.complete([7, 8]).status_code == 200
        resource.prlimit(running.pid, resource.RLIMIT_AS, before)
        assert running.complete([7] * 2_000_000).status_code == 400
        assert running.complete("def ").json()["choices"][0]["text"] == wanted


@slow
def test_ten_thousand_connections_are_served_or_refused_and_then_forgotten(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + 500:
        pytest.skip(f"this system lets a process open {hard} files, {CONNECTIONS + 500} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CONNECTIONS + 500), hard))
    try:
        with real_server(tmp_path) as running:
            answers = asyncio.run(statuses(running.port))
            assert set(answers) == {b"200", b"503"}
            assert answers.count(b"200") >= 4000
            wait_for(lambda: running.status("/ready") == 200)
            assert running.complete("def ").status_code == 200
            running.process.send_signal(signal.SIGTERM)
            assert running.wait_end() == exit_codes.OK
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def statuses(port):
    """Returns the status that each of very many connections gets, all of them open at once."""
    streams, answers = [], []
    try:
        for _ in range(0, CONNECTIONS, 250):
            new = [asyncio.open_connection("127.0.0.1", port) for _ in range(250)]
            streams += await asyncio.gather(*new)
            for _, writer in streams[-250:]:
                writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
            for reader, _ in streams[-250:]:
                answers.append((await reader.readline()).split()[1])
    finally:
        for _, writer in streams:
            writer.transport.abort()
    return answers
