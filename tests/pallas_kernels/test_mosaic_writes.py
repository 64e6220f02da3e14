"""The Mosaic GPU kernels of `page_write` and `rotary_write` themselves: interpreted, and lowered without a GPU.

What they share with other implementations is tested in test_page_write.py and test_rotary_write.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import NEWEST_JAX, gpu_arch
from pallas_kernels.mosaic.rows import flat_pieces, row_pieces
from pallas_kernels.page_write import cases as page_cases
from pallas_kernels.page_write import mosaic_gpu as pages_kernel
from pallas_kernels.rotary_write import cases as rotary_cases
from pallas_kernels.rotary_write import mosaic_gpu as rotary_kernel
from pallas_kernels.rotary_write.arguments import RotaryArrays
from pallas_kernels.rotary_write.cases import Case
from pallas_kernels.rotary_write.mosaic_block import Geometry
from tests.fast_cases import fast_cases
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import device, grouped
from tests.pallas_kernels.rotary_write.test_rotary_write import assert_is_oracle, real_tokens

PAGES = {case.name: case for case in page_cases.CASES}
ROTARY = {case.name: case for case in rotary_cases.CASES}
on_this_jax = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
)


def arrays_of(inputs):
    """Returns the arrays of a call of `rotary_write`, on the device."""
    (arrays,), _ = grouped(device(inputs), RotaryArrays)
    return arrays


# Keys beside values, and one number for each token; a row of one pool is fast in the next test.
@pytest.mark.parametrize(
    "name",
    fast_cases(
        ["kv-8-16-64-128", "latent", "scalars", "only-padding"], "kv-8-16-64-128", "scalars"
    ),
)
def test_interpreted_it_writes_exactly_its_slots_without_a_race(name, races):
    inputs = PAGES[name].inputs(1)
    inputs["slots"] = np.where(inputs["slots"] % 5 == 1, -inputs["slots"], inputs["slots"])
    written = pages_kernel.page_write(**device(inputs), interpret=True)
    for pool, wanted in zip(written, oracle.page_write(**inputs), strict=True):
        assert np.asarray(pool).tobytes() == wanted.tobytes()
    assert not races()


def test_pools_of_different_dtypes_and_shapes_share_their_slots(races):
    """As quantised keys, values and their scales do; a width that no power of two divides goes in pieces."""
    shapes = {"float8_e4m3fn": (3, 40), "int8": (3, 40), "float32": (3,), "uint8": (25,)}
    rng = np.random.default_rng(2)
    pools = [rng.integers(0, 99, (4, 8, *shape)).astype(dtype) for dtype, shape in shapes.items()]
    values = [rng.integers(0, 99, (6, *shape)).astype(dtype) for dtype, shape in shapes.items()]
    slots = np.array([31, 0, -1, 32, 2**31 - 1, 7], np.int32)
    arrays = [tuple(map(jnp.asarray, part)) for part in (pools, values)]
    written = pages_kernel.page_write(*arrays, jnp.asarray(slots), interpret=True)
    for pool, wanted in zip(written, oracle.page_write(pools, values, slots), strict=True):
        assert np.asarray(pool).tobytes() == wanted.tobytes()
    assert not races()


def test_the_interpreter_would_see_two_tokens_at_one_slot(races):
    inputs = device(PAGES["every-slot"].inputs(3))
    inputs["slots"] = inputs["slots"].at[0].set(inputs["slots"][1])
    try:
        jax.block_until_ready(pages_kernel.page_write(**inputs, interpret=True))
        found = races()
    # From JAX 0.12 on, the interpreter stops at the first race.
    except RuntimeError as error:
        found = "RACE DETECTED" in str(error)
    assert found


INTERPRETED = {
    "norm": 1,
    "groups": 2,
    "odd-heads": 3,
    "partly-turned": 1,
    "width-80": 1,
    "values": 2,
    "fp8": 2,
    "int8-norm": 1,
    "only-padding": 1,
}


# Groups over two blocks, heads that no power of two divides, a part that is not turned, and pages of 8 bits.
FAST = ("odd-heads", "partly-turned", "values", "fp8", "int8-norm")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param(*item, id=item[0], marks=[pytest.mark.slow] * (item[0] not in FAST))
        for item in INTERPRETED.items()
    ],
)
def test_interpreted_it_equals_the_oracle_without_a_race(name, blocks, races):
    inputs = ROTARY[name].inputs(4)
    padding = np.flatnonzero(~real_tokens(inputs))
    inputs["slots"][padding[:1]] = -1
    result = rotary_kernel.write(
        arrays_of(inputs),
        norm_eps=1e-6,
        value_norm="value_norm" in inputs,
        blocks=blocks,
        interpret=True,
    )
    assert_is_oracle(result, inputs, "bfloat16")
    assert not races()


def test_the_door_of_the_kernel_interprets_its_own_schedule(races):
    inputs = dataclasses.replace(ROTARY["groups"], tokens=2, padding_tokens=1).inputs(5, "float16")
    result = rotary_kernel.rotary_write(arrays_of(inputs), interpret=True)
    assert_is_oracle(result, inputs, "float16")
    nothing = inputs | {name: inputs[name][:0] for name in ("qkv", "cos", "sin", "slots")}
    q, pools = rotary_kernel.rotary_write(arrays_of(nothing), interpret=True)
    assert q.shape == (0, 8, 64)
    assert np.asarray(pools[0]).tobytes() == inputs["pages"][0].tobytes()
    assert not races()


LOWERED = {
    "llama": Case("", 64, 4096),
    "llama, one token": Case("", 1, 4096),
    "llama, many tokens": Case("", 8192, 4096),
    "llama, odd tokens": Case("", 8191, 4096),
    "llama, fp8": Case("", 64, 4096, quantised="float8_e4m3fn"),
    "qwen3, int8": Case("", 64, 4096, norm=True, quantised="int8"),
    "qwen2 0.5B": Case("", 8, 64, heads=14, kv_heads=2, head_dim=64, half=32),
    "gemma": Case("", 8, 64, heads=8, kv_heads=1, head_dim=256, half=128, quantised="int8"),
    "70B": Case("", 8, 64, heads=64, norm=True),
    "partly turned": Case("", 8, 64, half=16, norm=True),
    "phi": Case("", 8, 64, heads=32, kv_heads=32, head_dim=80, half=16),
    "head_dim 96": Case("", 8, 64, heads=15, kv_heads=5, head_dim=96, half=48, norm=True),
    "gemma 4": Case("", 8, 64, 64, 16, 8, 256, 128, norm=True, value_norm=True),
}


# Sizes that h200/test_kernels.py does not compile: a norm over 8 bits, narrow heads and parts that are not turned.
FAST_LOWERED = ("qwen3, int8", "phi", "head_dim 96")


@on_this_jax
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name not in FAST_LOWERED))
        for name, case in LOWERED.items()
    ],
)
def test_it_lowers_for_cuda_without_a_gpu(case):
    stored = case.quantised or "bfloat16"
    pool = (case.pages, case.page_size, case.kv_heads, case.head_dim)
    pools = [jax.ShapeDtypeStruct(pool, stored)] * 2
    pools += [jax.ShapeDtypeStruct(pool[:3], "float32")] * (2 if case.quantised else 0)
    shapes = {
        "qkv": ((case.tokens, case.heads + 2 * case.kv_heads, case.head_dim), "bfloat16"),
        "cos": ((case.tokens, case.half), "float32"),
        "sin": ((case.tokens, case.half), "float32"),
        "slots": ((case.tokens,), "int32"),
    }
    arrays = {name: jax.ShapeDtypeStruct(*of) for name, of in shapes.items()}
    norm = jax.ShapeDtypeStruct((2, case.head_dim), "bfloat16") if case.norm else None
    program = jax.jit(partial(rotary_kernel.rotary_write, value_norm=case.value_norm))
    lowered = program.trace(RotaryArrays(tuple(pools), **arrays, norm=norm)).lower(
        lowering_platforms=("cuda",)
    )
    assert "mosaic_gpu" in lowered.as_text()


# Few tokens and many have a way each; the pools of 8 bits have scales of 32.
@on_this_jax
@pytest.mark.parametrize("tokens", fast_cases([1, 64, 2112, 8192], 1, 2112))
@pytest.mark.parametrize("dtype", fast_cases(["bfloat16", "float8_e4m3fn"], "float8_e4m3fn"))
def test_page_write_lowers_for_cuda_without_a_gpu(tokens, dtype):
    shapes = [(8, 128)] * 2 + [(8,)] * 2
    dtypes = [dtype] * 2 + ["float32"] * 2
    pools, values = (
        tuple(
            jax.ShapeDtypeStruct((*lead, *shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        for lead in ((2**16 + 1, 64), (tokens,))
    )
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    program = jax.jit(pages_kernel.page_write)
    lowered = program.trace(pools, values, slots).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 14, 28, 32, 40, 64, 71])
def test_rows_are_cut_into_pieces_that_cover_each_once(rows):
    for columns in (8, 16, 32, 64, 128, 256):
        pieces = row_pieces(rows, columns, 8)
        covered = [piece.start + row for piece in pieces for row in range(piece.size)]
        assert covered == list(range(rows))


@pytest.mark.parametrize("length", [1, 3, 8, 25, 48, 576, 656, 1024, 1536, 4096])
def test_a_row_of_any_length_is_cut_into_pieces_that_begin_where_a_load_may(length):
    for itemsize in (1, 2, 4):
        pieces = flat_pieces(length, itemsize)
        covered = [piece.start + place for piece in pieces for place in range(piece.size)]
        assert covered == list(range(length))


def test_what_they_cannot_take_is_refused_with_the_number_that_they_got():
    fine = Geometry(8, 1, 64, 32, jnp.bfloat16, jnp.bfloat16)
    assert fine.refusal() is None
    for changes, named in (
        ({"dtype": jnp.float32, "stored": jnp.float32}, "float32"),
        ({"stored": jnp.float16}, "float16"),
        ({"half": 12}, "got 64 and 12"),
        ({"head_dim": 6, "half": 3}, "got 6 and 3"),
        ({"head_dim": 512}, "got 512"),
    ):
        assert named in dataclasses.replace(fine, **changes).refusal()
    with pytest.raises(ValueError, match="multiples of 8"):
        rotary_kernel.rotary_write(arrays_of(ROTARY["width-6"].inputs()))
    wide, odd = jnp.zeros((1, 1, 2**16)), jnp.zeros((1, 1, 2**16 - 1), jnp.int8)
    flags, empty = jnp.zeros((2, 4), bool), jnp.zeros((2, 0))
    for pool, named in (
        (wide, "got 512"),
        (odd, "got 518"),
        (flags, "got bool"),
        (empty, "got shape [2, 0]"),
    ):
        assert named in pages_kernel.refusal((pool,))


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one they need")
def test_they_refuse_devices_that_are_not_hopper():
    inputs = device(PAGES["every-slot"].inputs())
    assert "needs an sm90 GPU, found" in pages_kernel.why_not(**inputs)
    assert "needs an sm90 GPU, found" in rotary_kernel.why_not(arrays_of(ROTARY["norm"].inputs()))


def test_large_tokens_are_shared_by_several_blocks():
    shapes = {(14, 2, 64): 1, (8, 1, 256): 1, (16, 8, 128): 2, (32, 8, 128): 2, (64, 8, 128): 3}
    for (heads, kv_heads, head_dim), blocks in shapes.items():
        geometry = Geometry(heads, kv_heads, head_dim, head_dim // 2, jnp.bfloat16, jnp.bfloat16)
        assert geometry.blocks == blocks


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2])
def test_more_tokens_than_most_axes_of_a_grid_hold(blocks):
    """Axes of a CUDA grid but the first end at 65535."""
    case = Case("", 70_000, 1100, heads=2, kv_heads=1, head_dim=64, half=32)
    inputs = case.inputs(6)
    result = rotary_kernel.write(arrays_of(inputs), norm_eps=1e-6, blocks=blocks)
    assert_is_oracle(result, inputs, "bfloat16")
    values = tuple(inputs["qkv"][:, 2 + index : 3 + index] for index in range(2))
    pages = {"pages": inputs["pages"], "values": values, "slots": inputs["slots"]}
    for pool, wanted in zip(
        pages_kernel.page_write(**device(pages)), oracle.page_write(**pages), strict=True
    ):
        assert np.asarray(pool).tobytes() == wanted.tobytes()


LAST = 2**22  # the first slot of the last page


def ones_in_the_last_page(pool):
    """Counts what was written there and what was written elsewhere, without a copy of the pool."""
    wide = partial(jnp.sum, dtype=jnp.float32)
    last = wide(pool[-1, 63]), wide(pool[-1, 5]), wide(pool[-1])
    return *last, wide(pool[:-1].reshape(64, -1) != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["page_write", "rotary_write"])
def test_slots_past_two_to_the_31_elements_are_written_where_they_lie(kernel):
    """The pools have 4.3 billion elements."""
    pools = tuple(jnp.zeros((2**16 + 1, 64, 8, 128), jnp.bfloat16) for _ in "kv")
    slots = jnp.asarray([LAST + 63, LAST + 5], jnp.int32)
    if kernel == "page_write":
        row = jnp.ones((2, 8, 128), jnp.bfloat16)
        pools = jax.jit(pages_kernel.page_write, donate_argnums=0)(pools, (row, row), slots)
    else:
        qkv, cos, sin = jnp.ones((2, 48, 128), jnp.bfloat16), jnp.ones((2, 64)), jnp.zeros((2, 64))

        def write(*arrays):
            return rotary_kernel.rotary_write(RotaryArrays(*arrays))

        _, pools = jax.jit(write, donate_argnums=0)(pools, qkv, cos, sin, slots)
    for pool in pools:
        found = [float(value) for value in jax.jit(ones_in_the_last_page)(pool)]
        assert found == [1024.0, 1024.0, 2048.0, 0.0]
