"""A small server with OpenAI's API, in a thread: it counts words as tokens and answers with fixed texts."""

import asyncio
import json
import threading
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

MODEL = "stub"
KEY = "secret"


def prompt_tokens(body):
    """Counts the tokens of a prompt: of a text its words, of ids the ids."""
    if "messages" in body:
        return sum(len(str(message["content"] or "").split()) for message in body["messages"]) + 3
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def message_of(body):
    """Returns the assistant's message: a tool call for tools, an object for a schema, else words."""
    last = body["messages"][-1]
    if body.get("tools") and last["role"] != "tool":
        name = body["tools"][0]["function"]["name"]
        call = {"name": name, "arguments": json.dumps({"city": "Paris"})}
        tool_call = {"id": "call_1", "type": "function", "function": call}
        return {"role": "assistant", "content": None, "tool_calls": [tool_call]}, "tool_calls"
    if "response_format" in body:
        wanted = body["response_format"]["json_schema"]["schema"]["properties"]
        values = {"string": "Ada", "integer": 36, "array": ["chess"]}
        return {
            "role": "assistant",
            "content": json.dumps({name: values[kind["type"]] for name, kind in wanted.items()}),
        }, "stop"
    return {"role": "assistant", "content": "word " * body.get("max_tokens", 5)}, "stop"


def chunk_of(choices, usage=None):
    return {
        "id": "stub-1",
        "object": "chunk",
        "created": 1,
        "model": MODEL,
        "choices": choices,
        "usage": usage,
    }


def events_of(body, is_chat):
    """Returns the chunks of a streamed answer, one for each token."""
    count = body.get("max_tokens", 5)
    if is_chat:
        yield chunk_of([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for index in range(count):
        reason = "length" if index == count - 1 else None
        text = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
        yield chunk_of([{"index": 0, "finish_reason": reason, **text}])
    read = prompt_tokens(body)
    usage = {"prompt_tokens": read, "completion_tokens": count, "total_tokens": read + count}
    yield chunk_of([], usage)


def answer(is_chat, stub):
    async def endpoint(request):
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        body = await request.json()
        stub.requests.append(body)
        if stub.held_from is not None and len(stub.requests) >= stub.held_from:
            stub.held.set()
            while stub.held_from is not None:
                await asyncio.sleep(0.01)
        if stub.failures and (status := stub.failures.pop(0)):
            return JSONResponse({"error": {"message": "the queue is full"}}, status)
        if body.get("stream"):

            async def stream():
                for event in events_of(body, is_chat):
                    yield f"data: {json.dumps(event)}\n\n"
                    await asyncio.sleep(0)
                yield "data: [DONE]\n\n"

            return StreamingResponse(stream(), media_type="text/event-stream")
        message, reason = message_of(body) if is_chat else (None, "length")
        choice = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": message} if is_chat else {"text": "word " * body["max_tokens"]}
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        return JSONResponse(chunk_of([choice], usage) | {"object": "chat.completion"})

    return endpoint


async def models(request):
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return JSONResponse({"error": {"message": "no such key"}}, 401)
    return JSONResponse(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 512}]}
    )


async def health(request):
    return JSONResponse({"status": "ok"})


class Stub:
    """The running server.

    Attributes:
        url: its address.
        requests: bodies of the requests so far.
        failures: statuses of the next answers; 0 for one that succeeds.
        held_from: number of the first request that is not answered before this is `None`.
    """

    def __init__(self):
        self.url = ""
        self.requests = []
        self.failures = []
        self.held_from = None
        self.held = threading.Event()

    def wait_until_held(self):
        assert self.held.wait(timeout=60)


@contextmanager
def openai_stub():
    """Runs the server while the block does, on a free port."""
    stub = Stub()
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            *(
                Route(path, answer(is_chat, stub), methods=["POST"])
                for path, is_chat in (("/v1/completions", False), ("/v1/chat/completions", True))
            ),
        ]
    )
    # Uvicorn's own configuration closes the handlers of others, and absl's closes stderr.
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    with config.bind_socket() as sock:
        # From here on connections wait for the thread instead of being refused.
        sock.listen()
        stub.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        try:
            yield stub
        finally:
            server.should_exit = True
            thread.join(timeout=10)
    assert not thread.is_alive()
