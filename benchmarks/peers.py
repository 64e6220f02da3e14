"""What others offer for the same work, on contiguous tensors of the same sizes, timed in the same run.

A peer that cannot do a case says why; one that gives a wrong answer is refused like an implementation of ours.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.subjects import Subject, compare
from benchmarks.timing import Chain, Effort, Timing, time_launches
from tests.tolerances import OUTPUT

_HALF = ("bfloat16", "float16")


class NoPeer(RuntimeError):
    """A peer cannot do this case here."""


@dataclass(frozen=True)
class Contiguous:
    """The keys that a case's queries see, laid out without pages.

    Attributes:
        q: all rows have the same number of queries.
        k, v: and the same number of keys.
        window: keys that a query sees; `None` for all, also where the cut did it.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    window: int | None


def lay_out(subject: Subject) -> Contiguous:
    """Gathers an attention case's keys and values; raises `NoPeer` where no peer could use them."""
    inputs = subject.inputs
    if inputs["soft_cap"] is not None or inputs["sinks"] is not None:
        raise NoPeer("has no soft cap and no sinks")
    seq_lens, rows = inputs["seq_lens"], len(inputs["seq_lens"])
    q_lens = np.diff(inputs["cu_q_lens"]) if "cu_q_lens" in inputs else np.ones(rows, np.int64)
    if len(set(seq_lens)) > 1 or len(set(q_lens)) > 1 or len(inputs["q"]) != q_lens.sum():
        raise NoPeer("needs rows of equal length without padding")
    q_len, seq_len, window = int(q_lens[0]), int(seq_lens[0]), inputs["window"]
    if not q_len or not seq_len:
        raise NoPeer("needs at least one query and one key")
    start = 0
    if window is not None:
        start, window = max(0, seq_len - q_len + 1 - window), None if q_len == 1 else window
    position, page_size = np.arange(start, seq_len), inputs["k_pages"].shape[1]
    pages = inputs["page_table"][:, position // page_size]
    return Contiguous(
        q=inputs["q"].reshape(rows, q_len, *inputs["q"].shape[1:]),
        k=inputs["k_pages"][pages, position % page_size],
        v=inputs["v_pages"][pages, position % page_size],
        scale=inputs["scale"],
        window=window,
    )


def time_cudnn(subject: Subject, effort: Effort) -> Timing:
    """Times cuDNN's fused attention as JAX offers it."""
    if subject.op == "page_write":
        raise NoPeer("writes no pages")
    if jax.default_backend() != "gpu" or subject.dtype not in _HALF:
        raise NoPeer("needs an NVIDIA GPU and bfloat16 or float16")
    case = lay_out(subject)
    causal = case.q.shape[1] > 1
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

    own = [{"k": jnp.array(case.k), "v": jnp.array(case.v)} for _ in subject.own]
    chain = Chain(run, jnp.asarray(case.q), own, rounds=effort.rounds)
    try:
        answer = np.asarray(chain.launch()[-1], np.float32)
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise NoPeer(_first_line(error)) from error
    _check(subject, answer)
    return time_launches(chain.launch, calls=chain.calls, effort=effort)


def time_torch(subject: Subject, effort: Effort) -> Timing:
    """Times `scaled_dot_product_attention`, or `index_copy_` for writes, in a CUDA graph where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        raise NoPeer("torch is not installed")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    build = _torch_write if subject.op == "page_write" else _torch_attention
    calls, answer = build(subject, device)
    calls *= effort.rounds

    def launch() -> list[Any]:
        return [call() for call in calls]

    try:
        launch()
    except RuntimeError as error:
        raise NoPeer(_first_line(error)) from error
    _check(subject, answer())
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


def _torch_attention(
    subject: Subject, device: str
) -> tuple[list[Callable[[], Any]], Callable[[], Any]]:
    """One call per copy of the keys, and the answer of the last."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    case = lay_out(subject)
    if case.window is not None:
        raise NoPeer("has no window for more than one query")
    q_len, seq_len = case.q.shape[1], case.k.shape[1]
    mask = causal_lower_right(q_len, seq_len) if 1 < q_len < seq_len else None

    def call(q: Any, k: Any, v: Any) -> Any:  # noqa: ANN401 - torch is optional
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=1 < q_len == seq_len,
            scale=case.scale,
            enable_gqa=True,
        )

    q = _tensor(case.q, device).transpose(1, 2)
    sets = [
        (q, *(_tensor(part, device).transpose(1, 2) for part in (case.k, case.v)))
        for _ in subject.own
    ]
    calls = [lambda arguments=arguments: call(*arguments) for arguments in sets]
    return calls, lambda: calls[-1]().transpose(1, 2).float().cpu().numpy()


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
        return [pool.view(torch.uint8).cpu().numpy() for pool in fresh]

    return [lambda where=where: call(where, pools) for where in slots], answer


def _check(subject: Subject, answer: Any) -> None:  # noqa: ANN401 - an array, or the bytes of pools
    if subject.op == "page_write":
        compare(answer, subject.expected, exact=True)
    else:
        wanted = subject.expected
        compare([answer.reshape(wanted.shape)], [wanted], tolerance=OUTPUT[subject.dtype])


PEERS: dict[str, Callable[[Subject, Effort], Timing]] = {
    "cudnn": time_cudnn,
    "torch": time_torch,
}
