"""The engine's benchmark: its floor, the parts of a step, and a run on a small model."""

import json
import time

import jax
import numpy as np
import pytest

from benchmarks import engine
from benchmarks.engine import main, workload_floor
from benchmarks.stopwatch import Stopwatch, process_seconds
from benchmarks.timing import CEILINGS, Ceilings
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.models.registry import build_model

LOADS = {
    "prompt-heavy": Workload(requests=3, prompt_tokens=(40, 40), output_tokens=(2, 2)),
    "shared-prefix": Workload(
        data="shared-prefix",
        requests=6,
        prefix_tokens=64,
        prompt_tokens=(70, 80),
        output_tokens=(2, 4),
    ),
}
TINY = (
    "--shape tiny --dtype float32 --requests 5 --prompt-tokens 8:30 --output-tokens 3:6 --max-sequences 2 "
    "--batch 2 --token-budget 32 --context 20 --steps 4 --repeats 2 --long-prompt 100"
)


def rows(folder, part):
    return json.loads((folder / f"engine-tiny-{part}.json").read_text())["rows"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("records")
    settings = pytest.MonkeyPatch()
    settings.setattr(engine, "SHORT_PROMPTS", (16, 20))
    settings.setattr(engine, "LOADS", LOADS)
    main([*TINY.split(), "--folder", str(path)])
    settings.undo()
    return path


# The slow tests read what one run of the command has timed. tests/engine has engines under load, and test_host_steps.py
# the parts of a step.
@pytest.mark.slow
def test_every_part_is_recorded(folder):
    [steady] = rows(folder, "steady")
    assert steady["batch"] == 2
    # Eight tokens at least before the first step that counts, and half of the steps.
    assert steady["context"] >= 20 + 8
    parts = ("plan", "pack", "enqueue", "wait", "collect", "other_host")
    assert sum(steady[f"{part}_ms"] for part in parts) == pytest.approx(steady["step_ms"])
    assert all(steady[f"{part}_ms"] > 0 for part in parts)
    [throughput] = rows(folder, "throughput")
    asked = Workload(requests=5, prompt_tokens=(8, 30), output_tokens=(3, 6)).draw(256)
    assert throughput["output_tokens"] == sum(one.params.max_tokens for one in asked)
    assert throughput["compiled_while_serving"] == 0
    names = [path.name for path in folder.glob("engine-tiny-startup-*.json")]
    assert len(names) == 1


@pytest.mark.slow
def test_a_start_in_the_background_is_told_beside_what_requests_saw(tmp_path, monkeypatch):
    prompts, serve_requests = [], engine.serve

    def serve(served, requests, arrivals):
        prompts.extend(tuple(one.prompt) for one in requests)
        return serve_requests(served, requests, arrivals)

    monkeypatch.setattr(engine, "serve", serve)
    options = ["--parts", "startup", "--background", "--context", "64"]
    main([*TINY.split(), *options, "--folder", str(tmp_path)])
    # The prefix cache has every prompt that came before.
    assert len(set(prompts)) == len(prompts)
    [path] = tmp_path.glob("engine-tiny-startup-*-in-background.json")
    [row] = json.loads(path.read_text())["rows"]
    assert row["pending"] > 0 < row["programs"]
    for when in ("meanwhile", "afterwards"):
        assert row[f"{when}_requests"] % 8 == 0 < row[f"{when}_requests"]
        assert row[f"{when}_cached_tokens"] == 0
        assert row[f"{when}_first_token_p50_ms"] <= row[f"{when}_first_token_p99_ms"]


@pytest.mark.slow
def test_each_load_is_served_whole_and_a_shared_prefix_is_computed_once(folder):
    by_load = {row["load"]: row for row in rows(folder, "loads")}
    assert set(by_load) == set(LOADS)
    for name, row in by_load.items():
        asked = LOADS[name].draw(256)
        assert row["output_tokens"] == sum(one.params.max_tokens for one in asked)
        assert row["compiled_while_serving"] == row["failed"] == 0
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
    assert by_load["prompt-heavy"]["cached_tokens"] == 0
    # Two sequences run at once; the first two may both compute the prefix.
    assert by_load["shared-prefix"]["cached_tokens"] >= 4 * 64


def test_no_load_has_the_prompts_of_another():
    """The workload of part "throughput" has seed 0."""
    seeds = [0, *(load.seed for load in engine.LOADS.values())]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.slow
def test_a_kept_prefix_is_told_beside_the_cold_prompt(folder):
    by_name = {row["request"]: row for row in rows(folder, "first-token")}
    assert set(by_name) == {"prompt of 16", "prompt of 20", "cold", "90% kept"}
    assert by_name["cold"]["cached_tokens"] == 0
    assert by_name["90% kept"]["cached_tokens"] >= 64


def test_the_floor_counts_weights_keys_and_products(monkeypatch):
    config = SHAPES["tiny"]
    params = build_model(config).param_shapes("float32")
    leaves = jax.tree.leaves(params)
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    sizes = {"requests": 3, "prompt_tokens": (10, 10), "output_tokens": (4, 4)}
    requests = Workload(**sizes).draw(256)
    table = config.vocab_size * config.hidden_size
    weights = (sum(leaf.size for leaf in leaves) - table) * 4
    per_key = 2 * 2 * 2 * 16 * 4
    keys = 3 * (10 + 11 + 12 + 13)
    read = 4 * weights + keys * per_key
    assert workload_floor("tiny", requests, 1e9, arrays) == pytest.approx(read / 1e9)
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(CEILINGS, kind, Ceilings(1.0, 1.0, {"bfloat16": 1e12}))
    in_layers = sum(leaf.size for leaf in leaves) - 2 * table
    products = 30 * 2 * in_layers + 3 * 2 * 2 * 4 * 16 * 10**2
    assert workload_floor("tiny", requests, 1e9, arrays) == pytest.approx(
        read / 1e9 + products / 1e12
    )
    once = 4 * weights + (keys - 4 * 2 * 6) * per_key
    shared = (10 + 4 + 4) * 2 * in_layers + 2 * 2 * 4 * 16 * (10**2 + 4**2 + 4**2)
    assert workload_floor("tiny", requests, 1e9, arrays, common=6) == pytest.approx(
        once / 1e9 + shared / 1e12
    )


def test_a_stopwatch_counts_calls_that_fail_too():
    class Owner:
        def work(self, fails):
            time.sleep(0.002)
            if fails:
                raise ValueError("no")
            return 7

    owner, watch = Owner(), Stopwatch()
    watch.watch(owner, "work", "it")
    assert owner.work(False) == 7
    with pytest.raises(ValueError, match="no"):
        owner.work(fails=True)
    assert watch.seconds["it"] >= 0.004
    watch.reset()
    assert watch.seconds == {"it": 0.0}


def test_a_process_is_older_than_its_imports():
    assert process_seconds() > 0


@pytest.mark.torch
@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b", "llama-3.1-8b"])
def test_the_peer_has_a_model_of_the_same_size(shape):
    from benchmarks.hf_serving import build

    theirs = build(SHAPES[shape], "bfloat16", "meta")
    ours = build_model(SHAPES[shape]).param_shapes("bfloat16")
    assert sum(one.numel() for one in theirs.parameters()) == sum(
        leaf.size for leaf in jax.tree.leaves(ours)
    )
