"""The gated delta rule by flash-linear-attention (`fla`): calls over rotating memory, and the result of the last call.

Its Triton kernels get contiguous queries, keys, values and initial states, which an engine would have to copy out of
the convolution's result and the pool of states; these copies are not timed.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.contiguous import NoPeer
from benchmarks.torch_calls import Calls, to_tensor
from pallas_kernels.workbench.op_benchmark import BenchInputs

FUNCTIONS = {
    "delta_scan": "chunk_gated_delta_rule",
    "delta_update": "fused_recurrent_gated_delta_rule",
}
"""Op -> the function of `fla.ops.gated_delta_rule` that does its work."""


def load(op: str) -> Callable[..., Any]:
    """Returns fla's function for an op; raises `NoPeer` if there is none or fla cannot be imported."""
    if op not in FUNCTIONS:
        raise NoPeer("is timed for the gated delta rule alone")
    try:
        return getattr(import_module("fla.ops.gated_delta_rule"), FUNCTIONS[op])
    except (ImportError, AttributeError) as error:
        raise NoPeer(f"cannot be imported: {error}") from error


def delta(bench: BenchInputs, function: Callable[..., Any]) -> Calls:
    """Returns calls of one of fla's functions on the rows of a case.

    Args:
        bench: the inputs of `delta_scan` or `delta_update`.
        function: fla's function for the op, or one that takes its arguments.

    Raises:
        NoPeer: the case has padding, snapshots, or states that are not float32.
    """
    inputs = bench.inputs
    rows = len(inputs["read_states"])
    bounds = inputs.get("cu_q_lens", np.arange(rows + 1))
    if inputs["states"].dtype != np.float32:
        raise NoPeer("writes states in float32 alone")
    if len(inputs.get("snapshot_ends", ())):
        raise NoPeer("returns no state from within a row")
    is_padded = bounds[-1] != len(inputs["qkv"]) or not np.diff(bounds).all()
    if is_padded or (inputs["write_states"] >= len(inputs["states"])).any():
        raise NoPeer("needs rows that have tokens, without padding")

    heads, key_dim, value_dim = inputs["states"].shape[1:]
    total, wide = inputs["qkv"].shape
    keys = (wide - heads * value_dim) // 2
    q, k, v = np.split(inputs["qkv"], (keys, 2 * keys), axis=1)
    tokens = [part.reshape(total, -1, key_dim) for part in (q, k)]
    tokens += [v.reshape(total, heads, value_dim), inputs["a"], inputs["b"]]
    batched = bench.op == "delta_update"
    # One row of all tokens with bounds, or a row for each token.
    first = [to_tensor(one)[:, None] if batched else to_tensor(one)[None] for one in tokens]
    first.append(to_tensor(_initial_states(inputs)))
    options = {
        "cu_seqlens": None if batched else to_tensor(bounds.astype(np.int64)),
        "A_log": to_tensor(inputs["a_log"].astype(np.float32)),
        "dt_bias": to_tensor(inputs["dt_bias"].astype(np.float32)),
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }

    def call(q: Any, k: Any, v: Any, a: Any, b: Any, state: Any) -> Any:  # noqa: ANN401 - torch is optional
        return function(q, k, v, g=a, beta=b, initial_state=state, **options)

    copies = [first, *([one.clone() for one in first] for _ in bench.own[1:])]
    calls = [partial(call, *own) for own in copies]

    def answer() -> list[np.ndarray]:
        out, states = calls[-1]()
        return [out.reshape(total, heads, value_dim).float().cpu().numpy(), states.cpu().numpy()]

    return calls, answer


def _initial_states(inputs: Any) -> np.ndarray:  # noqa: ANN401 - arrays by name
    """Returns the state that each row begins with; zeros where it begins a sequence."""
    states, ids = inputs["states"], inputs["read_states"]
    begins = ids >= len(states)
    found = states[np.where(begins, 0, ids)]
    return np.where(begins[:, None, None, None], np.float32(0), found)
