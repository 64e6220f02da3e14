"""Every family over several devices computes what Hugging Face Transformers computes, in float32."""

import numpy as np
import pytest

from jaxkv.cache.state import init_cache
from jaxkv.models.tensor_parallel import TensorParallel, tensor_mesh
from tests.devices import needs_devices
from tests.layers.jaxprs import equations
from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")

pytestmark = [pytest.mark.torch, needs_devices(4)]

TOLERANCE = 1e-4
EVERY = cases.CASES | {f"hybrid-{name}": case for name, case in hybrid_cases.CASES.items()}
EVERY |= latent_cases.CASES
NOT_BY_FOUR = {
    f"hybrid-{name}"
    for name in (
        *("nemotron", "nemotron-latent", "falcon-h1", "falcon-h1-norm"),
        *("qwen3-next", "qwen3.5", "qwen3.5-multimodal", "zamba2", "zamba2-biases"),
    )
}
"""Cases with sizes that two devices can divide and four cannot."""

FAST = {
    # Two heads of keys and values for four devices.
    ("llama", 4),
    ("gpt-oss", 2),
    ("hybrid-granite", 2),
    ("hybrid-qwen3-next", 2),
    ("v32", 4),
}
"""Heads, experts, Mamba-2, gated delta and its convolution, latent attention, and both numbers of devices."""

PAIRS = [
    pytest.param(name, devices, marks=[pytest.mark.slow] * ((name, devices) not in FAST))
    for name in EVERY
    for devices in (2, 4)
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return cases.maker(EVERY, tmp_path_factory)


def driver_of(model, params):
    """Returns a driver whose parameters and cache are divided among the devices of a model."""
    driver = Driver(model, model.divided(params))
    counts = {
        group.name: driver.num_pages if group.unit == "page" else driver.num_states
        for group in driver.layout.groups
    }
    driver.cache = init_cache(driver.layout, counts, device=model.mesh)
    return driver


@pytest.mark.parametrize(
    ("name", "each", "embeddings"),
    [("gemma4", 2, 0), ("gemma4-e2b", 2, 1), ("qwen2-moe", 2, 0), ("minimax-m2", 3, 0)],
)
def test_a_layer_sums_once_after_attention_and_once_after_its_feed_forwards(
    make, name, each, embeddings
):
    """A dense feed-forward or a shared expert beside experts; each device has a whole table of 199 embeddings.

    MiniMax-M2 has norms over all heads of queries and of keys, which share a sum. Of 200 ids each device has a part, in
    the table of all layers too, which share a sum as well.
    """
    _, _, whole, params = make(name)
    model = TensorParallel(whole, tensor_mesh(2))
    driver = driver_of(model, params)
    for batch in (driver.batch([[1, 2, 3]]), driver.batch([[1]], decode=True)):
        found = equations(
            lambda params, cache, batch=batch: model.forward(params, cache, batch)[1],
            driver.params,
            driver.cache,
        )
        sums = [one for one in found if str(one.primitive).startswith("psum")]
        assert len(sums) == each * whole.num_layers + embeddings


@pytest.mark.parametrize(("name", "devices"), PAIRS)
def test_logits_of_prompts_chunks_and_decode_steps_equal_transformers(make, name, devices):
    case, theirs, whole, params = make(name)
    if devices == 4 and name in NOT_BY_FOUR:
        with pytest.raises(ValueError, match="tensor_parallel_size = 4 cannot divide this"):
            TensorParallel(whole, tensor_mesh(devices))
        return
    model = TensorParallel(whole, tensor_mesh(devices))
    tokens = case.prompt(40)
    # In the same chunks, on whose lengths stretched angles depend. Those of hybrid models do not, and the states of
    # some in Transformers go on by single tokens alone.
    wanted = cases.logits(
        theirs, tokens, chunks=None if name.startswith("hybrid-") else (23, 15, 1, 1)
    )
    assert np.std(wanted) > 0.3
    driver = driver_of(model, params)
    [first], [second] = driver.prefill([tokens[:23]]), driver.prefill([tokens[23:38]])
    steps = [driver.decode([token]) for token in tokens[38:]]
    assert cases.far(np.concatenate((first, second, *steps)), wanted) < TOLERANCE
