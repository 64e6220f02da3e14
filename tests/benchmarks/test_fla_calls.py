"""flash-linear-attention gets the numbers of our cases: a recurrence with its arguments gives the right result."""

import sys
from functools import partial

import pytest

from benchmarks import fla_calls, ops
from pallas_kernels.delta_scan.cases import Case as Scan
from pallas_kernels.delta_update.cases import Case as Update
from pallas_kernels.inputs.delta_layer import DeltaShape
from pallas_kernels.inputs.nan_filled_states import Rows
from tests.fast_cases import fast_cases

pytestmark = pytest.mark.torch
SHAPE = DeltaShape(2, 4, 8, 16)
CASES = {
    "delta_scan": Scan("rows", Rows((5, 1, 9), (0, 7, 64)), SHAPE),
    "delta_update": Update("rows", 7, SHAPE),
}


def recurrence(q, k, v, *, g, beta, initial_state, cu_seqlens, A_log, dt_bias, wrong=1.0, **flags):
    """The rule in float64, token by token; as fla, over a batch of equal rows or over packed rows with bounds."""
    import torch

    assert set(flags.values()) == {True}
    # fla would copy others while it is timed.
    assert all(one.is_contiguous() for one in (q, k, v, g, beta, initial_state))
    assert {q.dtype, k.dtype, v.dtype} == {v.dtype}
    q, k, v, g, beta, state = (one.double() for one in (q, k, v, g, beta, initial_state.clone()))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    shared = v.shape[2] // q.shape[2]
    q, k = (one.repeat_interleave(shared, 2) for one in (q * q.shape[-1] ** -0.5, k))
    decay = (-A_log.exp() * torch.nn.functional.softplus(g + dt_bias)).exp()
    bounds = cu_seqlens.tolist() if cu_seqlens is not None else [0, v.shape[1]]
    out = torch.zeros_like(v)
    for row in range(len(state)):
        batch, begin = (0, row) if cu_seqlens is not None else (row, 0)
        for token in range(bounds[begin], bounds[begin + 1]):
            at = batch, token
            held = state[row] * decay[at][:, None, None]
            known = torch.einsum("hk,hkv->hv", k[at], held)
            change = beta[at].sigmoid()[:, None] * (v[at] - known)
            state[row] = held + torch.einsum("hk,hv->hkv", k[at], change)
            out[at] = torch.einsum("hk,hkv->hv", q[at], state[row]) * wrong
    return out.to(initial_state.dtype), state.to(initial_state.dtype)


def measure(op, case, chosen=("xla",)):
    rows = ops.measure(op, case, dtype="float32", chosen=chosen, seconds=0.001)
    return {row["implementation"]: row for row in rows}


# A benchmark itself compares the results, as the test of a wrong one shows.
@pytest.mark.parametrize("op", fast_cases(CASES, "delta_update"))
def test_it_is_called_with_the_numbers_of_the_case(op, monkeypatch):
    monkeypatch.setattr(fla_calls, "load", lambda op: recurrence)
    rows = measure(op, CASES[op])
    assert rows["fla"]["refused"] is None
    assert rows["xla"]["peer"] == "fla"


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(fla_calls, "load", lambda op: partial(recurrence, wrong=1.1))
    row = measure("delta_update", CASES["delta_update"])["fla"]
    assert row["us"] is None
    assert row["refused"].startswith("WRONG")


@pytest.mark.parametrize(
    ("op", "case", "reason"),
    [
        ("delta_update", Update("padded", 2, SHAPE, padding_rows=1), "without padding"),
        ("delta_update", Update("half", 2, SHAPE, state_dtype="bfloat16"), "float32"),
        ("delta_scan", Scan("kept", Rows((64,), snapshots=True), SHAPE), "within a row"),
    ],
)
def test_it_says_which_cases_it_does_not_take(op, case, reason, monkeypatch):
    monkeypatch.setattr(fla_calls, "load", lambda op: recurrence)
    assert reason in measure(op, case, chosen=())["fla"]["refused"]


def test_it_is_told_if_there_is_no_function_to_call(monkeypatch):
    with pytest.raises(fla_calls.NoPeer, match="gated delta rule alone"):
        fla_calls.load("ssd_scan")
    # An entry of `None` makes an import fail, whether the package is there or not.
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(fla_calls.NoPeer, match="cannot be imported"):
        fla_calls.load("delta_scan")
