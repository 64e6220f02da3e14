"""Weights in few bits are multiplied by `skinny_matmul` of the model's family in every kind of layer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import init_cache
from jaxkv.config.blocks import (
    DeltaConfig,
    GlobalAttentionConfig,
    IndexConfig,
    LatentConfig,
    Mamba1Config,
    MambaConfig,
    MixtureConfig,
    ShortConvConfig,
    TransformerConfig,
)
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.layers import linear
from jaxkv.models import implementation
from jaxkv.models.blocks import BLOCKS
from jaxkv.models.decoder import Decoder
from pallas_kernels.dispatch import asking
from pallas_kernels.formats.few_bits import FewBits

STEPS = {"decode": (2, True, False), "prefill": (16, False, False), "fresh": (16, False, True)}
LATENT = LatentConfig(kv_lora_rank=24, rope_dim=8, nope_dim=8, value_dim=8, q_lora_rank=20)
CONFIG = ModelConfig(
    family="made-up",
    vocab_size=16,
    hidden_size=32,
    num_layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_size=48,
    max_positions=64,
    rope=RopeConfig(rotary_dim=8),
    windows=(None, None),
    mlp_bias=True,
    latent=replace(LATENT, index=IndexConfig(heads=16, head_dim=12, topk=16)),
    mamba=MambaConfig(heads=4, head_dim=8, d_state=8, d_conv=4, groups=2, chunk_size=4),
    mamba1=Mamba1Config(channels=32, d_state=8, dt_rank=4, d_conv=4, bias=True),
    delta=DeltaConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8, d_conv=4),
    short_conv=ShortConvConfig(channels=32, d_conv=3),
    transformer=TransformerConfig(adapter_rank=4),
    global_attention=GlobalAttentionConfig(kv_heads=2, head_dim=24),
    mixture=MixtureConfig(experts=4, top_k=2, size=16, gated=True, shared_size=16),
)
FAMILIES = {"mosaic_gpu": None, None: None, "xla": "xla", "xla_products": "xla"}
"""Family -> the implementation of `skinny_matmul` that it asks for; `None` for the preferred one."""
BOTH = {
    *("attention", "global_attention", "eagle_attention"),
    *("kv_shared_attention", "kv_shared_global_attention"),
    *("gated", "double_gated", "dense_and_mixture", "delta", "kimi_delta"),
}
"""Blocks whose plain weights are multiplied by `skinny_matmul` too."""


def config_of(block):
    """Returns the config of a model with a block; those of the delta rule have sizes of their own."""
    if block != "kimi_delta":
        return CONFIG
    return replace(CONFIG, delta=replace(CONFIG.delta, key_heads=4, gate_rank=12))


def projections(block):
    """Returns the names of a block's projections, which may be in few bits."""
    return {name for name, leaf in BLOCKS[block].leaves(config_of(block)).items() if leaf.adapts}


BLOCKS_WITH_PROJECTIONS = [block for block in BLOCKS if projections(block)]


@pytest.fixture
def asked(monkeypatch):
    """Returns a list of what layers ask `skinny_matmul` for: whether of few bits, and the implementation."""
    calls, multiply = [], linear.skinny_matmul

    def recorded(weight, x, *, implementation, **options):
        calls.append((isinstance(weight, FewBits), implementation))
        return multiply(weight, x, implementation=implementation, **options)

    monkeypatch.setattr(linear, "skinny_matmul", recorded)
    return calls


def trace(block, family, step, names=(), **sizes):
    """Traces a step of a plain layer, which has a cache, and of one whose parameters `names` are in few bits."""
    rotary = LATENT.rope_dim if "latent" in block else CONFIG.head_dim
    own = block.removeprefix("kv_shared_")
    first, owners = ("short_conv", ()) if own == block else (own, (0, 0))
    pattern = ((first,), (block,))
    rope = RopeConfig(rotary_dim=rotary)
    config = replace(config_of(block), rope=rope, pattern=pattern, key_owners=owners, **sizes)
    decoder = Decoder(config, implementation=family)
    params = decoder.param_shapes("bfloat16")
    plain, layer = params["layers"]
    params["layers"] = (plain, {**layer, **{name: in_few_bits(layer[name]) for name in names}})
    layout = group_layers(decoder.cache_specs(page_size=8, dtype="bfloat16"))
    tokens, decode, fresh = STEPS[step]

    def run(params):
        batch = implementation._batch(layout, tokens, decode=decode, fresh=fresh)
        cache = init_cache(layout, {group.name: 9 for group in layout.groups})
        return decoder.forward(params, cache, batch)

    # Outside of it, kernels that this device lacks would be refused.
    with asking():
        jax.eval_shape(run, params)


def in_few_bits(plain):
    rows, inner = plain.shape
    codes = jax.ShapeDtypeStruct((rows, inner), jnp.int8)
    return FewBits(codes, jax.ShapeDtypeStruct((rows, 1), plain.dtype), None, None, "int8")


@pytest.mark.parametrize(
    ("block", "step"),
    # Of blocks whose plain weights are XLA's, a decode step has the products of a prompt.
    [
        pytest.param(
            block, step, marks=[pytest.mark.slow] * (step == "prefill" and block not in BOTH)
        )
        for block in BLOCKS_WITH_PROJECTIONS
        for step in STEPS
        # Other blocks compute a fresh step as any prefill.
        if step != "fresh" or "latent" in block
    ],
)
def test_every_projection_in_few_bits_asks_for_the_product_of_the_family(block, step, asked):
    names = projections(block)
    for family, wanted in FAMILIES.items():
        asked.clear()
        trace(block, family, step, names)
        found = [one for one in asked if one[0] or not block.startswith("kv_shared_")]
        assert found == [(True, wanted)] * len(names), family


@pytest.mark.parametrize("block", [name for name in BLOCKS_WITH_PROJECTIONS if name not in BOTH])
def test_plain_projections_of_these_blocks_are_xlas_on_every_family(block, asked):
    for family in FAMILIES:
        trace(block, family, "decode")
    assert not asked


def test_shared_experts_without_gate_and_those_with_one_plain_weight_ask_too(asked):
    ungated = replace(CONFIG.mixture, gated=False)
    trace("shared", "mosaic_gpu", "decode", ["shared_up", "shared_down"], mixture=ungated)
    assert asked == [(True, None), (True, None)]
    for name in ("shared_up", "shared_down"):
        asked.clear()
        trace("shared", "mosaic_gpu", "decode", [name])
        assert (True, None) in asked
