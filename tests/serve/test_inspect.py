"""`jaxkv inspect` shows a server and a file alike, as text and as a page, and says what is wrong in one line."""

import asyncio
import json
import re
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from jaxkv.cli import main
from jaxkv.serve.dashboard.text_view import quantile, text_of
from tests.offload.test_prefix_file import save
from tests.serve.chromium import dashboard_server
from tests.serve.http.serving import serving

KEY = "a-key-of-tests"


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    monkeypatch.delenv("JAXKV_API_KEY", raising=False)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "prefixes")
    return tmp_path / "prefixes"


@pytest.fixture
def view():
    async def run():
        async with serving() as server:
            return (await server.http.get("/dashboard/data")).json()

    return asyncio.run(run())


class Odd(BaseHTTPRequestHandler):
    """A server that is none of jaxkv's; its path chooses the answer."""

    seen = []  # noqa: RUF012 - read by the tests

    def do_GET(self):
        self.seen.append(self.headers.get("Authorization"))
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "/json/dashboard/data")
            self.end_headers()
            return
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        answers = {"/json": b'{"model": "x"}', "/list": b"[1]", "/html": b"<html>"}
        self.wfile.write(answers[self.path.removesuffix("/dashboard/data")])

    def log_message(self, *given):
        del given


@pytest.fixture
def odd():
    Odd.seen.clear()
    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_printed_and_written_as_a_page(capsys, tmp_path, monkeypatch):
    out = tmp_path / "out.html"
    with dashboard_server(keys=(KEY,)) as port:
        address = f"http://127.0.0.1:{port}"
        assert main(["inspect", address, "--api-key", KEY]) == 0
        text = capsys.readouterr().out
        assert main(["inspect", address]) == 2
        assert "it needs a key; give --api-key or JAXKV_API_KEY" in capsys.readouterr().err
        assert main(["inspect", address, "--api-key", "another-key"]) == 2
        assert "the key is wrong" in capsys.readouterr().err
        monkeypatch.setenv("JAXKV_API_KEY", KEY)
        assert main(["inspect", f"{address}/dashboard", "--html", str(out)]) == 0
        assert capsys.readouterr().out == f"wrote {out}\n"
        monkeypatch.setenv("JAXKV_BASE_URL", address)
        assert main(["inspect"]) == 0
        assert capsys.readouterr().out.startswith("tiny model: ")
    assert "requests" in text
    assert "gqa: 600 pages" in text
    [embedded] = re.findall(r'id="embedded">(.*?)</script>', out.read_text(), re.DOTALL)
    assert json.loads(embedded)["maps"]
    assert re.fullmatch(
        r"live at \d{4}(-\d\d){2} \d\d(:\d\d){2} UTC", json.loads(embedded)["state"]
    )


def test_a_file_is_printed_and_written_as_a_page(saved, capsys, tmp_path):
    assert main(["inspect", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "gqa: 6 pages" in text
    assert "= cached 4 (67%), * checkpoints 2 (33%)" in text
    assert "====**" in text
    out = tmp_path / "out.html"
    assert main(["inspect", str(saved), "--html", str(out)]) == 0
    [embedded] = re.findall(r'id="embedded">(.*?)</script>', out.read_text(), re.DOTALL)
    assert json.loads(embedded)["model"] == "prefixes"


def test_each_mistake_is_one_line_that_says_what_to_do(odd, saved, capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    damaged = tmp_path / "damaged"
    damaged.write_bytes(saved.read_bytes()[:-3])
    cases = {
        nobody: "is the server running",
        "127.0.0.1:8000": "is no file; give a file of saved prefixes, or the address",
        "ftp://host": "must be like http://127.0.0.1:8000",
        f"http://any:{KEY}@127.0.0.1": "without name and password",
        str(damaged): "is damaged",
        str(tmp_path): "is no file",
        f"{odd}/html": "no JSON",
        f"{odd}/list": "no figures",
        f"{odd}/json": "figures of another form",
        f"{odd}/missing": "no jaxkv server, or an older one",
        f"{odd}/away": "answers 302",
    }
    for source, problem in cases.items():
        assert main(["inspect", source, "--api-key", KEY]) == 2, source
        told = capsys.readouterr()
        assert problem in told.err, source
        assert told.err.count("\n") == 1, source
        assert told.out == "", source
    # The redirect was not followed, so its target never saw the key.
    assert len(Odd.seen) == 5


def test_text_holds_no_control_characters(view):
    view["model"] = "x\x1b[31m\r\u202e"
    text = text_of(view)
    assert all(one.isprintable() for one in text.replace("\n", ""))
    assert text.startswith("x?[31m??: jaxkv")


def test_a_large_map_is_drawn_in_few_lines(view):
    [group] = [one for one in view["maps"] if one["name"] == "gqa"]
    group |= {"total": 8000, "cell": 2, "kinds": [1, 3], "lengths": [1000, 3000]}
    view["maps"] = [group]
    lines = text_of(view).splitlines()
    start = lines.index("gqa: 8,000 pages; one character is 8 pages")
    drawn = "".join(line.strip() for line in lines[start + 2 : lines.index("", start)])
    assert drawn == "#" * 250 + "=" * 750


def test_a_quantile_is_linear_inside_its_bucket():
    assert quantile([1.0, 3.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 3.0], [2, 2, 0], 0.25) == 0.5
    assert quantile([1.0, 3.0], [2, 2, 0], 0.75) == 2.0
    assert quantile([1.0, 3.0], [0, 0, 5], 0.5) == 3.0
