"""A whole model has one implementation, chosen before anything runs, and its reasons are logged once."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import init_cache
from jaxkv.cache.variants import gqa, place
from jaxkv.config.blocks import DeltaConfig, MixtureConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models import feed_forwards, implementation
from jaxkv.models.flax_model import FlaxModel
from jaxkv.models.implementation import Choice, ask, best_on_device, choose_implementation
from jaxkv.models.registry import build_model
from pallas_kernels import device, dispatch
from pallas_kernels.deferred import DEFERRED
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.families import CHANNEL_DECAYS, FAMILIES, member
from tests.layers.jaxprs import equations

LAYERS = 3
KERNELS = (DEFERRED, "mpmd_map", "core_map", "pallas_call")
"""What a kernel is in a jaxpr: a deferred one of ours, or what JAX 0.11 and 0.12 call one."""


@pytest.fixture
def hopper(monkeypatch):
    """Pretends that JAX compiles for an H200; nothing may run then."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(implementation, "_LOGGED", set())


def decoder(head_dim, **options):
    config = ModelConfig(
        family="llama",
        vocab_size=64,
        hidden_size=32,
        num_layers=LAYERS,
        heads=8,
        kv_heads=2,
        head_dim=head_dim,
        ffn_size=48,
        max_positions=512,
        rope=RopeConfig(rotary_dim=head_dim),
        windows=(None, 128, None),
    )
    return build_model(config, **options)


