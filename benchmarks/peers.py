"""What others offer for the same work, on contiguous tensors of the same sizes, timed in the same run.

A peer that cannot do a case says why; one that gives a wrong answer is refused like an implementation of ours.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Chain, Effort, Timing, time_chain, time_launches
from pallas_kernels.subjects import KINDS, Subject

_HALF = ("bfloat16", "float16")
# Kinds of rows that a peer may be called for, one after the other.
_MOST_KINDS = 4


class NoPeer(RuntimeError):
    """A peer cannot do this case here."""


@dataclass(frozen=True)
class Contiguous:
    """Rows of equal lengths and the keys that their queries see, laid out without pages.

    Attributes:
        tokens: where the rows' queries are among those of the case.
        q, k, v: [rows, length, heads, head_dim].
        window: keys that a query sees; `None` for all, also where the cut did it.
        causal: a query does not see keys after its own; otherwise it sees all.
    """

    tokens: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    window: int | None
    causal: bool


@lru_cache(maxsize=1)
def lay_out(subject: Subject) -> list[Contiguous]:
    """Gathers an attention case's keys and values, once for all peers; raises `NoPeer` where none could use them."""
    inputs = subject.inputs
    if "latent_pages" in inputs:
        return [_latents_alike(inputs)]
    if inputs["soft_cap"] is not None or inputs["sinks"] is not None:
        raise NoPeer("has no soft cap and no sinks")
    if inputs["k_scales"] is not None:
        raise NoPeer("takes keys and values in the queries' dtype alone")
    seq_lens = inputs["seq_lens"].astype(np.int64)
    bounds = inputs.get("cu_q_lens", np.arange(len(seq_lens) + 1)).astype(np.int64)
    lengths = np.stack([np.diff(bounds), seq_lens], axis=1)
    if not lengths.all() or bounds[-1] != len(inputs["q"]):
        raise NoPeer("needs rows of at least one query and one key, without padding")
    kinds = np.unique(lengths, axis=0)
    if len(kinds) > _MOST_KINDS:
        raise NoPeer(f"would be called for {len(kinds)} kinds of rows")
    return [_rows_alike(inputs, bounds, np.flatnonzero((lengths == kind).all(1))) for kind in kinds]


