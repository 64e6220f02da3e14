"""The contract of `ssd_scan`, signed by every implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ssd_scan
from pallas_kernels.inputs.nan_filled_states import Rows
from pallas_kernels.ssd_scan import mosaic_gpu, reference
from pallas_kernels.ssd_scan.cases import CASES, Case
from pallas_kernels.workbench.tolerances import OUTPUT
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import bits, call, cases, compared, compiled, implementations

SMALL = [case for case in CASES if case.ci]
every_implementation = implementations("xla", "mosaic_gpu")


def refusal(implementation, inputs):
    """Why an implementation refuses a case; plain XLA takes everything."""
    if implementation == "xla":
        return None
    return mosaic_gpu.why_not(inputs["states"], inputs["xbc"], chunk_size=inputs["chunk_size"])


# Sizes of kernels' blocks, which XLA has not.
@compared(SMALL, slow=("chunks-64", "wide", "large-state", "long"))
def test_it_equals_the_oracle(implementation, case, dtype):
    """The oracle is the sequential recurrence in float64. Unused places hold NaN."""
    inputs = case.inputs(1, dtype)
    state_oracle.assert_is_ssd(call(ssd_scan, refusal, inputs, implementation), inputs, dtype)


@cases(SMALL[:3])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    state_oracle.assert_is_ssd(compiled(reference.ssd_scan, inputs), inputs, "float32")


def kernel_case(rows, **changes):
    """A case that every implementation takes."""
    return Case("", rows, **{"heads": 2, "chunk_size": 64, **changes})


def parts_of(inputs, splits, op):
    """Runs each row up to its split, then from there on; returns each row's joined outputs and the pool."""
    bounds, states = inputs["cu_q_lens"], inputs["states"]
    read, joined = inputs["read_states"], [[] for _ in splits]
    done = np.zeros(len(splits), np.int32)
    begin = inputs["seq_lens"] - np.diff(bounds)
    for stops in (np.asarray(splits), np.diff(bounds)):
        spans = [
            slice(bounds[row] + done[row], bounds[row] + stops[row]) for row in range(len(splits))
        ]
        lengths = stops - done
        now = inputs | {
            **{n: np.concatenate([inputs[n][span] for span in spans]) for n in ("xbc", "dt")},
            "states": np.asarray(states),
            "cu_q_lens": np.cumsum([0, *lengths]).astype(np.int32),
            "seq_lens": (begin + stops).astype(np.int32),
            "read_states": read,
        }
        out, states = compiled(op, now)
        for row, part in enumerate(np.split(np.asarray(out), np.cumsum(lengths)[:-1])):
            joined[row].append(part)
        # A row of no tokens has not written its state yet.
        read = np.where(lengths > 0, inputs["write_states"], read).astype(np.int32)
        done = stops
    return [np.concatenate(parts) for parts in joined], np.asarray(states)


@every_implementation
def test_a_run_split_at_chunks_has_the_same_bits(implementation):
    """The grid of chunks is that of positions, and does not depend on where the parts begin in the packed tokens."""
    inputs = kernel_case(Rows((150, 200, 90), (0, 40, 64))).inputs(3)
    op = partial(ssd_scan, implementation=implementation)
    out, pool = compiled(op, inputs)
    joined, states = parts_of(inputs, [64, 88, 0], op)
    bounds = inputs["cu_q_lens"]
    for row, got in enumerate(joined):
        assert bits(got) == bits(np.asarray(out)[bounds[row] : bounds[row + 1]]), row
    written = inputs["write_states"]
    assert bits(states[written]) == bits(np.asarray(pool)[written])


# tests/models/families/test_hybrid_parity.py cuts prompts at such places too, and bounds how far the logits move.
@pytest.mark.slow
def test_other_splits_agree_to_rounding():
    """In float32 the difference is at most 1e-5."""
    inputs = Case("", Rows((50, 30), (3, 0)), 2, 8, 16, chunk_size=16).inputs(4, "float32")
    out, pool = compiled(ssd_scan, inputs)
    joined, states = parts_of(inputs, [7, 21], ssd_scan)
    np.testing.assert_allclose(np.concatenate(joined), out, rtol=1e-5, atol=1e-5)
    written = inputs["write_states"]
    np.testing.assert_allclose(states[written], pool[written], rtol=1e-5, atol=1e-5)


@every_implementation
def test_snapshots_are_the_states_that_a_run_up_to_there_ends_in(implementation):
    """Its bits are those of a run that ends at the snapshot."""
    inputs = kernel_case(Rows((200, 70), (64, 0), snapshots=True)).inputs(5)
    op = partial(ssd_scan, implementation=implementation)
    _, pool = compiled(op, inputs)
    first = inputs | {
        "xbc": np.concatenate([inputs["xbc"][:128], inputs["xbc"][200:264]]),
        "dt": np.concatenate([inputs["dt"][:128], inputs["dt"][200:264]]),
        "cu_q_lens": np.array([0, 128, 192], np.int32),
        "seq_lens": np.array([192, 64], np.int32),
    }
    _, ended = compiled(op, {name: v for name, v in first.items() if "snapshot" not in name})
    kept = dict(zip(inputs["snapshot_ends"], inputs["snapshot_states"], strict=True))
    for end, write in ((128, inputs["write_states"][0]), (264, inputs["write_states"][1])):
        assert bits(np.asarray(pool)[kept[end]]) == bits(np.asarray(ended)[write])


