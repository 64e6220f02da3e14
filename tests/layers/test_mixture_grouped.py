"""A mixture of experts through `grouped_matmul`: against a loop in float64 and Hugging Face, and when it is chosen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.blocks import MixtureConfig
from jaxkv.layers import mixture as layer
from jaxkv.layers.mixture import grouped_for, mixture_of_experts
from pallas_kernels.dispatch import Unsupported, fallbacks
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.gathered_matmul import mosaic_gpu as gathered_gpu
from pallas_kernels.grouped_matmul import mosaic_gpu
from tests.layers.jaxprs import equations
from tests.layers.test_mixture import CASES, TOKENS, by_hand, drawn


@pytest.mark.parametrize(("name", "tokens"), [("nemotron", 1), *((name, TOKENS) for name in CASES)])
def test_it_says_what_the_experts_say(name, tokens):
    mixture = CASES[name]
    params, x = drawn(mixture)
    x = x[:tokens]
    run = partial(mixture_of_experts, mixture=mixture, activation="silu", grouped="xla")
    got = jax.jit(run)(params, jnp.asarray(x))
    np.testing.assert_allclose(got, by_hand(params, x, mixture), rtol=2e-5, atol=2e-4)


def test_biases_and_bounds_are_those_of_the_plain_way():
    """GPT-OSS, whose parity the plain way has shown."""
    mixture = MixtureConfig(experts=6, top_k=2, size=8, gated=True, biases=True, clamp=1.5)
    params, x = drawn(mixture)
    draw = np.random.default_rng(5)
    for name, shape in {"router": (6,), "experts_up": (6, 16), "experts_down": (6, 12)}.items():
        params[f"{name}_bias"] = jnp.asarray(draw.normal(size=shape), jnp.float32)
    run = partial(mixture_of_experts, params, jnp.asarray(x), mixture=mixture, activation="silu")
    both = jax.jit(lambda: (run(grouped="xla"), run()))()
    np.testing.assert_allclose(*both, rtol=2e-5, atol=2e-4)


def test_many_tokens_are_asked_for_in_blocks(monkeypatch):
    """Their number bounds the memory, and changes nothing."""
    mixture = CASES["granite"]
    params, x = drawn(mixture)
    run = partial(mixture_of_experts, params, jnp.asarray(x), mixture=mixture, activation="silu")
    whole = jax.jit(lambda: run(grouped="xla"))()
    up = params["experts_up"].shape
    monkeypatch.setattr(layer, "_MOST_SORTED", 5 * mixture.top_k * max(up[1:]))
    assert len(x) % 5
    parts = jax.jit(lambda: run(grouped="xla"))()
    np.testing.assert_allclose(parts, whole, rtol=1e-6, atol=1e-6)
    loops = [eqn for eqn in equations(lambda: run(grouped="xla")) if str(eqn.primitive) == "scan"]
    assert [eqn.params["length"] for eqn in loops] == [-(-len(x) // 5)]


def test_no_token_of_a_block_asks_for_an_expert_twice(monkeypatch):
    """Padding of the last block neither: the kernel would leave rows of it undefined."""
    mixture, sort, seen = CASES["granite"], layer.group_rows, []
    params, x = drawn(mixture)
    monkeypatch.setattr(
        layer, "_MOST_SORTED", 5 * mixture.top_k * max(params["experts_up"].shape[1:])
    )

    def look(x, chosen, groups, **options):
        jax.debug.callback(lambda ids: seen.append(np.sort(ids, axis=1)), chosen)
        return sort(x, chosen, groups, **options)

    monkeypatch.setattr(layer, "group_rows", look)
    run = partial(mixture_of_experts, mixture=mixture, activation="silu", grouped="xla")
    jax.block_until_ready(jax.jit(run)(params, jnp.asarray(x)))
    jax.effects_barrier()
    chosen = np.concatenate(seen)
    assert len(chosen) > len(x)
    assert (chosen[:, 1:] != chosen[:, :-1]).all()


def test_tokens_do_not_see_each_other_not_even_broken_ones():
    """The places of a token's rows change with its neighbours. No bit of its result does."""
    mixture = CASES["nemotron"]
    params, x = drawn(mixture)
    run = jax.jit(
        lambda x: mixture_of_experts(params, x, mixture=mixture, activation="silu", grouped="xla")
    )
    clean = run(jnp.asarray(x))
    dirty = run(jnp.asarray(x).at[4:].set(jnp.nan))
    np.testing.assert_array_equal(dirty[:4], clean[:4])


