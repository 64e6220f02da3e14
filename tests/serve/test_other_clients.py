"""Published clients that share no environment with ours, unmodified, against a server behind real sockets."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxkv import default_model
from tests.serve.api.test_clients import KEY, TEXT, script
from tests.serve.http.listening import listening
from tests.serve.http.serving import CHATTY
from tests.serve.real_server import real_server

HERE = Path(__file__).parent / "clients"
FOLDER = Path(os.environ.get("JAXKV_CLIENTS", Path(sys.prefix) / "clients"))
"""Where `.ci/install clients` puts them."""

TOKENS = len(CHATTY.encode(TEXT, add_special=False))
CALL = ["weather", {"city": "Bern"}, "tool_calls"]

pytestmark = pytest.mark.slow


def need(path, how=".ci/install clients"):
    """Skips the test unless a client is installed."""
    if not (FOLDER / path).exists():
        pytest.skip(f"{FOLDER / path} is missing; run `{how}`")
    return FOLDER / path


async def printed(*command, **variables):
    """Returns what a program prints; fails if it fails."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, (out[-4000:], err[-4000:])
    return out.decode()


def results_of(*command, **variables):
    """Returns what a program prints as JSON, given the address and key of a server as its last arguments."""

    async def run():
        async with listening(script, keys=(KEY,)) as server:
            text = await printed(*command, server.url, KEY, **variables)
            return json.loads(text.splitlines()[-1])

    return asyncio.run(asyncio.wait_for(run(), 300))


def test_litellm_reads_all_of_the_apis():
    packages = need("litellm")
    # Otherwise it asks the internet for prices.
    variables = {"PYTHONPATH": str(packages), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    found = results_of(sys.executable, HERE / "litellm_calls.py", **variables)
    wanted = {"too long": ["ContextWindowExceededError", 400]}
    for name in ("openai", "anthropic"):
        wanted |= {
            f"{name} whole": TEXT,
            f"{name} stream": TEXT,
            f"{name} tokens": TOKENS,
            f"{name} call": CALL,
            f"{name} streamed call": CALL,
            f"{name} wrong key": ["AuthenticationError", 401],
        }
    assert found == wanted | {"completion": TEXT, "response": TEXT}


def test_openais_client_for_node_reads_all_of_the_apis():
    node = shutil.which("node") or pytest.skip("node is missing; install Node.js 20 or newer")
    modules = need("node_modules/openai").parent
    found = results_of(node, HERE / "openai_calls.mjs", modules)
    assert found == {
        "models": ["tiny"],
        "whole": TEXT,
        "tokens": TOKENS,
        "stream": TEXT,
        "call": CALL,
        "streamed call": CALL,
        "response": TEXT,
        "streamed response": TEXT,
        "completion": TEXT,
        "wrong key": ["AuthenticationError", 401, None, "invalid_api_key"],
        "too long": ["BadRequestError", 400, "max_tokens", "context_length_exceeded"],
        "left": "chat.completion.chunk",
    }


def test_guidellm_measures_a_server_without_an_error(tmp_path):
    how = (
        f"python3 -m venv {FOLDER}/guidellm && {FOLDER}/guidellm/bin/pip install guidellm==0.8.1 "
        "torch, which takes gigabytes"
    )
    program = need("guidellm/bin/guidellm", how)
    # The model in the package has no chat template.
    form, report = "request_format=/v1/completions", tmp_path / "report.json"
    with real_server(tmp_path) as server:
        options = (
            *("--backend", f"kind=openai_http,target={server.url},model=default,{form}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", "kind=max_requests,count=24"),
            *("--tokenizer", f"kind=hf_auto,model={default_model.path()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
        )
        asyncio.run(printed(program, "run", *options, HF_HUB_OFFLINE="1", PYTHONPATH=""))
    [found] = json.loads(report.read_text())["benchmarks"]
    requests = found["metrics"]["request_totals"]
    assert (requests["successful"], requests["errored"]) == (24, 0), requests
