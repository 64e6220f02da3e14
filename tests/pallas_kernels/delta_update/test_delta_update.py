"""The contract of `delta_update`, signed by every implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_update
from pallas_kernels.arguments.delta import DeltaArrays
from pallas_kernels.delta_update import mosaic_gpu, reference
from pallas_kernels.delta_update.cases import CASES, Case
from pallas_kernels.inputs.delta_layer import DeltaShape
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import bits, call, cases, compared, compiled, implementations

SMALL = [case for case in CASES if case.ci]
SHAPE = DeltaShape(1, 2, 128, 128)
every_implementation = implementations("xla", "mosaic_gpu")


def refusal(implementation, inputs):
    """Why an implementation refuses a case; plain XLA takes everything."""
    if implementation == "xla":
        return None
    layer = DeltaArrays(*(inputs[name] for name in DeltaArrays._fields))
    return layer.refusal() or mosaic_gpu.why_not(layer.states, layer.qkv)


@compared(SMALL)
def test_it_equals_the_oracle(implementation, case, dtype):
    """Padding rows give zeros and write nothing. Unused places hold NaN."""
    inputs = case.inputs(1, dtype)
    result = call(delta_update, refusal, inputs, implementation)
    state_oracle.assert_is_delta(result, inputs, dtype)
    padding = inputs["write_states"] >= len(inputs["states"])
    assert not np.asarray(result[0])[padding].any()


@cases([*SMALL[:2], SMALL[-1]])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    state_oracle.assert_is_delta(compiled(reference.delta_update, inputs), inputs, "float32")


@every_implementation
def test_gates_of_any_size_stay_numbers(implementation):
    """Forgetting all and nothing, steps of 0 and of thousands, corrections of 0 and 1, keys and queries of zeros."""
    inputs = Case("", 12, SHAPE).inputs(8, "float32")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        inputs[name] = rng.choice([-1e4, -40.0, 0.0, 30.0, 1e4], (12, 2)).astype(np.float32)
    inputs["a_log"] = np.array([-20.0, 4.0], np.float32)
    inputs["qkv"][::3, :256] = 0
    result = compiled(partial(delta_update, implementation=implementation), inputs)
    state_oracle.assert_is_delta(result, inputs, "float32")


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    inputs = Case("", 5, SHAPE).inputs(4)
    op = partial(delta_update, implementation=implementation)
    out, pool = compiled(op, inputs)
    order = np.array([3, 0, 4, 2, 1])
    names = ("qkv", "a", "b", "read_states", "write_states")
    again, pool_again = compiled(op, inputs | {name: inputs[name][order] for name in names})
    assert bits(np.asarray(out)[order]) == bits(again)
    assert bits(pool) == bits(pool_again)


@every_implementation
def test_rows_may_begin_with_the_same_state(implementation):
    inputs = Case("", 4, SHAPE).inputs(9, "float32")
    inputs["read_states"][2] = inputs["read_states"][3]
    result = compiled(partial(delta_update, implementation=implementation), inputs)
    state_oracle.assert_is_delta(result, inputs, "float32")


@every_implementation
def test_a_read_id_past_the_end_reads_zeros(implementation):
    inputs = Case("", 2, SHAPE).inputs(5)
    op = partial(delta_update, implementation=implementation)
    zero = inputs | {"read_states": np.zeros(2, np.int32)}
    far = inputs | {"read_states": np.array([2**31 - 1, len(inputs["states"])], np.int32)}
    for got, wanted in zip(compiled(op, far), compiled(op, zero), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
def test_a_donated_pool_is_written_in_place(implementation):
    """All bytes alias, and no copy is as large as the pool."""
    inputs = Case("", 4, SHAPE).inputs(6)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    states = jnp.zeros((999, *arrays.pop("states").shape[1:]), jnp.float32)

    def run(states, others):
        return delta_update(states=states, **others, implementation=implementation)

    program = jax.jit(run, donate_argnums=0).lower(states, arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == states.nbytes
    assert not re.search(r"= \w+\[999,2,128,128\]\S* copy\(", program.as_text())


def test_what_does_not_fit_is_refused_with_what_was_got(as_in_production):
    """These are the op's own tables; the checks that it shares with `delta_scan` are tested there."""
    good = Case("", 2, SHAPE).inputs(7, "float32")
    good["states"] = jnp.asarray(good["states"])
    ids = partial(np.array, dtype=np.int32)
    with pytest.raises(ValueError, match="row 0 reads state 2, which row 1 writes"):
        delta_update(**good | {"read_states": ids([2, 0]), "write_states": ids([1, 2])})
    with pytest.raises(ValueError, match=r"read_states must have shape \[2\]"):
        delta_update(**good | {"read_states": ids([1]), "write_states": ids([1])})
