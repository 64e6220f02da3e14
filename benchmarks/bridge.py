"""Times the bridge to PyTorch: leases, kernels called from torch, and generation with Transformers.

    python -m benchmarks.bridge --part lease,kernel,generate --record bridge

Each part prints its rows. Units are microseconds, or tokens per second of wall time. A value is the best of several
trials, and for the steps of one generation their median. "launch" is the host's time per call in a series of calls
without waiting; "total" is the time per call until all calls are done.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pallas_kernels
import torch_bridge
from benchmarks.record import RECORDS, save_record
from benchmarks.timing import Effort, refuse_profilers
from benchmarks.torch_decode import TorchDecoder
from jaxkv import SamplingParams
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place
from jaxkv.models.registry import build_model, read_config
from torch_bridge import JaxkvCache, from_torch, kernels, lease, to_torch
from torch_bridge.ops import direct
from torch_bridge.ops.direct import decode_kernel
from torch_bridge.sharing.dlpack import fence, jax_device
from torch_bridge.sharing.kept_lease import KeptLease
from torch_bridge.weights import share_params

_BATCHED = "torch_bridge.generate"
PARTS = ("lease", "kernel", "generate")
_TOLERANCE = 2e-2
Row = dict[str, Any]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    jnp.zeros(()).block_until_ready()


def time_calls(call: Callable[[], Any], *, calls: int, trials: int = 5) -> tuple[float, float]:
    """Returns microseconds per call: until the host has launched all calls, and until all are done."""
    out = call()
    _wait()
    best = (math.inf, math.inf)
    for _ in range(trials):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        sent = time.perf_counter()
        if isinstance(out, jax.Array):
            out.block_until_ready()
        _wait()
        done = time.perf_counter()
        best = (
            min(best[0], (sent - start) / calls * 1e6),
            min(best[1], (done - start) / calls * 1e6),
        )
    return best


def time_leases() -> list[Row]:
    """Times a lease with its commit, and its parts: DLPack conversions and the fence."""
    rows = []
    device = _device()
    for layers in (1, 4, 32):
        layout = group_layers(place([gqa(8, 128, dtype="bfloat16", page_size=16)] * layers))
        owner = CacheOwner(layout, {"gqa": 64}, device=jax_device(device))

        def borrow(owner: CacheOwner = owner) -> None:
            with lease(owner) as views:
                views.commit()

        _, us = time_calls(borrow, calls=20)
        rows.append({"what": "lease and commit", "arrays": 2 * layers, "us": us})
        kept = KeptLease(owner)
        _, us = time_calls(lambda kept=kept: kept.put_down(kept.borrow()), calls=20)
        rows.append({"what": "kept from forward to forward", "arrays": 2 * layers, "us": us})
    tensor, array = torch.zeros(64, 128, device=device), jnp.zeros((64, 128))
    array = jax.device_put(array, jax_device(device))
    for what, call in {
        "to_torch": partial(to_torch, array),
        "from_torch": partial(from_torch, tensor),
        "fence": partial(fence, tensor.device),
    }.items():
        launch, _ = time_calls(call, calls=200)
        rows.append({"what": what, "arrays": 1, "us": launch})
    return rows


def time_kernels(contexts: Sequence[tuple[int, int]]) -> list[Row]:
    """Times paged decode attention from torch, from JAX, and torch's SDPA on contiguous tensors of the same numbers."""
    rows = []
    device, dtype = _device(), torch.bfloat16
    heads, kv_heads, head_dim, page_size = 32, 8, 128, 16
    for batch, context in contexts:
        width = context // page_size
        q = torch.randn(batch, heads, head_dim, device=device, dtype=dtype)
        pools = [
            torch.randn(batch * width, page_size, kv_heads, head_dim, device=device, dtype=dtype)
            for _ in range(2)
        ]
        order = torch.randperm(batch * width, device=device).to(torch.int32)
        table, lengths = order.view(batch, width), torch.full((batch,), context, device=device)
        lengths = lengths.to(torch.int32)
        scale = head_dim**-0.5
        ours = partial(kernels.paged_attention, q, *pools, table, lengths, scale=scale)
        arrays = [from_torch(tensor) for tensor in (q, *pools, table, lengths)]
        program = jax.jit(partial(pallas_kernels.paged_attention, scale=scale))
        keys, values = (
            pool[table.long()].view(batch, context, kv_heads, head_dim).transpose(1, 2).contiguous()
            for pool in pools
        )
        peer = partial(
            torch.nn.functional.scaled_dot_product_attention,
            q[:, :, None],
            keys,
            values,
            scale=scale,
            enable_gqa=True,
        )
        torch.testing.assert_close(ours(), peer()[:, :, 0], rtol=_TOLERANCE, atol=_TOLERANCE)
        calls = {"from torch": ours, "from torch, through XLA": partial(_through_xla, ours)}
        alone = decode_kernel(q, *pools, table, lengths, scale=scale, window=None, soft_cap=None)
        if alone is not None:
            calls["from torch, launch alone"] = partial(alone, q, *pools, table, lengths)
        calls |= {"from JAX": partial(program, *arrays), "torch SDPA": peer}
        for what, call in calls.items():
            launch, total = time_calls(call, calls=100)
            row = {"case": f"B{batch} ctx{context}", "call": what}
            rows.append({**row, "launch_us": launch, "total_us": total})
    return rows


