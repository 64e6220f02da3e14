"""The contract of `delta_scan`, signed by every implementation. `test_recurrent_scans.py` has what other scans sign."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import delta_scan
from pallas_kernels.arguments.delta import DeltaArrays
from pallas_kernels.delta_scan import mosaic_gpu
from pallas_kernels.delta_scan.cases import CASES, Case
from pallas_kernels.inputs.delta_layer import DeltaShape
from pallas_kernels.inputs.nan_filled_states import Rows
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import bits, call, compared, compiled, implementations

SMALL = [case for case in CASES if case.ci]
SHAPE = DeltaShape(1, 2, 128, 128)
every_implementation = implementations("xla", "mosaic_gpu")


def refusal(implementation, inputs):
    """Why an implementation refuses a case; plain XLA takes everything."""
    if implementation == "xla":
        return None
    layer = DeltaArrays(*(inputs[name] for name in DeltaArrays._fields))
    sizes = {"chunk_size": inputs["chunk_size"]}
    return layer.refusal() or mosaic_gpu.why_not(layer.states, layer.qkv, **sizes)


# Sizes of kernels' blocks, which XLA has not; keys are shared by values in the first case too.
@compared(SMALL, slow=("chunks-64", "narrow", "shared-keys"))
def test_it_equals_the_oracle(implementation, case, dtype):
    """The oracle is the sequential recurrence in float64. Unused places hold NaN."""
    inputs = case.inputs(1, dtype)
    state_oracle.assert_is_delta(call(delta_scan, refusal, inputs, implementation), inputs, dtype)


def parts_of(inputs, splits, op):
    """Runs each row up to its split, then from there on; returns each row's joined outputs and the pool."""
    bounds, states = inputs["cu_q_lens"], inputs["states"]
    lengths, joined = np.diff(bounds), [[] for _ in splits]
    begin, read, done = inputs["seq_lens"] - lengths, inputs["read_states"], np.zeros_like(splits)
    for stops in (splits, lengths):
        spans = [slice(bounds[r] + done[r], bounds[r] + stops[r]) for r in range(len(splits))]
        tokens = np.cumsum([0, *(stops - done)])
        now = inputs | {
            **{n: np.concatenate([inputs[n][s] for s in spans]) for n in ("qkv", "a", "b")},
            "states": np.asarray(states),
            "cu_q_lens": tokens.astype(np.int32),
            "seq_lens": (begin + stops).astype(np.int32),
            "read_states": read,
        }
        out, states = compiled(op, now)
        for row, part in enumerate(np.split(np.asarray(out), tokens[1:-1])):
            joined[row].append(part)
        # A row of no tokens has not written its state yet.
        read = np.where(stops > done, inputs["write_states"], read).astype(np.int32)
        done = stops
    return [np.concatenate(parts) for parts in joined], np.asarray(states)


@every_implementation
def test_a_run_split_at_chunks_has_the_same_bits(implementation):
    """The grid of chunks is that of positions, and does not depend on where the parts begin in the packed tokens."""
    inputs = Case("", Rows((150, 200, 90), (0, 40, 64)), SHAPE).inputs(3)
    op = partial(delta_scan, implementation=implementation)
    out, pool = compiled(op, inputs)
    joined, states = parts_of(inputs, np.array([64, 88, 0]), op)
    bounds = inputs["cu_q_lens"]
    for row, got in enumerate(joined):
        assert bits(got) == bits(np.asarray(out)[bounds[row] : bounds[row + 1]]), row
    written = inputs["write_states"]
    assert bits(states[written]) == bits(np.asarray(pool)[written])


