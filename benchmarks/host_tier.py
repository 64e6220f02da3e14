"""Measures the host tier of the prefix cache: copy bandwidth in both directions, and times to the first token.

    python -m benchmarks.host_tier
    python -m benchmarks.host_tier --shape tiny --dtype float32 --tokens 96 --gibibytes 0.01    # to try it on a CPU

Weights are random. `host-transfers` has the copies of pages alone, beside torch's between pinned memory and the device,
if torch has one. `host-first-token` has one prompt that is computed, kept on the device, or kept on the host, alone and
while another sequence generates; each time its pages are read back and compared bit for bit.
"""

import argparse
import hashlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from benchmarks.timing import refuse_profilers
from jaxkv.bench.serving import Served
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import RequestState
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.programs import SwapSpec, pad_ids, unit_places, unit_shapes

Row = dict[str, Any]

_REPEATS = 7
_WARM_UPS = 2
_PAGES = 32


def median_ms(run: Callable[[], object], repeats: int = _REPEATS) -> tuple[float, float]:
    """Returns the time of the first call and the median of later ones, in milliseconds."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times[0], statistics.median(times[1:])


def transfers(engine: Engine) -> list[Row]:
    """Times copies of pages of the first group in both directions, with the programs of the engine."""
    group = engine.runner.layout.paged_groups[0]
    device = jax.devices()[0]
    memory = HostMemory(device)
    shapes, places = unit_shapes(group), unit_places(group, engine.runner.cache)
    units = [
        tuple(jnp.full(one.shape, at + 1, one.dtype, device=device) for one in shapes)
        for at in range(_PAGES)
    ]
    jax.block_until_ready(units)
    size = _PAGES * group.bytes_per_unit

    def send() -> list[Any]:
        return memory.wait_for_copies(memory.copy_to_host(units))

    stored = send()

    def bring() -> None:
        jax.block_until_ready(memory.copy_to_device(stored, places))

    rows = []
    for way, run in (("to the host", send), ("to the device", bring)):
        first, later = median_ms(run)
        rows.append(_transfer(f"{memory.kind}, {way}", size, _PAGES * len(shapes), first, later))
    return rows + _torch(size, _PAGES * len(shapes))


def _transfer(name: str, size: int, pieces: int, first: float, later: float) -> Row:
    return {
        "copy": name,
        "bytes": size,
        "pieces": pieces,
        "first_ms": first,
        "median_ms": later,
        "gb_per_second": size / later / 1e6,
    }


def _torch(size: int, pieces: int) -> list[Row]:
    """Times torch's copies of the same number of bytes, as one piece and as `pieces` pieces."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    rows = []
    for count in (1, pieces):
        host = [torch.empty(size // count, dtype=torch.uint8).pin_memory() for _ in range(count)]
        there = [torch.empty(size // count, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for way, source, target in (
            ("to the host", there, host),
            ("to the device", host, there),
        ):

            def copy(source: list[Any] = source, target: list[Any] = target) -> None:
                for a, b in zip(source, target, strict=True):
                    b.copy_(a, non_blocking=True)
                torch.cuda.synchronize()

            first, later = median_ms(copy)
            rows.append(_transfer(f"torch pinned, {way}", size, count, first, later))
    return rows


class _Bench:
    """An engine whose pool holds two prompts, so that a third prompt evicts the first.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokens, self.vocab = options.tokens, SHAPES[options.shape].vocab_size
        self.rng = np.random.default_rng(0)
        longest = options.tokens + options.tokens // 2
        self.engine = Served(
            shape=options.shape,
            dtype=options.dtype,
            max_model_len=longest,
            cache=CacheConfig(
                max_sequences=2,
                page_size=options.page_size,
                host_bytes=int(options.gibibytes * 2**30),
            ),
            engine=EngineConfig(token_budget=options.tokens),
        ).build()

    def text(self) -> tuple[int, ...]:
        """Returns the tokens of a random prompt."""
        return tuple(self.rng.integers(0, self.vocab, self.tokens).tolist())

    def add(self, prompt: tuple[int, ...], output: int = 1) -> RequestState:
        """Adds a greedy request for `output` tokens to the engine."""
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return self.engine.add([Request(prompt=prompt, params=params, seed=0, stop_ids=())])[0]

    def timed(self, prompt: tuple[int, ...], cached: int) -> float:
        """Returns the milliseconds to a prompt's first token.

        Raises:
            RuntimeError: not exactly `cached` of its tokens came from the cache.
        """
        start = time.perf_counter()
        made = self.add(prompt)
        while not made.generated:
            self.engine.step()
        took = time.perf_counter() - start
        self.engine.run([made])
        if made.cached != cached:
            raise RuntimeError(f"{made.cached} tokens were reused, {cached} were expected")
        return took * 1e3

    def evict(self, prompt: tuple[int, ...]) -> None:
        """Computes other prompts until this one is on the host alone.

        Raises:
            RuntimeError: a part of the prompt is not on the host.
        """
        index = self.engine.prefix
        assert index is not None, "the engine keeps prefixes"
        while index.explain(prompt).num_reused:
            self.engine.run([self.add(self.text())])
        if index.explain(prompt).num_with_host != len(prompt) - 1:
            raise RuntimeError(f"the prompt is not on the host: {index.explain(prompt)}")

    def contents(self, prompt: tuple[int, ...]) -> list[str]:
        """Returns a digest of each cached page of a prompt, in order."""
        index, sequence_runner = self.engine.prefix, self.engine.sequence_runner
        assert index is not None, "the engine keeps prefixes"
        group = sequence_runner.runner.layout.paged_groups[0]
        tree, digests = index._trees[group.name], []
        keys = index.keys()
        for key in keys.pages(prompt, group.page_size, len(prompt)):
            node = tree.find(key)
            if node is None:
                raise RuntimeError("a page that was just used is not kept")
            ids = pad_ids([node.page], 4, sequence_runner.runner.owner.counts[group.name])
            unit = sequence_runner.runner.run_read_only(SwapSpec(True, group.index, 4), ids)[0]
            digests.append(hashlib.md5(b"".join(np.asarray(a).tobytes() for a in unit)).hexdigest())
        return digests


def first_tokens(bench: _Bench) -> list[Row]:
    """Times one prompt after the other: computed, from the device, from the host, and from the host under load."""
    times: dict[str, list[float]] = {
        "computed": [],
        "kept on the device": [],
        "kept on the host": [],
        "kept on the host, another generates": [],
    }
    reused = bench.tokens - 1
    steps = []
    for repeat in range(_WARM_UPS + _REPEATS):
        prompt = bench.text()
        took = [bench.timed(prompt, 0), bench.timed(prompt, reused)]
        before = bench.contents(prompt)
        bench.evict(prompt)
        took.append(bench.timed(prompt, reused))
        same = bench.contents(prompt) == before
        bench.evict(prompt)
        other = bench.add(bench.text()[: bench.tokens // 4], output=bench.tokens // 4)
        while other.generated < 4:
            bench.engine.step()
        at, start = other.generated, time.perf_counter()
        took.append(bench.timed(prompt, reused))
        steps.append((other.generated - at) / (time.perf_counter() - start))
        bench.engine.abort(other)
        if not (same and bench.contents(prompt) == before):
            raise RuntimeError("what came back from the host is not what went there")
        if repeat >= _WARM_UPS:
            for name, one in zip(times, took, strict=True):
                times[name].append(one)
    host = bench.engine.host
    assert host is not None, "the engine has a tier on the host"
    print(host.stats, flush=True)
    median = {name: statistics.median(took) for name, took in times.items()}
    return [
        {
            "request": name,
            "prompt_tokens": bench.tokens,
            "ttft_ms": median[name],
            "spread_ms": max(took) - min(took),
            "times_sooner_than_computed": median["computed"] / median[name],
            "memory": host.kind,
        }
        for name, took in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both parts; each is printed and recorded as soon as it is done."""
    parser = argparse.ArgumentParser(description="Times what comes back from the host.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompts that are timed")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--gibibytes", type=float, default=8.0, help="of the host's memory")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args(arguments)
    refuse_profilers()
    bench = _Bench(options)
    for name, measure in (
        ("host-first-token", lambda: first_tokens(bench)),
        ("host-transfers", lambda: transfers(bench.engine)),
    ):
        path = save_record(name, measure(), folder=options.folder)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
