"""Times the bridge to PyTorch: leases, kernels called from torch, and generation with Transformers.

    python -m benchmarks.bridge --part lease,kernel,generate,hybrid,turn --record bridge

"hybrid" is "generate" for a model with Mamba-2 and attention. "turn" is the time to the first token of a prompt of
which nothing, or nine tenths, were computed in the turn before.

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
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import pallas_kernels
import torch_bridge
from benchmarks.record import RECORDS, save_record
from benchmarks.timing import Effort, refuse_profilers
from benchmarks.torch_decode import TorchDecoder
from jaxkv import SamplingParams
from jaxkv.bench.shapes import HYBRID_SHAPES
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
PARTS = ("lease", "kernel", "generate", "hybrid", "turn")
_KEPT = 0.9
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
    return _made(LlamaForCausalLM, config, device)


def _hybrid(layers: int, device: torch.device) -> GraniteMoeHybridForCausalLM:
    """Returns a model of the first layers of Granite 4 h-micro with random weights; tiny on a CPU.

    One layer at least attends.
    """
    small = device.type == "cpu"
    shape = HYBRID_SHAPES["tiny-hybrid" if small else "granite-4.0-h-micro"]
    mamba = shape.mamba
    assert mamba is not None
    kinds = [{"mamba2": "mamba"}.get(mixer, mixer) for mixer, _ in shape.pattern]
    layers = min(max(layers, 1 + kinds.index("attention")), len(kinds))
    config = GraniteMoeHybridConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        shared_intermediate_size=shape.ffn_size,
        num_local_experts=0,
        num_hidden_layers=layers,
        layer_types=kinds[:layers],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        attention_multiplier=shape.head_dim**-0.5,
        max_position_embeddings=shape.max_positions,
        mamba_n_heads=mamba.heads,
        mamba_d_head=mamba.head_dim,
        mamba_d_state=mamba.d_state,
        mamba_d_conv=mamba.d_conv,
        mamba_n_groups=mamba.groups,
        mamba_chunk_size=mamba.chunk_size,
        mamba_expand=mamba.heads * mamba.head_dim // shape.hidden_size,
        tie_word_embeddings=shape.tie_embeddings,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32" if small else "bfloat16",
    )
    return _made(GraniteMoeHybridForCausalLM, config, device)


_MODELS: dict[str, Callable[[int, torch.device], PreTrainedModel]] = {
    "llama": _model,
    "hybrid": _hybrid,
}


def _made[M: PreTrainedModel](kind: type[M], config: Any, device: torch.device) -> M:  # noqa: ANN401
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
        try:
            model = kind(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.eval()


def time_generate(
    model: PreTrainedModel,
    *,
    settings: Sequence[tuple[int, int]],
    new_tokens: int,
    compiled: bool,
    peer: bool,
    only: Sequence[str] = (),
) -> list[Row]:
    """Times `model.generate` with Transformers' caches and ours, on the same prompts.

    Args:
        model: the model.
        settings: (rows, prompt tokens) of each batch.
        new_tokens: generated tokens per row.
        compiled: whether to time Transformers' static cache with a compiled decode step too, which takes a minute.
        peer: whether to time a step of the gpt-fast style decoder on the same weights too; needs a GPU.
        only: begins of the names of the forms to time; all if empty.
    """
    device = model.device
    params, config = None, None
    if peer:
        raw = model.config.to_dict() | {"architectures": [type(model).__name__]}
        raw.pop("dtype", None)
        ours = build_model(read_config(raw))
        params, config = share_params(model, ours, copy=True), ours.config
    rows = []
    for batch, context in settings:
        ids = torch.randint(1, _ids_end(model), (batch, context), device=device)
        max_tokens = batch * (context + new_tokens + 16)
        cache, replayed = (
            JaxkvCache(model, max_tokens=max_tokens, max_sequences=batch + 1, graphs=graphs)
            for graphs in (False, True)
        )
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


def time_turns(
    name: str,
    model: PreTrainedModel,
    *,
    settings: Sequence[tuple[int, int]],
    trials: int = 5,
) -> list[Row]:
    """Times the first token of a prompt of which nothing, or `_KEPT`, was computed in the turn before.

    The time ends when the host has the token.

    Args:
        name: name of the model, for the rows.
        model: the model.
        settings: (rows, prompt tokens) of each batch.
        trials: number of prompts, of which the fastest counts.
    """
    rows = []
    for batch, context in settings:
        room = 2 * batch * (context + 32)
        cache = JaxkvCache(model, max_tokens=room, max_sequences=2 * batch)
        forms: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
            "dynamic, sdpa": ("sdpa", partial(_first_token, model)),
            "ours, our kernels": ("jaxkv", partial(_first_token, model, cache=cache)),
            _BATCHED: ("jaxkv", partial(_first_token_batched, model, cache)),
        }
        for form, (implementation, first_token) in forms.items():
            model.set_attn_implementation(implementation)
            for kept in (0, int(_KEPT * context)):
                if kept and form.startswith("dynamic"):
                    continue
                seconds, before = [], cache.stats()
                # The first prompt of a shape loads kernels, the second is recorded, and the third replayed.
                for _ in range(1 + trials):
                    ids = torch.randint(1, _ids_end(model), (batch, context), device=model.device)
                    cache.reset(keep_prefix=False)
                    if kept:
                        first_token(ids[:, :kept])
                        cache.reset()
                    before = cache.stats()
                    seconds.append(_seconds(partial(first_token, ids)))
                row = {"model": name, "batch": batch, "context": context, "kept": kept}
                rows.append({**row, "cache": form, "first_token_ms": min(seconds[1:]) * 1e3})
                now = cache.stats()
                if form.startswith("ours"):
                    rows[-1]["tokens_computed"] = now.tokens_computed - before.tokens_computed
                if not form.startswith("dynamic"):
                    rows[-1]["prompts_replayed"] = now.prompts_replayed - before.prompts_replayed
                    rows[-1]["graph_mb"] = now.graph_bytes / 2**20
                _print([rows[-1]])
    return rows


def _ids_end(model: PreTrainedModel) -> int:
    return min(1024, model.config.vocab_size)


def _seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of a call that waits for its own result."""
    _wait()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _first_token(
    model: PreTrainedModel, ids: torch.Tensor, *, cache: JaxkvCache | None = None
) -> list[int]:
    stock: Any = model.generate
    tokens = stock(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=1,
        do_sample=False,
    )
    return tokens[:, -1].tolist()


