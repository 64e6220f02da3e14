"""Layers of a kind share one trace, those of another kind do not, and a program is the same as without."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.bench.shapes import SHAPES
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import init_cache
from jaxkv.models import decoder as decoder_module
from jaxkv.models.blocks import BLOCKS
from jaxkv.models.implementation import _batch, ask
from jaxkv.models.registry import build_model
from jaxkv.models.shared_traces import SharedTraces

LAYERS = 4


def tiny(windows=(None,) * LAYERS):
    config = replace(
        SHAPES["tiny"],
        num_layers=LAYERS,
        windows=windows,
        pattern=SHAPES["tiny"].pattern[:1] * LAYERS,
    )
    model = build_model(config).running("xla")
    layout = group_layers(model.cache_specs(page_size=8, dtype="float32"))
    return model, layout, {group.name: 4 for group in layout.groups}


def lowered(windows=(None,) * LAYERS):
    """Traces and lowers a decode step of a model that was not traced yet."""
    model, layout, counts = tiny(windows)

    def run(params, cache):
        return model.forward(params, cache, _batch(layout, 2, decode=True))

    cache = jax.eval_shape(partial(init_cache, layout, counts))
    return jax.jit(run, donate_argnums=1).lower(model.param_shapes("float32"), cache)


@pytest.fixture
def traces(monkeypatch):
    """Returns block -> how often it was traced."""
    counted = Counter()

    def counting(name, block):
        def run(inputs):
            counted[name] += 1
            return block.run(inputs)

        return block._replace(run=run)

    for name, block in list(BLOCKS.items()):
        monkeypatch.setitem(BLOCKS, name, counting(name, block))
    return counted


def test_equal_layers_are_traced_once(traces):
    lowered()
    assert traces == {"attention": 1, "gated": 1}


def test_another_program_is_traced_anew(traces):
    lowered()
    lowered()
    assert traces == {"attention": 2, "gated": 2}


def test_layers_with_another_window_are_traced_apart(traces):
    lowered((None, 8, None, 8))
    assert traces["attention"] == 2
    lowered((None, 8, 16, 8))
    assert traces["attention"] == 2 + 3


def test_each_layer_answers_when_ops_are_asked(traces):
    model, layout, counts = tiny()
    lowered()
    places = {
        question.place for question in ask(model, model.param_shapes("float32"), layout, counts)
    }
    assert {f"layer {layer}" for layer in range(LAYERS)} <= places
    assert traces["attention"] == 1 + 2 * LAYERS


@pytest.mark.parametrize("windows", [(None,) * LAYERS, (None, 8, 8, None)])
def test_the_compiled_program_has_no_calls_and_the_same_results(monkeypatch, windows):
    model, layout, counts = tiny(windows)
    params = model.init_params(jax.random.key(0), "float32")

    def compiled():
        program = lowered(windows).compile()
        assert " call(" not in program.as_text()
        return program(params, init_cache(layout, counts))

    shared = compiled()
    monkeypatch.setattr(decoder_module, "is_asking", lambda: True)
    apart = compiled()
    assert jax.tree.structure(shared) == jax.tree.structure(apart)
    for one, other in zip(jax.tree.leaves(shared), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_leaves_that_are_no_arrays_are_constants_of_a_trace():
    seen = []

    def scaled(pair):
        array, factor = pair
        seen.append(type(factor))
        return array * factor

    def run(x):
        traces = SharedTraces(shares=True)
        return [traces.call("scaled", scaled, (x, factor)) for factor in (2.0, 3.0, 2.0)]

    one = jnp.ones(2, jnp.float32)
    assert [float(out[0]) for out in jax.jit(run)(one)] == [2.0, 3.0, 2.0]
    assert seen == [float, float]


def test_settings_and_names_tell_functions_apart():
    def run(x):
        traces = SharedTraces(shares=True)
        return [
            traces.call("same", lambda y, by=by: y * by, x, settings=by) for by in (2.0, 3.0)
        ] + [traces.call("other", lambda y: y * 5.0, x)]

    outs = jax.jit(run)(jnp.ones(2, jnp.float32))
    assert [float(out[0]) for out in outs] == [2.0, 3.0, 5.0]
