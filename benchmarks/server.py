"""The server beside the engine alone: throughput, first tokens and the HTTP process's share of a core.

    python -m benchmarks.server --shape qwen3-0.6b llama-3.1-8b --streams 256

Each shape runs with random weights and a made-up tokenizer of its vocabulary: once in one process without HTTP, as
`jaxkv bench throughput` and `latency` do, and once as `jaxkv serve` with `jaxkv bench serve` as client. Both get
prompts of the same lengths. The engine alone writes no text, so the difference is all that a server adds.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig

Row = dict[str, Any]

_READY_SECONDS = 400
_NAMES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Load:
    """The requests of one measurement.

    Attributes:
        requests: number of requests.
        prompt_tokens, output_tokens: of each.
        rate: requests per second; `None` sends all at once.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None

    def options(self) -> list[str]:
        """Returns the command's options."""
        found = [
            f"--requests={self.requests}",
            f"--prompt-tokens={self.prompt_tokens}",
            f"--output-tokens={self.output_tokens}",
        ]
        return [*found, *([] if self.rate is None else [f"--rate={self.rate:g}"])]


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


def alone(shape: str, load: Load, options: Sequence[str]) -> Row:
    """Returns the figures of the engine without a server, in a process of its own."""
    mode = "throughput" if load.rate is None else "latency"
    command = [sys.executable, "-m", "jaxkv.cli", "bench", mode, f"--shape={shape}", "--json"]
    done = subprocess.run(
        [*command, *load.options(), *options], capture_output=True, text=True, check=False
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


def served(url: str, pid: int, load: Load, vocab_size: int, warm_up: int) -> Row:
    """Returns the figures of requests to a server, and the HTTP process's CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "jaxkv.cli", "bench", "serve", f"--base-url={url}"]
        command += [f"--result-json={target}", f"--vocab-size={vocab_size}", "--ignore-eos"]
        before = _cpu_seconds(pid)
        done = subprocess.run(
            [*command, f"--warm-up={warm_up}", *load.options()],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr[-2000:]}")
        return json.loads(target.read_text()) | {"cpu_seconds": _cpu_seconds(pid) - before}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(shape: str, full: Load, light: Load, max_sequences: int) -> list[Row]:
    """Returns a row for each load of one shape."""
    longest = max(load.prompt_tokens + load.output_tokens for load in (full, light)) + 8
    options = [f"--max-sequences={max_sequences}", f"--max-model-len={longest}"]
    rows = []
    engine = [alone(shape, load, options) for load in (full, light)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        warm = f"--warm-up={full.requests}:{full.prompt_tokens}"
        began = time.monotonic()
        with server(Path(folder), [*options, warm]) as (url, pid):
            started = time.monotonic() - began
            for load, before in zip((full, light), engine, strict=True):
                vocab_size = SHAPES[shape].vocab_size
                after = served(url, pid, load, vocab_size, min(full.requests, 64))
                rows.append(_row(shape, load, before, after) | {"server_start_s": started})
    return rows


def _row(shape: str, load: Load, before: Mapping[str, Any], after: Mapping[str, Any]) -> Row:
    if after["failed"]:
        raise RuntimeError(f"{after['failed']} requests failed: {set(after['errors'])}")
    engine, both = before["output_tokens_per_second"], after["output_throughput"]
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
        "http_process_cores": after["cpu_seconds"] / after["duration"],
        "http_process_us_per_token": after["cpu_seconds"] / after["total_output_tokens"] * 1e6,
    }


def main() -> None:
    """Measures the shapes of the command line, prints a table and writes a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3-0.6b"], choices=sorted(SHAPES))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--rate", type=float, default=4.0, help="of the measurement of latency")
    parser.add_argument("--record", default="server")
    options = parser.parse_args()
    sizes = options.prompt_tokens, options.output_tokens
    full = Load(options.streams, *sizes)
    light = Load(max(8, int(10 * options.rate)), options.prompt_tokens, 32, options.rate)
    rows = []
    for shape in options.shape:
        for row in measure(shape, full, light, options.streams):
            rows.append(row)
            print(json.dumps(row), flush=True)
    # JAX starts here, since a process that holds the GPU's memory would leave none to those measured.
    from benchmarks.record import save_record

    print(save_record(options.record, rows))


if __name__ == "__main__":
    main()
