"""`Operation`: one row of the table of routes, and the ASGI application that serves it."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from jaxkv.serve.engine_client import EngineBusy, EngineLost, RequestRefused, SlowReader
from jaxkv.serve.http.errors import (
    ApiError,
    ErrorForm,
    from_engine,
    internal_error,
    openai_error,
    unavailable,
)
from jaxkv.serve.http.replies import Answer, error_event, error_reply
from jaxkv.serve.http.request import (
    LARGE_BODY,
    REQUEST_ID,
    ClientGone,
    Request,
    receive_request,
)
from jaxkv.serve.http.service import Service

_LOG = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route.

    Attributes:
        path: as Starlette writes it, such as "/v1/models/{model:path}".
        method: "GET", which serves HEAD too, or "POST".
        handler: answers a request; it raises `ApiError`.
        summary: one line for the OpenAPI document.
        body: the struct of the request's body, or the JSON schema of one that the handler reads by itself; `None` if
            the request has none.
        reply: the JSON schema of the reply of status 200.
        errors: the statuses of its errors.
        needs_key: whether it is closed without a key; `jaxkv.serve.http.auth.OPEN_PATHS` must agree.
        error_form: how its errors are written.
        content_type: content type of the reply.
    """

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
    body: type | Mapping[str, Any] | None = None
    reply: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    errors: tuple[int, ...] = (401, 503)
    needs_key: bool = True
    error_form: ErrorForm = openai_error
    content_type: str = "application/json"

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are answered."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class Endpoint:
    """The ASGI application of one operation.

    A request's work is cancelled when its client goes, whether it streams or not, and when its time is over.

    Args:
        service: what the handler is given.
        operation: its row.
    """

    def __init__(self, service: Service, operation: Operation) -> None:
        self._service = service
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request as ASGI's."""
        sender = _Sender(send)
        try:
            await self._serve(scope, receive, sender)
        except ClientGone:
            return
        except ApiError as error:
            await self._fail(error, scope[REQUEST_ID], sender)
        except MemoryError:
            _LOG.error(
                "request %s: the memory of this process has no room for it", scope[REQUEST_ID]
            )
            error = unavailable(
                "out_of_memory",
                "the server is short of memory now; try again, or send a shorter request",
                self._service.limits.retry_after_seconds,
            )
            await self._fail(error, scope[REQUEST_ID], sender)
        except Exception:
            if sender.started:
                raise
            # The HTTP server closes the connection of an application that raises, which its client may use again.
            _LOG.exception("request %s: a mistake of the server", scope[REQUEST_ID])
            error = internal_error(scope[REQUEST_ID])
            reply = error_reply(error, self._operation.error_form, scope[REQUEST_ID])
            await reply.send(sender)

    async def _serve(self, scope: Scope, receive: Receive, send: "_Sender") -> None:
        limits = self._service.limits
        request = await receive_request(scope, receive, limits)
        if self._operation.method == "POST" and len(request.body) >= LARGE_BODY:
            request = replace(request, tree=await self._service.in_thread(request.json))
        try:
            async with asyncio.timeout(limits.request_seconds):
                await _while_connected(self._answer(request, send), receive)
        except TimeoutError:
            raise ApiError(
                504,
                "request_timeout",
                f"the request took more than {limits.request_seconds:g} s; ask for fewer tokens",
            ) from None
        except (RequestRefused, EngineBusy, EngineLost, SlowReader) as error:
            raise from_engine(error, limits.retry_after_seconds) from error

    async def _answer(self, request: Request, send: "_Sender") -> None:
        answer = await self._operation.handler(self._service, request)
        await answer.send(send)

    async def _fail(self, error: ApiError, request_id: str, send: "_Sender") -> None:
        form = self._operation.error_form
        # 503 is an answer of a server that loads or drains, not a failure of the request.
        if error.status >= 500 and error.status != 503:
            _LOG.warning("request %s failed: %s %s", request_id, error.status, error.code)
        if not send.started:
            await error_reply(error, form, request_id).send(send)
            return
        piece = error_event(error, form, request_id)
        await send({"type": "http.response.body", "body": piece})


class _Sender:
    """ASGI's `send`, which knows whether the reply has begun."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        self.started = True
        await self._send(message)


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`; cancels it when the client goes.

    Raises:
        ClientGone: the client went first.
    """
    # Eager: its prompt is in the engine before anything else has its turn.
    working = asyncio.eager_task_factory(asyncio.get_running_loop(), work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))


async def _gone(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
