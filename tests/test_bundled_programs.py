"""`jaxkv compile` and `LLM(programs=...)`: another process answers alike without a trace, or is told what differs."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxkv import (
    LLM,
    CacheConfig,
    EngineConfig,
    SamplingParams,
    SpeculationConfig,
    StructuredOutputs,
)
from jaxkv.bench.shapes import SHAPES
from jaxkv.cli import main
from jaxkv.engine.bundled_programs import refuse_unbundled
from jaxkv.errors import BadBundle, ProgramRefused
from jaxkv.examples import flax_nnx_model
from jaxkv.models.flax_model import FlaxModel
from jaxkv.models.registry import build_model
from jaxkv.models.tensor_parallel import AXIS
from jaxkv.programs.manifest import compile_count
from jaxkv.sampling.processors import LogitsProcessors
from tests.devices import needs_devices
from tests.jax_settings import cache_settings
from tests.one_layer import one_layer_model

ROOT = Path(__file__).parents[1]
SIZES = {"max_model_len": 32, "max_num_seqs": 1}
OPTIONS = ["--max-model-len", "32", "--max-sequences", "1"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)

LOADS = """
import json, sys
from jaxkv.programs import compile as compilation

def refuse(name, *_):
    raise AssertionError(f"{name} was traced")

compilation.trace = refuse
from jaxkv import LLM, SamplingParams
from jaxkv.programs.manifest import compile_count

folder, model, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model, programs=folder, strict=True, progress=False, **sizes)
programs = llm.engine.runner.programs.manifest()
before = compile_count()
[output] = llm.generate("def add(", SamplingParams(temperature=0.0, max_tokens=6))
print(json.dumps({
    "tokens": list(output.token_ids),
    "loaded": [program.loaded for program in programs],
    "host_seconds": sum(program.host_seconds for program in programs),
    "late": llm.stats().compiled_late,
    "counts": dict(llm.budget.counts),
}))
"""


def run(*arguments):
    """Runs Python with the settings of JAX that the tests have."""
    settings = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    strict = {name.upper(): getattr(jax.config, name) for name in settings}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | strict,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiled(model, tmp_path_factory):
    """Returns the folder that the command makes, and what it prints. The command turns JAX's cache off."""
    folder = tmp_path_factory.mktemp("programs") / "bundle"
    command = ["compile", "--model", str(model), "-o", str(folder), *OPTIONS]
    said = io.StringIO()
    with cache_settings(jax_enable_compilation_cache=True), contextlib.redirect_stdout(said):
        assert main([*command, "--warm-up", "1:16:greedy"]) == 0
    return folder, said.getvalue()


@pytest.fixture(scope="module")
def traced(model):
    """An `LLM` without the folder, which compiles what it needs."""
    with LLM(model, progress=False, **SIZES) as llm:
        yield llm


def test_another_process_loads_all_of_them_traces_none_and_answers_alike(model, compiled, traced):
    folder, said = compiled
    ended = run("-c", LOADS, str(folder), str(model), json.dumps(SIZES))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert found["loaded"] == [True] * len(manifest["programs"])
    assert f"{len(found['loaded'])} programs in {folder}" in said
    assert (found["host_seconds"], found["late"]) == (0.0, 0)
    [expected] = traced.generate("def add(", GREEDY)
    assert found["tokens"] == list(expected.token_ids)
    assert found["counts"] == dict(traced.budget.counts)


def test_they_are_those_of_the_warm_up_with_the_same_options(compiled, traced):
    traced.warm_up(
        batch=1, prompt_tokens=16, sampling=SamplingParams(temperature=0.0, max_tokens=16)
    )
    manifest = json.loads((compiled[0] / "manifest.json").read_text())
    assert manifest["programs"] == [
        str(program.spec) for program in traced.engine.runner.programs.manifest()
    ]


