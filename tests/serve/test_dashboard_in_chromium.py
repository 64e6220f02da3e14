"""The dashboard in a headless Chromium: it shows the figures, escapes all text and keeps its own rules."""

import asyncio

from jaxkv.serve.dashboard.page import page_with
from tests.serve.chromium import dashboard_server, load, needs_chromium
from tests.serve.http.serving import serving

pytestmark = needs_chromium
KEY = "a-key-of-tests"
HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'


def busy(service, engine):
    engine.stats |= {"running": 11, "waiting": 3}
    engine.picture = {
        **engine.picture,
        "program_list": [{"name": HOSTILE, "seconds": 1.0, "loaded": False}],
    }
    service.recorder.first_token_seconds.observe(0.03, times=40)
    service.recorder.finished["stop"] = 39


def test_the_page_shows_the_figures_of_a_server_and_escapes_all_text():
    with dashboard_server(keys=(KEY,), model=HOSTILE, change=busy) as port:
        dom, messages = load(f"http://any:{KEY}@127.0.0.1:{port}/dashboard")
    assert messages == []
    assert 'role="status">live<' in dom
    assert "<dt>requests running</dt><dd>11</dd>" in dom
    assert "<dt>requests waiting</dt><dd>3</dd>" in dom
    assert "<dt>finished</dt><dd>39</dd>" in dom
    assert "40 values since the start" in dom
    assert 'aria-label="gqa: free 49, used by requests 10,' in dom
    assert "<title>jaxkv: &lt;/script&gt;&lt;script&gt;" in dom
    assert "<td>&lt;/script&gt;" in dom
    assert "<img" not in dom
    assert dom.count("<script") == 2


def test_without_the_key_the_browser_sees_nothing():
    with dashboard_server(keys=(KEY,)) as port:
        for address in (f"http://127.0.0.1:{port}", f"http://any:wrong-key@127.0.0.1:{port}"):
            dom, _ = load(f"{address}/dashboard")
            assert "requests running" not in dom
            assert "<canvas" not in dom


def test_a_page_in_a_file_shows_its_data_and_asks_nobody(tmp_path):
    async def run():
        async with serving() as server:
            return (await server.http.get("/dashboard/data")).json()

    view = asyncio.run(run()) | {"model": HOSTILE, "state": "a file"}
    file = tmp_path / "page.html"
    file.write_text(page_with(view), encoding="utf-8")
    dom, messages = load(file.as_uri())
    assert messages == []
    assert 'role="status">a file<' in dom
    assert "<dt>programs compiled</dt><dd>12</dd>" in dom
    assert "<title>jaxkv: &lt;/script&gt;" in dom
    assert "<img" not in dom
