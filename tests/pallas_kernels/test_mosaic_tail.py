"""What lies between two attentions as one kernel: interpreted with one block, and on a GPU beside single products."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from pallas_kernels import skinny_matmul
from pallas_kernels.device import NEWEST_JAX
from pallas_kernels.skinny_matmul import mosaic_gpu, mosaic_tail
from pallas_kernels.skinny_matmul.mosaic_tail import Norms, chain_of, layer_tail, why_not
from tests.pallas_kernels.contract import bits
from tests.tolerances import assert_output

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)
EPS = 1e-5
NORMS = Norms(here=1, after=0, eps=EPS)
PRODUCTS = ("o", "gate_up", "down", "qkv")
LLAMA_8B = {"hidden": 4096, "ffn": 14336, "heads": 4096, "qkv": 6144}
QWEN_06B = {"hidden": 1024, "ffn": 3072, "heads": 2048, "qkv": 4096}


def drawn(rows, hidden, ffn, heads, qkv, seed=0):
    """What the heads say, the residual stream, and the weights."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    def weight(*shape):
        return normal(*shape) * jnp.asarray(shape[1] ** -0.5, jnp.bfloat16)

    norms = jnp.linspace(0.5, 2, 2 * hidden).reshape(2, hidden).astype(jnp.bfloat16)
    weights = {
        "o": weight(hidden, heads),
        "gate_up": weight(2 * ffn, hidden),
        "down": weight(hidden, ffn),
        "norms": norms,
    }
    if qkv:
        weights |= {"qkv": weight(qkv, hidden), "next_norms": norms[::-1]}
    return normal(rows, heads), normal(rows, hidden), weights


def oracle(mixed, hidden, weights):
    """The tail in float64, rounded where one product hands on to another."""
    wide = {name: np.asarray(value, np.float64) for name, value in weights.items()}

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)

    def normed(x, norm, weight):
        root = np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS)
        return rounded(x * norm) @ weight.T / root

    hidden = np.asarray(hidden, np.float64) + np.asarray(mixed, np.float64) @ wide["o"].T
    hidden = rounded(hidden)
    gate, up = np.split(normed(hidden, wide["norms"][1], wide["gate_up"]), 2, axis=1)
    hidden = hidden + rounded(gate / (1 + np.exp(-gate)) * up) @ wide["down"].T
    if "qkv" not in wide:
        return hidden, None
    return hidden, normed(rounded(hidden), wide["next_norms"][0], wide["qkv"])


@pytest.fixture
def races():
    """Tells whether the interpreter saw a race, and leaves it as it was found."""
    yield lambda: interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("qkv", [128, 0], ids=["between two layers", "after the last layer"])
def test_interpreted_it_equals_the_oracle(qkv):
    """One block has nobody to wait for; phases are shorter than the ring, so that their weights come far ahead."""
    arrays = drawn(5, 128, 128, 256, qkv)
    result = layer_tail(
        *arrays, jnp.zeros(1, jnp.int32), activation="silu", norms=NORMS, blocks=1, interpret=True
    )
    hidden, projected = oracle(*arrays)
    assert_output(result.hidden, hidden, "bfloat16")
    if qkv:
        assert_output(result.qkv, projected, "bfloat16")
    else:
        assert result.qkv is None


