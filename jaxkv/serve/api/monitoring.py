"""The routes that show the server's state: `/metrics`, and the dashboard with its data. They change nothing."""

from jaxkv.serve.dashboard.page import page, page_headers
from jaxkv.serve.dashboard.view import server_view
from jaxkv.serve.exposition import CONTENT_TYPE, exposition
from jaxkv.serve.http.errors import unavailable
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import Reply
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service
from jaxkv.serve.stats_poll import EngineSilent, Snapshot, StatsPoll

_DATA_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


async def metrics(service: Service, request: Request) -> Reply:
    """Answers the metrics for Prometheus."""
    del request
    snapshot = await _snapshot(service, service.stats)
    text = exposition(service.recorder, snapshot, service.model_name)
    return Reply(text, content_type=CONTENT_TYPE)


async def dashboard(service: Service, request: Request) -> Reply:
    """Answers the dashboard's page."""
    del service, request
    return Reply(page(), content_type="text/html; charset=utf-8", headers=page_headers())


async def dashboard_data(service: Service, request: Request) -> Reply:
    """Answers what the dashboard shows."""
    del request
    snapshot = await _snapshot(service, service.picture)
    view = server_view(
        service.recorder,
        snapshot,
        model_name=service.model_name,
        alive=service.client.alive,
    )
    return Reply(Reply.json(view).body, headers=_DATA_HEADERS)


async def _snapshot(service: Service, poll: StatsPoll) -> Snapshot:
    """Returns the engine's latest statistics.

    Raises:
        ApiError: 503 while it loads, is silent, or after it has ended.
    """
    _ = service.facts  # Raises while there is no engine.
    try:
        return await poll.get()
    except EngineSilent as error:
        wait = service.limits.retry_after_seconds
        raise unavailable("engine_silent", str(error), wait) from error


OPERATIONS = (
    Operation(
        path="/metrics",
        handler=metrics,
        summary="Metrics for Prometheus",
        reply={"type": "string"},
        content_type="text/plain",
    ),
    Operation(
        path="/dashboard",
        handler=dashboard,
        summary="A page to look into the server",
        reply={"type": "string"},
        content_type="text/html",
        errors=(401,),
    ),
    Operation(
        path="/dashboard/data",
        handler=dashboard_data,
        summary="What the dashboard shows",
        reply={
            "type": "object",
            "required": ["model", "state", "stats", "maps", "trees", "rate"],
        },
    ),
)
