"""`ApiError`: the status, code and message of a failed request, and the bodies of its reply.

A message names fields, limits and counts. It never holds texts of a prompt, paths, addresses or other errors' words.
"""

from collections.abc import Callable, Mapping

import msgspec

from jaxkv.serve.engine_client import (
    EngineBusy,
    EngineLost,
    ReplicaLost,
    RequestRefused,
    SlowReader,
)
from jaxkv.wording import clip

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        code: a short name of the cause, for programs.
        message: what was got, what was wanted, what to do; for people.
        param: the field of the request that is wrong, as a path such as "messages[0].role".
        headers: further headers of the reply.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )


ErrorForm = Callable[[ApiError, str], bytes]
"""Returns the JSON body of an error, given the error and the id of the request."""


def openai_error(error: ApiError, request_id: str) -> bytes:
    """Returns the error in OpenAI's form. The request id is in the header `x-request-id` and in messages of 500."""
    del request_id
    body = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": body})


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Returns the error of a request that can never be served."""
    return ApiError(400, code, message, param)


def internal_error(request_id: str) -> ApiError:
    """Returns the one error of every mistake of the server's own."""
    return ApiError(
        500, "internal_error", f"the server made a mistake; its log names the request {request_id}"
    )


def unavailable(code: str, message: str, retry_after: int) -> ApiError:
    """Returns the error of a server that takes no requests now.

    Args:
        code: a short name of the cause.
        message: why.
        retry_after: seconds after which the client may try again.
    """
    return ApiError(503, code, message, headers={"retry-after": str(retry_after)})


def from_engine(error: Exception, retry_after: int) -> ApiError:
    """Returns the client's error for an error of the engine's process.

    Args:
        error: `RequestRefused`, `EngineBusy`, `EngineLost` or `SlowReader`.
        retry_after: seconds after which the client may try again.
    """
    match error:
        case RequestRefused():
            return bad_request(clip(error, 500))
        case EngineBusy():
            return unavailable(
                "engine_busy", "the engine cannot begin the request now; try again", retry_after
            )
        case ReplicaLost():
            return unavailable("replica_lost", f"{error}; try again", retry_after)
        case EngineLost():
            return unavailable(
                "engine_unavailable", "the engine has stopped; the server is ending", retry_after
            )
        case SlowReader():
            return ApiError(408, "slow_reader", "the client read its stream too slowly")
    raise error
