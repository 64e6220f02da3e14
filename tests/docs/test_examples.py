"""The examples run against a server with OpenAI's API, and the files for deployment are well-formed and agree."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from jaxkv import cli
from tests.docs.blocks import ROOT
from tests.openai_stub import KEY, openai_stub

EXAMPLES = ROOT / "docs" / "examples"
DEPLOY = EXAMPLES / "deploy"
COMPOSE = DEPLOY / "compose.yaml"


@pytest.fixture(scope="module")
def running():
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def stub(running, monkeypatch):
    monkeypatch.setenv("JAXKV_BASE_URL", running.url)
    monkeypatch.setenv("JAXKV_API_KEY", KEY)
    running.requests.clear()
    return running


def printed(name, capsys):
    pytest.importorskip("openai")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_client_gets_a_completion_and_a_streamed_chat(stub, capsys):
    words = "word " * 16
    assert printed("openai_client.py", capsys) == (
        f"model: stub\ncompletion: {words!r}\nchat: {words}\nusage: 7 + 16 tokens\n"
    )


def test_a_tool_is_called_and_its_result_sent_back(stub, capsys):
    out = printed("tool_calls.py", capsys)
    weather = "18 degrees and sunny in Paris"
    assert out.startswith(f'call: get_weather({{"city": "Paris"}}) -> {weather}\nanswer: word ')
    _, asked, last = stub.requests[-1]["messages"]
    assert asked["tool_calls"][0]["id"] == last["tool_call_id"] == "call_1"
    assert (last["role"], last["content"]) == ("tool", weather)


def test_an_answer_that_fits_a_schema_is_read_as_json(stub, capsys):
    assert printed("json_schema.py", capsys) == "Ada is 36 and likes chess\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_shell_asks_for_the_same(stub):
    out = subprocess.run(
        [str(EXAMPLES / "curl.sh")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert '"status":"ok"' in out
    assert '"id":"stub"' in out
    assert out.rstrip().endswith("data: [DONE]")
    assert [request["model"] for request in stub.requests] == ["stub", "stub"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_shell_stops_at_an_error_and_shows_it(stub, monkeypatch):
    monkeypatch.setenv("JAXKV_API_KEY", "wrong")
    done = subprocess.run([str(EXAMPLES / "curl.sh")], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "401" in done.stderr
    assert stub.requests == []


INSTRUCTIONS = (
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "ENV",
    "VOLUME",
    "USER",
    "EXPOSE",
    "HEALTHCHECK",
    "STOPSIGNAL",
    "ENTRYPOINT",
)


def instructions():
    """Returns pairs of an instruction of the Dockerfile and its arguments; continued lines are joined."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r" *\\\n *", " ", text)
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line]


