"""`jaxkv bench serve` as a user runs it, against a server on the loopback."""

import json
import signal
import subprocess
import sys

import pytest

from jaxkv import __version__
from jaxkv.cli import main
from tests.openai_stub import KEY, openai_stub

SMALL = ["--requests", "4", "--prompt-tokens", "20:30", "--output-tokens", "2:4"]


@pytest.fixture(scope="module")
def running():
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def stub(running, monkeypatch):
    monkeypatch.setenv("JAXKV_API_KEY", KEY)
    running.requests.clear()
    running.failures.clear()
    return running


def test_the_figures_are_printed_and_written(stub, capsys, tmp_path):
    files = ["--plot", str(tmp_path / "out.html"), "--result-json", str(tmp_path / "out.json")]
    command = ["bench", "serve", "--base-url", stub.url, *SMALL, *files]
    assert main([*command, "--goodput", "ttft:60000,e2el:60000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"stub at {stub.url}, completions, all at once\n4 requests in ")
    for word in ("met the objectives", "TTFT", "TPOT", "ITL", "E2EL"):
        assert word in out
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["completed"], told["model_id"]) == (4, "stub")
    assert told["jaxkv"]["version"] == __version__
    assert told["request_goodput"] == pytest.approx(told["request_throughput"])
    page = (tmp_path / "out.html").read_text()
    assert "jaxkv bench serve: stub" in page
    # Two texts whose tokens the server counts, then the run.
    assert len(stub.requests) == 6


def test_several_rates_are_several_runs(stub, capsys, tmp_path):
    file = tmp_path / "out.json"
    files = ["--result-json", str(file), "--plot", str(tmp_path / "out.html")]
    rates = ["--rate", "900,1000,inf", "--endpoint", "chat", "--json"]
    assert main(["bench", "serve", "--base-url", f"{stub.url}/v1", *SMALL, *rates, *files]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["request_rate"] for run in printed] == [900.0, 1000.0, None]
    assert [run["request_rate"] for run in json.loads(file.read_text())] == [900, 1000, "inf"]
    assert all("messages" in request for request in stub.requests)
    # Six charts against the rate and three timelines.
    assert (tmp_path / "out.html").read_text().count("<svg ") == 9


def test_failed_requests_are_printed_and_no_mistake_of_the_user(stub, capsys):
    stub.failures += [0, 0, 429, 429]
    assert main(["bench", "serve", "--base-url", stub.url, *SMALL]) == 0
    assert "2 failed: 429 Too Many Requests: the queue is full" in capsys.readouterr().out


def test_a_wrong_key_is_said_before_the_run(stub, capsys):
    assert main(["bench", "serve", "--base-url", stub.url, "--api-key", "wrong", *SMALL]) == 2
    told = capsys.readouterr().err
    assert "answered 401 Unauthorized: no such key; give the key with --api-key" in told
    assert told.count("\n") == 1
    assert "wrong" not in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1: Connection refused"),
        (["--rate", "0"], "the request rate must be above 0, got 0"),
        (["--goodput", "tps:3"], "must be like ttft:200,tpot:20,e2el:5000, got 'tps:3'"),
        (["--goodput", "ttft:0"], "must be like ttft:200"),
        (["--data", "sharegpt", "--data-file", "x"], "not allowed with argument"),
        (["--vocab-size", "9", "--data-file", "x"], "--vocab-size draws prompts"),
        (["--max-concurrency", "0"], "--max-concurrency must be an int in [1, "),
        (["--warm-up", "-1"], "--warm-up must be an int in [0, "),
        (["--open-connections", "-1"], "--open-connections must be an int in [0, "),
        (["--plot", "x.gif"], "a plot is a file .html or .png"),
        (["--result-json", "/no/such/folder/x.json"], "does not exist"),
        (["--endpoint", "embeddings"], "endpoint must be one of"),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, options, message):
    assert main(["bench", "serve", *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr("jaxkv.bench.serve_command._PACKAGES", ("msgspec", "no_such_package"))
    assert main(["bench", "serve"]) == 2
    assert "needs no_such_package; run pip install 'jaxkv[serve]'" in capsys.readouterr().err


INTERRUPTIBLE = """
import signal, sys
# A shell that runs the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxkv.cli import main
sys.exit(main())
"""


def test_ctrl_c_ends_with_partial_figures_and_without_jax(stub):
    """The third and the later answers never end."""
    stub.held_from = 2 + 3
    command = [sys.executable, "-X", "importtime", "-c", INTERRUPTIBLE, "bench", "serve", *SMALL]
    with subprocess.Popen(
        [*command, "--base-url", stub.url, "--max-concurrency", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stub.wait_until_held()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            stub.held_from = None
    assert process.returncode == 130
    assert "PARTIAL: interrupted after 2 of 4 requests had ended\n2 requests in" in out
    imported = [line.split("|")[-1].strip() for line in err.splitlines() if "|" in line]
    assert "jaxkv.bench.client.measure" in imported
    assert "jax" not in imported
    assert "Traceback" not in err
