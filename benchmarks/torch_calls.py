"""The ops in plain torch: calls over rotating memory, and the result of the last call.

Nothing is compiled or fused by hand; on a GPU `peers.time_torch` captures the calls in a CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.contiguous import Contiguous, NoPeer, in_order
from pallas_kernels.formats.index_keys import split_index_pages
from pallas_kernels.formats.latent_records import decode_records
from pallas_kernels.workbench.op_benchmark import BenchInputs

Calls = tuple[list[Callable[[], Any]], Callable[[], list[np.ndarray]]]
"""One call per copy of what is read, and what makes the answer of the last one."""


def to_tensor(array: np.ndarray) -> Any:  # noqa: ANN401 - torch is optional
    """Returns a torch tensor with the numbers of an array; bfloat16, which NumPy lacks, is passed as bits."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # JAX's arrays are not writable, of which torch warns.
    array = np.array(array, order="C", copy=not array.flags.writeable or None)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _array(tensor: Any) -> np.ndarray:  # noqa: ANN401 - torch is optional
    """Returns the bits of a tensor as an array."""
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def attention(cases: Sequence[Contiguous], bench: BenchInputs) -> Calls:
    """Returns calls of `scaled_dot_product_attention`, one per copy of the keys; a kernel per batch of equal rows."""
    if any(case.window is not None for case in cases):
        raise NoPeer("has no window for more than one query")
    first = [
        [to_tensor(part).transpose(1, 2) for part in (case.q, case.k, case.v)] for case in cases
    ]
    copies = [[(q, k.clone(), v.clone()) for q, k, v in first] for _ in bench.own[1:]]
    attends = [_attend(case) for case in cases]

    def call(sets: Any) -> list[Any]:  # noqa: ANN401 - torch is optional
        return [attend(*tensors) for attend, tensors in zip(attends, sets, strict=True)]

    calls = [lambda sets=sets: call(sets) for sets in [first, *copies]]

    def answer() -> list[np.ndarray]:
        outs = [out.transpose(1, 2).float().cpu().numpy() for out in calls[-1]()]
        return [in_order(bench, cases, outs)]

    return calls, answer


def _attend(case: Contiguous) -> Callable[..., Any]:
    """Returns torch's attention for rows of one kind: causal, aligned to the last key."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    q_len, seq_len = case.q.shape[1], case.k.shape[1]
    return partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=causal_lower_right(q_len, seq_len) if case.causal and q_len < seq_len else None,
        is_causal=case.causal and q_len == seq_len,
        scale=case.scale,
        enable_gqa=True,
    )


def _write(bench: BenchInputs) -> Calls:
    """Returns calls of `index_copy_`, one per set of slots, without padding, which torch would refuse."""
    import torch

    num_slots = int(np.prod(bench.inputs["pages"][0].shape[:2]))
    real = np.flatnonzero(bench.inputs["slots"] < num_slots)
    values = [to_tensor(value[real]) for value in bench.inputs["values"]]
    pools = [to_tensor(page.copy()).flatten(0, 1) for page in bench.inputs["pages"]]
    slots = [
        torch.from_numpy(np.asarray(own["slots"])[real].astype(np.int64)).to(pools[0].device)
        for own in bench.own
    ]

    def call(where: Any, into: list[Any]) -> None:  # noqa: ANN401 - torch is optional
        for pool, value in zip(into, values, strict=True):
            pool.index_copy_(0, where, value)

    def answer() -> list[np.ndarray]:
        fresh = [to_tensor(page.copy()).flatten(0, 1) for page in bench.inputs["pages"]]
        call(slots[0], fresh)
        return [_array(pool[slots[0]]) for pool in fresh]

    return [lambda where=where: call(where, pools) for where in slots], answer


def _product(bench: BenchInputs) -> Calls:
    """Returns calls of torch's `linear`, followed by separate operations for activation, norm and residual."""
    import torch

    inputs = bench.inputs
    x = to_tensor(inputs["x"])
    bias, residual = (
        None if inputs[name] is None else to_tensor(inputs[name]) for name in ("bias", "residual")
    )
    weights = _copies(to_tensor(inputs["weight"]), bench)
    functions: dict[str, Callable[[Any], Any]] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "relu2": lambda sums: torch.nn.functional.relu(sums).square(),
    }
    activate = functions.get(inputs["activation"], lambda sums: sums)

    def call(weight: Any) -> Any:  # noqa: ANN401 - torch is optional
        sums = torch.nn.functional.linear(x, weight, bias)
        if inputs["gated"]:
            gates, ups = sums.chunk(2, dim=1)
            sums = activate(gates * inputs["gate_multiplier"]) * ups
        else:
            sums = activate(sums * inputs["gate_multiplier"])
        if residual is not None:
            sums = sums + residual
        return sums.float() if inputs["result"] == "float32" else sums

    return _calls(call, weights, lambda out: [out.float().cpu().numpy()])


