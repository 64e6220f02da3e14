"""Public names: each package lists them, and every public function and class documents its arguments and errors."""

import inspect
import subprocess
import sys

import pytest

import jaxkv
import pallas_kernels

PUBLIC = {
    "jaxkv": {
        "LLM",
        "AsyncLLM",
        "CacheConfig",
        "CheckpointPolicy",
        "EngineConfig",
        "FlaxModel",
        "LoraConfig",
        "ReasoningTokens",
        "SamplingParams",
        "SpeculationConfig",
        "StructuredOutputs",
        "TensorParallel",
        "generate",
        "load_model",
        "score",
        "tensor_mesh",
    },
    "pallas_kernels": {
        "causal_conv",
        "delta_scan",
        "delta_update",
        "filter_bounds",
        "gathered_matmul",
        "group_rows",
        "grouped_matmul",
        "index_topk",
        "latent_attention",
        "page_write",
        "paged_attention",
        "ragged_attention",
        "rotary_write",
        "row_topk",
        "selective_scan",
        "selective_update",
        "skinny_matmul",
        "sparse_attention",
        "ssd_scan",
        "ssd_update",
    },
}
BRIDGE = {
    "CacheLeased",
    "CachePoisoned",
    "JaxkvCache",
    "JaxkvCacheStats",
    "Lease",
    "LeaseLeaked",
    "NotZeroCopy",
    "from_torch",
    "generate",
    "lease",
    "to_torch",
}


def takes_arguments(thing):
    names = [name for name in inspect.signature(thing).parameters if name not in ("args", "kwargs")]
    return bool(names)


@pytest.mark.parametrize("package", [jaxkv, pallas_kernels], ids=lambda package: package.__name__)
def test_a_package_lists_its_public_names(package):
    assert set(package.__all__) == PUBLIC[package.__name__]
    for name in package.__all__:
        thing = getattr(package, name)
        assert thing.__doc__
        if takes_arguments(thing):
            assert "Args:" in thing.__doc__ or "Attributes:" in thing.__doc__, name
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        package.nothing_of_this_name


@pytest.mark.torch
def test_the_bridge_lists_its_public_names():
    import torch_bridge

    assert set(torch_bridge.__all__) == BRIDGE
    assert all(getattr(torch_bridge, name).__doc__ for name in BRIDGE)


def test_importing_the_packages_loads_no_library_before_it_is_used():
    program = (
        "import sys, jaxkv, pallas_kernels;"
        "print([name for name in ('jax', 'flax', 'torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
