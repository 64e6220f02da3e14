"""The bytes of DSA's records and indexer pages, against NumPy and `struct`, and what writing them leaves alone."""

import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats.index_keys import (
    read_index_keys,
    split_index_pages,
    write_index_keys,
)
from pallas_kernels.formats.latent_records import (
    decode_records,
    encode_records,
    join_records,
    record_bytes,
    split_records,
)
from pallas_kernels.formats.quantise import SMALLEST_SCALE
from pallas_kernels.page_write.api import page_write

RANK, ROPE, DIM = 512, 64, 128
E4M3 = ml_dtypes.float8_e4m3fn
both_scales = pytest.mark.parametrize("power_of_two", [False, True])


def latents(seed=0, tokens=32):
    """Groups of very different magnitudes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, RANK // 128, 128))
    values *= 2.0 ** rng.integers(-30, 30, (tokens, RANK // 128, 1))
    return values.reshape(tokens, RANK).astype(np.float32)


def ropes(seed=0, tokens=32):
    rng = np.random.default_rng(seed + 1)
    return rng.standard_normal((tokens, ROPE)).astype(ml_dtypes.bfloat16)


def scale_of(values, power_of_two, floor):
    """What the papers' quantisers say, in float64 but for the one float32 product that is stored."""
    scale = np.float32(np.abs(values).max()) * np.float32(1 / 448)
    if not power_of_two:
        return np.float32(max(scale, floor))
    return np.float32(2.0 ** np.ceil(np.log2(max(np.float64(scale), 1e-4))))


def golden(latent, rope, power_of_two):
    """One record by `struct` and NumPy's own rounding to fp8."""
    groups = latent.reshape(-1, 128)
    scales = [scale_of(group, power_of_two, SMALLEST_SCALE) for group in groups]
    numbers = b"".join(
        np.clip(group / scale, -448, 448).astype(E4M3).tobytes()
        for group, scale in zip(groups, scales, strict=True)
    )
    halves = struct.unpack(f"<{len(rope)}H", rope.tobytes())
    return numbers + struct.pack("<4f", *scales) + struct.pack(f"<{len(rope)}H", *halves)


def encode(latent, rope, **options):
    return np.array(jax.jit(lambda *a: encode_records(*a, **options))(latent, rope))


@both_scales
def test_a_record_is_what_struct_packs(power_of_two):
    """A record has 656 bytes: latent, scales and rotary key, little-endian."""
    latent, rope = latents(), ropes()
    latent[0] = 0
    latent[1, 3], latent[1, 128:256] = 448, np.linspace(-448, 448, 128)
    latent[2] = 1e-30
    records = encode(latent, rope, power_of_two=power_of_two)
    assert records.shape == (32, 656) == (32, record_bytes(RANK, ROPE))
    wanted = [golden(*token, power_of_two) for token in zip(latent, rope, strict=True)]
    assert [record.tobytes() for record in records] == wanted


def test_known_bytes_of_known_tokens():
    """The bytes are written by hand, so that encoder and NumPy cannot be wrong together."""
    latent, rope = np.zeros((2, RANK), np.float32), np.zeros((2, ROPE), ml_dtypes.bfloat16)
    latent[1, :3], rope[1, 0] = (448, -1, 0.5), 1.0
    records = encode(latent, rope)
    assert records[0].tobytes() == bytes(512) + bytes.fromhex("00008000") * 4 + bytes(128)
    assert records[1, :4].tobytes().hex() == "7eb83000"
    assert records[1, 512:520].tobytes().hex() == "0000803f00008000"
    assert records[1, 528:532].tobytes().hex() == "803f0000"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@both_scales
def test_a_group_that_is_no_number_says_so_to_every_reader(bad, power_of_two):
    """It is never decoded as a number, and changes no other group or token."""
    latent, rope = latents(), ropes()
    clean = encode(latent, rope, power_of_two=power_of_two)
    latent[3, 200] = bad
    records = encode(latent, rope, power_of_two=power_of_two)
    assert not records[3, 128:256].any()
    decoded = np.asarray(decode_records(jnp.asarray(records), rank=RANK))
    assert np.isnan(decoded[3, 128:256]).all()
    records[3, 128:256], records[3, 516:520] = clean[3, 128:256], clean[3, 516:520]
    assert np.array_equal(records, clean)


def test_what_is_too_large_for_fp8_saturates_before_the_cast():
    """XLA casts what is above 464 to NaN; a quotient may round up to just above 448."""
    rng = np.random.default_rng(5)
    largest = rng.uniform(1, 2, 4096).astype(np.float32) * np.float32(1e6)
    latent = np.zeros((4096, 128), np.float32)
    latent[:, 7] = largest
    numbers = split_records(
        jnp.asarray(encode(latent, np.zeros((4096, 2), np.float32))), rank=128
    ).latent
    assert (np.asarray(numbers[:, 7], np.float32) == 448).all()


