"""Measures how fast a sharded checkpoint gets from disk to the device, and how much host memory that takes.

    python -m benchmarks.loading --shape llama-3.1-8b
    python -m benchmarks.loading --shape tiny --place build    # to try it on a CPU

Writes a random checkpoint in bfloat16 under the names of the family, in shards of at most 5 GB, and reads it with
`load_params`: once with the files out of the page cache ("disk"), once from it ("page cache"). Beside each is what the
machine can do: plain reads of the same files with as many threads, and copies of host buffers of a leaf's size to the
device. Each load runs in a process of its own, whose peak of resident memory is recorded. Record: loading-SHAPE.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model, load_params, rules_for
from jaxkv.weights.rules import expand
from jaxkv.weights.safetensors import INDEX

Row = dict[str, Any]

SHARD_BYTES = 5 * 10**9
_BLOCK = 2**26
_THREADS = 8


def write_checkpoint(shape: str, folder: Path) -> int:
    """Writes a random checkpoint of a shape, shard by shard; returns its size in bytes."""
    model = build_model(SHAPES[shape])
    recipes = expand(rules_for(model.config), model.config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.param_shapes("bfloat16"))
    # Random bytes would hold infinities and NaNs; a repeated block of numbers costs as much to read.
    numbers = np.random.default_rng(0).standard_normal(2**22, np.float32).astype(ml_dtypes.bfloat16)
    where: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    held = total = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for path, leaf in leaves:
        recipe = recipes[jax.tree_util.keystr(path, simple=True, separator=".")]
        for name, wanted in zip(recipe.sources, recipe.source_shapes(leaf.shape), strict=True):
            tensor = np.resize(numbers, wanted)
            if held + tensor.nbytes > SHARD_BYTES:
                flush()
                held = 0
            shard[name] = tensor
            held, total = held + tensor.nbytes, total + tensor.nbytes
    flush()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    return total


def leave_page_cache(folder: Path) -> None:
    """Writes the files back and drops them from the page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_seconds(folder: Path) -> float:
    """Returns how long reading all files takes with several threads, without looking at the bytes."""
    kept = threading.local()

    def read(place: tuple[Path, int]) -> None:
        path, offset = place
        if not hasattr(kept, "buffer"):
            kept.buffer = bytearray(_BLOCK)
        with path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [kept.buffer], offset)

    paths = sorted(folder.glob("*.safetensors"))
    places = [(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)]
    start = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, places))
    return time.perf_counter() - start


def copy_bytes_per_second(size: int = 2**28, repeats: int = 8) -> float:
    """Returns the bandwidth of `jax.device_put` of pageable host buffers of `size` bytes, one at a time."""
    buffers = [np.zeros(size, np.uint8) for _ in range(repeats)]
    jax.block_until_ready(jax.device_put(buffers[0]))
    start = time.perf_counter()
    for buffer in buffers:
        jax.block_until_ready(jax.device_put(buffer))
    return repeats * size / (time.perf_counter() - start)


def load_once(shape: str, folder: Path) -> Row:
    """Loads the checkpoint; returns seconds, and the process's peak of resident memory before and after, in bytes."""
    model = build_model(SHAPES[shape])
    jax.block_until_ready(jax.device_put(np.zeros(8)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    jax.block_until_ready(load_params(folder, model, dtype="bfloat16", progress=False))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak before": before, "peak after": after}


def measure(shape: str, folder: Path) -> list[Row]:
    """Returns a row for each source of the bytes."""
    size = write_checkpoint(shape, folder)
    copies = copy_bytes_per_second()
    rows = []
    for source in ("disk", "page cache"):
        if source == "disk":
            leave_page_cache(folder)
        plain = read_seconds(folder)
        if source == "disk":
            leave_page_cache(folder)
        command = [sys.executable, "-m", "benchmarks.loading", "--shape", shape]
        done = subprocess.run(
            [*command, "--once", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"loading failed: {done.stderr[-2000:]}")
        once = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            {
                "bytes from": source,
                "GB": round(size / 1e9, 2),
                "seconds": round(once["seconds"], 2),
                "GB/s": round(size / once["seconds"] / 1e9, 2),
                "plain reads GB/s": round(size / plain / 1e9, 2),
                "copies to the device GB/s": round(copies / 1e9, 2),
                "host peak before GB": round(once["peak before"] / 1e9, 2),
                "host peak after GB": round(once["peak after"] / 1e9, 2),
            }
        )
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--place", type=Path, help="where to write the checkpoint for a while")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(load_once(options.shape, options.once)))
        return
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        rows = measure(options.shape, Path(folder))
    path = save_record(f"loading-{options.shape}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