def test_the_cache_has_the_size_that_they_were_compiled_for(model, compiled, traced):
    pages = traced.budget.counts
    with LLM(
        model, programs=compiled[0], progress=False, cache=CacheConfig(memory_share=0.5), **SIZES
    ) as llm:
        assert llm.budget.counts == pages
    with pytest.raises(BadBundle, match=r"counts\.\w+: \d+ here, \d+ in the bundle"):
        LLM(
            model,
            programs=compiled[0],
            progress=False,
            cache=CacheConfig(budget_bytes=2**22),
            **SIZES,
        )


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_num_seqs": 2}, "cache.max_sequences: 2 here, 1 in the bundle"),
        ({"max_model_len": 48}, "max_model_len: 48 here, 32 in the bundle"),
        ({"block_size": 16}, "cache.page_size: 16 here, 64 in the bundle"),
        ({"dtype": "float32"}, "spec.arrays.0.dtype: float32 here, bfloat16 in the bundle"),
        ({"enable_prefix_caching": False}, "engine.prefix_cache: False here, True in the bundle"),
        ({"lora": True}, "lora: {'max_adapters'"),
        ({"quantization": "int8"}, "params"),
        pytest.param(
            {"tensor_parallel_size": 2},
            "mesh: {'tensor': 2} here, None in the bundle",
            marks=needs_devices(2),
        ),
    ],
)
def test_other_options_are_refused_with_the_difference(model, compiled, options, difference):
    with pytest.raises(BadBundle) as refused:
        LLM(model, programs=compiled[0], progress=False, **{**SIZES, **options})
    assert difference in str(refused.value)


def test_another_model_is_refused_with_the_difference(compiled):
    with pytest.raises(BadBundle, match=r"model\.config\.num_layers: \d+ here, 1 in the bundle"):
        LLM(programs=compiled[0], progress=False, **SIZES)


def test_another_version_is_refused_with_the_difference(model, compiled, monkeypatch):
    monkeypatch.setattr("jaxkv.engine.bundled_programs.__version__", "9.9")
    monkeypatch.setattr("jaxkv.engine.bundled_programs._sources", lambda: "edited")
    with pytest.raises(BadBundle) as refused:
        LLM(model, programs=compiled[0], progress=False, **SIZES)
    lines = str(refused.value).split("\n")
    assert lines[1] == "  jaxkv: 9.9 here, 0.1.0 in the bundle"
    assert lines[2].startswith("  jaxkv_sources: edited here, ")


def test_a_strict_engine_refuses_what_is_not_among_them(model, compiled):
    with (
        LLM(model, programs=compiled[0], strict=True, progress=False, **SIZES) as llm,
        pytest.raises(ProgramRefused, match="was not compiled before serving began"),
    ):
        llm.generate("def ", SamplingParams(temperature=1.0, max_tokens=2))


def double(logits, history):
    del history
    return logits * 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"logits_processors": {"double": double}}, "logits processors"),
        (
            {"speculation": SpeculationConfig(method="draft_model", model="x", tokens=2)},
            "a model or head that drafts",
        ),
    ],
)
def test_programs_that_no_bundle_holds_are_refused(model, compiled, options, what):
    with pytest.raises(BadBundle, match=f"{what} cannot be in a bundle"):
        LLM(model, programs=compiled[0], progress=False, **SIZES, **options)


@pytest.fixture(scope="module")
def divided(model, tmp_path_factory):
    """Returns the folder that the command makes for two devices."""
    folder = tmp_path_factory.mktemp("divided") / "bundle"
    command = ["compile", "--model", str(model), "-o", str(folder), *OPTIONS]
    several = ["--tensor-parallel-size", "2", "--warm-up", "1:16:greedy"]
    ended = run("-m", "jaxkv.cli", *command, *several)
    assert ended.returncode == 0, ended.stderr
    return folder


@needs_devices(2)
@pytest.mark.slow
def test_another_process_loads_the_programs_of_several_devices_too(model, divided, traced):
    sizes = json.dumps({**SIZES, "tensor_parallel_size": 2})
    ended = run("-c", LOADS, str(divided), str(model), sizes)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    manifest = json.loads((divided / "manifest.json").read_text())
    assert manifest["facts"]["mesh"] == {"tensor": 2}
    assert found["loaded"] == [True] * len(manifest["programs"])
    assert (found["host_seconds"], found["late"]) == (0.0, 0)
    [expected] = traced.generate("def add(", GREEDY)
    assert found["tokens"] == list(expected.token_ids)


