"""A client of the server's application on a fake engine, without sockets."""

import asyncio
import json
from contextlib import asynccontextmanager
from urllib.parse import unquote

import httpx

from jaxkv import default_model
from jaxkv.serve.api.app import make_app
from jaxkv.serve.http.auth import ApiKeys
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.http.service import Service
from jaxkv.text.chat_template import ChatTemplate
from jaxkv.text.tokenizer import load_tokenizer
from tests.serve.fake_engine import FakeEngine, fake_engine

TOKENIZER = load_tokenizer(default_model.path())
TEMPLATE = """{%- if tools %}tools <tool_call></tool_call> {{ tools | tojson }}
{% endif %}{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{% for call in message.tool_calls or () %}{{ call.function.name }}({{ call.function.arguments | tojson }})
{% endfor %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{{ greeting }}{% endif %}{# <think></think> #}"""
CHATTY = load_tokenizer(default_model.path())
CHATTY.chat_template = ChatTemplate({"default": TEMPLATE}, CHATTY.special_tokens)
"""A tokenizer with a chat template of Hermes' tool calls and Qwen's reasoning."""

MODEL = "tiny"


class Server:
    """A served fake engine.

    Attributes:
        engine: the fake engine.
        service: the service on it.
        app: the ASGI application.
        http: a client of it.
    """

    def __init__(self, engine: FakeEngine, service: Service, app, http: httpx.AsyncClient):
        self.engine, self.service, self.app, self.http = engine, service, app, http


@asynccontextmanager
async def serving(*given, keys=(), limits=None, tokenizer=TOKENIZER, **options):
    """Yields a `Server`; the arguments are those of `fake_engine`, `Service` and `ApiKeys`."""
    async with fake_engine(*given, **options) as engine:
        service = Service(engine.client, tokenizer, MODEL, limits=limits or Limits())
        app = make_app(service, ApiKeys(keys))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            yield Server(engine, service, app, http)


async def raw_request(server, method, path, headers=(), body=b""):
    """Returns (status, headers, body) of a request whose path is passed on as it is, as uvicorn does."""
    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path.partition("?")[0]),
        "raw_path": path.partition("?")[0].encode(),
        "query_string": path.partition("?")[2].encode(),
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    messages, sent, done = [{"type": "http.request", "body": body}], [], asyncio.Event()

    async def receive():
        if messages:
            return messages.pop(0)
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await server.app(scope, receive, send)
    done.set()
    start, *rest = sent
    return (
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        b"".join(each["body"] for each in rest),
    )


def events_of(text):
    """Returns the JSON of all events of a stream, which ends with [DONE]."""
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), text
    return [json.loads(each.removeprefix("data: ")) for each in events]
