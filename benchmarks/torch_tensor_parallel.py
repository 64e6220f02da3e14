"""The torch decoder in the design of gpt-fast on several GPUs, beside `benchmarks.tensor_parallel`.

    python -m benchmarks.torch_tensor_parallel --shape llama-3.1-8b --batch 1,8,64 --devices 1,2

One process per GPU. Heads and feed-forwards are divided, embedding and head are on every GPU, and NCCL adds up after
each output projection, inside the one CUDA graph of a step, as in gpt-fast (PyTorch, 2023). Weights are random; each
GPU draws a whole parameter at a time and keeps its part. Record: torch-tensor-parallel-SHAPE.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from benchmarks.decode_start import decode_parser, parse
from benchmarks.record import load_record, save_record
from benchmarks.report import render
from benchmarks.torch_decode import TorchDecoder
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.model import ModelConfig
from jaxkv.models.registry import build_model

_REPLAYS, _TRIALS = 32, 5
"""Steps of a trial. All processes take equally many, since each waits for the others' sums."""


def part_of(
    name: str, whole: torch.Tensor, config: ModelConfig, rank: int, devices: int
) -> torch.Tensor:
    """Returns the part of a parameter that a device keeps, by the name of its leaf."""
    if name in ("o", "down"):
        return whole.chunk(devices, dim=1)[rank].contiguous()
    if name == "gate_up":
        return torch.cat([half.chunk(devices)[rank] for half in whole.chunk(2)])
    if name == "qkv":
        sizes = [count * config.head_dim for count in (config.heads, *(config.kv_heads,) * 2)]
        return torch.cat([each.chunk(devices)[rank] for each in whole.split(sizes)])
    return whole


def joined(part: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a part over all processes."""
    everybody: Any = dist.group.WORLD
    return collectives.wait_tensor(collectives.all_reduce(part, "sum", everybody))


def make_decoder(
    config: ModelConfig,
    batch: int,
    length: int,
    rank: int,
    devices: int,
    device: torch.device,
    joined: Callable[[torch.Tensor], torch.Tensor] = joined,
) -> TorchDecoder:
    """Returns a decoder with one device's part of random weights, which are the same for any number of devices."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> torch.Tensor:
        whole = torch.randn(leaf.shape, generator=draw, device=device, dtype=dtype)
        name = str(getattr(path[-1], "key", ""))
        return part_of(name, whole / leaf.shape[-1] ** 0.5, config, rank, devices)

    shapes = build_model(config).param_shapes("bfloat16")
    params: Any = jax.tree_util.tree_map_with_path(drawn, shapes)
    names = ("heads", "kv_heads", "ffn_size")
    own = replace(config, **{name: getattr(config, name) // devices for name in names})
    return TorchDecoder(own, params, batch, length, joined if devices > 1 else lambda part: part)


def measure(decoder: TorchDecoder, prompts: np.ndarray, new_tokens: int) -> dict[str, float]:
    """Returns milliseconds of uncompiled prompts, and of steps at mid-generation."""
    prompt_ms = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoder.prefill(prompts)
        prompt_ms.append((time.perf_counter() - start) * 1e3)
    graph = decoder.step_graph(prompts.shape[1] + new_tokens // 2)
    step_ms = []
    for _ in range(_TRIALS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        step_ms.append((time.perf_counter() - start) / _REPLAYS * 1e3)
    spread = (max(step_ms) - min(step_ms)) / statistics.median(step_ms)
    return {
        "ms_per_token": statistics.median(step_ms),
        "prompt_ms": min(prompt_ms),
        "spread": spread,
    }


def _run(rank: int, devices: int, port: int, options: Any, results: Any) -> None:  # noqa: ANN401
    """Measures all batch sizes in one process; the first puts its rows into the queue."""
    jax.config.update("jax_platforms", "cpu")
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=devices)
    config, device, rows = SHAPES[options.shape], torch.device("cuda", rank), []
    for batch in map(int, options.batch.split(",")):
        length = options.context + options.new_tokens
        decoder = make_decoder(config, batch, length, rank, devices, device)
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, options.context))
        row = {"devices": devices, "batch": batch, "context": options.context}
        rows.append(row | measure(decoder, prompts, options.new_tokens))
        del decoder
        torch.cuda.empty_cache()
    if rank == 0:
        results.put(rows)
    # A graph holds communicators, so the group is not destroyed before the process ends.


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all numbers of devices and batch sizes, and writes the record `torch-tensor-parallel-SHAPE`."""
    jax.config.update("jax_platforms", "cpu")
    parser = decode_parser(
        "Times torch's.", record="torch-tensor-parallel", new_tokens=64, repeats=3
    )
    parser.add_argument("--devices", default="1,2", help="comma-separated numbers of devices")
    options = parse(parser, arguments, record="torch-tensor-parallel")
    rows: list[dict[str, Any]] = []
    for devices in map(int, options.devices.split(",")):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = torch.multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        torch.multiprocessing.spawn(_run, (devices, port, options, results), nprocs=devices)
        rows += results.get()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        path = save_record(options.record, rows, folder=options.folder, torch_device=device)
        print(render(load_record(path)), flush=True)


if __name__ == "__main__":
    main()
