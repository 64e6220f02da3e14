"""The published suite `llm-comply` on the server: chat, Open Responses and Messages.

Its requests with an image are expected to be refused: the server's models read text alone.
"""

import asyncio
import json
import sys

import msgspec
import pytest

from tests.serve.fake_engine import FACTS
from tests.serve.http.listening import listening
from tests.serve.http.serving import CHATTY

KEY = "key-of-the-suite"
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
)
WITH_IMAGES = {"chat-image-input", "image-input", "anth-image-input"}


def script(submit):
    """Calls the tool if there is one, otherwise answers."""
    wants = "tools <tool_call>" in CHATTY.decode(submit.ids)
    return CHATTY.encode(CALL if wants else "Hello there, friend.", add_special=False)


async def results_of(form):
    """Returns what the suite prints about one API."""
    # Its requests leave room for 4096 tokens.
    facts = msgspec.structs.replace(FACTS, max_model_len=8192)
    async with listening(script, keys=(KEY,), facts=facts) as server:
        options = ["-u", f"{server.url}/v1", "-k", KEY, "-m", "tiny", "--format", form, "--json"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", "llm_comply.cli", *options),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await process.communicate()
        return json.loads(printed)


@pytest.mark.parametrize("form", ["openai-chat", "open-responses", "anthropic"])
def test_every_case_of_the_suite_passes_but_those_with_images(form):
    found = asyncio.run(asyncio.wait_for(results_of(form), 120))
    results = found["results"] if isinstance(found, dict) else found
    assert len(results) >= 8
    failed = {each["id"]: each for each in results if each["status"] == "failed"}
    assert set(failed) == WITH_IMAGES & {each["id"] for each in results}, failed
