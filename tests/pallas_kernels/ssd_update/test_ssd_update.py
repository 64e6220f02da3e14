"""The contract of `ssd_update`, signed by every implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ssd_scan, ssd_update
from pallas_kernels.inputs.nan_filled_states import Rows
from pallas_kernels.ssd_scan import cases as scan_cases
from pallas_kernels.ssd_update import reference
from pallas_kernels.ssd_update.cases import CASES, Case
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import bits, cases, compared, compiled, implementations

SMALL = [case for case in CASES if case.ci]
every_implementation = implementations("xla", "mosaic_gpu")


@compared(SMALL)
def test_it_equals_the_oracle(implementation, case, dtype):
    """Padding rows give zeros and write nothing. Unused places hold NaN."""
    inputs = case.inputs(1, dtype)
    result = compiled(partial(ssd_update, implementation=implementation), inputs)
    state_oracle.assert_is_ssd(result, inputs, dtype)
    padding = inputs["write_states"] >= len(inputs["states"])
    assert not np.asarray(result[0])[padding].any()


@cases(SMALL[:2])
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    state_oracle.assert_is_ssd(compiled(reference.ssd_update, inputs), inputs, "float32")


def test_steps_equal_a_scan_of_the_same_tokens():
    """A state stepped token by token against one scanned: 1e-5 in float32, outputs and state."""
    case = scan_cases.Case("", Rows((21, 21), (0, 5)), 4, 8, 16, groups=2, chunk_size=8, gated=True)
    inputs = case.inputs(3, "float32")
    out, pool = compiled(ssd_scan, inputs)
    tables = {name: inputs[name] for name in ("read_states", "write_states")}
    layer = {name: inputs[name] for name in ("a_log", "d", "dt_bias")}
    update = jax.jit(partial(ssd_update, **layer))
    states, outs = inputs["states"], []
    for step in range(21):
        token = np.array([step, 21 + step])
        now = {name: inputs[name][token] for name in ("xbc", "dt", "z")}
        got, states = update(**now, **tables, states=states)
        outs.append(got)
        tables["read_states"] = inputs["write_states"]
    np.testing.assert_allclose(np.concatenate(np.stack(outs, 1)), out, rtol=1e-5, atol=1e-5)
    written = inputs["write_states"]
    np.testing.assert_allclose(states[written], pool[written], rtol=1e-5, atol=1e-5)


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    inputs = Case("", 5, 2, 64, 128, groups=1).inputs(4)
    op = partial(ssd_update, implementation=implementation)
    out, pool = compiled(op, inputs)
    order = np.array([3, 0, 4, 2, 1])
    names = ("xbc", "dt", "read_states", "write_states")
    again, pool_again = compiled(op, inputs | {name: inputs[name][order] for name in names})
    assert bits(np.asarray(out)[order]) == bits(again)
    assert bits(pool) == bits(pool_again)


@every_implementation
def test_a_read_id_past_the_end_reads_zeros(implementation):
    inputs = Case("", 2, 2, 64, 128, groups=1).inputs(5)
    op = partial(ssd_update, implementation=implementation)
    zero = inputs | {"read_states": np.zeros(2, np.int32)}
    far = inputs | {"read_states": np.array([2**31 - 1, len(inputs["states"])], np.int32)}
    for got, wanted in zip(compiled(op, far), compiled(op, zero), strict=True):
        assert bits(got) == bits(wanted)


@every_implementation
def test_a_donated_pool_is_written_in_place(implementation):
    """All bytes alias, and no copy is as large as the pool."""
    inputs = Case("", 4, 2, 64, 128, groups=1).inputs(6)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    states = jnp.zeros((999, *arrays.pop("states").shape[1:]), jnp.float32)

    def run(states, others):
        return ssd_update(states=states, **others, implementation=implementation)

    program = jax.jit(run, donate_argnums=0).lower(states, arrays).compile()
    assert program.memory_analysis().alias_size_in_bytes == states.nbytes
    assert not re.search(r"= \w+\[999,2,64,128\]\S* copy\(", program.as_text())


def test_what_does_not_fit_is_refused_with_what_was_got(as_in_production):
    """These are the op's own tables; the checks that it shares with `ssd_scan` are tested there."""
    good = Case("", 2, 2, 8, 16, groups=1).inputs(7, "float32")
    good["states"] = jnp.asarray(good["states"])
    ids = partial(np.array, dtype=np.int32)
    with pytest.raises(ValueError, match="row 0 reads state 2, which row 1 writes"):
        ssd_update(**good | {"read_states": ids([2, 0]), "write_states": ids([1, 2])})
    with pytest.raises(ValueError, match=r"read_states must have shape \[2\]"):
        ssd_update(**good | {"read_states": ids([1]), "write_states": ids([1])})
