"""The picture of an engine agrees with its statistics between any two steps, and names no token."""

import random

import pytest

from jaxkv.cache.page_map import KINDS
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.monitoring.inspection import draw
from jaxkv.monitoring.stats import collect_stats
from tests.engine.simulated_engines import Setting, engine_of
from tests.engine.simulated_memory import put_caches_on_device


@pytest.mark.parametrize("kind", ["windows", "hybrid"])
def test_a_picture_agrees_with_the_statistics_after_each_step(kind, monkeypatch):
    put_caches_on_device(monkeypatch)
    checkpoint_bytes = 2**22 if kind == "hybrid" else None
    setting = Setting(kind, rows=2, checkpoint_bytes=checkpoint_bytes)
    engine, _ = engine_of(random.Random(0), setting)
    stem = list(range(1, 13))
    for last in range(3):
        params = SamplingParams(max_tokens=4)
        engine.add([Request(prompt=(*stem, last), params=params, seed=0, stop_ids=())])
    seen = dict.fromkeys(KINDS, 0)
    running = set()
    while engine.has_work:
        engine.step()
        stats, picture = collect_stats(engine), draw(engine)
        for group, counted in zip(picture.maps, stats.cache, strict=True):
            counts = dict(zip(KINDS, group.counts, strict=True))
            assert (group.name, group.total) == (counted.name, counted.total)
            assert counts["free"] == counted.free
            assert counts["used"] + counts["shared"] == counted.used
            assert counts["cached"] + counts["checkpoint"] == counted.kept
            seen = {name: seen[name] + counts[name] for name in KINDS}
        states = [line.status for line in picture.requests]
        assert states.count("running") == stats.running
        assert states.count("waiting") == stats.waiting
        running |= {line.number for line in picture.requests if line.status == "running"}
        assert len(picture.program_list) == stats.programs
    assert len(running) == 3
    assert all(seen[name] for name in KINDS if name != "checkpoint" or kind == "hybrid")
    assert picture.checkpoints == (stats.prefix.checkpoints if kind == "hybrid" else 0)
    assert all(0 < tree.ends <= tree.pages for tree in picture.trees)
