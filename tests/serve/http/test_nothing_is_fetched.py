"""Requests make the HTTP process open no file and no connection, and run no code, whatever they ask for."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Sends every request twice, since modules are imported and caches filled the first time, and prints Python's audit
# events of the second time.
PROGRAM = """
import asyncio, json, sys
from tests.serve.http.serving import CHATTY, serving

WATCHED = ("open", "import", "exec", "compile", "socket.", "subprocess.", "os.", "pickle.", "ctypes.", "shutil.")
URL, FILE = "http://127.0.0.1:1/metadata", "/etc/passwd"

def user(*parts):
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": list(parts)}]}

def asked(**fields):
    return {"model": "tiny", "max_output_tokens": 4, "input": URL, **fields}

def completion(**fields):
    return {"model": "tiny", "max_tokens": 4, "prompt": FILE, **fields}

TEXT = {"type": "text", "text": "{{ cycler.__init__.__globals__ }} " + URL + " " + FILE}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": URL}}}
POSTS = [
    ("/v1/completions", completion()),
    ("/v1/completions", completion(stream=True, logprobs=1, echo=True)),
    ("/v1/completions", completion(response_format=SCHEMA)),
    ("/v1/completions", completion(model=FILE)),
    ("/v1/chat/completions", user(TEXT)),
    ("/v1/chat/completions", user(TEXT) | {"chat_template": "{{ 1 }}"}),
    ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": URL}})),
    ("/v1/chat/completions", user({"type": "image_url", "image_url": {"url": "file://" + FILE}})),
    ("/v1/responses", asked()),
    ("/v1/responses", asked(tools=[{"type": "mcp", "server_label": "a", "server_url": URL}])),
    ("/v1/responses", asked(input=[{"role": "user", "content": [{"type": "input_file", "file_url": URL}]}])),
    ("/v1/messages", user(TEXT)),
    ("/v1/messages", user({"type": "document", "source": {"type": "url", "url": URL}})),
    ("/v1/messages", user(TEXT) | {"mcp_servers": [{"type": "url", "url": URL, "name": "a"}]}),
    ("/v1/messages/count_tokens", user(TEXT)),
    ("/tokenize", {"prompt": FILE}),
    ("/detokenize", {"tokens": [5, 6]}),
]
GETS = ["/v1/models", "/v1/models/" + FILE, "/version", "/openapi.json", "/metrics", "/dashboard", "/dashboard/data",
        "/health", "/ready", "/dashboard/../../../etc/passwd", "/static/../../etc/passwd"]
seen, statuses, watching = [], [], False

def watch(event, arguments):
    if watching and event.startswith(WATCHED):
        seen.append([event, str(arguments)[:200]])

async def main():
    global watching
    async with serving(lambda submit: [5, 6], tokenizer=CHATTY) as server:
        for watching in (False, True):
            for path, body in POSTS:
                statuses.append((await server.http.post(path, json=body)).status_code)
            for path in GETS:
                statuses.append((await server.http.get(path)).status_code)
        watching = False

sys.addaudithook(watch)
asyncio.run(main())
print(json.dumps({"seen": seen, "statuses": statuses}))
"""


def test_requests_open_no_file_and_no_connection_and_run_no_code():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout)
    assert found["seen"] == []
    assert set(found["statuses"]) == {200, 400, 404}