def test_the_image_runs_as_a_user_without_rights_and_is_checked():
    found = instructions()
    assert {name for name, _ in found} == set(INSTRUCTIONS)
    last = dict(found)
    assert last["USER"] == "10001:10001"
    assert "/health" in last["HEALTHCHECK"]
    assert last["ENTRYPOINT"].startswith('["jaxkv", "serve"')
    bases = [arguments.split()[0] for name, arguments in found if name == "FROM"]
    assert all(re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-base-ubuntu24\.04", base) for base in bases)
    # Nothing of the build is run as root after the user was set.
    names = [name for name, _ in found]
    assert "RUN" not in names[names.index("USER") :]


def test_the_image_gets_what_the_package_is_made_of_and_nothing_else():
    copied = {
        source
        for name, arguments in instructions()
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    packages = re.search(r"^packages = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert packages is not None
    assert set(re.findall(r'"(\w+)"', packages[1])) <= copied


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_serves_when_its_commands_are_run_in_folders(tmp_path):
    """What only Docker can do is left out: the base image, its packages, the user, and CUDA's libraries."""
    port = str(free_port())
    source = tmp_path / "source"

    def here(text):
        text = text.replace("8000", port).replace("cuda13,", "").replace("--no-cache-dir ", "")
        for folder in ("/opt/jaxkv", "/cache"):
            text = text.replace(folder, str(tmp_path) + folder)
        return text

    found = instructions()
    source.mkdir()
    for name, arguments in found:
        if name == "COPY" and not arguments.startswith("--from"):
            *copied, _ = arguments.split()
            subprocess.run(["cp", "-r", *(str(ROOT / each) for each in copied), source], check=True)
        elif name == "RUN" and "apt-get" not in arguments:
            command = shlex.split(here(arguments))
            if command[0] == "python3":
                command[0] = sys.executable
            done = subprocess.run(command, cwd=source, capture_output=True, text=True)
            if "No matching distribution" in done.stderr:
                pytest.skip("PyPI cannot be reached")
            assert done.returncode == 0, done.stderr[-2000:]
    variables = dict(word.split("=", 1) for word in here(dict(found)["ENV"]).split())
    variables["PATH"] = variables["PATH"].replace("$PATH", os.environ["PATH"])
    key = variables["JAXKV_API_KEY"] = "secret-of-the-image"
    (tmp_path / "cache").mkdir()
    check = json.loads(here(dict(found)["HEALTHCHECK"]).split(" CMD ")[1])
    entry = json.loads(here(dict(found)["ENTRYPOINT"]))
    with (tmp_path / "out").open("w") as out:
        # Not ROOT: the installed package is what serves.
        given = {"cwd": tmp_path, "env": variables}
        running = subprocess.Popen(
            [shutil.which(entry[0], path=variables["PATH"]), *entry[1:]], stdout=out, **given
        )
    try:
        while "(ready)" not in (tmp_path / "out").read_text():
            assert running.poll() is None
            time.sleep(0.2)
        assert subprocess.run(check, **given).returncode == 0
        body = {"model": "default", "prompt": "def ", "max_tokens": 3}
        url, headers = f"http://127.0.0.1:{port}/v1/completions", {"x-api-key": key}
        assert httpx.post(url, json=body, timeout=120).status_code == 401
        assert httpx.post(url, json=body, headers=headers, timeout=120).status_code == 200
        assert list((tmp_path / "cache" / "programs").iterdir())
        running.send_signal(getattr(signal, dict(found)["STOPSIGNAL"]))
        assert running.wait(60) == 0
        assert subprocess.run(check, capture_output=True, **given).returncode != 0
    finally:
        running.kill()
        running.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_the_commands_of_image_compose_and_unit_are_those_of_jaxkv(read):
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    more = read(COMPOSE)["services"]["jaxkv"]["command"]
    [started] = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "jaxkv.service").read_text(), re.M)
    for words in ([*entry, *more], shlex.split(started)):
        assert words[0].rsplit("/", 1)[-1] == "jaxkv"
        options = cli._parser().parse_args(words[1:])
        assert options.port == 8000


@pytest.fixture
def read():
    yaml = pytest.importorskip("yaml")
    return lambda path: yaml.safe_load(path.read_text())


def test_compose_publishes_on_the_loopback_alone_with_fixed_images(read):
    services = read(COMPOSE)["services"]
    assert set(services) == {"jaxkv", "prometheus", "grafana"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.search(r":v?\d", service.get("image", ":1")), name
    assert "ports" not in services["prometheus"]


def test_compose_mounts_files_that_exist_and_volumes_that_it_declares(read):
    compose = read(COMPOSE)
    build = compose["services"]["jaxkv"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                path = (DEPLOY / source).resolve()
                assert path.exists(), source
                assert path.is_relative_to(ROOT), source
            else:
                assert source in compose["volumes"]


def test_prometheus_asks_the_server_with_the_key_and_grafana_asks_prometheus(read):
    compose = read(COMPOSE)
    [job] = read(DEPLOY / "prometheus.yml")["scrape_configs"]
    [secret] = compose["services"]["prometheus"]["secrets"]
    assert compose["secrets"][secret] == {"environment": "JAXKV_API_KEY"}
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["jaxkv:8000"]}]
    [source] = read(DEPLOY / "grafana-datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = read(DEPLOY / "grafana-dashboards.yaml")["providers"]
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/jaxkv.json" in mounts


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit_and_rates_it_as_hardened(tmp_path):
    unit = (DEPLOY / "jaxkv.service").read_text()
    [command] = re.findall(r"^ExecStart=(\S+)", unit, re.M)
    file = tmp_path / "jaxkv.service"
    # Only the program itself is missing here.
    file.write_text(
        unit.replace(command, "/bin/true").replace("/usr/bin/nvidia-modprobe", "/bin/true")
    )
    for check in ("verify --man=no", "security --offline=yes --threshold=25"):
        done = subprocess.run(
            ["systemd-analyze", *shlex.split(check), str(file)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stderr == ""
