"""`jaxkv plan` predicts the cache that `LLM` allocates once its weights are in the same memory."""

import inspect
import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv import LLM, default_model
from jaxkv.bench.workload import Workload
from jaxkv.cache.budget import checkpoint_bytes
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.warm_up import compile_all, declare_served
from jaxkv.models.implementation import Choice
from jaxkv.models.registry import build_model, load_config, load_params, read_config
from jaxkv.plan import explain_plan, plan_cache, resolve_dtype
from jaxkv.plan import resolve_length as checked_resolve_length
from jaxkv.runner.program_specs import StepSpec
from jaxkv.weights.quantised.weight_forms import weight_forms
from pallas_kernels.dispatch import Unsupported
from tests.jax_settings import cache_settings
from tests.models.hf_config.test_config_json_hybrid import QWEN3_NEXT
from tests.models.hf_config.test_config_json_window import GEMMA_4

# Users have no shape checker before it, which refuses other types by itself.
resolve_length = inspect.unwrap(checked_resolve_length)

CACHE = CacheConfig(max_sequences=4, page_size=16, memory_share=0.5)


def plan(free_bytes, cache=CACHE, **options):
    return explain_plan(
        None, dtype="auto", max_model_len=256, cache=cache, free_bytes=free_bytes, **options
    )


def test_experts_cannot_be_kept_of_a_model_without_a_mixture():
    with pytest.raises(ValueError, match="need a mixture of experts, and this llama has none"):
        plan(None, CacheConfig(routed_experts=True))


def test_mailboxes_of_several_devices_leave_less_for_the_cache(monkeypatch):
    def room(free_bytes):
        return re.findall(r"of ([\d,]+) bytes used", plan(free_bytes, tensor_parallel_size=2))

    before, wanted = room(6_200_000), room(6_200_000 - 2**18)
    assert len(wanted) == 1
    assert before != wanted
    monkeypatch.setattr("jaxkv.plan.mailbox_room", lambda model: 2**18)
    assert room(6_200_000) == wanted


def host_plan(devices, host_bytes):
    cache = CacheConfig(max_sequences=4, page_size=16, host_bytes=host_bytes)
    return plan(None, cache, tensor_parallel_size=devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_host_tier_has_room_for_a_page_on_each_device(devices):
    for given in (1, 24_575):
        told = rf"host_bytes must be at least 24,576, since .* takes {24_576 // devices:,} bytes"
        with pytest.raises(ValueError, match=rf"{told}.* got {given:,}; raise it, or set 0"):
            host_plan(devices, given)
    assert "at most 16 tokens" in host_plan(devices, 24_576)
    assert "host:" not in host_plan(devices, 0)


@pytest.mark.parametrize("file", [QWEN3_NEXT, GEMMA_4])
def test_a_host_tier_has_room_for_a_page_of_each_group_and_a_checkpoint(file):
    config = read_config(file)
    room = {"dtype": "float32", "max_model_len": 64, "free_bytes": None}
    layout, _ = plan_cache(build_model(config), CACHE, **room)
    pages = [group.bytes_per_unit for group in layout.paged_groups]
    assert len(pages) > 1 or layout.state_groups
    each = checkpoint_bytes(layout) + sum(pages)
    plan_cache(build_model(config), replace(CACHE, host_bytes=each), **room)
    with pytest.raises(ValueError, match=f"host_bytes must be at least {each:,}, since the sho"):
        plan_cache(build_model(config), replace(CACHE, host_bytes=each - 1), **room)


def test_a_cache_without_room_for_a_sequence_tells_what_its_states_leave():
    cache = CacheConfig(max_sequences=4, page_size=16, budget_bytes=500_000)
    with pytest.raises(ValueError, match="lower max_model_len or max_sequences") as refusal:
        plan(None, cache)
    given, states, wanted = (
        int(number.replace(",", ""))
        for number in re.findall(
            r"([\d,]+) bytes, ([\d,]+) of them .* needs ([\d,]+);", str(refusal.value)
        )[0]
    )
    assert given - states < wanted


def weight_bytes(text):
    return int(re.search(r"weights: ([\d,]+) bytes", text)[1].replace(",", ""))


@pytest.mark.parametrize("length", [64.5, 64.0, True, "64", [64], 1, 0, -1, 2049, float("nan")])
def test_a_length_that_is_no_int_or_out_of_range_is_refused_by_name(length):
    with pytest.raises(ValueError, match=r"max_model_len .*2048"):
        resolve_length(length, 2048)


def test_a_refused_length_names_the_models_own_as_the_reason():
    with pytest.raises(ValueError, match=r"got 4096; the model supports at most 2,048 tokens$"):
        resolve_length(4096, 2048)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", "float32"),
        ("float", "float32"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("float16", "float16"),
        ("auto", "bfloat16"),
    ],
)
def test_short_names_of_dtypes_are_understood(name, dtype):
    assert resolve_dtype(name, "bfloat16") == dtype
    assert CacheConfig(dtype=name).dtype == (name if name == "auto" else dtype)


def test_a_dtype_of_no_meaning_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match="one of auto, float32, bfloat16, float16, got 'int4'"):
        resolve_dtype("int4", "float32")


