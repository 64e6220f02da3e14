"""The routes about the server itself: `/health`, `/ready`, `/version` and the models."""

from jaxkv.serve.http.errors import ApiError, unavailable
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import Reply
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service
from jaxkv.version import __version__
from jaxkv.wording import listed


async def health(service: Service, request: Request) -> Reply:
    """Answers 200 while the engine lives, loading or not."""
    del request
    client, wait = service.client, service.limits.retry_after_seconds
    silent = client.silent_seconds
    if client.failure is not None:
        raise unavailable("engine_unavailable", "the engine has stopped", wait)
    if client.facts is not None and silent > service.limits.silence_seconds:
        raise unavailable("engine_silent", f"the engine has been silent for {silent:.0f} s", wait)
    return Reply.json({"status": "ok"})


async def ready(service: Service, request: Request) -> Reply:
    """Answers 200 if a new request would be taken."""
    await health(service, request)
    service.check_takes(1)
    return Reply.json({"status": "ready"})


async def version(service: Service, request: Request) -> Reply:
    """Answers the version of jaxkv."""
    del service, request
    return Reply.json({"version": __version__})


async def models(service: Service, request: Request) -> Reply:
    """Lists the served model and its adapters."""
    del request
    served = [_model(service, name) for name in (None, *service.adapters)]
    return Reply.json({"object": "list", "data": served})


async def model(service: Service, request: Request) -> Reply:
    """Describes the served model, or an adapter of it."""
    return Reply.json(_model(service, check_model(service, request.path["model"])))


def check_model(service: Service, name: str) -> str | None:
    """Returns the adapter that a request names as its model; `None` for the model alone.

    Raises:
        ApiError: 404 if it is neither the served model nor an adapter of it.
    """
    if name == service.model_name:
        return None
    if name in service.adapters:
        return name
    adapters = f", and its adapters are {listed(service.adapters)}" if service.adapters else ""
    raise ApiError(
        404,
        "model_not_found",
        f"that model is not served here; the served model is {service.model_name!r}{adapters}",
        "model",
    )


def _model(service: Service, adapter: str | None = None) -> dict[str, object]:
    return {
        "id": adapter or service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxkv",
        "root": adapter or service.model_name,
        "parent": None if adapter is None else service.model_name,
        "max_model_len": service.facts.max_model_len,
        "default_sampling_params": service.facts.sampling_defaults,
    }


_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer"},
        "default_sampling_params": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "of requests that do not give these fields",
        },
    },
}
_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}

OPERATIONS = (
    Operation(
        path="/health",
        handler=health,
        summary="Whether the engine lives",
        reply=_STATUS,
        errors=(503,),
        needs_key=False,
    ),
    Operation(
        path="/ready",
        handler=ready,
        summary="Whether new requests are taken",
        reply=_STATUS,
        errors=(429, 503),
        needs_key=False,
    ),
    Operation(
        path="/version",
        handler=version,
        summary="The version of the server",
        reply={
            "type": "object",
            "required": ["version"],
            "properties": {"version": {"type": "string"}},
        },
        errors=(401,),
    ),
    Operation(
        path="/v1/models",
        handler=models,
        summary="The served models",
        reply={
            "type": "object",
            "required": ["object", "data"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
        },
    ),
    Operation(
        path="/v1/models/{model:path}",
        handler=model,
        summary="One served model",
        reply=_MODEL,
        errors=(401, 404, 503),
    ),
)
