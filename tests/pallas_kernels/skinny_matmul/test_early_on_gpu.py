"""On a GPU: products that copy their weight while the previous kernel runs have the bits of those that wait."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import skinny_matmul
from pallas_kernels.argument_weights import argument_weights
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.mosaic.jax_versions import overlaps_launches
from tests.pallas_kernels.few_bits import drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not overlaps_launches(), reason="before JAX 0.12 no launches overlap"),
]

# Wide and narrow products by turns, whose blocks leave an SM at different times.
SIZES = [(4096, 1024), (1024, 6144), (6144, 512), (512, 4096)] * 8


def weights(kind):
    draw = np.random.default_rng(0)
    if kind == "bfloat16":
        shapes = [(out, inner) for inner, out in SIZES]
        made = [draw.normal(size=shape) * shape[1] ** -0.5 for shape in shapes]
        return [jnp.asarray(one, jnp.bfloat16) for one in made]
    return [jax.tree.map(jnp.asarray, drawn(kind, (out,), inner)) for inner, out in SIZES]


# More rows run in tiles under the fixed order.
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 300])
@pytest.mark.parametrize("kind", ["bfloat16", "e4m3 by 128", "int4 by 128"])
def test_a_chain_of_products_has_the_same_bits_every_time(kind, rows):
    given = weights(kind)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, SIZES[0][0])), jnp.bfloat16)
    multiply = partial(skinny_matmul, implementation="mosaic_gpu")

    def chain(given, x):
        for weight in given:
            with fixed_order(rows > 64):
                found = multiply(weight, x)
            # Each product needs all of the one before, and numbers stay near 1.
            x = (found / (1 + jnp.abs(found).max())).astype(x.dtype)
        return x

    wanted = np.asarray(jax.jit(chain)(given, x)).tobytes()
    with argument_weights():
        early = jax.jit(chain).trace(given, x)
    assert "of_argument" in str(early.jaxpr)
    run = early.lower().compile()
    assert {np.asarray(run(given, x)).tobytes() for _ in range(200)} == {wanted}
