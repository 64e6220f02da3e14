"""Statistics and a picture of an engine that does not exist: its books are real, its requests are drawn."""

import json
import random
from dataclasses import asdict
from functools import cache

from jaxkv.cache.kept_pages.stats import PrefixStats
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.page_map import page_map, tree_summaries
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.spec import ArraySpec, PagedSpec, StateSpec, group_layers
from jaxkv.cache.variants import place
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.engine.speculation.speculation import SpeculationStats
from jaxkv.offload.entries import HostStats

_KEY = (ArraySpec("key", (3,), "uint8"),)
_STATE = (ArraySpec("ssm", (2,), "float32"),)
_PAGES = 600


def _books():
    """Returns a layout, its allocator and its index, after some random requests; ten of them run."""
    specs = [PagedSpec("gqa", _KEY, 16, None), StateSpec("mamba2", _STATE)]
    layout = group_layers(place(specs))
    allocator = PageAllocator(layout, {"gqa": _PAGES, "mamba2": 60})
    index = PrefixIndex(layout, allocator, secret=b"t", checkpoints=24, policy=CheckpointPolicy())
    draw = random.Random(3)
    stems = [[draw.randrange(99) for _ in range(160)] for _ in range(3)]
    running = []
    for seq in range(34):
        text = draw.choice(stems)[: draw.randrange(30, 160)]
        text = text + [draw.randrange(99) for _ in range(draw.randrange(20, 500))]
        keys = index.keys()
        index.adopt(seq, text, keys)
        allocator.reserve(seq, len(text))
        allocator.commit(seq, len(text))
        index.publish(seq, text, keys, len(text))
        index.store_checkpoint(seq, text, keys, len(text), current=True)
        running.append((seq, len(text)))
        if len(running) > 10:
            gone, _ = running.pop(draw.randrange(len(running)))
            allocator.release(gone)
    return layout, allocator, index, running


def _group(group, mapped, num_bytes):
    free, used, shared, cached, checkpoint = mapped.counts
    return {
        "name": group.name,
        "unit": group.unit,
        "total": mapped.total,
        "free": free,
        "used": used + shared,
        "kept": cached + checkpoint,
        "num_bytes": num_bytes,
    }


@cache
def fake_stats():
    """Returns (statistics, picture) as the engine process sends them; do not change them."""
    layout, allocator, index, running = _books()
    maps = page_map(layout, allocator, index)
    stats = {
        "implementation": "mosaic_gpu",
        "implementation_reasons": [],
        "batch_invariant": False,
        "device": "NVIDIA H200",
        "cache": [
            _group(group, one, 2**31) for group, one in zip(layout.groups, maps, strict=True)
        ],
        "cache_bytes": 2**32,
        "programs": 12,
        "programs_pending": 0,
        "compile_seconds": 41.5,
        "compiled_late": 1,
        "running": len(running),
        "waiting": 2,
        "steps": 4242,
        "wait_seconds": 2.5,
        "recoveries": 0,
        "speculation": asdict(
            SpeculationStats(
                drafted=(300, 200),
                accepted=(210, 90),
                steps=180,
                overlapped=160,
                steps_by_drafts=(40, 140),
                pauses=1,
                is_paused=False,
            )
        ),
        "prefix": asdict(PrefixStats(hits=20, misses=14, tokens_reused=2100, tokens_computed=9800)),
        "host_cache": "pinned_host",
        "host": asdict(
            HostStats(limit_bytes=2**30, used_bytes=2**28, entries=90, written=130, read=40)
        ),
        "fallbacks": [],
    }
    picture = {
        "maps": [asdict(one) for one in maps],
        "trees": [asdict(one) for one in tree_summaries(index)],
        "checkpoints": index.num_checkpoints,
        "requests": [
            {
                "number": seq,
                "status": "running",
                "prompt_tokens": length - 7,
                "cached_tokens": 32,
                "computed_tokens": length,
                "generated_tokens": 8,
                "preemptions": 0,
            }
            for seq, length in running
        ],
        "program_list": [
            {"name": f"decode rows={2**n} tokens=4096", "seconds": 4.0 - n / 4, "loaded": n > 3}
            for n in range(12)
        ],
        "picture_seconds": 0.002,
    }
    return json.loads(json.dumps([stats, picture]))