def _through_xla(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
    before, direct.IS_ON = direct.IS_ON, False
    try:
        return call()
    finally:
        direct.IS_ON = before


def _model(layers: int, device: torch.device) -> LlamaForCausalLM:
    """Returns a model of Llama-3.1-8B's widths with random weights."""
    small = device.type == "cpu"
    config = LlamaConfig(
        vocab_size=1024 if small else 128256,
        hidden_size=256 if small else 4096,
        intermediate_size=512 if small else 14336,
        num_hidden_layers=layers,
        num_attention_heads=8 if small else 32,
        num_key_value_heads=2 if small else 8,
        max_position_embeddings=131072,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32" if small else "bfloat16",
    )
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.eval()


def time_generate(
    *,
    layers: int,
    settings: Sequence[tuple[int, int]],
    new_tokens: int,
    compiled: bool,
    peer: bool,
    only: Sequence[str] = (),
) -> list[Row]:
    """Times `model.generate` with Transformers' caches and ours, on the same prompts.

    Args:
        layers: number of layers.
        settings: (rows, prompt tokens) of each batch.
        new_tokens: generated tokens per row.
        compiled: whether to time Transformers' static cache with a compiled decode step too, which takes a minute.
        peer: whether to time a step of the gpt-fast style decoder on the same weights too; needs a GPU.
        only: begins of the names of the forms to time; all if empty.
    """
    device = _device()
    model = _model(layers, device)
    params, config = None, None
    if peer:
        raw = model.config.to_dict() | {"architectures": [type(model).__name__]}
        raw.pop("dtype", None)
        ours = build_model(read_config(raw))
        params, config = share_params(model, ours, copy=True), ours.config
    rows = []
    for batch, context in settings:
        ids = torch.randint(1, 1024, (batch, context), device=device)
        max_tokens = batch * (context + new_tokens + 16)
        cache = JaxkvCache(model, max_tokens=max_tokens, graphs=False)
        replayed = JaxkvCache(model, max_tokens=max_tokens, graphs=True)
        forms: dict[str, tuple[str, dict[str, Any]]] = {
            "dynamic, sdpa": ("sdpa", {}),
            "static, sdpa": ("sdpa", {"cache_implementation": "static", "disable_compile": True}),
            "ours, sdpa on gathered pages": ("sdpa", {"past_key_values": cache}),
            "ours, our kernels": ("jaxkv", {"past_key_values": cache}),
            "ours, our kernels, one lease": ("jaxkv", {"past_key_values": cache}),
            "ours, our kernels, graphs": ("jaxkv", {"past_key_values": replayed}),
            _BATCHED: ("jaxkv", {"past_key_values": replayed}),
        }
        if compiled:
            forms["static, sdpa, compiled"] = ("sdpa", {"cache_implementation": "static"})
        reference = None
        for name, (implementation, options) in forms.items():
            if only and not name.startswith(tuple(only)):
                continue
            model.set_attn_implementation(implementation)
            session = name.endswith("one lease")
            seconds, tokens = math.inf, ids
            for _ in range(2):
                for one in (cache, replayed):
                    one.reset(keep_prefix=False)
                if name == _BATCHED:
                    steps, tokens = _generate_batched(model, ids, new_tokens, replayed)
                else:
                    steps, tokens = _generate(
                        model, ids, new_tokens, options, cache if session else None
                    )
                seconds = min(seconds, median(steps))
            reference = tokens if reference is None else reference
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "cache": name,
                    "decode_tokens_per_s": batch / seconds,
                    "ms_per_step": seconds * 1e3,
                    "tokens_as_dynamic": (tokens == reference).float().mean().item(),
                }
            )
            if options.get("past_key_values") is replayed:
                rows[-1] |= _graph_columns(replayed)
            options.clear()
            _print([rows[-1]])
        del cache, replayed, forms
        if params is not None and config is not None:
            decoder = TorchDecoder(config, params, batch, context + new_tokens)
            seconds = decoder.time_step(context + new_tokens // 2, Effort()).us / 1e6
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "cache": "gpt-fast style, one graph, no host",
                    "decode_tokens_per_s": batch / seconds,
                    "ms_per_step": seconds * 1e3,
                }
            )
            _print([rows[-1]])
            del decoder
    return rows


