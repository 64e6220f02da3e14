"""The server beside the engine alone: throughput, first tokens and the HTTP process's share of a core.

    python -m benchmarks.server --shape qwen3-0.6b llama-3.1-8b --streams 256

Each shape runs with random weights and a made-up tokenizer of its vocabulary: once in one process without HTTP
(`benchmarks.engine_loads`), and once as `jaxkv serve` with `jaxkv bench serve` as client. Both get prompts of the same
lengths: all at once, several times, and then a few per second. Programs are compiled, and run once, before both, and
the client opens its connections before the first request. The engine alone writes no text, so the difference is all
that a server adds. Where a step waits little for the device, the host is the limit. One record is written for each
shape.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine_loads import Load
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig
from jaxkv.serve.stats_poll import GOOD_SECONDS

Row = dict[str, Any]

_READY_SECONDS = 400
_COUNTERS = {
    "steps": "steps",
    "wait_seconds": "device_wait_seconds",
    "evictions": "prefix_cache_evictions",
}
"""Name here -> name of a counter among the server's metrics."""
_NAMES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_model(shape: str, directory: Path) -> None:
    """Writes the config.json of a shape, and a tokenizer in which every id is a word of its own."""
    config = SHAPES[shape]
    (directory / "config.json").write_text(json.dumps(_config_json(config)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġt{number:x}" for number in range(len(alphabet), config.vocab_size)]
    vocab = {text: number for number, text in enumerate([*alphabet, *words])}
    if len(vocab) > config.vocab_size:
        vocab = {text: number for text, number in vocab.items() if number < config.vocab_size}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))