class TwoHeadDims(nnx.Module):
    """A module whose second layer has heads that no kernel takes."""

    vocab_size = 64
    max_positions = 512

    def __init__(self):
        self.embed = nnx.Embed(64, 16, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

    def cache_specs(self, *, page_size, dtype):
        return place(gqa(2, dim, dtype=dtype, page_size=page_size) for dim in (64, 80))

    def __call__(self, tokens, positions, attend):
        hidden = self.embed(tokens)
        for layer, dim in enumerate((64, 80)):
            q = jnp.zeros((tokens.shape[0], 4, dim), jnp.bfloat16)
            attend(layer, q, q[:, :2], q[:, :2], scale=1.0)
        return hidden

    def logits(self, hidden):
        return self.embed.attend(hidden).astype(jnp.float32)


def chosen(model, *, dtype="bfloat16", page_size=64):
    layout, counts, params = cache_of(model, dtype, page_size)
    return choose_implementation(model, params, layout, counts)


def cache_of(model, dtype, page_size):
    layout = group_layers(model.cache_specs(page_size=page_size, dtype=dtype))
    counts = {group.name: 9 for group in layout.groups}
    return layout, counts, model.param_shapes("bfloat16")


def kernels_of(model, kinds=KERNELS):
    """Counts the kernels of some kinds in a step of decode and in one of prefill."""
    layout, counts, params = cache_of(model, "bfloat16", 64)

    def step(decode):
        def run(params):
            batch = implementation._batch(layout, 2 if decode else 32, decode=decode)
            return model.forward(params, init_cache(layout, counts), batch)

        found = equations(run, params, whole=KERNELS)
        return sum(str(equation.primitive) in kinds for equation in found)

    return step(True), step(False)


def test_without_a_gpu_a_model_runs_as_xla_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(device, "gpu_arch", lambda: None)
    monkeypatch.setattr(implementation, "_LOGGED", set())
    with caplog.at_level(logging.INFO, logger="jaxkv"):
        first, again = chosen(decoder(128)), chosen(decoder(128))
    assert first == again == best_on_device()
    assert first.name == "xla"
    assert [record.message for record in caplog.records] == [f"the model runs as {first}"]
    assert "needs an sm90 GPU" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_on_hopper_a_model_that_the_kernels_take_runs_on_them_in_every_layer():
    model = decoder(128)
    choice = chosen(model)
    assert choice == Choice("mosaic_gpu")
    # Each layer's write and attention.
    assert kernels_of(model.running(choice.name)) == (2 * LAYERS, 2 * LAYERS)
    # No body is traced with the program, not even that of the write, which changes pools. (The checks of shapes wrap
    # a function of the prefill's.)
    decode, _ = kernels_of(model.running(choice.name), (DEFERRED,))
    assert decode == 2 * LAYERS


@pytest.mark.usefixtures("hopper")
def test_on_hopper_many_tokens_ask_experts_through_their_kernel(monkeypatch):
    """Rows are sorted and multiplied twice in each layer, with a list of visits each time, which XLA makes once.

    Two tokens, which ask for little here, are answered the plain way.
    """
    dense = decoder(128)
    mixture = MixtureConfig(experts=8, top_k=2, size=64, gated=True)
    pattern = (("attention", "mixture"),) * LAYERS
    config = replace(dense.config, hidden_size=128, pattern=pattern, mixture=mixture)
    model = build_model(config)
    assert chosen(model) == Choice("mosaic_gpu")
    before = dispatch.fallbacks()
    few, many = kernels_of(model.running("mosaic_gpu"))
    # A model that was told to run on XLA has none of them, not even for the router.
    assert kernels_of(model.running("xla")) == (0, 0)
    assert dispatch.fallbacks() == before
    monkeypatch.setattr(feed_forwards, "grouped_for", lambda *_, **__: None)
    assert kernels_of(model.running("mosaic_gpu")) == (few, many - 5 * LAYERS)


@pytest.mark.usefixtures("hopper")
def test_one_head_dim_that_the_kernels_refuse_sends_the_whole_model_to_xla(caplog):
    model = decoder(80)
    before = dispatch.fallbacks()
    with caplog.at_level(logging.INFO, logger="jaxkv"):
        choice = chosen(model)
        assert chosen(model) == choice
    assert choice.name == "xla"
    [told] = [record.message for record in caplog.records]
    assert "paged_attention in layer 0 and 2 more: head_dim must be" in told
    assert "got 80" in told
    assert kernels_of(model.running(choice.name)) == (0, 0)
    assert dispatch.fallbacks() == before


@pytest.mark.usefixtures("hopper")
def test_one_layer_is_enough():
    """Never a mixture: layer 0 could run on the kernels, layer 1 cannot."""
    model = FlaxModel(TwoHeadDims())
    choice = chosen(model)
    assert choice.name == "xla"
    assert any(
        reason.startswith("paged_attention in layer 1: head_dim") for reason in choice.reasons
    )
    assert not any("layer 0" in reason for reason in choice.reasons)
    assert kernels_of(model.running("xla")) == (0, 0)


@pytest.mark.usefixtures("hopper")
def test_heads_too_wide_for_kernels_are_xlas_alone_and_counted(caplog):
    """A model with a few such layers (Gemma 4) keeps its kernels in the others."""
    model = decoder(512)
    assert chosen(model) == Choice("mosaic_gpu")
    key = ("attention", "mosaic_gpu", "heads have at most 256 components there, got 512")
    before = dispatch.fallbacks().get(key, 0)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert kernels_of(model.running("mosaic_gpu")) == (0, 0)
    # In steps of decode and of prefill.
    assert dispatch.fallbacks()[key] == before + 2 * LAYERS
    told = "attention runs as xla, since mosaic_gpu cannot: heads have at most 256 components there"
    assert before or told in caplog.text
    assert cache_of(model, "bfloat16", 64)[0].shared_group is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("gate_rank", [None, 64])
def test_the_rule_of_kimi_delta_attention_is_xlas_alone_and_counted(gate_rank):
    block = "delta" if gate_rank is None else "kimi_delta"
    delta = DeltaConfig(
        key_heads=2, value_heads=2, key_dim=128, value_dim=128, d_conv=4, gate_rank=gate_rank
    )
    pattern = ((block, "gated"), ("attention", "gated"), (block, "gated"))
    plain = decoder(128)
    model = replace(plain, config=replace(plain.config, delta=delta, pattern=pattern))
    other = "kimi_delta" if gate_rank is None else "delta"
    with pytest.raises(ValueError, match=f"the pattern has {other} blocks, but their sizes are"):
        replace(model.config, pattern=((other, "gated"),) * LAYERS)
    assert chosen(model) == Choice("mosaic_gpu")
    keys = [(op, "mosaic_gpu", CHANNEL_DECAYS) for op in ("delta_update", "delta_scan")]
    before = [dispatch.fallbacks().get(key, 0) for key in keys]
    assert all(kernels_of(model.running("mosaic_gpu")))
    found = [dispatch.fallbacks().get(key, 0) for key in keys]
    assert found == [count + 2 * (gate_rank is not None) for count in before]


@pytest.mark.usefixtures("hopper")
def test_keys_in_fp8_are_refused_where_xla_would_copy_them():
    assert chosen(decoder(512), dtype="int8") == Choice("mosaic_gpu")
    with pytest.raises(Unsupported, match="runs as xla for heads of 512 components; store keys"):
        chosen(decoder(512), dtype="fp8")


@pytest.mark.usefixtures("hopper")
def test_a_cache_dtype_that_no_kernel_takes_is_a_reason_too():
    choice = chosen(decoder(128), dtype="float32")
    assert choice.name == "xla"
    assert "float32" in str(choice)


@pytest.mark.usefixtures("hopper")
def test_a_named_implementation_that_cannot_run_raises_with_every_reason():
    with pytest.raises(Unsupported, match="cannot run as mosaic_gpu") as refused:
        chosen(decoder(80, implementation="mosaic_gpu"))
    questions = ask(decoder(80), *reversed_cache(decoder(80)))
    # An op that likes its plain form better at such sizes is no reason.
    liked = [q for q in questions if next(iter(q.refusals)) == "mosaic_gpu"]
    told = {q.op for q in liked if q.refusals["mosaic_gpu"]}
    assert "paged_attention" in told
    for op in told:
        assert f"{op} in layer 0 and 2 more" in str(refused.value)


def reversed_cache(model):
    layout, counts, params = cache_of(model, "bfloat16", 64)
    return params, layout, counts


def test_a_named_implementation_that_this_device_lacks_raises(monkeypatch):
    monkeypatch.setattr(device, "gpu_arch", lambda: None)
    with pytest.raises(Unsupported, match="needs an sm90 GPU, found no NVIDIA GPU"):
        chosen(decoder(128, implementation="mosaic_gpu"))


@pytest.mark.usefixtures("hopper")
def test_xla_that_was_asked_for_needs_no_reason():
    assert chosen(decoder(128, implementation="xla")) == Choice("xla")


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(
        ValueError, match="one of mosaic_gpu, xla, cudnn, xla_products, got 'nonesuch'"
    ):
        chosen(decoder(128, implementation="nonesuch"))


def test_each_op_is_asked_once_per_layer_and_kind_of_step():
    questions = ask(decoder(16), *reversed_cache(decoder(16)))
    places = [f"layer {layer}" for layer in range(LAYERS)]
    for op in ("paged_attention", "ragged_attention"):
        assert [question.place for question in questions if question.op == op] == places
    assert all("xla" in question.refusals for question in questions)


def test_a_family_names_an_implementation_or_leaves_the_choice_to_the_op():
    assert member("xla", "page_write") == "xla"
    assert member("cudnn", "paged_attention") == "cudnn"
    assert member("cudnn", "ragged_attention") is None
    assert member("mosaic_gpu", "paged_attention") == "mosaic_gpu"
    assert member("mosaic_gpu", "page_write") is None
    assert member(None, "page_write") is None
    assert member("nonesuch", "page_write") == "nonesuch"
    assert member("xla_products", "skinny_matmul") == "xla"
    assert member("xla_products", "gathered_matmul") == "xla"
    assert member("xla_products", "page_write") is None
    assert set(FAMILIES) == {"mosaic_gpu", "xla", "cudnn", "xla_products"}


def test_a_model_of_another_implementation_is_another_model():
    for model in (decoder(16), FlaxModel(TwoHeadDims())):
        named = model.running("xla")
        assert named.implementation == "xla"
        assert named != model
        assert model.implementation is None
        assert named == model.running("xla")
        assert hash(named) == hash(model.running("xla"))
    assert decoder(16).running("xla") == replace(decoder(16), implementation="xla")
