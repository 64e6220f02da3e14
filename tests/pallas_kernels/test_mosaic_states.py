"""The Mosaic GPU kernels with recurrent states themselves: interpreted, and lowered without a GPU.

What they share with other implementations is tested in the ops' own suites.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.arguments.delta import DeltaArrays
from pallas_kernels.arguments.ssd import Sizes, SsdArrays
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.causal_conv import cases as conv_cases
from pallas_kernels.causal_conv import mosaic_gpu as conv
from pallas_kernels.causal_conv.arguments import ConvArrays
from pallas_kernels.delta_scan import cases as delta_scan_cases
from pallas_kernels.delta_scan import mosaic_gpu as delta_scan
from pallas_kernels.delta_update import cases as delta_update_cases
from pallas_kernels.delta_update import mosaic_gpu as delta_update
from pallas_kernels.device import NEWEST_JAX, gpu_arch
from pallas_kernels.inputs.delta_layer import DeltaShape
from pallas_kernels.inputs.nan_filled_states import Rows
from pallas_kernels.ssd_scan import cases as scan_cases
from pallas_kernels.ssd_scan import mosaic_gpu as scan
from pallas_kernels.ssd_scan.mosaic_schedule import Geometry, Schedule
from pallas_kernels.ssd_update import cases as update_cases
from pallas_kernels.ssd_update import mosaic_gpu as update
from pallas_kernels.workbench.tolerances import OUTPUT
from tests.fast_cases import fast_cases
from tests.pallas_kernels import state_oracle
from tests.pallas_kernels.contract import device, grouped

CONV = {case.name: case for case in conv_cases.CASES}
SCAN = {case.name: case for case in scan_cases.CASES}
UPDATE = {case.name: case for case in update_cases.CASES}
DELTA_SCAN = {case.name: case for case in delta_scan_cases.CASES}
DELTA_UPDATE = {case.name: case for case in delta_update_cases.CASES}
KERNELS = {
    "causal_conv": conv,
    "ssd_scan": scan,
    "ssd_update": update,
    "delta_scan": delta_scan,
    "delta_update": delta_update,
}
GROUPS = {
    "causal_conv": (ConvArrays,),
    "ssd_scan": (SsdArrays, StateTables),
    "ssd_update": (SsdArrays,),
    "delta_scan": (DeltaArrays, StateTables),
    "delta_update": (DeltaArrays,),
}
on_this_jax = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
)


@pytest.mark.parametrize(
    "name",
    [
        "mixed",
        # One token each, which `mixed` has among others.
        pytest.param("decode-padding", marks=pytest.mark.slow),
        pytest.param("carries", marks=pytest.mark.slow),
        pytest.param("five-taps", marks=pytest.mark.slow),
    ],
)
def test_interpreted_the_convolution_equals_the_oracle_without_a_race(name, races):
    """States are read before they are written; ids below 0 count as ids past the end."""
    inputs = CONV[name].inputs(1)
    inputs["write_states"][-1] = -1
    if "cu_q_lens" not in inputs:
        inputs["read_states"][0] = -1
    expected = inputs | {
        table: np.where(inputs[table] < 0, len(inputs["states"]), inputs[table])
        for table in ("read_states", "write_states")
    }
    (arrays,), options = grouped(device(inputs), *GROUPS["causal_conv"])
    out, pool = conv.causal_conv(arrays, **options, interpret=True)
    wanted, wanted_pool = state_oracle.causal_conv(expected)
    tolerance = OUTPUT["bfloat16"]
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), wanted, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_array_equal(np.asarray(pool).astype(np.float64), wanted_pool)
    assert not races()


# Groups are in the gated one too.
@pytest.mark.parametrize("name", fast_cases(["groups", "gated", "rounded"], "gated", "rounded"))
def test_interpreted_the_update_equals_the_oracle_without_a_race(name, races):
    inputs = UPDATE[name].inputs(2, "float32")
    inputs["read_states"][0] = -1
    far = np.where(inputs["read_states"] < 0, len(inputs["states"]), inputs["read_states"])
    (layer,), others = grouped(device(inputs), *GROUPS["ssd_update"])
    result = update.ssd_update(layer, **others, interpret=True)
    state_oracle.assert_is_ssd(result, inputs | {"read_states": far}, "float32")
    assert not races()


@pytest.mark.parametrize("name", ["shared-keys", "rounded", "eight-rows"])
def test_interpreted_the_delta_update_equals_the_oracle_without_a_race(name, races):
    """Gates forget all and nothing, correct fully and not at all; a key may be zero."""
    inputs = DELTA_UPDATE[name].inputs(2, "float32")
    inputs["qkv"][1] = 0
    inputs["read_states"][0] = -1
    gates = np.random.default_rng(2).choice([-1e4, -3.0, 0.5, 1e4], (2, *inputs["a"].shape))
    inputs["a"][:2], inputs["b"][:2] = gates[:, :2].astype(np.float32)
    far = np.where(inputs["read_states"] < 0, len(inputs["states"]), inputs["read_states"])
    (layer,), others = grouped(device(inputs), *GROUPS["delta_update"])
    result = delta_update.delta_update(layer, **others, interpret=True)
    state_oracle.assert_is_delta(result, inputs | {"read_states": far}, "float32")
    assert not races()


SMALL_DELTA_SCAN = delta_scan_cases.Case(
    "", Rows((200, 3), (0, 62), 1, 5, snapshots=True), DeltaShape(1, 1, 64, 64), ci=True
)


def interpreted_delta_scan(inputs):
    arrays, options = grouped(device(inputs), *GROUPS["delta_scan"])
    return delta_scan.delta_scan(*arrays, **options, interpret=True)


def test_interpreted_the_delta_scan_equals_the_oracle_without_a_race(races):
    """Rows begin inside a chunk and pass its end, with snapshots and padding; gates are of all sizes."""
    inputs = SMALL_DELTA_SCAN.inputs(3)
    gates = np.random.default_rng(3).choice([-1e4, -3.0, 0.5, 1e6], (2, 40, 1))
    inputs["a"][20:60], inputs["b"][20:60] = gates.astype(inputs["a"].dtype)
    inputs["qkv"][7] = 0
    inputs["states"][0], inputs["read_states"][0] = 7.0, -1
    result = interpreted_delta_scan(inputs)
    inputs["read_states"][0] = len(inputs["states"])
    state_oracle.assert_is_delta(result, inputs, "bfloat16")
    assert not races()


# XLA keeps them exact in tests/pallas_kernels/delta_scan; the test above has gates that correct fully.
@pytest.mark.slow
def test_interpreted_equal_keys_that_are_corrected_fully_keep_a_piece_exact(races):
    """Every token corrects the one before it, and nothing is forgotten: the system's worst case."""
    case = replace(SMALL_DELTA_SCAN, rows=Rows((64,)))
    inputs = case.inputs(4)
    inputs["qkv"][:, 64:128] = 1.0
    inputs["a"][:], inputs["b"][:] = -30.0, 30.0
    state_oracle.assert_is_delta(interpreted_delta_scan(inputs), inputs, "bfloat16")
    assert not races()


