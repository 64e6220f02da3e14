"""The Mosaic GPU kernel of `sparse_attention` itself: interpreted, lowered without a GPU, hostile cases on one.

What it shares with other implementations is tested in test_sparse_attention.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
from pallas_kernels.device import NEWEST_JAX, gpu_arch
from pallas_kernels.latent_kernel.schedule import Geometry, Schedule
from pallas_kernels.mosaic import jax_versions
from pallas_kernels.sparse_attention import mosaic_gpu, reference
from pallas_kernels.sparse_attention.cases import Case
from tests.pallas_kernels.contract import bits
from tests.tolerances import assert_lse, assert_output

OPTIONS = LatentOptions(512, 1.0)
ALONE = Schedule(1, 1)


def arrays_of(inputs):
    return SparseArrays(*(jnp.asarray(inputs[name]) for name in SparseArrays._fields))


def attend(inputs, schedule, *, interpret=False):
    """Runs the kernel under a schedule of our choice; slots that are not chosen may be any number."""
    slots = np.array(inputs["slots"])
    for row, count in enumerate(inputs["counts"]):
        slots[row, count:] = 2**30 + row
    return mosaic_gpu.attend(
        arrays_of(inputs | {"slots": slots}),
        options=LatentOptions(inputs["value_dim"], inputs["scale"]),
        schedule=schedule,
        want_lse=True,
        interpret=interpret,
    )


def assert_is_reference(result, inputs):
    options = {name: inputs[name] for name in ("value_dim", "scale")}
    run = jax.jit(partial(reference.sparse_attention, **options))
    wanted_out, wanted_lse = run(*arrays_of(inputs))
    assert_output(result[0], np.asarray(wanted_out, np.float64), inputs["q"].dtype.name)
    assert_lse(result[1], wanted_lse)


SMALL = Case("", (0, 1, 130), 200, topk=130, heads=8)
INTERPRETED = {
    "bytes": (SMALL, ALONE),
    "numbers, shares": (
        dataclasses.replace(SMALL, counts=(130,), rank=256, plain=True),
        Schedule(1, 2),
    ),
}


@pytest.mark.parametrize(("case", "schedule"), INTERPRETED.values(), ids=INTERPRETED)
def test_interpreted_it_equals_the_reference_without_a_race(case, schedule, races):
    """Records that no token chose hold NaN."""
    inputs = case.inputs(1)
    assert_is_reference(attend(inputs, schedule, interpret=True), inputs)
    assert not races()


@pytest.mark.slow
def test_interpreted_it_equals_the_reference_without_a_producer(no_requests, races):
    test_interpreted_it_equals_the_reference_without_a_race(*INTERPRETED["bytes"], races)


LOWERED = {
    "alone": (64, Schedule(1, 1)),
    "in clusters": (64, Schedule(2, 1)),
    "in pairs": (128, Schedule(1, 1)),
    "in pairs, parts": (128, Schedule(1, 2)),
}


# The one of most instructions: records are widened, a pair shares them, and its parts are joined.
FAST = {("bytes", "in pairs, parts")}


@pytest.mark.parametrize(
    ("plain", "heads", "schedule"),
    [
        pytest.param(
            stored == "numbers",
            *lowered,
            id=f"{stored}-{name}",
            marks=[pytest.mark.slow] * ((stored, name) not in FAST),
        )
        for stored in ("bytes", "numbers")
        for name, lowered in LOWERED.items()
    ],
)
def test_it_lowers_for_cuda_without_a_gpu(plain, heads, schedule):
    """What the interpreter does not run is built here: the instructions that gather, and those that share."""
    if jax.__version_info__[:2] > NEWEST_JAX:
        pytest.skip("the kernels refuse this JAX; why_not says so")
    inputs = Case("", (5,) * 3, 128, topk=128, heads=heads, plain=plain).inputs()
    shapes = jax.tree.map(jax.typeof, arrays_of(inputs))
    run = partial(mosaic_gpu.attend, options=OPTIONS, schedule=schedule, want_lse=True)
    lowered = jax.jit(run).trace(shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_it_cannot_take_is_refused_with_the_number_that_it_got():
    arrays = arrays_of(dataclasses.replace(SMALL, rank=384).inputs())
    with pytest.raises(ValueError, match="value_dim must be 256 or 512, got 384"):
        mosaic_gpu.sparse_attention(arrays, LatentOptions(384, 1.0))
    for changes, value_dim, named in (
        ({"rope_dim": 32}, 512, "got 544 and 512"),
        ({"rank": 256}, 256, "multiple of 16 bytes, got 392"),
    ):
        arrays = arrays_of(dataclasses.replace(SMALL, **changes).inputs())
        with pytest.raises(ValueError, match=named):
            mosaic_gpu.sparse_attention(arrays, LatentOptions(value_dim, 1.0))


def test_bytes_want_queries_in_the_dtype_of_their_rotary_parts():
    """Records hold these as bfloat16, whose bits would be read as what queries are."""
    arrays = arrays_of(SMALL.inputs())
    arrays = arrays._replace(q=arrays.q.astype(jnp.float16))
    with pytest.raises(ValueError, match="q must be bfloat16, got float16"):
        mosaic_gpu.sparse_attention(arrays, OPTIONS)


def test_a_grid_is_not_longer_than_the_card_takes():
    arrays = jax.eval_shape(lambda: arrays_of(SMALL.inputs()))
    tokens = {
        name: jax.ShapeDtypeStruct((2**16, *of.shape[1:]), of.dtype)
        for name, of in arrays._asdict().items()
        if name in ("q", "slots", "counts")
    }
    with pytest.raises(ValueError, match="at most 65535 tokens in a call, got 65536"):
        jax.eval_shape(
            lambda arrays: mosaic_gpu.sparse_attention(arrays, OPTIONS), arrays._replace(**tokens)
        )


def test_blocks_in_pairs_are_in_no_other_clusters(monkeypatch):
    """Where requests for registers are ignored there are no pairs."""
    monkeypatch.setattr(jax_versions, "HONOURS_REGISTER_REQUESTS", True)
    arrays = arrays_of(dataclasses.replace(SMALL, heads=128).inputs())
    with pytest.raises(ValueError, match="got a schedule with clusters of 2; use parts"):
        mosaic_gpu.attend(arrays, options=OPTIONS, schedule=Schedule(2, 1), want_lse=False)


@pytest.mark.parametrize(
    ("tokens", "parts"), [(1, 8), (8, 8), (32, 2), (33, 2), (34, 1), (66, 1), (2048, 1)]
)
def test_pairs_are_cut_into_as_many_parts_as_the_card_holds_blocks_of(tokens, parts):
    geometry = Geometry(128, 576, 512, 64, jnp.bfloat16, packed=False)
    assert mosaic_gpu.schedule_of(geometry, tokens, 2048) == Schedule(1, parts)


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one it needs")
def test_it_refuses_devices_that_are_not_hopper():
    assert "needs an sm90 GPU, found" in mosaic_gpu.why_not(arrays_of(SMALL.inputs()), OPTIONS)


EDGES = Case("", (0, 1, 63, 64, 65, 128, 129, 300, 512, 500), 2000, topk=512)
PLAIN = dataclasses.replace(EDGES, plain=True)
HOSTILE = {
    "bytes in pairs": (EDGES, ALONE),
    "bytes in pairs, parts": (EDGES, Schedule(1, 2)),
    "bytes in pairs, 100 heads": (dataclasses.replace(EDGES, heads=100), ALONE),
    "numbers in pairs": (PLAIN, ALONE),
    "numbers of 256 in pairs, parts": (dataclasses.replace(PLAIN, rank=256), Schedule(1, 2)),
    "bytes, 64 heads": (dataclasses.replace(EDGES, heads=64), ALONE),
    "bytes, 64 heads, clusters": (dataclasses.replace(EDGES, heads=64), Schedule(2, 1)),
    "bytes, 16 heads, parts": (dataclasses.replace(EDGES, heads=16), Schedule(1, 2)),
    "numbers, 192 heads": (dataclasses.replace(PLAIN, heads=192), ALONE),
    "numbers, 64 heads of 256, clusters": (
        dataclasses.replace(PLAIN, heads=64, rank=256),
        Schedule(4, 1),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "schedule"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("factor", [1, 8])
def test_it_equals_the_reference_whatever_lies_in_unseen_places(case, schedule, factor):
    """The bits are the same each time, and for tokens in another order."""
    inputs = case.inputs(1)
    inputs["q"] *= factor
    out, lse = attend(inputs, schedule)
    assert_is_reference((out, lse), inputs)
    for _ in range(10):
        assert bits(attend(inputs, schedule)[0]) == bits(out)
    order = np.random.default_rng(3).permutation(len(case.counts))
    moved = inputs | {name: inputs[name][order] for name in ("q", "slots", "counts")}
    assert bits(attend(moved, schedule)[0]) == [bits(out)[token] for token in order]