@pytest.mark.parametrize("sizes", [LLAMA_8B, QWEN_06B], ids=["8b", "0.6b"])
def test_every_block_has_the_same_columns_of_every_product(sizes):
    weights = jax.eval_shape(partial(drawn, 1, **sizes))[2]
    chain = chain_of({name: weights[name] for name in PRODUCTS}, 1, "bfloat16", "silu", NORMS)
    assert chain.blocks == 128
    for phase in chain.phases:
        tiles = phase.schedule.tiles_per_block(phase.geometry) * chain.blocks
        assert tiles * phase.schedule.columns == phase.geometry.out


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        (9, {}, "at most 8 rows, got 9"),
        (1, {"sizes": QWEN_06B}, "are faster product by product"),
        (1, {"activation": "gelu"}, "activation must be one of silu, gelu_tanh, relu2, got 'gelu'"),
        (1, {"dtype": "float16"}, "all weights must be float16"),
        (1, {"sizes": LLAMA_8B | {"qkv": 2560}}, "cannot be shared out evenly"),
    ],
)
def test_it_says_what_it_cannot_take(rows, change, message, monkeypatch):
    """A-14."""
    monkeypatch.setattr(mosaic_tail, "why_not_mosaic", lambda: None)
    weights = jax.eval_shape(partial(drawn, rows, **change.get("sizes", LLAMA_8B)))[2]
    products = {name: weights[name] for name in PRODUCTS}
    options = change.get("dtype", "bfloat16"), change.get("activation", "silu")
    assert message in (why_not(products, rows, *options) or "")


def test_a_card_with_fewer_multiprocessors_is_refused(monkeypatch):
    """Blocks that are not at work at once would wait for one another forever."""
    monkeypatch.setattr(mosaic_tail, "why_not_mosaic", lambda: None)
    weights = jax.eval_shape(partial(drawn, 1, **LLAMA_8B))[2]
    products = {name: weights[name] for name in PRODUCTS}
    assert "needs 128 multiprocessors" in (why_not(products, 1, "bfloat16", "silu") or "")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [LLAMA_8B, QWEN_06B], ids=["8b", "0.6b"])
@pytest.mark.parametrize("rows", [1, 8])
def test_it_has_the_bits_of_its_products_alone_again_and_again(sizes, rows):
    """S5-41. Each product under its schedule in the chain; a barrier that let a block pass early would show."""
    mixed, hidden, weights = drawn(rows, **sizes)
    products = {name: weights[name] for name in PRODUCTS}
    assert getattr(jax.devices()[0], "core_count", 0) >= 128
    chain = chain_of(products, rows, mixed.dtype, "silu", NORMS)
    schedules = {phase.names[0][1]: phase.schedule for phase in chain.phases}

    @jax.jit
    def alone(mixed, hidden, weights):
        def multiply(name, x, **options):
            return mosaic_gpu.skinny_matmul(
                weights[name], x, schedule=schedules[name], norm_eps=EPS, **options
            )

        middle = multiply("o", mixed, residual=hidden, next_norm=weights["norms"], norm_row=1)
        gates = {"gated": True, "activation": "silu"}
        gated = multiply("gate_up", middle.weighed, squares=middle.squares, **gates)
        last = multiply("down", gated, residual=middle.result, next_norm=weights["next_norms"])
        return last.result, multiply("qkv", last.weighed, squares=last.squares)

    run = jax.jit(partial(layer_tail, activation="silu", norms=NORMS))
    wanted = [bits(array) for array in alone(mixed, hidden, weights)]
    met = jnp.zeros(1, jnp.int32)
    for _ in range(50):
        result = run(mixed, hidden, weights, met)
        met = result.met
        assert [bits(result.hidden), bits(result.qkv)] == wanted
    assert int(met[0]) == 50 * 3 * chain.blocks
    close = partial(skinny_matmul, implementation="xla")
    np.testing.assert_allclose(
        np.asarray(result.hidden, np.float32),
        np.asarray(_plain(close, mixed, hidden, weights), np.float32),
        rtol=2e-2,
        atol=5e-2,
    )


def _plain(multiply, mixed, hidden, weights):
    """The residual stream after the tail, product by product."""
    hidden = multiply(weights["o"], mixed, residual=hidden)
    wide = hidden.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=1, keepdims=True) + EPS)
    x = (unit * weights["norms"][1].astype(jnp.float32)[None]).astype(hidden.dtype)
    gated = multiply(weights["gate_up"], x, gated=True, activation="silu")
    return multiply(weights["down"], gated, residual=hidden)