def _rows_alike(inputs: Mapping[str, Any], bounds: np.ndarray, rows: np.ndarray) -> Contiguous:
    """Lays out some rows of one length."""
    q_len, seq_len = int(bounds[rows[0] + 1] - bounds[rows[0]]), int(inputs["seq_lens"][rows[0]])
    start, window = 0, inputs["window"]
    if window is not None:
        start, window = max(0, seq_len - q_len + 1 - window), None if q_len == 1 else window
    position, page_size = np.arange(start, seq_len), inputs["k_pages"].shape[1]
    pages = inputs["page_table"][rows][:, position // page_size]
    tokens = bounds[rows][:, None] + np.arange(q_len)
    return Contiguous(
        tokens=tokens.reshape(-1),
        q=inputs["q"][tokens],
        k=inputs["k_pages"][pages, position % page_size],
        v=inputs["v_pages"][pages, position % page_size],
        scale=inputs["scale"],
        window=window,
        causal=q_len > 1,
    )


def _latents_alike(inputs: Mapping[str, Any]) -> Contiguous:
    """Lays out rows of one query over latents; its heads stand as queries that share one head of keys."""
    seq_len = int(inputs["seq_lens"][0])
    if "cu_q_lens" in inputs or not (inputs["seq_lens"] == seq_len).all() or not seq_len:
        raise NoPeer("needs rows of one query and equally many keys")
    position, page_size = np.arange(seq_len), inputs["latent_pages"].shape[1]
    pages = inputs["page_table"][:, position // page_size]
    latents = inputs["latent_pages"][pages, position % page_size]
    q = inputs["q"]
    return Contiguous(
        tokens=np.arange(q.shape[0] * q.shape[1]),
        q=q[:, :, None],
        k=latents,
        v=latents[..., : inputs["value_dim"]],
        scale=inputs["scale"],
        window=None,
        causal=False,
    )


def time_cudnn(subject: Subject, effort: Effort) -> Timing:
    """Times cuDNN's fused attention as JAX offers it."""
    if subject.op == "skinny_matmul":
        raise NoPeer("is no attention")
    if KINDS[subject.op].writes:
        raise NoPeer("writes no pages")
    if jax.default_backend() != "gpu" or subject.dtype not in _HALF:
        raise NoPeer("needs an NVIDIA GPU and bfloat16 or float16")
    cases = lay_out(subject)
    if len(cases) > 1:
        raise NoPeer("needs rows of equal length")
    case = cases[0]
    causal = case.causal
    if causal and case.q.shape[1] != case.k.shape[1]:
        raise NoPeer("aligns its causal mask to the first key, not the last")

    def run(q: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return q, jax.nn.dot_product_attention(
            q,
            own["k"],
            own["v"],
            scale=case.scale,
            is_causal=causal,
            local_window_size=None if case.window is None else (case.window - 1, 0),
            implementation="cudnn",
        )

    first = {"k": jnp.asarray(case.k), "v": jnp.asarray(case.v)}
    own = [first, *(jax.tree.map(jnp.copy, first) for _ in subject.own[1:])]
    chain = Chain(run, jnp.asarray(case.q), own)
    try:
        answer = np.asarray(chain.launch()[-1])
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise NoPeer(_first_line(error)) from error
    subject.compare([_in_order(subject, cases, [answer])])
    return time_chain(chain, effort)


def _in_order(
    subject: Subject, cases: Sequence[Contiguous], answers: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns the outputs of all kinds of rows, one query after the other as in the case."""
    together = np.concatenate([answer.reshape(-1, *answer.shape[2:]) for answer in answers])
    out = np.empty_like(together)
    out[np.concatenate([case.tokens for case in cases])] = together
    return out.reshape(*subject.inputs["q"].shape[:2], -1)


def time_torch(subject: Subject, effort: Effort) -> Timing:
    """Times `scaled_dot_product_attention`, or `index_copy_` for writes, in a CUDA graph where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        raise NoPeer("torch is not installed")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if subject.op == "rotary_write":
        raise NoPeer("does not rotate and write in one call")
    if KINDS[subject.op].pool == "states":
        raise NoPeer("has no op that carries such states")
    if subject.op == "skinny_matmul":
        raise NoPeer("is not set up for products; XLA's stand beside the kernel")
    build = _torch_write if subject.op == "page_write" else _torch_attention
    calls, answer = build(subject, device)
    calls *= effort.rounds

    def launch() -> list[Any]:
        return [call() for call in calls]

    try:
        launch()
    except RuntimeError as error:
        raise NoPeer(_first_line(error)) from error
    subject.compare(answer())
    if device == "cpu":
        return time_launches(launch, calls=len(calls), effort=effort, wait=lambda _: None)
    # Capturing needs a stream other than the default one, on which everything has run before.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The graph writes into these at every replay.
        held = launch()
    timing = time_launches(
        graph.replay,
        calls=len(calls),
        effort=effort,
        wait=lambda _: torch.cuda.synchronize(),
    )
    del held
    return timing


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _tensor(array: np.ndarray, device: str) -> Any:  # noqa: ANN401 - torch is optional
    """A torch tensor of the same numbers; NumPy's bfloat16 is unknown to torch and goes as its bits."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _array(tensor: Any) -> np.ndarray:  # noqa: ANN401 - torch is optional
    """The bits of a tensor."""
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def _torch_attention(
    subject: Subject, device: str
) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    """One call per copy of the keys, each of one kernel per kind of rows, and the answer of the last."""
    cases = lay_out(subject)
    if any(case.window is not None for case in cases):
        raise NoPeer("has no window for more than one query")
    first = [
        [_tensor(part, device).transpose(1, 2) for part in (case.q, case.k, case.v)]
        for case in cases
    ]
    copies = [[(q, k.clone(), v.clone()) for q, k, v in first] for _ in subject.own[1:]]
    attends = [_attend(case) for case in cases]

    def call(sets: Any) -> list[Any]:  # noqa: ANN401 - torch is optional
        return [attend(*tensors) for attend, tensors in zip(attends, sets, strict=True)]

    calls = [lambda sets=sets: call(sets) for sets in [first, *copies]]

    def answer() -> list[np.ndarray]:
        outs = [out.transpose(1, 2).float().cpu().numpy() for out in calls[-1]()]
        return [_in_order(subject, cases, outs)]

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


def _torch_write(
    subject: Subject, device: str
) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    """One call per set of slots; padding is left out, since torch would refuse it."""
    import torch

    num_slots = int(np.prod(subject.inputs["pages"][0].shape[:2]))
    real = np.flatnonzero(subject.inputs["slots"] < num_slots)
    values = [_tensor(value[real], device) for value in subject.inputs["values"]]
    pools = [_tensor(page.copy(), device).flatten(0, 1) for page in subject.inputs["pages"]]
    slots = [
        torch.from_numpy(np.asarray(own["slots"])[real].astype(np.int64)).to(device)
        for own in subject.own
    ]

    def call(where: Any, into: list[Any]) -> None:  # noqa: ANN401 - torch is optional
        for pool, value in zip(into, values, strict=True):
            pool.index_copy_(0, where, value)

    def answer() -> list[np.ndarray]:
        fresh = [_tensor(page.copy(), device).flatten(0, 1) for page in subject.inputs["pages"]]
        call(slots[0], fresh)
        return [_array(pool[slots[0]]) for pool in fresh]

    return [lambda where=where: call(where, pools) for where in slots], answer


PEERS: dict[str, Callable[[Subject, Effort], Timing]] = {
    "cudnn-contiguous": time_cudnn,
    "torch": time_torch,
}
