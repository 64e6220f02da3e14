"""A plan promises what `LLM` will find once its weights lie in the same memory."""

import inspect
import re

import jax
import numpy as np
import pytest

from jaxkv import default_model
from jaxkv.config import CacheConfig
from jaxkv.models.registry import build_model, load_config
from jaxkv.plan import explain_plan, plan_cache
from jaxkv.plan import resolve_length as checked_resolve_length
from jaxkv.weights.load import load_params

# Users have no shape checker before it, which refuses other types by itself.
resolve_length = inspect.unwrap(checked_resolve_length)

CACHE = CacheConfig(max_sequences=4, page_size=16, memory_share=0.5)


def plan(free_bytes, cache=CACHE, **options):
    return explain_plan(
        None, dtype="auto", max_model_len=256, cache=cache, free_bytes=free_bytes, **options
    )


def weight_bytes(text):
    return int(re.search(r"weights: ([\d,]+) bytes", text)[1].replace(",", ""))


@pytest.mark.parametrize("length", [64.5, 64.0, True, "64", [64], 1, 0, -1, 2049, float("nan")])
def test_a_length_that_is_no_int_or_out_of_range_is_refused_by_name(length):
    with pytest.raises(ValueError, match=r"max_model_len .*2048"):
        resolve_length(length, 2048)


def test_a_length_is_the_models_own_unless_given():
    assert resolve_length(None, 2048) == 2048
    assert resolve_length(2, 2048) == 2
    assert type(resolve_length(np.int32(64), 2048)) is int


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_weights_are_counted_to_the_byte(dtype):
    text = explain_plan(None, dtype=dtype, max_model_len=64, cache=CACHE, free_bytes=None)
    config = load_config(default_model.path())
    params = load_params(
        default_model.path(),
        build_model(config),
        dtype=config.dtype if dtype == "auto" else dtype,
        progress=False,
    )
    assert weight_bytes(text) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_the_cache_gets_its_share_of_what_the_weights_leave():
    config = load_config(default_model.path())
    room = {"dtype": config.dtype, "max_model_len": 256}
    _, wanted = plan_cache(build_model(config), CACHE, free_bytes=None, **room)
    given = wanted.bytes * 2 // 3
    weights = weight_bytes(plan(None))
    assert f" of {given:,} bytes used" in plan(weights + 2 * given)
    assert f" of {given:,} bytes used" in plan(2 * given, holds_weights=False)
    assert f" of {wanted.bytes:,} bytes used" in plan(weights + 2 * wanted.bytes)


def test_weights_that_alone_exceed_the_memory_say_so():
    weights = weight_bytes(plan(None))
    for cache in (CACHE, CacheConfig(budget_bytes=2**30)):
        with pytest.raises(
            ValueError, match=f"weights alone need {weights:,} .* {weights - 1:,} are"
        ):
            plan(weights - 1, cache)
    with pytest.raises(ValueError, match="the budget is 0"):
        plan(weights)