def test_the_sampling_of_generation_config_json_is_shown(tmp_path):
    for file in default_model.path().iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    options = {"dtype": "auto", "max_model_len": 256, "cache": CACHE, "free_bytes": None}
    shown = explain_plan(tmp_path, **options)
    assert "chat samples with temperature 0.6, top_k 20 by default" in shown
    assert "chat samples" not in explain_plan(None, **options)


def test_the_ids_that_end_a_text_are_shown(tmp_path):
    (tmp_path / "config.json").write_bytes((default_model.path() / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    options = {"dtype": "auto", "max_model_len": 256, "cache": CACHE, "free_bytes": None}
    assert "\ntexts end at token id 7, 3\n" in explain_plan(tmp_path, **options)


def test_an_end_id_that_no_file_names_is_shown_as_the_tokenizers_or_transformers_own(tmp_path):
    raw = json.loads((default_model.path() / "config.json").read_text())
    del raw["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = {"dtype": "auto", "max_model_len": 256, "cache": CACHE, "free_bytes": None}
    line = "\ntexts end at the tokenizer's end token, or if it has none, at token id 2\n"
    assert line in explain_plan(tmp_path, **options)


def test_a_length_is_the_models_own_unless_given():
    assert resolve_length(None, 2048) == 2048
    assert resolve_length(2, 2048) == 2
    assert type(resolve_length(np.int32(64), 2048)) is int


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("auto", None), ("float32", None), ("auto", "int4"), ("auto", "int8"), ("float16", "fp8")],
)
def test_the_weights_are_counted_to_the_byte(dtype, quantization):
    options = {"dtype": dtype, "quantization": quantization}
    text = explain_plan(None, **options, max_model_len=64, cache=CACHE, free_bytes=None)
    config = load_config(default_model.path())
    params = load_params(
        default_model.path(),
        build_model(config),
        dtype=config.dtype if dtype == "auto" else dtype,
        quantization=quantization,
        progress=False,
    )
    forms = f"expected by config.json: {next(iter(weight_forms(params)))}"
    assert (forms if quantization else "with --quantization: fp8 ") in text
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


def listed(text):
    """Returns the programs that a plan lists: (name, rows, tokens, pages per row)."""
    found = re.findall(r"^  (\w+) +(\d+) rows +(\d+) tokens +(\d+) pages per row", text, re.M)
    return [(name, int(rows), int(tokens), int(pages)) for name, rows, tokens, pages in found]


def test_the_programs_are_those_that_an_engine_compiles():
    """`jaxkv plan` lists the programs that warming up for the longest requests makes."""
    engine_config = EngineConfig(token_budget=64)
    text = plan(None, engine=engine_config)
    llm = LLM(max_model_len=256, cache=CACHE, engine=engine_config, progress=False)
    request = Workload(prompt_tokens=(1, 200), output_tokens=(1, 56)).example()
    needed = declare_served(llm.engine, request, 4)
    steps = [spec for spec in needed if isinstance(spec, StepSpec)]
    assert [spec.name for spec in steps] == [name for name, *_ in listed(text)]
    assert [(spec.rows, spec.tokens, max(spec.table_widths)) for spec in steps] == [
        tuple(sizes) for _, *sizes in listed(text)
    ]
    assert all(re.search(rf"^  {spec.name}\b", text, re.M) for spec in needed)
    assert f"{len(needed)} programs" in text


@pytest.fixture
def nothing_is_known(tmp_path):
    """A fresh folder for compiled programs."""
    (tmp_path / "programs").mkdir(mode=0o700)
    with cache_settings(jax_compilation_cache_dir=str(tmp_path / "programs")):
        yield


@pytest.mark.usefixtures("nothing_is_known")
def test_what_compiling_took_is_told_once_it_is_known():
    """They are the seconds and bytes of the programs that were compiled on this machine."""
    small = EngineConfig(token_budget=16)
    assert "is known once they were compiled" in plan(None, engine=small)
    llm = LLM(max_model_len=256, cache=CACHE, engine=small, progress=False)
    request = Workload(prompt_tokens=(1, 4), output_tokens=(1, 4)).example()
    warm_up = compile_all(llm.engine.runner, declare_served(llm.engine, request, 1)[:1])
    text = plan(None, engine=small)
    assert re.search(rf"1 of \d+ were .* up to {warm_up.temp_bytes:,} bytes of temporary", text)
    [line] = [line for line in text.splitlines() if line.endswith("MiB")]
    [program] = llm.engine.runner.programs.manifest()
    assert line.startswith(f"  {program.spec.name} ")
    assert float(line.split()[-4]) == round(program.seconds, 1)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="our kernels may run here")
def test_an_fp8_cache_is_planned_and_its_refusal_told():
    text = plan(None, CacheConfig(max_sequences=4, page_size=16, dtype="fp8"))
    assert "would be refused on this machine: an fp8 cache needs our kernels" in text
    assert listed(text)
    with pytest.raises(Unsupported, match="fp8"):
        plan(None, CacheConfig(dtype="fp8"), implementation="xla")


def test_an_fp8_cache_that_can_run_tells_of_machines_where_it_cannot(monkeypatch):
    monkeypatch.setattr("jaxkv.plan.choose_implementation", lambda *_: Choice("mosaic_gpu"))
    text = plan(None, CacheConfig(max_sequences=4, page_size=16, dtype="fp8"))
    assert "runs as mosaic_gpu (a machine without our kernels would refuse" in text
    assert "would refuse" not in plan(None)
