"""The view: the JSON that the dashboard and `jaxkv inspect` show. It has numbers, but no text or token of a request."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.metrics import Histogram, Recorder
from jaxkv.serve.stats_poll import Snapshot
from jaxkv.serve.wire import Alive
from jaxkv.version import __version__

_STALE_SECONDS = 10.0
_PARTS = ("maps", "trees", "checkpoints", "requests", "program_list")


def server_view(
    recorder: Recorder, snapshot: Snapshot, *, model_name: str, alive: Alive
) -> dict[str, Any]:
    """Returns the view of a server.

    Args:
        recorder: what the server has done.
        snapshot: the engine's statistics, with its picture.
        model_name: the served model.
        alive: the engine's last sign of life.

    Returns:
        model: its name.
        about: a line about version and device.
        state: "live", or what the engine does instead.
        facts: further figures, as pairs of name and value.
        stats: the fields of `jaxkv.monitoring.stats.Stats`; `None` for a file.
        sizes: group name -> bytes of its pages or states; a server has them in `stats`.
        maps, trees, checkpoints, requests, program_list: see `jaxkv.monitoring.inspection.Picture`; requests and
            programs are `None` for a file.
        rate: generated tokens of each second, oldest first; `None` for a file, like the following.
        first_token, inter_token: histograms of seconds, each with the upper bounds and the counts of its buckets.
        finished: finish reason -> number of samples.
    """
    stats = {name: value for name, value in snapshot.stats.items() if name not in _PARTS}
    replicas = stats.pop("replicas", [])
    return {
        "model": model_name,
        "about": f"jaxkv {__version__}, {stats['implementation']} on {stats['device']}",
        "state": _state(snapshot, alive),
        "facts": _facts(replicas),
        "stats": stats,
        "sizes": {},
        **{name: snapshot.stats[name] for name in _PARTS},
        "rate": recorder.rate.seconds(time.monotonic()),
        "first_token": _buckets(recorder.first_token_seconds),
        "inter_token": _buckets(recorder.inter_token_seconds),
        "finished": recorder.finished,
    }


def _facts(replicas: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, str]]:
    """Returns what is to be said of replicas, whose figures are added up."""
    if not replicas:
        return []
    up = sum(one is not None for one in replicas)
    return [("replicas", f"{up} of {len(replicas)} work; pages are those of one")]


def _state(snapshot: Snapshot, alive: Alive) -> str:
    if alive.compiling:
        return "compiling a program"
    if snapshot.age > _STALE_SECONDS:
        return f"the engine's figures are {snapshot.age:.0f} s old"
    return "live"


def _buckets(histogram: Histogram) -> Mapping[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}