@every_implementation
def test_what_passes_the_state_by_is_rounded_once(implementation):
    """Steps of nothing leave the skip alone; a factor rounded beforehand would show where outputs nearly cancel."""
    inputs = kernel_case(Rows((70, 9), (5, 0))).inputs(9)
    inputs["dt_bias"] = np.full_like(inputs["dt_bias"], -100.0)
    inputs["states"] = np.zeros_like(inputs["states"])
    inputs["d"] = inputs["d"] + np.float32(np.e)
    heads, tokens = len(inputs["d"]), int(inputs["cu_q_lens"][-1])
    head_dim = inputs["states"].shape[2]
    x = inputs["xbc"][:tokens, : heads * head_dim].astype(np.float32)
    wanted = x.reshape(tokens, heads, head_dim) * inputs["d"][:, None]
    out, _ = compiled(partial(ssd_scan, implementation=implementation), inputs)
    np.testing.assert_array_equal(np.asarray(out)[:tokens], wanted.astype(inputs["xbc"].dtype))


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """The bits of a row do not depend on its neighbours or on its place among the tokens."""
    inputs = kernel_case(Rows((33, 2, 90), (4, 1, 0), padding_tokens=3)).inputs(6)
    op = partial(ssd_scan, implementation=implementation)
    out, pool = compiled(op, inputs)
    order = [2, 0, 1]
    tokens = np.split(np.arange(125), inputs["cu_q_lens"][1:3])
    moved = np.concatenate([tokens[row] for row in order])
    permuted = inputs | {
        **{name: inputs[name][np.append(moved, [125, 126, 127])] for name in ("xbc", "dt")},
        "cu_q_lens": np.cumsum([0, *(len(tokens[row]) for row in order)]).astype(np.int32),
        **{name: inputs[name][order] for name in ("seq_lens", "read_states", "write_states")},
    }
    again, pool_again = compiled(op, permuted)
    assert bits(np.asarray(out)[moved]) == bits(np.asarray(again)[:125])
    assert bits(pool) == bits(pool_again)


@every_implementation
def test_a_read_id_past_the_end_reads_zeros(implementation):
    inputs = kernel_case(Rows((5, 70), (0, 0))).inputs(7)
    op = partial(ssd_scan, implementation=implementation)
    far = inputs | {"read_states": np.array([2**31 - 1, len(inputs["states"])], np.int32)}
    for got, wanted in zip(compiled(op, far), compiled(op, inputs), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
def test_steps_of_any_size_stay_numbers(implementation):
    """Forgetting all, forgetting nothing, steps of 0 and of thousands."""
    inputs = kernel_case(Rows((130,), (0,))).inputs(8)
    rng = np.random.default_rng(0)
    inputs["dt"] = rng.choice([-1e4, -40.0, -8.0, 0.0, 30.0], inputs["dt"].shape).astype(
        inputs["dt"].dtype
    )
    inputs["a_log"] = np.array([-20.0, 4.0], np.float32)
    result = compiled(partial(ssd_scan, implementation=implementation), inputs)
    out, pool = (np.asarray(array).astype(np.float64) for array in result)
    wanted, wanted_pool = state_oracle.ssd(inputs)
    assert np.isfinite(out).all()
    scale = np.abs(wanted).max()
    assert np.abs(out - wanted).max() <= OUTPUT["bfloat16"] * scale
    used = inputs["write_states"]
    scale = np.abs(wanted_pool[used]).max()
    assert np.abs(pool[used] - wanted_pool[used]).max() <= OUTPUT["bfloat16"] * scale


@every_implementation
def test_a_donated_pool_is_written_in_place(implementation):
    """All bytes alias, and no copy is as large as the pool."""
    inputs = kernel_case(Rows((70, 9), (64, 0), snapshots=True)).inputs(9)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    states = jnp.zeros((999, *arrays.pop("states").shape[1:]), jnp.float32)

    def run(states, others):
        return ssd_scan(states=states, **others, chunk_size=64, implementation=implementation)

    program = jax.jit(run, donate_argnums=0).lower(states, arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == states.nbytes
    assert not re.search(r"= \w+\[999,2,64,128\]\S* copy\(", program.as_text())


def refused(message, **changes):
    good = Case("", Rows((3, 2), (4, 0)), 2, 8, 16, chunk_size=2).inputs(8, "float32")
    inputs = good | changes
    inputs["states"] = jnp.asarray(inputs["states"])
    with pytest.raises(ValueError, match=message):
        ssd_scan(**inputs)


def test_what_does_not_fit_is_refused_with_what_was_got(as_in_production):
    ids = partial(np.array, dtype=np.int32)
    refused(
        "row 1 reads state 3, which row 0 writes", read_states=ids([1, 3]), write_states=ids([3, 2])
    )
    refused("got 16 columns", xbc=np.zeros((5, 16), np.float32))
    refused("divides the heads, got 112 columns", xbc=np.zeros((5, 112), np.float32))
    refused(r"a_log must have shape \[2\]", a_log=np.zeros(3, np.float32))
    refused(r"dt must have shape \[5, 2\]", dt=np.zeros((4, 2), np.float32))
    refused(r"z must have shape \[5, 16\]", z=np.zeros((5, 2), np.float32))
    refused("dt must have a floating dtype, got int32", dt=np.zeros((5, 2), np.int32))
    refused("with 0 <= low <= high, got", dt_limits=(0.2, 0.1))
    refused("chunk_size must be at least 1, got 0", chunk_size=0)
    refused(r"seq_lens must have shape \[2\]", seq_lens=ids([1]))
    refused("rise from 0 to at most 5", cu_q_lens=ids([1, 3, 5]))