def _graph_columns(cache: JaxkvCache) -> Row:
    stats = cache.stats()
    return {
        "graph_mb": stats.graph_bytes / 2**20,
        "recording_s": stats.graph_seconds,
        "steps_replayed": stats.steps_replayed,
        "why_not_replayed": stats.why_not_replayed,
    }


def _generate(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    new_tokens: int,
    options: dict[str, Any],
    session: JaxkvCache | None,
) -> tuple[list[float], torch.Tensor]:
    """Returns the seconds of each decode step of one call, and its tokens."""
    clock = _Clock()
    mask = torch.ones_like(ids)
    call = partial(
        model.generate,  # pyright: ignore[reportAttributeAccessIssue] - its mixin's `self` is too strict
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
        **options,
    )
    _wait()
    if session is None:
        tokens = call()
    else:
        with session.session():
            tokens = call()
    return clock.steps(), tokens


def _generate_batched(
    model: LlamaForCausalLM, ids: torch.Tensor, new_tokens: int, cache: JaxkvCache
) -> tuple[list[float], torch.Tensor]:
    """Returns the mean seconds of a decode step of each row of one `torch_bridge.generate`, and its tokens.

    One step computes all prompts, so that all rows decode at the same time.
    """
    rows = ids.shape[0]
    made = torch_bridge.generate(
        model,
        ids.tolist(),
        SamplingParams(temperature=0.0, max_tokens=new_tokens),
        cache=cache,
        max_sequences=rows,
        token_budget=ids.numel(),
    )
    steps = []
    for one in made:
        assert one.timing.first_token is not None
        steps.append((one.timing.finished - one.timing.first_token) / (new_tokens - 1))
    said = torch.tensor([one.token_ids for one in made], device=ids.device)
    return steps, torch.cat([ids, said], 1)


class _Clock:
    """A Transformers streamer that records the time of each call: the prompt's first, then one per step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Records the time; called with the prompt, then with the tokens of each step."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing; called after the last token."""

    def steps(self) -> list[float]:
        """Returns the seconds between tokens, without the prompt's."""
        return [after - before for before, after in pairwise(self.times[1:])]


def _print(rows: Sequence[Row]) -> None:
    for row in rows:
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{value}"
            for name, value in row.items()
        )
        print("  ".join(cells), flush=True)


def _pairs(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (pair.split("x") for pair in text.split(","))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts and saves one record of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", default=",".join(PARTS), help="comma-separated; all if not given")
    parser.add_argument("--settings", default="1x1024,8x1024,64x1024", help="rows x prompt tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32, help="at least 3")
    parser.add_argument("--compiled", action="store_true", help="also Transformers' compiled step")
    parser.add_argument("--peer", action="store_true", help="also a gpt-fast style step; GPU only")
    parser.add_argument("--only", default="", help="begins of forms, separated by semicolons")
    parser.add_argument(
        "--record", help="begin of the records' names; nothing is saved if not given"
    )
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    given = parser.parse_args(arguments)
    refuse_profilers()
    unknown = set(given.part.split(",")) - set(PARTS)
    if unknown:
        raise ValueError(f"no such part: {sorted(unknown)}; choose among {', '.join(PARTS)}")
    settings = _pairs(given.settings)
    torch.manual_seed(0)
    np.random.seed(0)
    for part in given.part.split(","):
        if part == "lease":
            rows = time_leases()
        elif part == "kernel":
            rows = time_kernels(settings)
        else:
            rows = time_generate(
                layers=given.layers,
                settings=settings,
                new_tokens=given.new_tokens,
                compiled=given.compiled,
                peer=given.peer,
                only=[one.strip() for one in given.only.split(";") if one.strip()],
            )
        print(f"-- {part}")
        _print(rows)
        if given.record:
            print(save_record(f"{given.record}-{part}", rows, folder=given.folder))


if __name__ == "__main__":
    main()
