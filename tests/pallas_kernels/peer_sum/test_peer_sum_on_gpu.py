"""`peer_sum` on several GPUs of one process, beside sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.models.tensor_parallel import AXIS, tensor_mesh
from pallas_kernels.peer_sum.api import (
    MOST_BYTES,
    make_mailboxes,
    peer_sum,
    peer_sum_weighed,
    why_not_mailboxes,
)
from tests.devices import needs_devices

pytestmark = [pytest.mark.gpu, needs_devices(2)]

DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((1, 4096), (1, 8192), (3, 4096), (7, 1028), (64, 8192), (65, 5120), (256, 4096))


@pytest.fixture(scope="module")
def mesh():
    return tensor_mesh(jax.device_count())


@pytest.fixture(scope="module")
def mailboxes(mesh):
    assert why_not_mailboxes(mesh) is None
    return make_mailboxes(mesh)


def of_each(mesh, arrays):
    """Puts row i of an array on device i."""
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(AXIS)))


def summed(mesh, mailboxes, parts, function=peer_sum, **changes):
    """Returns the results of all devices, one after the other."""

    def run(part, peers):
        found = function(part[0], peers, **changes)
        return jax.tree.map(lambda one: one[None], found)

    split = PartitionSpec(AXIS)
    run = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(of_each(mesh, parts), mailboxes.peers))


def drawn(count, shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(jnp.dtype(dtype))


def rounded(numbers, dtype):
    """Returns sums in float32 and in the order of the devices, rounded once."""
    total = numbers[0].astype(np.float32)
    for one in numbers[1:]:
        total = total + one.astype(np.float32)
    return total.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_devices_get_the_sum_rounded_once(mesh, mailboxes, shape, dtype):
    parts = drawn(mesh.size, shape, dtype)
    found = summed(mesh, mailboxes, parts)
    np.testing.assert_array_equal(found, np.stack([rounded(parts, dtype)] * mesh.size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_residual_joins_and_the_next_norm_weighs(mesh, mailboxes, rows, dtype):
    width = 5120
    parts, [residual] = drawn(mesh.size, (rows, width), dtype), drawn(1, (rows, width), dtype, 1)
    norms = drawn(2, (width,), dtype, 2)
    given = {"residual": residual, "norms": norms, "norm_row": 1}
    out, weighed, squares = summed(mesh, mailboxes, parts, peer_sum_weighed, **given)
    wanted = rounded([*parts, residual], dtype)
    np.testing.assert_array_equal(out, np.stack([wanted] * mesh.size))
    wide = wanted.astype(np.float32)
    product = (wide * norms[1].astype(np.float32)).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(weighed, np.stack([product] * mesh.size))
    assert (squares == squares[:1]).all()
    of_rows = np.sum(squares[0].astype(np.float64), axis=0)
    np.testing.assert_allclose(of_rows, np.sum(wide.astype(np.float64) ** 2, axis=1), rtol=1e-6)
    alone = summed(mesh, mailboxes, parts, residual=residual)
    np.testing.assert_array_equal(alone, out)


def test_sums_of_changing_sizes_follow_one_another(mesh, mailboxes):
    """Of whole numbers, so any word of another sum would be seen; many launches are sent before one has ended."""
    draw = np.random.default_rng(3)
    rows = draw.integers(1, 200, 40).tolist()

    def run(part, peers):
        kept = part[0]
        for at, count in enumerate(rows):
            # Each sum needs the one before.
            total = peer_sum(kept[:count] + at, peers)
            kept = kept.at[:count].set(total % 64)
        return kept[None]

    split = PartitionSpec(AXIS)
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    whole = draw.integers(0, 64, (mesh.size, 200, 1024)).astype(np.float32)
    given = of_each(mesh, whole)
    for _ in range(250):
        given = step(given, mailboxes.peers)
    for _ in range(250):
        for at, count in enumerate(rows):
            total = np.sum(whole[:, :count] + at, axis=0, dtype=np.float32)
            whole[:, :count] = total % 64
    np.testing.assert_array_equal(np.asarray(given), whole)


def test_the_largest_array_is_summed(mesh, mailboxes):
    parts = drawn(mesh.size, (MOST_BYTES // 4 // 1024, 1024), "float32")
    np.testing.assert_array_equal(summed(mesh, mailboxes, parts)[0], rounded(parts, "float32"))