@needs_devices(4)
@pytest.mark.slow
def test_another_number_or_order_of_devices_is_refused(model, divided, monkeypatch):
    def refusal(devices):
        with pytest.raises(BadBundle) as refused:
            LLM(model, programs=divided, tensor_parallel_size=devices, progress=False, **SIZES)
        return str(refused.value)

    assert "mesh: None here, {'tensor': 2} in the bundle" in refusal(1)
    assert "mesh.tensor: 4 here, 2 in the bundle" in refusal(4)
    reversed_mesh = Mesh(np.asarray(jax.devices()[1::-1]), (AXIS,))
    monkeypatch.setattr("jaxkv.models.tensor_parallel.tensor_mesh", lambda _: reversed_mesh)
    assert refusal(2).split("\n")[1:-1] == [
        "  devices.0: cpu 1 here, cpu 0 in the bundle",
        "  devices.1: cpu 0 here, cpu 1 in the bundle",
    ]


def test_the_devices_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("jaxkv.engine.bundled_programs.spans_processes", lambda _: True)
    with pytest.raises(BadBundle, match="programs over the devices of several processes cannot be"):
        refuse_unbundled(build_model(SHAPES["tiny"]), LogitsProcessors(), EngineConfig())


@pytest.mark.slow
def test_programs_of_every_kind_come_back(model, tmp_path, compiled_anew):
    """Draws, penalties, grammars, scores, drafts by lookup, adapters, saved prefixes and the host tier."""
    options = {
        "cache": CacheConfig(host_bytes=2**20),
        "speculation": SpeculationConfig(method="ngram", tokens=2),
        "lora": True,
        "progress": False,
        **SIZES,
    }
    every = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.1,
        logprobs=2,
        prompt_logprobs=1,
        max_tokens=8,
        seed=5,
        structured_outputs=StructuredOutputs(regex="[a-z]+"),
    )
    sizes = {"batch": 1, "prompt_tokens": 8}
    folder = tmp_path / "bundle"
    with LLM(model, **options) as llm:
        llm.warm_up(**sizes, sampling=replace(every, structured_outputs=None))
        llm.warm_up(**sizes, sampling=every, saved_prefixes=True)
        specs = [program.spec for program in llm.engine.runner.programs.manifest()]
        [expected] = llm.generate("def add(", every)
        assert llm.save_programs(folder) == len(specs)
    kinds = {spec.kind for spec in specs}
    assert kinds >= {"decode", "prefill", "verify", "sample", "score", "admit", "readmit"}
    assert kinds >= {"copy", "swap_out", "swap_in", "checksum"}
    with LLM(model, programs=folder, strict=True, **options) as llm:
        loaded = llm.engine.runner.programs.manifest()
        assert [program.spec for program in loaded] == specs
        assert all(program.loaded for program in loaded)
        [output] = llm.generate("def add(", every)
        assert output.token_ids == expected.token_ids
        assert output.prompt_logprobs == expected.prompt_logprobs


def test_layers_that_draft_are_refused_though_they_name_no_model():
    drafted = EngineConfig(speculation=SpeculationConfig(method="mtp"))
    with pytest.raises(BadBundle, match="a model or head that drafts"):
        refuse_unbundled(build_model(SHAPES["tiny"]), LogitsProcessors(), drafted)
    looked_up = EngineConfig(speculation=SpeculationConfig(method="ngram"))
    refuse_unbundled(build_model(SHAPES["tiny"]), LogitsProcessors(), looked_up)


def test_a_module_of_a_users_own_is_refused_since_its_code_is_no_fact():
    model = FlaxModel(flax_nnx_model.Transformer(nnx.Rngs(0)))
    with pytest.raises(BadBundle, match="programs of a FlaxModel, whose code is not part of jaxkv"):
        refuse_unbundled(model, LogitsProcessors(), EngineConfig())


def test_the_command_refuses_a_folder_that_exists_before_it_compiles(tmp_path, capsys):
    before = compile_count()
    assert main(["compile", "-o", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "--output must be a new folder" in told.err
    assert compile_count() == before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("1:99999999", "TOKENS of --warm-up 1:99999999 must be an int in [1, 31], got 99999999;"),
        ("1:32", "[1, 31], got 32; --max-model-len is 32, of which one token is generated"),
        ("9999999:8", "BATCH of --warm-up 9999999:8 must be an int in [1, 1048576], got 9999999"),
    ],
)
def test_the_command_names_the_warm_up_that_is_out_of_range(model, tmp_path, capsys, given, told):
    before = compile_count()
    command = ["compile", "--model", str(model), "-o", str(tmp_path / "bundle"), *OPTIONS]
    with cache_settings(jax_enable_compilation_cache=True):
        assert main([*command, "--warm-up", "1:8", "--warm-up", given]) == 2
    assert told in capsys.readouterr().err
    assert compile_count() == before