def _top_keys(bench: BenchInputs) -> Calls:
    """Products in bfloat16 summed in float32, `topk`, and a sort of the positions; of one row, or of equal ones."""
    import torch

    inputs = bench.inputs
    lengths, table = inputs["seq_lens"], inputs["page_table"]
    bounds = inputs.get("cu_q_lens", np.arange(len(lengths) + 1))
    queries, seen = bounds[1:] - bounds[:-1], int(lengths[0])
    alike = (queries == queries[0]).all() and (lengths == seen).all()
    if not alike or bounds[-1] != len(inputs["q"]) or seen - queries[0] + 1 < inputs["topk"]:
        raise NoPeer("needs rows alike, all of whose queries see more keys than are chosen")
    position, page_size = np.arange(seen), inputs["index_pages"].shape[1]
    pages = table[:, position // page_size]
    slots = pages * page_size + position % page_size
    keys, scales = _keys(inputs["index_pages"])
    keys, scales = (part.reshape(-1, *part.shape[2:])[slots] for part in (keys, scales))
    q = np.asarray(inputs["q"], np.float32).reshape(len(lengths), -1, keys.shape[-1])
    weights = to_tensor(inputs["weights"])
    on_gpu = weights.is_cuda
    halves = torch.bfloat16 if on_gpu and bench.dtype != "float32" else torch.float32
    q, first = to_tensor(q).to(halves), to_tensor(keys).to(halves)
    scales = to_tensor(scales)[:, None]
    mask = torch.ones(queries[0], seen, dtype=torch.bool, device=q.device).triu(
        seen - queries[0] + 1
    )
    multiply = torch.bmm if halves == torch.float32 else partial(torch.bmm, out_dtype=torch.float32)

    def call(keys: Any) -> Any:  # noqa: ANN401 - torch is optional
        products = multiply(q, keys.transpose(1, 2)).relu_()
        products = products.view(len(weights), weights.shape[1], seen)
        scores = torch.bmm(weights[:, None], products).view(len(lengths), -1, seen)
        scores = (scores * scales).masked_fill_(mask, -torch.inf)
        return scores.topk(inputs["topk"], sorted=False).indices.sort().values

    def answer(found: Any) -> list[np.ndarray]:  # noqa: ANN401 - torch is optional
        found = found.cpu().numpy()
        chosen = np.take_along_axis(slots[:, None], found, axis=2).reshape(len(weights), -1)
        return [chosen, np.full(len(chosen), inputs["topk"])]

    return _calls(call, _copies(first, bench), answer)


def _keys(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the stored index keys in float32, and the scale of each."""
    if pages.dtype != np.uint8:
        return pages.astype(np.float32), np.ones(pages.shape[:2], np.float32)
    numbers, scales = split_index_pages(jnp.asarray(pages))
    return np.asarray(numbers.astype(jnp.float32)), np.asarray(scales)


def _chosen_records(bench: BenchInputs) -> Calls:
    """Returns calls that gather plain records and run `scaled_dot_product_attention` with heads as queries."""
    import torch

    inputs = bench.inputs
    if (inputs["counts"] != inputs["slots"].shape[1]).any():
        raise NoPeer("needs tokens that choose equally many")
    records, rank = jnp.asarray(inputs["records"]), inputs["value_dim"]
    if records.dtype == jnp.uint8:
        records = decode_records(records, rank=rank).astype(inputs["q"].dtype)
    first = to_tensor(np.asarray(records.reshape(-1, records.shape[-1])))
    q, slots = to_tensor(inputs["q"])[:, None], to_tensor(inputs["slots"]).long()

    def call(records: Any) -> Any:  # noqa: ANN401 - torch is optional
        keys = records[slots][:, None]
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, keys[..., :rank], scale=inputs["scale"]
        )

    return _calls(call, _copies(first, bench), lambda out: [out[:, 0].float().cpu().numpy()])


def _bounds(bench: BenchInputs) -> Calls:
    """Returns calls that sort the logits, accumulate probabilities, and find the first sum above p."""
    import torch

    names = ("logits", "top_k", "top_p", "min_p", "temperature")
    first, top_k, *columns = (to_tensor(bench.inputs[name]) for name in names)
    top_p, min_p, temperature = (column[:, None] for column in columns)
    vocab = first.shape[1]
    rank = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None] - 1

    def call(logits: Any) -> Any:  # noqa: ANN401 - torch is optional
        falling = logits.sort(descending=True).values
        best, kth = falling[:, :1], falling.gather(1, rank)
        weights = torch.where(falling >= kth, ((falling - best) / temperature).exp(), 0.0)
        mass = weights.cumsum(1)
        crossing = (mass < top_p * mass[:, -1:]).sum(1, keepdim=True).clamp(max=vocab - 1)
        nucleus = torch.where(top_p < 1, falling.gather(1, crossing), -torch.inf)
        least = best + temperature * min_p.log()
        return torch.maximum(torch.maximum(kth, nucleus), least)[:, 0]

    return _calls(call, _copies(first, bench), lambda out: [out.cpu().numpy()])


def _largest(bench: BenchInputs) -> Calls:
    """Returns calls of `topk`."""
    scores, count = bench.inputs["scores"], bench.inputs["count"]
    if any(len(np.unique(row)) < len(row) for row in scores):
        raise NoPeer("returns equal numbers in any order")
    first = to_tensor(scores)

    def read(found: Any) -> list[np.ndarray]:  # noqa: ANN401 - torch is optional
        return [found.values.cpu().numpy(), found.indices.int().cpu().numpy()]

    return _calls(lambda scores: scores.topk(count), _copies(first, bench), read)


def _copies(first: Any, bench: BenchInputs) -> list[Any]:  # noqa: ANN401 - torch is optional
    """Returns one copy of a tensor per call, so that each call reads separate memory."""
    return [first, *(first.clone() for _ in bench.own[1:])]


def _calls(
    call: Callable[[Any], Any], own: Sequence[Any], read: Callable[[Any], list[np.ndarray]]
) -> Calls:
    """Returns a call for each of `own`, and a function that returns the result of the last."""
    return [partial(call, tensor) for tensor in own], lambda: read(call(own[-1]))


BUILDERS: Mapping[str, Callable[[BenchInputs], Calls]] = {
    "page_write": _write,
    "skinny_matmul": _product,
    "index_topk": _top_keys,
    "row_topk": _largest,
    "sparse_attention": _chosen_records,
    "filter_bounds": _bounds,
}
"""How torch does an op's work on a bench; attention is `attention`, and what is not here torch has no calls for."""
