"""Measures how fast a sharded checkpoint gets from disk to the device, and how much host memory that takes.

    python -m benchmarks.loading --shape llama-3.1-8b
    python -m benchmarks.loading --shape llama-3.1-8b --buffers 8x12x32 16x24x16 8x12x32-pageable
    python -m benchmarks.loading --shape llama-3.1-8b --quantization none fp8 int8 int4
    python -m benchmarks.loading --shape tiny --place build    # to try it on a CPU

Writes a random checkpoint in bfloat16 under the names of the family, in shards of at most 5 GB, and reads it with
`load_params`: once with the files out of the page cache ("disk"), then from it ("page cache"), there with each of the
`--buffers` and of the `--quantization`s, which round the weights while they are read. Beside each is what the machine
can do: plain reads of the same files with as many threads into buffers that are used again, and copies of pageable and
of page-locked buffers to the device. Each load runs in a process of its own, whose growth of resident memory is
recorded. Record: loading-SHAPE.
"""

import argparse
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model, load_params, rules_for
from jaxkv.weights import staging
from jaxkv.weights.quantised.rounding import ROUNDINGS
from jaxkv.weights.rules import expand
from jaxkv.weights.safetensors import INDEX

Row = dict[str, Any]

SHARD_BYTES = 5 * 10**9
_PLAIN = "none"
_BLOCK = 2**23
_READ = 2**23
_THREADS = 8


def write_checkpoint(shape: str, folder: Path) -> int:
    """Writes a random checkpoint of a shape, shard by shard; returns its size in bytes."""
    model = build_model(SHAPES[shape])
    recipes = expand(rules_for(model.config), model.config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.param_shapes("bfloat16"))
    # Random bytes would hold infinities and NaNs; a repeated block of numbers costs as much to read.
    numbers = np.random.default_rng(0).standard_normal(_BLOCK // 2, np.float32)
    block = numbers.astype(ml_dtypes.bfloat16).tobytes()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = total = 0
    for path, leaf in leaves:
        recipe = recipes[jax.tree_util.keystr(path, simple=True, separator=".")]
        for name, wanted in zip(recipe.sources, recipe.source_shapes(leaf.shape), strict=True):
            size = 2 * math.prod(wanted)
            if held + size > SHARD_BYTES:
                shards.append({})
                held = 0
            shards[-1][name] = wanted
            held, total = held + size, total + size
    where: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            where.update(dict.fromkeys(shard, name))
            pool.submit(_write_shard, folder / name, shard, block)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    return total


def _write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]], block: bytes) -> None:
    """Writes a safetensors file of tensors in bfloat16, whose bytes are those of `block`, repeated."""
    header, total = {}, 0
    for name, shape in tensors.items():
        end = total + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, total, len(block)):
            file.write(memoryview(block)[: total - begin])


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
            kept.buffer = bytearray(_READ)
        with path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [kept.buffer], offset)

    paths = sorted(folder.glob("*.safetensors"))
    places = [(path, at) for path in paths for at in range(0, path.stat().st_size, _READ)]
    start = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, places))
    return time.perf_counter() - start


def copy_bytes_per_second(size: int, *, locked: bool, at_once: int = 1, count: int = 64) -> float:
    """Returns the bandwidth of `jax.device_put` of host buffers, used again and again.

    Args:
        size: bytes of a buffer.
        locked: whether their pages are locked, so that the device copies them by itself.
        at_once: number of buffers, each of which may be on its way.
        count: number of copies.
    """
    (device,) = jax.device_put(np.zeros(8)).devices()
    buffers = [np.zeros(size, np.uint8) for _ in range(at_once)]
    for buffer in buffers if locked else ():
        device.client.dma_map(buffer.ctypes.data, size)
    jax.block_until_ready(jax.device_put(buffers[0]))
    on_the_way: list[jax.Array | None] = [None] * at_once
    start = time.perf_counter()
    for number in range(count):
        jax.block_until_ready(on_the_way[number % at_once])
        on_the_way[number % at_once] = jax.device_put(buffers[number % at_once])
    jax.block_until_ready(on_the_way)
    seconds = time.perf_counter() - start
    for buffer in buffers if locked else ():
        device.client.dma_unmap(buffer.ctypes.data)
    return count * size / seconds


