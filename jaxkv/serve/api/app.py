"""The ASGI application of the server, and the one table of its routes."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxkv.serve.api import chat, completions, messages, monitoring, responses, state, tokens
from jaxkv.serve.http.auth import ApiKeys
from jaxkv.serve.http.errors import ApiError, ErrorForm, internal_error, openai_error
from jaxkv.serve.http.guard import Guard
from jaxkv.serve.http.openapi import document
from jaxkv.serve.http.operation import Endpoint, Operation
from jaxkv.serve.http.replies import Reply
from jaxkv.serve.http.request import REQUEST_ID, Request
from jaxkv.serve.http.service import Service


async def openapi(service: Service, request: Request) -> Reply:
    """Answers the document of all routes."""
    del request
    return Reply.json(document(OPERATIONS, service.model_name))


OPERATIONS: tuple[Operation, ...] = (
    completions.OPERATION,
    chat.OPERATION,
    *responses.OPERATIONS,
    *messages.OPERATIONS,
    *tokens.OPERATIONS,
    *state.OPERATIONS,
    *monitoring.OPERATIONS,
    Operation(
        path="/openapi.json",
        handler=openapi,
        summary="This document",
        errors=(401,),
    ),
)
"""All routes of the server, those of most requests first: Starlette tries one after the other."""


def make_app(
    service: Service, keys: ApiKeys | None = None, operations: Sequence[Operation] = OPERATIONS
) -> ASGIApp:
    """Returns the application.

    Args:
        service: the served model.
        keys: the API keys; without any, all requests are served.
        operations: the routes.
    """
    routes = [
        Route(each.path, Endpoint(service, each), methods=list(each.methods)) for each in operations
    ]
    failures = _Failures({each.path: each.error_form for each in operations})
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: failures.refuse, 500: failures.fail}
    )
    app.router.redirect_slashes = False
    return Guard(app, keys or ApiKeys(), failures.forms)


_REFUSALS = {
    404: ("not_found", "there is no such path; /openapi.json lists all paths"),
    405: ("method_not_allowed", "the path has no such method"),
}


class _Failures:
    """Answers what no operation answers.

    Args:
        forms: path -> form of its errors.
    """

    def __init__(self, forms: dict[str, ErrorForm]) -> None:
        self.forms = forms

    async def refuse(self, request: StarletteRequest, error: Exception) -> Response:
        """Answers requests for paths and methods that no route has."""
        assert isinstance(error, HTTPException), error
        code, message = _REFUSALS[error.status_code]
        return self._response(
            request, ApiError(error.status_code, code, message, headers=error.headers)
        )

    async def fail(self, request: StarletteRequest, error: Exception) -> Response:
        """Answers errors outside operations. Starlette raises them again, for the server's log."""
        del error
        return self._response(request, internal_error(request.scope[REQUEST_ID]))

    def _response(self, request: StarletteRequest, error: ApiError) -> Response:
        form = self.forms.get(request.scope["path"], openai_error)
        body = form(error, request.scope[REQUEST_ID])
        return Response(body, error.status, error.headers, "application/json")