# The states of the first case, above, have snapshots too.
@implementations("xla", "mosaic_gpu", slow=("xla",))
def test_snapshots_are_the_states_that_a_run_up_to_there_ends_in(implementation):
    """Its bits are those of a run that ends at the snapshot."""
    inputs = Case("", Rows((200, 70), (64, 0), snapshots=True), SHAPE).inputs(5)
    op = partial(delta_scan, implementation=implementation)
    _, pool = compiled(op, inputs)
    tokens = np.r_[:128, 200:264]
    first = inputs | {
        **{name: inputs[name][tokens] for name in ("qkv", "a", "b")},
        "cu_q_lens": np.array([0, 128, 192], np.int32),
        "seq_lens": np.array([192, 64], np.int32),
    }
    _, ended = compiled(op, {name: v for name, v in first.items() if "snapshot" not in name})
    kept = dict(zip(inputs["snapshot_ends"], inputs["snapshot_states"], strict=True))
    for end, write in ((128, inputs["write_states"][0]), (264, inputs["write_states"][1])):
        assert bits(np.asarray(pool)[kept[end]]) == bits(np.asarray(ended)[write])


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """The bits of a row do not depend on its neighbours or on its place among the tokens."""
    inputs = Case("", Rows((33, 2, 90), (4, 1, 0), padding_tokens=3), SHAPE).inputs(6)
    op = partial(delta_scan, implementation=implementation)
    out, pool = compiled(op, inputs)
    order = [2, 0, 1]
    tokens = np.split(np.arange(125), inputs["cu_q_lens"][1:3])
    moved = np.concatenate([tokens[row] for row in order])
    permuted = inputs | {
        **{name: inputs[name][np.append(moved, [125, 126, 127])] for name in ("qkv", "a", "b")},
        "cu_q_lens": np.cumsum([0, *(len(tokens[row]) for row in order)]).astype(np.int32),
        **{name: inputs[name][order] for name in ("seq_lens", "read_states", "write_states")},
    }
    again, pool_again = compiled(op, permuted)
    assert bits(np.asarray(out)[moved]) == bits(np.asarray(again)[:125])
    assert bits(pool) == bits(pool_again)


@every_implementation
def test_a_read_id_past_the_end_reads_zeros(implementation):
    inputs = Case("", Rows((5, 70), (0, 0)), SHAPE).inputs(7)
    op = partial(delta_scan, implementation=implementation)
    far = inputs | {"read_states": np.array([2**31 - 1, len(inputs["states"])], np.int32)}
    for got, wanted in zip(compiled(op, far), compiled(op, inputs), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
def test_gates_of_any_size_stay_numbers(implementation):
    """Forgetting all and nothing, steps of 0 and of thousands, corrections of 0 and 1, keys and queries of zeros."""
    inputs = Case("", Rows((130,)), SHAPE).inputs(8)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        drawn = rng.choice([-1e4, -40.0, -8.0, 0.0, 30.0], inputs[name].shape)
        inputs[name] = drawn.astype(inputs[name].dtype)
    inputs["a_log"] = np.array([-20.0, 4.0], np.float32)
    inputs["qkv"][::7, :256] = 0
    result = compiled(partial(delta_scan, implementation=implementation), inputs)
    state_oracle.assert_is_delta(result, inputs, "bfloat16")


# test_delta.py has it of XLA in float32.
@implementations("xla", "mosaic_gpu", slow=("xla",))
def test_equal_keys_that_are_corrected_fully_keep_a_chunk_exact(implementation):
    """Every token corrects the one before it, and nothing is forgotten: the system's worst case."""
    inputs = Case("", Rows((128,)), SHAPE).inputs(9)
    inputs["qkv"][:, 128:256] = 1.0
    inputs["a"][:], inputs["b"][:] = -30.0, 30.0
    result = compiled(partial(delta_scan, implementation=implementation), inputs)
    state_oracle.assert_is_delta(result, inputs, "bfloat16")


@every_implementation
def test_a_donated_pool_is_written_in_place(implementation):
    """All bytes alias, and no copy is as large as the pool."""
    inputs = Case("", Rows((70, 9), (64, 0), snapshots=True), SHAPE).inputs(9)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    states = jnp.zeros((999, *arrays.pop("states").shape[1:]), jnp.float32)

    def run(states, others):
        return delta_scan(states=states, **others, chunk_size=64, implementation=implementation)

    program = jax.jit(run, donate_argnums=0).lower(states, arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == states.nbytes
    assert not re.search(r"= \w+\[999,2,128,128\]\S* copy\(", program.as_text())
