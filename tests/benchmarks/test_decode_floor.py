"""The benchmark of decode steps: all forms have the same floor, and the torch peer is the same model."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import decode_floor
from benchmarks.decode_floor import PARTS, SAMPLED
from benchmarks.prompt_floor import prompt_seconds
from benchmarks.record import load_record
from benchmarks.report import render
from benchmarks.timing import CEILINGS, Ceilings
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="says what happens without a GPU"
)
TINY = "--shape tiny --dtype float32 --batch 2 --context 16 --new-tokens 4 --steps 4 --repeats 1 --record it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("records")
    decode_floor.main([*TINY.split(), "--folder", str(path)])
    return path


@pytest.mark.slow
def test_every_way_is_timed_against_the_same_floor(folder):
    record = load_record(folder / "it.json")
    rows = {row["form"]: row for row in record.rows}
    timed = ["generate", "steps, overlapped", "steps, in turn", "engine", "greedy, again", *SAMPLED]
    assert [form for form in rows if rows[form]["refused"] is None][: len(timed)] == timed
    for form in timed:
        row = rows[form]
        assert row["batch"] == 2
        assert row["ratio_to_floor"] == row["ms_per_step"] / row["floor_ms"]
    assert len({rows[form]["floor_ms"] for form in timed if form != "engine"}) == 1
    assert rows["engine"]["context"] > 16
    for form in SAMPLED:
        over = 100 * (rows[form]["ms_per_step"] / rows["greedy, again"]["ms_per_step"] - 1)
        assert rows[form]["over_greedy_percent"] == pytest.approx(over)
    table = render(record, ["form", "ms_per_step", "host_ms", "ratio_to_floor", "refused"])
    assert all(f"| {form} |" in table for form in rows)


@pytest.mark.slow
def test_the_host_has_its_share_of_a_step_of_the_engine(folder):
    [row] = [row for row in load_record(folder / "it.json").rows if row["form"] == "engine"]
    parts = [row[f"{part}_ms"] for part in ("plan", "pack", "enqueue", "collect")]
    assert all(part > 0 for part in parts)
    assert row["host_ms"] >= sum(parts)


@pytest.mark.slow
@on_cpu
def test_what_cannot_run_here_says_why(folder):
    refused = {
        row["form"]: row["refused"]
        for row in load_record(folder / "it.json").rows
        if row["refused"]
    }
    assert set(refused) == {"steps, overlapped, XLA's products", "torch, gpt-fast style"}
    assert "xla_products" in refused["steps, overlapped, XLA's products"]
    assert "GPU" in refused["torch, gpt-fast style"]


@pytest.mark.slow
def test_first_tokens_are_told_of_one_step_and_of_the_engine(folder):
    rows = load_record(folder / "it-first-token.json").rows
    assert [row["form"] for row in rows][:2] == ["all prompts in one step", "engine"]
    for row in rows:
        assert (row["batch"], row["prompt_tokens"]) == (2, 16)
        assert 0 < row["first_ms"] <= row["last_ms"]


def test_parts_are_chosen_by_name(tmp_path, capsys):
    arguments = [*TINY.split(), "--parts", "peer", "--folder", str(tmp_path)]
    decode_floor.main(arguments)
    assert [row["form"] for row in load_record(tmp_path / "it.json").rows] == [
        "torch, gpt-fast style"
    ]
    with pytest.raises(SystemExit):
        decode_floor.main(["--parts", "forms,everything"])
    assert f"among {', '.join(PARTS)}, got everything" in capsys.readouterr().err


# An engine is timed in tests/benchmarks/test_engine.py; it sends several steps in
# tests/engine/steps/test_multi_step.py.
@pytest.mark.slow
def test_an_engine_that_sends_several_steps_at_once_is_also_timed_one_by_one(tmp_path):
    arguments = [*TINY.split(), "--parts", "engine", "--steps-per-launch", "2"]
    decode_floor.main([*arguments, "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "it.json").rows
    assert {row["form"]: row["steps_per_launch"] for row in rows} == {
        "engine, one step per launch": 1.0,
        "engine": 2.0,
    }


def test_the_floor_of_prompts_is_their_products_and_attention(monkeypatch):
    config = SHAPES["tiny"]
    params = jax.tree.map(
        np.zeros_like, build_model(config).init_params(jax.random.key(0), "float32")
    )
    monkeypatch.setitem(
        CEILINGS, jax.devices()[0].device_kind, Ceilings(1.0, 1.0, {"bfloat16": 1e9})
    )
    in_layers = 2 * (2 * 64 + 128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 64
    products = 2 * in_layers * (5 + 7)
    attention = 2 * 2 * 4 * 16 * (25 + 49)
    assert prompt_seconds(config, params, [5, 7]) == pytest.approx((products + attention) / 1e9)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_peer_generates_what_transformers_does(family):
    import torch

    from benchmarks.hf_serving import build
    from benchmarks.torch_decode import TorchDecoder

    qwen = {"family": "qwen3", "qk_norm": True, "tie_embeddings": True}
    config = replace(SHAPES["tiny"], **(qwen if family == "qwen3" else {}))
    params = build_model(config).init_params(jax.random.key(1), "float32")
    # Norms start as ones, which would hide a norm that is left out.
    params = jax.tree.map(
        lambda leaf: leaf * (1 + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape)), params
    )
    theirs = build(config, "float32", "cpu")
    theirs.load_state_dict(_state(params), strict=False)
    prompts = np.random.default_rng(3).integers(0, config.vocab_size, (2, 9))
    ids = torch.from_numpy(prompts)
    wanted = theirs.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    peer = TorchDecoder(config, params, 2, 16)
    found = [peer.prefill(prompts), *(peer.step(9 + at) for at in range(5))]
    np.testing.assert_array_equal(np.stack(found, axis=1), wanted[:, 9:].numpy())


def _state(params):
    """Our parameters under Transformers' names."""
    import torch

    named = {"model.embed_tokens": params["embed"], "model.norm": params["final_norm"]}
    named["lm_head"] = params.get("lm_head", params["embed"])
    for layer, weights in enumerate(params["layers"]):
        at = f"model.layers.{layer}"
        parts = np.split(np.asarray(weights["qkv"]), [64, 96])
        for name, part in zip("qkv", parts, strict=True):
            named[f"{at}.self_attn.{name}_proj"] = part
        for name, part in zip(
            ("gate", "up"), np.split(np.asarray(weights["gate_up"]), 2), strict=True
        ):
            named[f"{at}.mlp.{name}_proj"] = part
        named[f"{at}.self_attn.o_proj"], named[f"{at}.mlp.down_proj"] = (
            weights["o"],
            weights["down"],
        )
        norms = ("input_layernorm", "post_attention_layernorm")
        named |= {f"{at}.{name}": norm for name, norm in zip(norms, weights["norms"], strict=True)}
        for name, norm in zip(("q_norm", "k_norm"), weights.get("qk_norm", ()), strict=False):
            named[f"{at}.self_attn.{name}"] = norm
    return {f"{name}.weight": torch.from_numpy(np.array(value)) for name, value in named.items()}


@pytest.mark.torch
def test_the_peer_says_what_it_does_not_know():
    from benchmarks.torch_decode import TorchDecoder

    config = replace(SHAPES["tiny"], windows=(8, 8))
    params = build_model(config).init_params(jax.random.key(0), "float32")
    with pytest.raises(ValueError, match="got windows"):
        TorchDecoder(config, params, 1, 8)