def _first_token_batched(model: PreTrainedModel, cache: JaxkvCache, ids: torch.Tensor) -> None:
    torch_bridge.generate(
        model,
        ids.tolist(),
        SamplingParams(temperature=0.0, max_tokens=1),
        cache=cache,
        max_sequences=len(ids),
        token_budget=ids.numel(),
    )


def _graph_columns(cache: JaxkvCache) -> Row:
    stats = cache.stats()
    return {
        "leases_taken": stats.leases_taken,
        "graph_mb": stats.graph_bytes / 2**20,
        "recording_s": stats.graph_seconds,
        "steps_replayed": stats.steps_replayed,
        "why_not_replayed": stats.why_not_replayed,
    }


def _generate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    new_tokens: int,
    options: dict[str, Any],
    session: JaxkvCache | None,
) -> tuple[list[float], torch.Tensor]:
    """Returns the seconds of each decode step of one call, and its tokens."""
    clock = _Clock()
    mask = torch.ones_like(ids)
    stock: Any = model.generate
    call = partial(
        stock,
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
    model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, cache: JaxkvCache
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
    parser.add_argument("--models", default=",".join(_MODELS), help="models of the part turn")
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
        elif part == "turn":
            rows = []
            for name in given.models.split(","):
                model = _MODELS[name](given.layers, _device())
                rows += time_turns(name, model, settings=settings)
        else:
            make = _hybrid if part == "hybrid" else _model
            rows = time_generate(
                make(given.layers, _device()),
                settings=settings,
                new_tokens=given.new_tokens,
                compiled=given.compiled,
                peer=given.peer and part == "generate",
                only=[one.strip() for one in given.only.split(";") if one.strip()],
            )
        print(f"-- {part}")
        _print(rows)
        if given.record:
            print(save_record(f"{given.record}-{part}", rows, folder=given.folder))


if __name__ == "__main__":
    main()
