"""What scores of `index_topk` owe beyond the op's contract: digits, and bits that packing leaves alone."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.index_keys import read_index_keys
from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.index_topk.cases import Case
from pallas_kernels.index_topk.mosaic_places import CHUNK
from pallas_kernels.index_topk.mosaic_scores import score
from pallas_kernels.index_topk.scoring import visit_tiles
from pallas_kernels.workbench.tolerances import SCORE
from tests.pallas_kernels.contract import grouped

FP8 = "float8_e4m3fn"


def arrays_of(case: Case, seed: int) -> IndexArrays:
    """A case's arrays, on the device."""
    (arrays,), _ = grouped(case.inputs(seed), IndexArrays)
    return jax.tree.map(jnp.asarray, arrays)


def alone(arrays: IndexArrays, seen: int) -> IndexArrays:
    """The packed queries of one row, each as a row of its own that sees the first `seen` keys."""
    count = len(arrays.q)
    return arrays._replace(
        page_table=jnp.repeat(arrays.page_table, count, axis=0),
        seq_lens=jnp.full((count,), seen, jnp.int32),
        cu_q_lens=None,
    )


@partial(jax.jit, static_argnames="count")
def exact_scores(arrays: IndexArrays, first: int, count: int) -> jax.Array:
    """The scores of some queries of the only row, in float32."""
    q, weights = (
        jax.lax.dynamic_slice_in_dim(array, first, count) for array in (arrays.q, arrays.weights)
    )
    keys = read_index_keys(arrays.index_pages[arrays.page_table[0]])
    keys = keys.reshape(-1, keys.shape[-1])
    sums = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    # XLA must not see that both were of 8 bits: see scoring.py.
    wide = jax.lax.optimization_barrier(q.astype(jnp.float32))
    products = jnp.maximum(sums("qhd,kd->qhk", wide, keys), 0)
    return sums("qhk,qh->qk", products, weights)


# "wide" has more tiles than stages in a block too.
@pytest.mark.parametrize(
    ("heads", "keys", "is_packed"),
    [
        pytest.param(8, 500, True, id="narrow", marks=pytest.mark.slow),
        pytest.param(40, 1300, True, id="wide"),
        pytest.param(40, 250, True, id="short", marks=pytest.mark.slow),
        pytest.param(72, 900, False, id="wide alone", marks=pytest.mark.slow),
    ],
)
def test_interpreted_scores_are_those_of_float32(heads, keys, is_packed, races):
    """Blocks of one warpgroup, and of three, the last of which may have no keys; one or two queries in a product."""
    case = Case("", ((5, keys),), index_heads=heads, queries=FP8)
    arrays = arrays_of(case, 3)
    given = arrays if is_packed else alone(arrays, keys)
    found = score(given, keys=CHUNK, interpret=True)
    found = np.asarray(jax.block_until_ready(found))
    wanted = np.asarray(exact_scores(arrays, 0, 5))
    for query in range(5):
        seen = keys - 4 + query
        largest = np.abs(wanted[query, :seen]).max()
        assert np.abs(found[query, :seen] - wanted[query, :seen]).max() < 1e-6 * largest
    assert not races()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_card_a_prompt_misses_no_key_that_scores_clearly_more(seed):
    """All queries of a prompt, whose products on tensor cores have fewer digits than float32."""
    keys, topk, together = 4 * CHUNK, 2048, 32
    case = Case("", ((512, keys),), queries=FP8)
    arrays = arrays_of(case, seed)
    found = score(arrays, keys=keys)

    @jax.jit
    def missed(found, wanted, first):
        seen = keys - 511 + first + jnp.arange(together)
        is_seen = jnp.arange(keys)[None] < seen[:, None]
        found, wanted = (jnp.where(is_seen, x, -jnp.inf) for x in (found, wanted))
        _, chosen = jax.lax.top_k(found, topk)
        is_left = jax.vmap(lambda x, at: x.at[at].set(False))(is_seen, chosen)
        best = jnp.max(jnp.where(is_left, wanted, -jnp.inf), axis=1)
        worst = jnp.min(jnp.take_along_axis(wanted, chosen, axis=1), axis=1)
        return (best - worst) / jnp.max(jnp.where(is_seen, jnp.abs(wanted), 0), axis=1)

    for first in range(0, 512, together):
        wanted = exact_scores(arrays, first, together)
        assert np.asarray(missed(found[first : first + together], wanted, first)).max() <= SCORE


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 48, 64, 128])
def test_on_a_card_packing_changes_no_bit(heads):
    """What a key scores is the same for a query alone and for one of a pair, in blocks of one or three warpgroups."""
    keys = 5000
    case = Case("", ((7, keys),), index_heads=heads, queries=FP8)
    arrays = arrays_of(case, 2)
    packed = np.asarray(score(arrays, keys=CHUNK))
    single = np.asarray(score(alone(arrays, keys), keys=CHUNK))
    for query in range(7):
        seen = keys - 6 + query
        assert np.array_equal(packed[query, :seen], single[query, :seen])


@pytest.mark.gpu
def test_on_a_card_xla_multiplies_no_numbers_of_eight_bits():
    """Whose sums it would round to some 14 bits, whatever precision is asked for."""
    keys = 4096
    arrays = arrays_of(Case("", ((64, keys),), queries=FP8), 4)
    found = jax.jit(lambda arrays: visit_tiles(lambda tile: tile.scores, arrays))(arrays)
    found, wanted = np.asarray(found), np.asarray(exact_scores(arrays, 0, 64))
    for query in range(64):
        seen = keys - 63 + query
        largest = np.abs(wanted[query, :seen]).max()
        assert np.abs(found[query, :seen] - wanted[query, :seen]).max() < 2e-6 * largest


def test_xla_cannot_see_that_queries_had_eight_bits():
    """What the test above measures, where there is no card: what XLA multiplies comes from behind a barrier."""
    arrays = arrays_of(Case("", ((3, 64),), index_heads=8, queries=FP8), 5)
    trace = jax.make_jaxpr(lambda arrays: visit_tiles(lambda tile: tile.scores, arrays))
    assert re.search(r":bf16\[[\d,]+,8,128\] = optimization_barrier", str(trace(arrays)))
