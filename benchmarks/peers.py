"""Peers of the ops: cuDNN, torch and flash-linear-attention on contiguous tensors of the same sizes, in the same run.

A peer that does not support a case raises `NoPeer` with the reason. A wrong result raises, as for jaxkv's own
implementations.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fla_calls, torch_calls
from benchmarks.contiguous import NoPeer, in_order, lay_out
from benchmarks.timing import Chain, Effort, Timing, time_chain, time_launches
from pallas_kernels.workbench.op_benchmark import KINDS, BenchInputs

__all__ = ["PEERS", "NoPeer", "time_cudnn", "time_fla", "time_torch"]

_HALF = ("bfloat16", "float16")
_ATTENTION = ("paged_attention", "ragged_attention", "latent_attention")


def time_cudnn(bench: BenchInputs, effort: Effort) -> Timing:
    """Times cuDNN's fused attention through JAX."""
    if bench.op not in _ATTENTION:
        raise NoPeer("attends to contiguous keys, and nothing else")
    if jax.default_backend() != "gpu" or bench.dtype not in _HALF:
        raise NoPeer("needs an NVIDIA GPU and bfloat16 or float16")
    cases = lay_out(bench)
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
    own = [first, *(jax.tree.map(jnp.copy, first) for _ in bench.own[1:])]
    chain = Chain(run, jnp.asarray(case.q), own)
    try:
        answer = np.asarray(chain.launch()[-1])
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise NoPeer(_first_line(error)) from error
    bench.compare([in_order(bench, cases, [answer])])
    return time_chain(chain, effort)


def time_torch(bench: BenchInputs, effort: Effort) -> Timing:
    """Times the op in plain torch (see `torch_calls.py`); on a GPU in a CUDA graph."""
    if importlib.util.find_spec("torch") is None:
        raise NoPeer("torch is not installed")
    if bench.op == "rotary_write":
        raise NoPeer("does not rotate and write in one call")
    if KINDS[bench.op].pool == "states":
        raise NoPeer("has no op that carries such states")
    if bench.op == "gathered_matmul":
        raise NoPeer("copies the matrices before it multiplies them")
    if bench.op == "group_rows":
        raise NoPeer("sorts, sums and gathers in separate calls")
    if bench.op in _ATTENTION:
        return _time_calls(bench, torch_calls.attention(lay_out(bench), bench), effort)
    return _time_calls(bench, torch_calls.BUILDERS[bench.op](bench), effort)


def time_fla(bench: BenchInputs, effort: Effort) -> Timing:
    """Times the gated delta rule of flash-linear-attention (see `fla_calls.py`); on a GPU in a CUDA graph."""
    calls, answer = fla_calls.delta(bench, fla_calls.load(bench.op))
    try:
        calls[-1]()
    except (AssertionError, TypeError, ValueError) as error:
        raise NoPeer(_first_line(error)) from error
    return _time_calls(bench, (calls, answer), effort)


def _time_calls(bench: BenchInputs, made: torch_calls.Calls, effort: Effort) -> Timing:
    """Times calls of torch functions after comparing the result of the last one."""
    import torch

    calls, answer = made
    calls *= effort.rounds

    def launch() -> list[Any]:
        return [call() for call in calls]

    try:
        launch()
    except RuntimeError as error:
        raise NoPeer(_first_line(error)) from error
    bench.compare(answer())
    if not torch.cuda.is_available():
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


PEERS: dict[str, Callable[[BenchInputs, Effort], Timing]] = {
    "cudnn-contiguous": time_cudnn,
    "torch": time_torch,
    "fla": time_fla,
}
