"""Steps of few tokens on the GPU kernels: projections compute the norms and the residual additions between them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkv.config.blocks import Multipliers
from jaxkv.models import decoder
from jaxkv.models.registry import build_model, read_config
from jaxkv.models.tensor_parallel import AXIS, TensorParallel, tensor_mesh
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.peer_sum.api import peers_shape
from pallas_kernels.skinny_matmul.weighed import weigh
from tests.devices import needs_devices
from tests.layers.jaxprs import equations
from tests.models.driver import Driver, run_step
from tests.models.hf_config.test_config_json_hybrid import QWEN3_NEXT
from tests.models.test_decoder import QWEN3_MOE, SMALL, TINY, prompt

LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "sliding_window": None}
PLAIN = {name: value for name, value in TINY.items() if "window" not in name}


def drawn(model, dtype="float32"):
    """Returns parameters whose norms differ from each other and from ones."""
    leaves, tree = jax.tree.flatten(model.init_params(jax.random.key(1), dtype))
    draw = np.random.default_rng(1)
    for at, declared in enumerate(model.leaf_declarations().values()):
        if declared.is_scale:
            leaves[at] = jnp.asarray(draw.uniform(0.5, 2, leaves[at].shape), leaves[at].dtype)
        elif leaves[at].ndim == 2:
            leaves[at] *= 10
    return tree.unflatten(leaves)


def answers(model, params, decodes):
    driver = Driver(model, params, **SMALL)
    said = driver.prefill([prompt(5), prompt(7, 1), prompt(3, 2)])
    return np.concatenate([*said, driver.decode([3, 4, 5])] if decodes else said)


@pytest.fixture
def joined(monkeypatch):
    """Makes XLA compute the fused norms that the GPU kernels compute; returns the token counts of its calls."""
    asked = []

    def joins(implementation, tokens):
        asked.append(tokens)
        return True

    monkeypatch.setattr(decoder, "joins_norms", joins)
    run_step.clear_cache()
    yield asked
    run_step.clear_cache()


# The second layer of this Qwen3-Next is a dense one.
MIXED = QWEN3_NEXT | {"num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("family", "decodes"),
    [
        # A decode step has the same joints as a prompt.
        (MIXED, False),
        *(
            pytest.param(family, True, marks=pytest.mark.slow)
            for family in (MIXED, TINY, PLAIN | LLAMA, QWEN3_MOE)
        ),
    ],
    ids=["prompts of qwen3-next", "qwen3-next", "qwen2", "llama", "qwen3-moe"],
)
def test_logits_are_those_of_norms_on_their_own(family, decodes, joined, monkeypatch):
    """In float32 within 1e-5: only the order of two multiplications differs."""
    model = build_model(read_config(family), implementation="xla")
    params = drawn(model)
    said = answers(model, params, decodes)
    assert joined
    monkeypatch.setattr(decoder, "joins_norms", lambda implementation, tokens: False)
    run_step.clear_cache()
    wanted = answers(model, params, decodes)
    np.testing.assert_allclose(said, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_step_then_divides_by_no_root_before_a_projection(joined):
    """One norm comes first, before any projection, and one last; projections compute all others."""
    model = build_model(read_config(PLAIN | LLAMA), implementation="xla")
    driver = Driver(model, drawn(model), **SMALL)
    batch = driver.batch([[1], [2], [3]], decode=True)
    found = list(equations(lambda p, c: model.forward(p, c, batch)[1], driver.params, driver.cache))
    roots = [equation for equation in found if str(equation.primitive) == "rsqrt"]
    shapes = [root.outvars[0].aval.shape for root in roots]
    assert len(shapes) == 2 * model.num_layers + 1


def test_stages_that_do_not_join_end_with_the_norm_of_one_that_does(joined):
    """A mixture and its shared expert are two blocks, whose sum XLA adds to the residual stream."""
    model = build_model(read_config(QWEN3_NEXT), implementation="xla")
    assert [len(stages) for stages in model.config.pattern] == [2] * 4
    assert [stages[1] for stages in model.config.pattern].count("mixture+shared") == 3
    params, hidden = drawn(model), jnp.zeros((3, 128))
    of_layer = {id(layer["norms"]): number for number, layer in enumerate(params["layers"])}
    norms = list(model._next_norms(params, hidden, None))
    # The second layer has a dense feed-forward, and the last stage no next norm.
    assert [(of_layer.get(id(norm)), row) for norm, row in norms] == [
        *((None, 0), (1, 0), (1, 1), (2, 0)),
        *((None, 0), (3, 0), (None, 0), (None, 0)),
    ]
    with fixed_order():
        assert model._next_norms(params, hidden, None) is None


def test_models_that_do_more_between_two_blocks_keep_their_norms():
    """Constants of the residual stream, one wider than the model or in float16, other families of implementations."""
    config = read_config(PLAIN | LLAMA)
    plain = build_model(config, implementation="mosaic_gpu")
    hidden = jnp.zeros((3, config.hidden_size), jnp.bfloat16)
    params = plain.param_shapes("bfloat16")
    assert plain._next_norms(params, hidden, None) is not None
    assert plain.running("xla")._next_norms(params, hidden, None) is None
    # Their product with the stream may be infinite before the division.
    assert plain._next_norms(params, hidden.astype(jnp.float16), None) is None
    for changed in (
        replace(config, multipliers=Multipliers(residual=0.5)),
        replace(config, wide_residual=True),
        replace(config, layer_embedding_size=8),
        replace(config, layer_scalars=True),
    ):
        other = build_model(changed, implementation="mosaic_gpu")
        assert other._next_norms(params, hidden, None) is None


@pytest.fixture
def mailboxes(monkeypatch):
    """Makes XLA compute what the kernel of `peer_sum` computes on GPUs; returns the names of what each call got."""
    calls = []

    def summed(part, peers, *, residual=None):
        assert peers.shape == (1, peers_shape(2)[1])
        calls.append([] if residual is None else ["residual"])
        total = lax.psum(part, AXIS)
        return total if residual is None else total + residual

    def weighed(part, peers, *, residual, norms, norm_row):
        total = summed(part, peers, residual=residual)
        calls[-1].append("norms")
        return tuple(weigh(total, norms[norm_row]))

    monkeypatch.setattr("jaxkv.layers.shards.peer_sum", summed)
    monkeypatch.setattr("jaxkv.layers.shards.peer_sum_weighed", weighed)
    monkeypatch.setattr("jaxkv.layers.shards.why_not", lambda part, *, weighs=False: None)
    return calls


@needs_devices(2)
# Sums without mailboxes are those of tests/models/families/test_tensor_parallel.py.
@pytest.mark.parametrize("has_peers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sums_over_devices_by_way_of_mailboxes_join_and_weigh(joined, mailboxes, has_peers):
    """Logits are those of one device. Without mailboxes XLA adds up, and norms stay on their own."""
    model = build_model(read_config(PLAIN | LLAMA | {"vocab_size": 64, "num_hidden_layers": 2}))
    params, tokens = drawn(model), [prompt(5), prompt(7, 1), prompt(3, 2)]
    split = TensorParallel(model, tensor_mesh(2))
    alone, several = Driver(model, params, **SMALL), Driver(split, split.divided(params), **SMALL)
    if has_peers:
        several.cache = replace(several.cache, peers=jnp.zeros(peers_shape(2), jnp.int32))
    said, wanted = several.prefill(tokens), alone.prefill(tokens)
    # The embeddings, and two blocks of each layer; no norm follows the last one in its layer.
    of_layers = [["residual", "norms"]] * (2 * model.num_layers - 1) + [["residual"]]
    assert mailboxes == ([[], *of_layers] if has_peers else [])
    assert (several.cache.peers is not None) == has_peers
    for ours, theirs in zip(said, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    ours, theirs = several.decode([3, 4, 5]), alone.decode([3, 4, 5])
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@needs_devices(2)
def test_a_model_on_xla_alone_uses_no_mailboxes(mailboxes):
    model = build_model(read_config(PLAIN | LLAMA | {"num_hidden_layers": 1}), implementation="xla")
    split = TensorParallel(model, tensor_mesh(2))
    driver = Driver(split, split.divided(drawn(model)), **SMALL)
    driver.cache = replace(driver.cache, peers=jnp.zeros(peers_shape(2), jnp.int32))
    driver.prefill([prompt(5)])
    assert mailboxes == []


@needs_devices(2)
def test_norms_of_another_dtype_than_the_activations_join_no_sum(mailboxes):
    """The kernel multiplies numbers of one dtype."""
    model = build_model(read_config(PLAIN | LLAMA), implementation="mosaic_gpu")
    part = TensorParallel(model, tensor_mesh(2)).part
    hidden, peers = jnp.zeros((3, 32), jnp.bfloat16), jnp.zeros((1, 6), jnp.int32)
    assert part._next_norms(part.param_shapes("bfloat16"), hidden, peers) is not None
    assert part._next_norms(part.param_shapes("float32"), hidden, peers) is None