def test_a_kernel_that_cannot_run_is_not_replaced():
    """An implementation that was asked for by name has no fallback."""
    mixture = CASES["granite"]
    params, x = drawn(mixture)
    with pytest.raises(Unsupported, match="grouped_matmul"):
        mixture_of_experts(
            params, jnp.asarray(x), mixture=mixture, activation="silu", grouped="mosaic_gpu"
        )


def rounded(shape, code):
    """Returns the type of a weight in few bits, with a scale for each 32 columns."""
    *lead, inner = shape
    codes = jax.ShapeDtypeStruct((*lead, inner * CODES[code].bits // 8), CODES[code].stored)
    scales = jax.ShapeDtypeStruct((*lead, inner // 32), jnp.float8_e8m0fnu)
    return FewBits(codes, scales, zeros=None, order=None, code=code)


def test_models_on_our_kernels_take_it_and_others_do_not(monkeypatch):
    """Sizes that the kernel does not take are recorded as a fallback."""
    for module in (mosaic_gpu, gathered_gpu):
        monkeypatch.setattr(module, "why_not", module.refusal)
    mixture = MixtureConfig(experts=6, top_k=2, size=64, gated=True)

    def chosen(implementation, size=64, dtype=jnp.bfloat16, tokens=4, code=None, width=128):
        shapes = {"experts_up": (6, 2 * size, width), "experts_down": (width, 6, size)}
        params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        if code is not None:
            params = {name: rounded(weight.shape, code) for name, weight in params.items()}
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        return grouped_for(params, x, mixture=mixture, implementation=implementation)

    before = sum(fallbacks().values())
    assert chosen("mosaic_gpu") == "mosaic_gpu"
    assert [chosen(name) for name in ("xla", "cudnn", None)] == [None] * 3
    # Three tokens ask for four of six experts, some of them twice: small ones are read sooner than rows are sorted.
    assert chosen("mosaic_gpu", tokens=3) is None
    assert chosen("mosaic_gpu", tokens=3, size=2**17) == "mosaic_gpu"
    with fixed_order():
        assert chosen("mosaic_gpu", tokens=3) == "mosaic_gpu"
    # One token asks for no expert twice. Places of larger weights are no int32, so rows are sorted.
    assert chosen("mosaic_gpu", tokens=1, size=2**17) is None
    assert chosen("mosaic_gpu", tokens=1, size=2**22) == "mosaic_gpu"
    # Two tokens ask for 100 MB twice, or for as many bytes of codes, which the products of sorted rows widen slowly.
    assert chosen("mosaic_gpu", tokens=2, size=2**17) == "mosaic_gpu"
    assert chosen("mosaic_gpu", tokens=2, size=2**18, code="float8_e4m3fn") is None
    # Of three tokens, sorting pays for codes of 8 bits, and not yet for as many bytes of 4 bits.
    few = {"tokens": 3, "size": 4096}
    assert chosen("mosaic_gpu", **few, width=8192, code="float8_e4m3fn") == "mosaic_gpu"
    assert chosen("mosaic_gpu", **few, width=16384, code="float4_e2m1fn") is None
    # A block keeps a row of x of each choice that it adds up, and one of the first product.
    one = {"tokens": 1, "code": "float4_e2m1fn"}
    assert chosen("mosaic_gpu", **one, width=2**16) is None
    assert chosen("mosaic_gpu", **one, size=2**16) == "mosaic_gpu"
    assert sum(fallbacks().values()) == before
    assert chosen("mosaic_gpu", size=60) is None
    assert chosen("mosaic_gpu", dtype=jnp.float32) is None
    assert sum(fallbacks().values()) == before + 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [("gathered", 1), ("gathered", 4), *(("grouped", tokens) for tokens in (1, 9, 40, 300))],
)
def test_the_kernel_says_what_the_experts_say(kernel, tokens):
    """With windows of 16, 32 and 128 rows, a token beside broken ones, whose rows lie elsewhere, keeps its bits."""
    mixture = MixtureConfig(experts=16, top_k=4, size=192, gated=True)
    draw = np.random.default_rng(3)
    shapes = {"router": (16, 128), "experts_up": (16, 384, 128), "experts_down": (128, 16, 192)}
    params = {
        name: jnp.asarray(draw.normal(size=shape) * shape[-1] ** -0.5, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    x = jnp.asarray(draw.normal(size=(tokens, 128)), jnp.bfloat16)
    options = {"mixture": mixture, "activation": "silu", kernel: "mosaic_gpu"}
    run = jax.jit(partial(mixture_of_experts, **options))
    got = np.asarray(run(params, x), np.float64)
    wanted = by_hand(params, np.asarray(x, np.float32), mixture)
    assert np.max(np.abs(got - wanted)) < 0.02 * np.max(np.abs(wanted))
    broken = np.asarray(run(params, x.at[1::2].set(jnp.nan)), np.float64)
    np.testing.assert_array_equal(broken[::2], got[::2])


@pytest.mark.gpu
def test_in_the_fixed_order_a_token_has_the_bits_that_it_has_alone():
    """Also among 300, whose windows have 128 rows."""
    mixture = MixtureConfig(experts=16, top_k=4, size=192, gated=True)
    draw = np.random.default_rng(3)
    shapes = {"router": (16, 128), "experts_up": (16, 384, 128), "experts_down": (128, 16, 192)}
    params = {
        name: jnp.asarray(draw.normal(size=shape) * shape[-1] ** -0.5, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    x = jnp.asarray(draw.normal(size=(300, 128)), jnp.bfloat16)

    def run(tokens):
        options = {"mixture": mixture, "activation": "silu", "grouped": "mosaic_gpu"}
        with fixed_order():
            return np.asarray(jax.jit(partial(mixture_of_experts, **options))(params, x[tokens]))

    whole = run(np.arange(300))
    for tokens in ([299], [64, 3, 0], np.arange(100, 140)):
        np.testing.assert_array_equal(run(np.array(tokens)), whole[tokens])


@pytest.fixture
def interpreted(monkeypatch):
    """Lets the kernels run where there is no GPU."""
    for module, name in ((mosaic_gpu, "grouped_matmul"), (gathered_gpu, "gathered_matmul")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
        monkeypatch.setattr(module, "why_not", module.refusal)


# The kernel is interpreted in tests/pallas_kernels/grouped_matmul, what surrounds it is compared above, and the family
# is that of Transformers in tests/models/families/test_hybrid_parity.py.
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("kernel", "tokens"), [("grouped", 7), ("gathered", 3)])
def test_qwen3_next_through_the_interpreted_kernel_equals_hugging_face(interpreted, kernel, tokens):
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    hidden, experts, size = 64, 6, 64
    config = Qwen3NextConfig(
        hidden_size=hidden,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=8,
    )
    torch.manual_seed(0)
    block = Qwen3NextSparseMoeBlock(config)
    narrow = {}
    with torch.no_grad():
        for name, weight in (
            ("router", block.gate.weight),
            ("experts_up", block.experts.gate_up_proj),
            ("experts_down", block.experts.down_proj),
        ):
            weight.normal_(std=hidden**-0.5)
            weight.copy_(weight.bfloat16())
            narrow[name] = jnp.asarray(weight.numpy(), jnp.bfloat16)
        narrow["experts_down"] = narrow["experts_down"].swapaxes(0, 1)
        x = torch.randn(tokens, hidden).bfloat16().float()
        _, weights, chosen = block.gate(x)
        wanted = block.experts(x, chosen, weights).numpy()
    mixture = MixtureConfig(
        experts=experts, top_k=2, size=size, gated=True, renormalise=config.norm_topk_prob
    )
    got = mixture_of_experts(
        narrow,
        jnp.asarray(x.numpy(), jnp.bfloat16),
        mixture=mixture,
        activation="silu",
        **{kernel: "mosaic_gpu"},
    )
    assert got.dtype == jnp.bfloat16
    error = np.max(np.abs(np.asarray(got, np.float64) - wanted))
    assert error < 0.01 * np.max(np.abs(wanted))