@both_scales
def test_the_error_is_at_most_half_a_step(power_of_two):
    """The unit is that of e4m3 times the scale. The rotary key is decoded bit by bit."""
    latent, rope = latents(2), ropes(2)
    records = jnp.asarray(encode(latent, rope, power_of_two=power_of_two))
    planar = split_records(records, rank=RANK)
    decoded = np.asarray(decode_records(records, rank=RANK), np.float64)
    scales = np.repeat(np.asarray(planar.scales, np.float64), 128, axis=-1)
    stored = np.abs(np.asarray(planar.latent, np.float64))
    step = 2.0 ** (np.floor(np.log2(np.maximum(stored, 2.0**-6))) - 3)
    slack = np.abs(latent) * 2.0**-22
    assert (np.abs(decoded[:, :RANK] - latent) <= step / 2 * scales + slack).all()
    assert decoded[:, RANK:].astype(ml_dtypes.bfloat16).tobytes() == rope.tobytes()
    if power_of_two:
        assert (np.exp2(np.round(np.log2(scales))) == scales).all()


def test_packed_and_planar_are_the_same_bits():
    """Any bytes at all, those of no number included."""
    records = np.random.default_rng(3).integers(0, 256, (64, 656)).astype(np.uint8)
    planar = split_records(jnp.asarray(records), rank=RANK)
    assert planar.latent.dtype == jnp.float8_e4m3fn
    assert np.array_equal(join_records(planar), records)
    pages = np.random.default_rng(4).integers(0, 256, (3, 8, 132)).astype(np.uint8)
    keys = split_index_pages(jnp.asarray(pages))
    parts = (np.asarray(part).view(np.uint8).reshape(3, -1) for part in keys)
    assert np.array_equal(np.concatenate(tuple(parts), axis=1).reshape(pages.shape), pages)


def test_records_are_written_at_real_slots_only():
    """Padding slots change no byte."""
    rng = np.random.default_rng(6)
    pool = rng.integers(0, 256, (4, 8, 1, 656)).astype(np.uint8)
    records = encode(latents(tokens=5), ropes(tokens=5))[:, None, :]
    slots = np.array([9, 32, 31, 33, 2**30], np.int32)
    (written,) = page_write((jnp.asarray(pool),), (jnp.asarray(records),), slots)
    expected = pool.reshape(32, 1, 656).copy()
    expected[[9, 31]] = records[[0, 2]]
    assert np.array_equal(np.asarray(written).reshape(32, 1, 656), expected)


@both_scales
def test_an_indexer_key_touches_its_own_bytes_and_its_scale(power_of_two):
    """Byte d of token t lies at `t * 128 + d` of a page, its scale behind all keys."""
    rng = np.random.default_rng(7)
    pages = rng.integers(0, 256, (5, 16, 132)).astype(np.uint8)
    keys = rng.standard_normal((4, DIM)).astype(np.float32)
    keys[3] = 0
    slots = np.array([3 * 16 + 5, 5 * 16 + 1, 0, 4 * 16 + 15], np.int32)  # the second is padding
    written = jax.jit(write_index_keys, static_argnames="power_of_two", donate_argnums=0)(
        jnp.asarray(pages), keys, slots, power_of_two=power_of_two
    )
    expected = pages.reshape(5, 16 * 132).copy()
    for key, slot in zip(keys, slots, strict=True):
        page, t = divmod(int(slot), 16)
        scale = np.float32(max(np.abs(key).max(), np.float32(1e-4))) * np.float32(1 / 448)
        if power_of_two:
            scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
        if page < 5:
            numbers = np.clip(key / scale, -448, 448).astype(E4M3)
            expected[page, t * 128 : t * 128 + 128] = numbers.view(np.uint8)
            expected[page, 2048 + 4 * t : 2048 + 4 * t + 4] = list(struct.pack("<f", scale))
    assert np.array_equal(np.asarray(written).reshape(5, -1), expected)


def test_indexer_keys_come_back():
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((6, DIM)).astype(np.float32)
    keys[2, 4], slots = np.nan, np.arange(6, dtype=np.int32)
    write = jax.jit(write_index_keys)
    pages = write(jnp.zeros((1, 8, 132), jnp.uint8), keys, slots)
    read = np.asarray(read_index_keys(pages))[0, :6]
    assert np.isnan(read[2]).all()
    good = [0, 1, 3, 4, 5]
    bound = np.abs(keys[good]).max(-1, keepdims=True) / 28 * 1.001
    assert (np.abs(read[good] - keys[good]) <= bound).all()
    plain = write(jnp.zeros((1, 8, DIM), jnp.float32), keys[good], slots[:5] + 3)
    assert np.array_equal(np.asarray(plain)[0, 3:], keys[good])


def test_what_is_no_record_is_refused():
    with pytest.raises(
        ValueError, match=r"multiple of 128 components, got 100; store it in a floating"
    ):
        encode_records(jnp.zeros((1, 100)), jnp.zeros((1, 64)))
    with pytest.raises(ValueError, match="528 bytes and 2 per rotary component; got uint8 of 527"):
        split_records(jnp.zeros((1, 527), jnp.uint8), rank=512)
    with pytest.raises(ValueError, match="hold keys of 128 components, got 64"):
        write_index_keys(
            jnp.zeros((1, 8, 132), jnp.uint8), jnp.zeros((1, 64)), jnp.zeros(1, jnp.int32)
        )