@pytest.mark.slow
def test_interpreted_a_delta_scan_that_is_split_at_a_chunk_has_the_same_bits():
    """The second part begins elsewhere among the packed tokens."""
    rows = Rows((64, 33, 5), (0, 0, 3))
    inputs = replace(SMALL_DELTA_SCAN, rows=rows).inputs(5)
    inputs["cu_q_lens"] = np.array([0, 97, 97, 102], np.int32)
    inputs["seq_lens"] = np.array([97, 0, 8], np.int32)
    out, pool = interpreted_delta_scan(inputs)
    write = inputs["write_states"]
    parts = [(np.r_[:64, 97:102], [0, 64, 64, 69], [64, 0, 8], inputs["read_states"])]
    parts += [(np.r_[97:102, 64:97], [0, 5, 5, 38], [8, 0, 97], write[[2, 1, 0]])]
    first, second = (
        inputs
        | {name: inputs[name][tokens] for name in ("qkv", "a", "b")}
        | {"cu_q_lens": np.array(bounds, np.int32), "seq_lens": np.array(lengths, np.int32)}
        | {"read_states": read}
        for tokens, bounds, lengths, read in parts
    )
    begun, states = interpreted_delta_scan(first)
    second |= {"states": np.asarray(states), "write_states": write[[2, 1, 0]]}
    rest, split = interpreted_delta_scan(second)
    np.testing.assert_array_equal(np.concatenate((begun[:64], rest[5:])), out[:97])
    np.testing.assert_array_equal(split[write[0]], pool[write[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks-64", "narrow", "shared-keys", "only-padding"])
def test_interpreted_larger_delta_scans_equal_the_oracle_without_a_race(name, races):
    inputs = DELTA_SCAN[name].inputs(4)
    state_oracle.assert_is_delta(interpreted_delta_scan(inputs), inputs, "bfloat16")
    assert not races()


# The first row has four pieces, more than there are stages.
SMALL_SCAN = scan_cases.Case(
    "", Rows((200, 3), (0, 62), 1, 5, snapshots=True), 2, 64, 64, chunk_size=64
)


def under(schedule, inputs, **options):
    """Runs the scan under one schedule."""
    arrays, others = grouped(device(inputs), *GROUPS["ssd_scan"])
    return scan.scan(*arrays, **others, schedule=schedule, **options)


# Two stages are filled in another order than three. Weights that are not exact are compared with exact ones below.
SCHEDULES = [
    Schedule(2, 3),
    Schedule(1, 2),
    pytest.param(Schedule(2, 2, exact=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_interpreted_the_scan_equals_the_oracle_without_a_race(schedule, races):
    """Rows begin inside a chunk and pass its end, with snapshots and padding; a head forgets all, and steps are 0."""
    inputs = SMALL_SCAN.inputs(3)
    inputs["a_log"][0], inputs["dt"][70:90] = 6.0, -1e4
    result = under(schedule, inputs, interpret=True)
    state_oracle.assert_is_ssd(result, inputs, "bfloat16")
    assert not races()


# XLA rounds it once in tests/pallas_kernels/ssd_scan; the test above bounds what the kernel may differ by.
@pytest.mark.slow
def test_interpreted_what_passes_the_state_by_is_rounded_once(races):
    """As in the op's own suite, where it needs a GPU."""
    inputs = replace(SMALL_SCAN, rows=Rows((9,), (60,))).inputs(5)
    inputs |= {"dt_bias": np.full(2, -100.0, np.float32), "d": np.float32([2.71828, -1.41421])}
    inputs["states"] = np.zeros_like(inputs["states"])
    out, _ = under(Schedule(2, 2), inputs, interpret=True)
    x = inputs["xbc"][:9, :128].astype(np.float32).reshape(9, 2, 64)
    wanted = (x * inputs["d"][:, None]).astype(inputs["xbc"].dtype)
    np.testing.assert_array_equal(np.asarray(out)[:9], wanted)
    assert not races()


@pytest.mark.slow
def test_interpreted_exact_weights_lose_next_to_nothing_to_rounding():
    """Beyond the rounding of outputs, which is the same for both."""
    inputs = scan_cases.Case("", Rows((128,)), 1, 64, 64, chunk_size=64).inputs(0)
    right, _ = state_oracle.ssd(inputs)

    def lost(exact):
        out, _ = under(Schedule(1, 2, exact), inputs, interpret=True)
        rounded = right.astype(out.dtype)
        found, least = (
            np.mean((np.asarray(each).astype(np.float64) - right) ** 2) for each in (out, rounded)
        )
        return found - least

    assert lost(exact=True) < lost(exact=False) / 10


@pytest.mark.slow
def test_interpreted_a_step_of_nan_reaches_no_earlier_token():
    inputs = replace(SMALL_SCAN, rows=Rows((70,))).inputs(3)
    clean, _ = under(Schedule(1, 2), inputs, interpret=True)
    inputs["dt"][30] = np.nan
    out, _ = under(Schedule(1, 2), inputs, interpret=True)
    assert np.asarray(out)[:30].tobytes() == np.asarray(clean)[:30].tobytes()
    assert np.isnan(np.asarray(out)[30:70].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [Schedule(1, 2), Schedule(2, 3), Schedule(2, 2, exact=False)])
def test_a_scan_in_float16_equals_the_oracle(schedule):
    inputs = SCAN["chunks-64"].inputs(6, "float16")
    state_oracle.assert_is_ssd(under(schedule, inputs), inputs, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunks-64", "wide", "only-padding", "long"])
@pytest.mark.parametrize(
    "schedule", [Schedule(1, 2), Schedule(1, 3), Schedule(2, 2), Schedule(2, 3)]
)
def test_every_schedule_gives_the_same_bits(name, schedule):
    """Small cases would all run under the one for few blocks."""
    inputs = SCAN[name].inputs(6)
    result = under(schedule, inputs)
    state_oracle.assert_is_ssd(result, inputs, "bfloat16")
    for got, other in zip(result, under(Schedule(1, 2), inputs), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(other).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks-64", "wide", "large-state", "only-padding"])
def test_interpreted_larger_scans_equal_the_oracle_without_a_race(name, races):
    inputs = SCAN[name].inputs(4)
    arrays, options = grouped(device(inputs), *GROUPS["ssd_scan"])
    result = scan.ssd_scan(*arrays, **options, interpret=True)
    state_oracle.assert_is_ssd(result, inputs, "bfloat16")
    assert not races()


def shapes(case, dtype="bfloat16"):
    """A case's arguments, its arrays as shapes."""
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype)
        if isinstance(value, np.ndarray)
        else value
        for name, value in case.inputs(0, dtype).items()
    }


ROWS = Rows((3071, 512, 1), (256, 0, 700), 2, 8, snapshots=True)
LOWERED = {
    "causal_conv": [
        *(
            replace(CONV["t2048-c4352"], channels=channels)
            for channels in (4352, 8448, 10240, 9728)
        ),
        replace(CONV["t2048-c4352"], rows=ROWS, biased=False, d_conv=2),
        CONV["b64-c10240"],
    ],
    "ssd_scan": [
        replace(SCAN["t2048-h128-g8"], rows=ROWS, heads=heads, groups=groups, d_state=d_state)
        for heads, groups, d_state in ((128, 8, 128), (24, 1, 128), (6, 2, 192), (6, 2, 256))
    ]
    + [replace(SCAN["t2048-h128-g8"], heads=8, groups=2, head_dim=128, gated=True)],
    "ssd_update": [
        UPDATE["b8"],
        replace(UPDATE["b8"], state_dtype="bfloat16", gated=True),
        replace(UPDATE["b8"], heads=32, groups=2, head_dim=128, d_state=256),
        replace(UPDATE["b8"], heads=24, groups=1, head_dim=80, d_state=16),
    ],
    "delta_scan": [
        replace(DELTA_SCAN["t2048-one-row"], rows=ROWS, shape=DeltaShape(*sizes))
        for sizes in ((16, 32, 128, 128), (2, 2, 64, 64), (1, 3, 128, 64))
    ],
    "delta_update": [
        DELTA_UPDATE["b8"],
        replace(DELTA_UPDATE["b8"], state_dtype="bfloat16", padding_rows=2),
        replace(DELTA_UPDATE["b8"], shape=DeltaShape(30, 30, 96, 192)),
        replace(DELTA_UPDATE["b8"], shape=DeltaShape(2, 6, 16, 24)),
        replace(DELTA_UPDATE["b8"], shape=DeltaShape(1, 2, 192, 64)),
    ],
}


# Other numbers of channels, heads and sizes; h200/test_kernels.py compiles the convolution, the scan and both updates.
FAST = {
    *(("ssd_update", 1), ("delta_scan", 2), ("delta_update", 1), ("delta_update", 3)),
}


@on_this_jax
@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(
            op, case, id=f"{op}-{number}", marks=[pytest.mark.slow] * ((op, number) not in FAST)
        )
        for op, found in LOWERED.items()
        for number, case in enumerate(found)
    ],
)
def test_they_lower_for_cuda_without_a_gpu(op, case):
    given = shapes(case)
    options = {
        name: value for name, value in given.items() if not isinstance(value, jax.ShapeDtypeStruct)
    }
    arrays = {name: value for name, value in given.items() if name not in options}

    def run(arrays):
        groups, others = grouped(arrays | options, *GROUPS[op])
        return getattr(KERNELS[op], op)(*groups, **others)

    program = jax.jit(run)
    assert "mosaic_gpu" in program.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_what_they_cannot_take_is_refused_with_the_number_that_they_got():

    def refused(op, named, case, dtype="bfloat16", **changes):
        given = device(case.inputs(0, dtype)) | changes
        names = {
            "causal_conv": ("weight", "x"),
            "ssd_scan": ("states", "xbc"),
            "ssd_update": ("states", "xbc"),
            "delta_scan": ("states", "qkv"),
            "delta_update": ("states", "qkv"),
        }
        known = {"causal_conv": ("first_channel",)}
        known |= dict.fromkeys(("ssd_scan", "delta_scan"), ("chunk_size",))
        arrays, options = ([given[n] for n in names[op]], {n: given[n] for n in known.get(op, ())})
        assert named in KERNELS[op].refusal(*arrays, **options)

    refused("causal_conv", "got 136, 152 and 4", CONV["decode-padding"], first_channel=4)
    refused("causal_conv", "at most 8, got 9", replace(CONV["b1-c4352"], d_conv=9))
    small = SMALL_SCAN
    refused("ssd_scan", "got float32", small, "float32")
    refused("ssd_scan", "got 64 and 96", replace(small, d_state=96))
    refused("ssd_scan", "at most 256, got 320", replace(small, d_state=320))
    refused("ssd_scan", "multiple of 64, got 96", small, chunk_size=96)
    refused("ssd_update", "got 12 and 16", replace(UPDATE["groups"], head_dim=12))
    refused("ssd_update", "at most 1024, got 2048", replace(UPDATE["groups"], d_state=2048))

    def refused_delta(named, *sizes):
        refused("delta_update", named, delta_update_cases.Case("", 2, DeltaShape(1, 2, *sizes)))

    refused_delta("value_dim must be a multiple of 8, got 12", 16, 12)
    refused_delta("key_dim must be at most 512, got 1024", 1024, 32)
    refused_delta("a power of two or a multiple of 16, got 24", 24, 32)
    small_delta = SMALL_DELTA_SCAN
    refused("delta_scan", "got float32", small_delta, "float32")
    refused("delta_scan", "got 64 and 96", replace(small_delta, shape=DeltaShape(1, 1, 64, 96)))
    refused(
        "delta_scan", "at most 128, got 192", replace(small_delta, shape=DeltaShape(1, 1, 192, 64))
    )
    refused(
        "delta_scan",
        "at most 4 value heads, got 5",
        replace(small_delta, shape=DeltaShape(1, 5, 64, 64)),
    )
    refused("delta_scan", "multiple of 64, got 96", small_delta, chunk_size=96)
    arrays, options = grouped(device(small.inputs()), *GROUPS["ssd_scan"])
    with pytest.raises(ValueError, match="cannot take this: chunk_size"):
        scan.ssd_scan(*arrays, **options | {"chunk_size": 96})


def test_few_rows_get_a_consumer_per_block():
    """Two consumers share B and C where there is work for all multiprocessors anyway, and registers for both."""
    for heads, groups, d_state, rows, consumers in (
        (128, 8, 128, 1, 1),
        (128, 8, 128, 8, 2),
        (128, 1, 256, 8, 1),
        (24, 24, 128, 64, 1),
        (6, 2, 128, 64, 1),
    ):
        sizes = Sizes(heads, 64, d_state, groups)
        geometry = Geometry(sizes, jnp.dtype("bfloat16"), jnp.dtype("float32"))
        schedule = Schedule.by_rule(geometry, rows)
        assert schedule.consumers == consumers
        assert schedule.stages > 1
        assert geometry.units_per_group % consumers == 0


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one they need")
def test_they_refuse_devices_that_are_not_hopper():
    given = device(SMALL_SCAN.inputs())
    for kernel in (scan, update):
        options = {"chunk_size": 64} if kernel is scan else {}
        assert "needs an sm90 GPU" in kernel.why_not(given["states"], given["xbc"], **options)
    assert "needs an sm90 GPU" in conv.why_not(given["xbc"], given["xbc"], first_channel=0)
    given = device(DELTA_UPDATE["one-row"].inputs())
    assert "needs an sm90 GPU" in delta_update.why_not(given["states"], given["qkv"])
    refusal = delta_scan.why_not(given["states"], given["qkv"], chunk_size=64)
    assert "needs an sm90 GPU" in refusal


def changed_states(pool):
    """Which states of a pool of ones hold anything else, without a copy of the pool."""
    return jnp.any((pool != 1).reshape(len(pool), -1), axis=1)


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
def test_states_past_two_to_the_31_elements_are_written_where_they_lie(op):
    """The last state is stepped, and no other one is written."""
    if op == "causal_conv":
        case = replace(CONV["b1-c4352"], rows=Rows((1,), (5,)))
        states = jnp.ones((2**18 + 1, 3, 4352), jnp.bfloat16)
    elif op in ("delta_update", "delta_scan"):
        long = replace(DELTA_SCAN["t2048-one-row"], rows=Rows((3,)))
        case = DELTA_UPDATE["b1"] if op == "delta_update" else long
        states = jnp.ones((2**12 + 1, 32, 128, 128), jnp.float32)
    else:
        case = (
            UPDATE["b1"] if op == "ssd_update" else replace(SCAN["t2048-h128-g8"], rows=Rows((3,)))
        )
        states = jnp.ones((2**11 + 1, 128, 64, 128), jnp.float32)
    last = jnp.full(1, len(states) - 1, jnp.int32)
    inputs = device(case.inputs(5)) | {"read_states": last, "write_states": last}
    del inputs["states"]
    options = {
        name: inputs.pop(name) for name in list(inputs) if not hasattr(inputs[name], "shape")
    }
    run = jax.jit(
        lambda states, inputs: getattr(pallas_kernels, op)(
            states=states, **inputs, **options, implementation="mosaic_gpu"
        ),
        donate_argnums=0,
    )
    _, states = run(states, inputs)
    assert np.flatnonzero(jax.jit(changed_states)(states)).tolist() == [int(last[0])]
