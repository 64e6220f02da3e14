"""When cuDNN's paged attention may run: only by name, on an NVIDIA GPU, for what it was seen to do right.

What it computes is tested in test_paged_attention.py, on a GPU.
"""

import importlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.paged_attention import cudnn


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretends that there is a GPU with a cuDNN of some version."""

    def pretend(version=91900, arch=90):
        found = None if version is None else SimpleNamespace(cudnn_get_version=lambda: version)
        monkeypatch.setattr(cudnn, "gpu_arch", lambda: arch)
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        monkeypatch.setattr(module, "cuda_versions", found)

    return pretend


def arguments(*, head_dim=64, page_size=16, dtype=jnp.bfloat16):
    pool = jnp.zeros((3, page_size, 2, head_dim), dtype)
    q = jnp.zeros((2, 4, head_dim), dtype)
    return q, pool, pool, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)


def why_not(*arrays, window=None, soft_cap=None, **others):
    return cudnn.why_not(AttentionArrays(*arrays, **others), ScoreOptions(1.0, window, soft_cap))


def test_it_takes_what_it_was_seen_to_do_right(on_gpu):
    on_gpu()
    assert why_not(*arguments()) is None
    assert why_not(*arguments(head_dim=80, page_size=1, dtype=jnp.float16)) is None


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        ({}, {"window": 4}, "does not support window"),
        ({}, {"soft_cap": 4.0}, "does not support soft cap"),
        ({}, {"sinks": jnp.zeros(4)}, "does not support sinks"),
        (
            {},
            {"k_scales": jnp.zeros((3, 16, 2)), "v_scales": jnp.zeros((3, 16, 2))},
            "does not support scales",
        ),
        ({"head_dim": 68}, {}, "multiple of 8 up to 256, got 68"),
        ({"head_dim": 264}, {}, "multiple of 8 up to 256, got 264"),
        ({"page_size": 48}, {}, "power of two, got 48"),
        ({"dtype": jnp.float32}, {}, "got float32"),
    ],
)
def test_it_says_what_it_lacks(on_gpu, sizes, options, told):
    on_gpu()
    assert told in why_not(*arguments(**sizes), **options)


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        ({"arch": None}, "found no NVIDIA GPU"),
        ({"arch": 75}, "found sm75"),
        ({"version": None}, "needs cuDNN, which JAX did not find"),
        ({"version": 90100}, "needs cuDNN 90500 or newer, found 90100"),
    ],
)
def test_it_says_what_the_machine_lacks(on_gpu, machine, told):
    on_gpu(**machine)
    assert told in why_not(*arguments())


def test_another_jax_may_have_another_private_door(on_gpu, monkeypatch):
    on_gpu()
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    assert "uses a private module of jax 0.11 and 0.12, found" in why_not(*arguments())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
def test_without_a_gpu_it_is_refused_by_name_and_never_tried_otherwise():
    with pytest.raises(Unsupported, match="cudnn: needs an sm80 GPU"):
        paged_attention(*arguments(), scale=1.0, implementation="cudnn")
    assert paged_attention(*arguments(), scale=1.0).shape == (2, 4, 64)


@pytest.mark.parametrize("return_lse", [False, True])
def test_this_jax_lowers_it_to_one_call_of_cudnn_on_the_pages(on_gpu, return_lse):
    on_gpu()

    def attend(*arrays):
        return cudnn.paged_attention(
            AttentionArrays(*arrays), ScoreOptions(0.25, None, None), return_lse=return_lse
        )

    traced = jax.jit(attend).trace(*arguments())
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(traced.out_info)]
    assert shapes == [((2, 4, 64), jnp.bfloat16), ((2, 4), jnp.float32)][: 1 + return_lse]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    [call] = re.findall(r"custom_call @__cudnn\$(\w+)\(([^)]*)\) \{(.*)", text)
    assert call[0] == "fmhaSoftmax"
    # The query, both pools as they are, both lengths, and the page table twice.
    operands = call[1].split(", ")
    assert len(operands) == 7
    assert operands[1:3] == ["%arg1", "%arg2"]
    assert operands[5] == operands[6]
    assert r"fmha_scale\22: 0.25," in call[2]
    assert r"is_paged_attention\22: true" in call[2]


def test_jax_still_has_the_private_names_that_are_used():
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    for name in ("_dot_product_attention", "MaskType", "AttentionLayout", "check_cudnn_version"):
        assert hasattr(module, name)
