"""The benchmark's serving loop: all requests are served, nothing compiles after the warm-up, each token counts once."""

import pytest

from jaxkv.bench.modes import StartUp, measure_rates, measure_startup
from jaxkv.bench.serving import Served, serve
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.models.registry import build_model

WORKLOAD = Workload(
    data="shared-prefix",
    requests=6,
    prompt_tokens=(20, 40),
    output_tokens=(2, 9),
    prefix_tokens=17,
)


def tiny(**options):
    settings = {
        "shape": "tiny",
        "dtype": "float32",
        "max_model_len": 64,
        "cache": CacheConfig(max_sequences=2, page_size=16),
        "engine": EngineConfig(token_budget=32),
    }
    return Served(**settings | options)


@pytest.fixture(scope="module")
def result():
    [measured] = measure_rates(tiny(), WORKLOAD, (1000.0,))
    return measured


def test_every_token_that_was_asked_for_is_counted(result):
    asked = WORKLOAD.draw(256)
    told = result.as_dict()
    assert told["requests"] == 6
    assert told["failed"] == 0
    assert told["prompt_tokens"] == sum(len(request.prompt) for request in asked)
    assert told["output_tokens"] == sum(request.params.max_tokens for request in asked)
    # The first two may start together; every later request finds the one page that all share.
    assert told["cached_tokens"] >= 4 * 16
    assert told["request_rate"] == 1000.0


def test_nothing_is_compiled_while_it_serves(result):
    """What `warm` declares is all that the workload needs."""
    assert result.about["compiled_while_serving"] == 0
    assert "0 programs compiled while serving" in str(result)


def test_startup_tells_its_parts():
    result = measure_startup(tiny(), WORKLOAD, began=0.0)
    outcome = result.outcome
    assert isinstance(outcome, StartUp)
    assert outcome.warm_up.programs > 3
    assert outcome.start_up_seconds > outcome.import_seconds + outcome.load_seconds
    told = result.as_dict()
    assert told["warm_up"]["programs"] == outcome.warm_up.programs
    assert "programs in" in str(result)


def test_who_comes_due_while_nobody_is_served_is_waited_for():
    engine = tiny().build()
    lines = serve(engine, WORKLOAD.draw(256)[:2], [0.0, 30.0 / 1000])
    assert lines[1].arrived == 0.03
    assert all(line.tokens == sorted(line.tokens) for line in lines)
    assert lines[1].tokens[0] > 0.03
    assert not engine.has_work


def test_a_request_that_can_never_fit_is_refused_before_anything_begins():
    engine = tiny().build()
    long = Workload(requests=2, prompt_tokens=(40, 60), output_tokens=(30, 40))
    with pytest.raises(ValueError, match="one sequence can have"):
        serve(engine, long.draw(256), [0.0, 0.0])
    assert engine.steps == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": "gpt-5"}, "shape must be one of"),
        ({"model": "some/dir"}, "not both"),
        ({"load_format": "dummy"}, "has random weights"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny(**wrong)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("qwen3-0.6b", 0.596)],
)
def test_shapes_have_as_many_parameters_as_their_models(name, billions):
    import jax

    leaves = jax.tree.leaves(build_model(SHAPES[name]).param_shapes("bfloat16"))
    assert sum(leaf.size for leaf in leaves) == pytest.approx(billions * 1e9, rel=2e-3)