@dataclass(frozen=True)
class Buffers:
    """How the loader stages leaves: threads that read, number and size of the buffers, and whether they are locked."""

    readers: int = staging.READERS
    buffers: int = staging.BUFFERS
    mebibytes: int = staging.BUFFER_BYTES >> 20
    locked: bool = True

    @classmethod
    def parse(cls, text: str) -> "Buffers":
        """Reads READERSxBUFFERSxMEBIBYTES, with "-pageable" at the end for pages that are not locked."""
        numbers, _, pageable = text.partition("-")
        return cls(*(int(number) for number in numbers.split("x")), locked=pageable != "pageable")

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        text = f"{self.readers}x{self.buffers}x{self.mebibytes}"
        return text if self.locked else f"{text}-pageable"

    def use(self) -> None:
        """Makes the loader of this process use them."""
        staging.READERS, staging.BUFFERS = self.readers, self.buffers
        staging.BUFFER_BYTES = self.mebibytes << 20
        if not self.locked:
            staging.Buffer.lock = lambda self, client: "not locked for the benchmark"


def _resident_bytes(kind: str) -> int:
    """Returns the process's resident memory: now ("VmRSS") or at its peak ("VmHWM")."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, kind
    return int(found[1]) * 1024


def load_once(shape: str, folder: Path, quantization: str | None) -> Row:
    """Loads the checkpoint.

    Returns seconds, by how many bytes the process's resident memory grew at its peak, and the bytes on the device.
    """
    model = build_model(SHAPES[shape])
    jax.block_until_ready(jax.device_put(np.zeros(8)))
    # The peak begins anew, so that the start of JAX does not hide that of the loading.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmRSS")
    start = time.perf_counter()
    options = {"dtype": "bfloat16", "quantization": quantization, "progress": False}
    params = jax.block_until_ready(load_params(folder, model, **options))
    seconds = time.perf_counter() - start
    on_device = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {
        "seconds": seconds,
        "host peak": _resident_bytes("VmHWM") - before,
        "on device": on_device,
    }


Variant = tuple[Buffers, str | None]
"""How leaves are staged, and how weights are rounded while they are read."""


def measure(shape: str, folder: Path, variants: Sequence[Variant]) -> list[Row]:
    """Returns a row for each source of the bytes: from the disk with the first variant, then from the page cache."""
    size = write_checkpoint(shape, folder)
    copies = {"pageable copies GB/s": copy_bytes_per_second(2**28, locked=False, count=8)}
    if jax.devices()[0].platform != "cpu":
        locked = copy_bytes_per_second(2**25, locked=True, at_once=3)
        copies["page-locked copies GB/s"] = locked
    rows = []
    for source, those in (("disk", variants[:1]), ("page cache", variants)):
        if source == "disk":
            leave_page_cache(folder)
        plain = read_seconds(folder)
        if source == "disk":
            leave_page_cache(folder)
        for buffers, quantization in those:
            once = _load_in_process(shape, folder, buffers, quantization)
            rows.append(
                {
                    "bytes from": source,
                    "buffers": str(buffers),
                    "quantization": quantization,
                    "GB": round(size / 1e9, 2),
                    "seconds": round(once["seconds"], 2),
                    "GB/s": round(size / once["seconds"] / 1e9, 2),
                    "plain reads GB/s": round(size / plain / 1e9, 2),
                    **{name: round(found / 1e9, 2) for name, found in copies.items()},
                    "host peak GB": round(once["host peak"] / 1e9, 2),
                    "on device GB": round(once["on device"] / 1e9, 2),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _load_in_process(shape: str, folder: Path, buffers: Buffers, quantization: str | None) -> Row:
    """Returns what `load_once` does in a process of its own."""
    variant = ["--buffers", str(buffers), "--quantization", quantization or _PLAIN]
    command = [sys.executable, "-m", "benchmarks.loading", "--shape", shape, *variant]
    done = subprocess.run(
        [*command, "--once", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"loading failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--place", type=Path, help="where to write the checkpoint for a while")
    parser.add_argument(
        "--buffers",
        type=Buffers.parse,
        nargs="+",
        default=[Buffers()],
        metavar="READERSxBUFFERSxMEBIBYTES[-pageable]",
        help="how leaves are staged; the first is the one that loads from the disk too",
    )
    parser.add_argument(
        "--quantization",
        choices=[_PLAIN, *sorted(ROUNDINGS)],
        nargs="+",
        default=[_PLAIN],
        help="how weights are rounded while they are read; the first is the one that loads from the disk too",
    )
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--record", help="name of the record; loading-SHAPE if not given")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args()
    roundings = [None if name == _PLAIN else name for name in options.quantization]
    if options.once:
        options.buffers[0].use()
        print(json.dumps(load_once(options.shape, options.once, roundings[0])))
        return
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        rows = measure(options.shape, Path(folder), list(product(options.buffers, roundings)))
    path = save_record(options.record or f"loading-{options.shape}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