def _config_json(config: ModelConfig) -> Row:
    rope = config.rope
    scaling = None
    if rope.kind == "llama3":
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return {
        "architectures": [_NAMES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "bfloat16",
    }


def alone(shape: str, loads: Sequence[Load], sizes: Sequence[str]) -> list[Row]:
    """Returns the figures of the engine without a server for each load, from one process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine_loads", f"--shape={shape}", *sizes]
    done = subprocess.run(
        [*command, *(f"--load={load}" for load in loads)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the engine alone failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


@contextmanager
def server(directory: Path, options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Starts `jaxkv serve` and yields its address and the number of the HTTP process."""
    command = [sys.executable, "-m", "jaxkv.cli", "serve", f"--model={directory}", "--port=0"]
    process = subprocess.Popen(
        [*command, "--load-format=dummy", "--served-model-name=measured", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "it is a pipe"
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise RuntimeError(f"the server did not start: {line!r}, exit code {process.wait()}")
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(60)


def served(url: str, pid: int, load: Load, vocab_size: int, seed: int) -> Row:
    """Returns the figures of requests to a server, the CPU seconds of both its processes, and the engine's counts."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "jaxkv.cli", "bench", "serve", f"--base-url={url}"]
        command += [f"--result-json={target}", f"--vocab-size={vocab_size}", "--ignore-eos"]
        before, counted = _cpu_seconds(pid), _counters(url)
        done = subprocess.run(
            [*command, f"--seed={seed}", *_options(load)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr[-2000:]}")
        used = [now - then for now, then in zip(_cpu_seconds(pid), before, strict=True)]
        # The server answers with figures that are younger than this.
        time.sleep(2 * GOOD_SECONDS)
        counts = {name: now - counted[name] for name, now in _counters(url).items()}
        return json.loads(target.read_text()) | counts | {"cpu_seconds": used}


def _counters(url: str) -> dict[str, float]:
    """Returns the engine's steps, waits for the device and evictions so far, from the server's metrics."""
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {
        name: re.search(rf"^jaxkv:{metric}_total{{.*}} (\S+)$", text, re.MULTILINE)
        for name, metric in _COUNTERS.items()
    }
    # The server writes all of them.
    return {name: float(one[1]) for name, one in found.items() if one is not None}


def _options(load: Load) -> list[str]:
    """Returns a load as options of `jaxkv bench serve`."""
    return [
        f"--requests={load.requests}",
        f"--prompt-tokens={load.prompt_tokens}",
        f"--output-tokens={load.output_tokens}",
        *(
            [f"--open-connections={load.requests}"]
            if load.rate is None
            else [f"--rate={load.rate:g}"]
        ),
    ]


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Returns the CPU seconds of the HTTP process and of its engine process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    [engine] = [int(child) for child, name in names.items() if b"engine_program" in name]
    return _own_cpu_seconds(pid), _own_cpu_seconds(engine)


def _own_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(shape: str, loads: Sequence[Load]) -> Iterator[Row]:
    """Yields a row for each load of one shape."""
    most = max(load.requests for load in loads if load.rate is None)
    longest = max(load.prompt_tokens + load.output_tokens for load in loads) + 8
    sizes = [f"--max-sequences={most}", f"--max-model-len={longest}"]
    engine = alone(shape, loads, sizes)
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        warm = f"--warm-up={most}:{max(load.prompt_tokens for load in loads)}:greedy"
        began = time.monotonic()
        with server(Path(folder), [*sizes, warm]) as (url, pid):
            started, vocab_size = time.monotonic() - began, SHAPES[shape].vocab_size
            # The first requests import modules and fill caches of texts.
            served(url, pid, replace(loads[0], requests=min(most, 16)), vocab_size, len(loads))
            for index, (load, before) in enumerate(zip(loads, engine, strict=True)):
                after = served(url, pid, load, vocab_size, index)
                yield _row(shape, load, before, after) | {"server_start_s": started}


def _row(shape: str, load: Load, before: Mapping[str, Any], after: Mapping[str, Any]) -> Row:
    if after["failed"]:
        raise RuntimeError(f"{after['failed']} requests failed: {set(after['errors'])}")
    engine, both = before["output_tokens_per_second"], after["output_throughput"]
    http, engine_process = after["cpu_seconds"]
    return {
        "shape": shape,
        "requests": load.requests,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "rate": "all at once" if load.rate is None else load.rate,
        "engine_tokens_per_s": engine,
        "server_tokens_per_s": both,
        "share": both / engine,
        "engine_ttft_p50_ms": before["ttft_ms"]["p50"],
        "server_ttft_p50_ms": after["median_ttft_ms"],
        "engine_ttft_p99_ms": before["ttft_ms"]["p99"],
        "server_ttft_p99_ms": after["p99_ttft_ms"],
        **_steps("engine", load, before, before["seconds"]),
        **_steps("server", load, after, after["duration"]),
        "server_evicted_pages": after["evictions"],
        "http_process_cores": http / after["duration"],
        "engine_process_cores": engine_process / after["duration"],
        "http_process_us_per_token": http / after["total_output_tokens"] * 1e6,
    }


def _steps(which: str, load: Load, counts: Mapping[str, Any], seconds: float) -> Row:
    """Returns the steps of a measurement, how long one waited for the device, and the host's time between two waits.

    At a rate of requests the engine is idle in between, so the host's time is not known.
    """
    steps, waited = counts["steps"], counts["wait_seconds"]
    host = {f"{which}_host_ms_per_step": (seconds - waited) / steps * 1e3}
    return {
        f"{which}_steps": int(steps),
        f"{which}_wait_ms_per_step": waited / steps * 1e3,
        **(host if load.rate is None else {}),
    }


def main() -> None:
    """Measures the shapes of the command line, prints each row as JSON, and writes a record for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--bursts", type=int, default=3, help="measurements of all at once")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--rate", type=float, default=4.0, help="of the measurement of latency")
    parser.add_argument("--record", default="server", help="the shape is added to it")
    parser.add_argument("--folder", type=Path, help="where the records are written")
    options = parser.parse_args()
    full = Load(options.streams, options.prompt_tokens, options.output_tokens)
    light = Load(max(8, int(10 * options.rate)), options.prompt_tokens, 32, options.rate)
    rows: dict[str, list[Row]] = {}
    try:
        for shape in options.shape:
            for row in measure(shape, [*[full] * options.bursts, light]):
                rows.setdefault(shape, []).append(row)
                print(json.dumps(row), flush=True)
    finally:
        # JAX starts here, since a process that holds the GPU's memory would leave none to those measured.
        from benchmarks.record import RECORDS, save_record

        for shape, found in rows.items():
            folder = options.folder or RECORDS
            print(save_record(f"{options.record}-{shape}", found, folder=folder))


if __name__ == "__main__":
    main()
