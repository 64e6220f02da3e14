"""A view as text for a terminal: figures, and one character for each page or state of a map."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from jaxkv.cache.page_map import KINDS

_MARKS = ".#%=*"
_MEANINGS = ("free", "used by requests", "used and cached", "cached", "checkpoints")
_WIDTH, _MOST_LINES = 64, 16
_MOST_REQUESTS, _MOST_PROGRAMS = 20, 10


def text_of(view: Mapping[str, Any]) -> str:
    """Returns a view as lines of text, without control characters.

    Args:
        view: see `jaxkv.serve.dashboard.view.server_view`.

    Raises:
        KeyError, TypeError, ValueError, IndexError: it is no view.
    """
    lines = [f"{view['model']}: {view['about']}; {view['state']}", ""]
    figures = [*_figures(view), *((str(name), str(value)) for name, value in view["facts"])]
    width = max((len(name) for name, _ in figures), default=0) + 2
    lines += [f"{name:<{width}}{value}" for name, value in figures]
    for group in view["maps"]:
        lines += ["", *_map(group)]
    for name, rows in _tables(view):
        lines += ["", f"{name}:", *_aligned(rows)]
    return "\n".join(map(_printable, lines)) + "\n"


def _figures(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stats = view["stats"]
    if stats is None:
        return
    done = view["finished"]
    yield "requests", f"{stats['running']:,} running, {stats['waiting']:,} waiting"
    yield "finished", f"{sum(done.values()):,}, of which {done['error']:,} failed"
    rate = view["rate"]
    now, most = (rate[-1], max(rate)) if rate else (0, 0)
    yield "tokens per second", f"{now:,} now, at most {most:,} in the last {len(rate)} s"
    yield "time to first token", _quantiles(view["first_token"])
    yield "time between tokens", _quantiles(view["inter_token"])
    yield "steps", f"{stats['steps']:,}, {stats['recoveries']:,} caches recovered"
    yield (
        "programs",
        f"{stats['programs']:,} compiled in {stats['compile_seconds']:.1f} s, "
        f"{stats['compiled_late']:,} after the warm-up, {stats['programs_pending']:,} to come",
    )
    prefix = stats["prefix"]
    if prefix is None:
        yield "prefix cache", "off"
    else:
        asked = prefix["tokens_reused"] + prefix["tokens_computed"]
        yield (
            "prefix cache",
            f"{_share(prefix['tokens_reused'], asked)} of {asked:,} prompt tokens found, "
            f"{prefix['evictions']:,} pages evicted, {view['checkpoints']:,} checkpoints",
        )
    if (drafts := stats["speculation"]) is not None:
        drafted, accepted = sum(drafts["drafted"]), sum(drafts["accepted"])
        yield (
            "drafts",
            f"{_share(accepted, drafted)} of {drafted:,} accepted, {drafts['pauses']:,} pauses",
        )
    host = stats["host"]
    if host is None:
        yield "host tier", str(stats["host_cache"])
    else:
        yield (
            "host tier",
            f"{_bytes(host['used_bytes'])} of {_bytes(host['limit_bytes'])}, {host['written']:,} units written, "
            f"{host['read']:,} read",
        )


def _map(group: Mapping[str, Any]) -> list[str]:
    counts, total = group["counts"], group["total"]
    legend = ", ".join(
        f"{mark} {meaning} {count:,} ({_share(count, total)})"
        for mark, meaning, count in zip(_MARKS, _MEANINGS, counts, strict=True)
        if count
    )
    cells = np.repeat(np.array(group["kinds"], np.int64), np.array(group["lengths"], np.int64))
    together = -(-len(cells) // (_WIDTH * _MOST_LINES)) or 1
    drawn = "".join(_MARKS[_most_common(part)] for part in _parts(cells, together))
    units = together * group["cell"]
    each = f"; one character is {units:,} {group['unit']}s" if units > 1 else ""
    rows = [drawn[at : at + _WIDTH] for at in range(0, len(drawn), _WIDTH)]
    return [
        f"{group['name']}: {total:,} {group['unit']}s{each}",
        f"  {legend}",
        *(f"  {row}" for row in rows),
    ]


def _parts(cells: np.ndarray, together: int) -> Iterator[np.ndarray]:
    for start in range(0, len(cells), together):
        yield cells[start : start + together]


def _most_common(kinds: np.ndarray) -> int:
    return int(np.argmax(np.bincount(kinds, minlength=len(KINDS))))


def _tables(view: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    trees = view["trees"]
    if trees:
        heads = ["group", "cached pages", "texts", "longest, tokens"]
        rows = [
            [
                one["name"],
                f"{one['pages']:,}",
                f"{one['ends']:,}",
                f"{one['deepest'] * one['page_size']:,}",
            ]
            for one in trees
        ]
        yield "prefix cache", [heads, *rows]
    requests = view["requests"]
    if requests:
        names = ("number", "status", "prompt_tokens", "cached_tokens", "generated_tokens")
        rows = [[str(one[name]) for name in names] for one in requests[:_MOST_REQUESTS]]
        yield "requests", [[name.replace("_", " ") for name in names], *rows]
    programs = view["program_list"]
    if programs:
        rows = [[one["name"], f"{one['seconds']:.2f}"] for one in programs[:_MOST_PROGRAMS]]
        yield "slowest programs", [["program", "seconds"], *rows]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Returns the value below which `part` of a histogram's values lie, linear in its bucket; `None` without values."""
    if not sum(counts):
        return None
    left = part * sum(counts)
    edges = [0.0, *bounds, bounds[-1]]
    for (low, high), inside in zip(pairwise(edges), counts, strict=True):
        if inside and left <= inside:
            return low + (high - low) * left / inside
        left -= inside
    return bounds[-1]


def _quantiles(histogram: Mapping[str, Any]) -> str:
    bounds, counts = histogram["bounds"], histogram["counts"]
    if not sum(counts):
        return "no values yet"
    parts = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))
    return ", ".join(
        f"{name} {_seconds(quantile(bounds, counts, part) or 0.0)}" for name, part in parts
    )


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.0f}%" if total else "-"


def _bytes(num_bytes: int) -> str:
    count = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _printable(line: str) -> str:
    """Returns a line without control characters, which could command a terminal."""
    return "".join(one if one.isprintable() else "?" for one in line)
