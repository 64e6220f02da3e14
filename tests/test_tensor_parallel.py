"""`LLM(tensor_parallel_size=...)`: the tokens of one device, in a cache and parameters that the devices divide."""

import json
import math
import re
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxkv
from jaxkv import (
    LLM,
    CacheConfig,
    EngineConfig,
    LoraConfig,
    SamplingParams,
    SpeculationConfig,
    StructuredOutputs,
    default_model,
)
from jaxkv.errors import BadCheckpoint
from jaxkv.models import tensor_parallel
from jaxkv.models.registry import (
    build_model,
    expected_params,
    load_config,
    load_params,
    rules_for,
)
from jaxkv.models.tensor_parallel import AXIS, TensorParallel, over_devices, tensor_mesh
from jaxkv.plan import explain_plan
from jaxkv.runner.adapter_stacks import stack_bytes
from jaxkv.runner.program_specs import StepSpec
from jaxkv.weights.named_arrays import NamedWeights
from jaxkv.weights.quantised.weight_forms import is_few_bits
from pallas_kernels.dispatch import Unsupported
from tests.devices import needs_devices
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model
from tests.weights.adapter_files import save_adapter

pytestmark = needs_devices(8)

PROMPT = "def f(x):\n    return x + 1\n\n\ndef g(y):\n    return y * 2\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
CHOSEN = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    seed=5,
    n=2,
    max_tokens=12,
    logprobs=2,
    frequency_penalty=0.3,
    logit_bias={7: 2.0},
)
SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 16,
    "progress": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("model") / "one-layer")


@pytest.fixture(scope="module")
def single(folder):
    with few_programs(LLM(folder, **SMALL)) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair(folder):
    with few_programs(LLM(folder, tensor_parallel_size=2, **SMALL)) as llm:
        yield llm


def tokens_of(outputs):
    return [list(sample.token_ids) for one in outputs for sample in one.outputs]


def chosen_of(sample):
    """Returns the tokens of a sample and their log-probabilities."""
    steps = zip(sample.logprobs, sample.token_ids, strict=True)
    return list(sample.token_ids), [step[token] for step, token in steps]


def test_tokens_and_log_probabilities_are_those_of_one_device(single, pair):
    for params in (GREEDY, DRAWN):
        wanted = single.generate([PROMPT, "import"], params)
        got = pair.generate([PROMPT, "import"], params)
        assert tokens_of(got) == tokens_of(wanted)
        for one, other in zip(got, wanted, strict=True):
            for ours, theirs in zip(one.outputs, other.outputs, strict=True):
                if params.logprobs is not None:
                    assert [list(step) for step in ours.logprobs] == [
                        list(step) for step in theirs.logprobs
                    ]
                    values = [
                        [*map(list, map(dict.values, one.logprobs))] for one in (ours, theirs)
                    ]
                    chex.assert_trees_all_close(*values, atol=1e-4)


# The search itself, and sampling behind it, are in tests/sampling/test_vocab.py.
@pytest.mark.slow
def test_filters_of_many_rows_keep_what_one_device_keeps(folder, single, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "_MOST_JOINED_BYTES", 0)
    with few_programs(LLM(folder, tensor_parallel_size=4, **SMALL)) as llm:
        for params in (DRAWN, replace(DRAWN, top_p=1.0, top_k=5), replace(DRAWN, min_p=0.1)):
            got = llm.generate([PROMPT, "import"], params)
            assert tokens_of(got) == tokens_of(single.generate([PROMPT, "import"], params))


# tests/models/families/test_tensor_parallel.py has two heads of keys and values for four devices.
@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 8])
def test_more_devices_than_heads_of_keys_share_them(folder, single, devices):
    """The model has 8 heads, of 2 of keys and values."""
    with few_programs(LLM(folder, tensor_parallel_size=devices, **SMALL)) as llm:
        assert tokens_of(llm.generate([PROMPT], GREEDY)) == tokens_of(
            single.generate([PROMPT], GREEDY)
        )
        key = llm.engine.runner.cache.layer(0)["key"]
        assert key.shape[2] == devices
        assert key.addressable_shards[0].data.shape[2] == 1


def test_a_known_beginning_is_not_computed_again(single, pair):
    wanted = [tokens_of(single.generate([PROMPT + end], GREEDY)) for end in ("a", "b")]
    outputs = [pair.generate([PROMPT + end], GREEDY) for end in ("a", "b")]
    assert [tokens_of(one) for one in outputs] == wanted
    assert outputs[1][0].usage.cached_tokens >= 16


# Preemption is the host's, and knows nothing of devices; a lost cache, below, makes the same rows compute again.
@pytest.mark.slow
def test_few_pages_make_requests_wait_and_change_no_token(folder, single):
    prompts = [PROMPT + str(number) for number in range(4)]
    longer = SamplingParams(temperature=0.0, max_tokens=40)
    pages = {"cache": CacheConfig(budget_bytes=190_000), "max_model_len": 96}
    with few_programs(LLM(folder, tensor_parallel_size=2, **SMALL | pages)) as llm:
        got = llm.generate(prompts, longer)
    assert sum(one.usage.preemptions for one in got) > 0
    assert tokens_of(got) == tokens_of(single.generate(prompts, longer))


def test_drafts_and_launches_of_several_steps_change_no_token(folder, single):
    text = "a = 1\nb = 2\na = 1\nb = 2\na = 1\n"
    wanted = tokens_of(single.generate([text], GREEDY))
    drafts = SpeculationConfig(tokens=2, adaptive=False)
    engine = EngineConfig(speculation=drafts, steps_per_launch=4)
    with few_programs(LLM(folder, tensor_parallel_size=2, engine=engine, **SMALL)) as llm:
        assert tokens_of(llm.generate([text], GREEDY)) == wanted
        programs = [program.spec for program in llm.engine.runner.programs.manifest()]
        kinds = {(spec.drafts > 0, spec.steps) for spec in programs if isinstance(spec, StepSpec)}
    assert kinds == {(False, 1), (False, 4), (True, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, replace(DRAWN, n=1, top_p=1.0), replace(DRAWN, n=1)])
def test_texts_of_a_grammar_are_those_of_one_device(single, pair, params):
    """The devices divide the logits of the program that samples, unless filters need them all."""
    pytest.importorskip("llguidance")
    wishes = [replace(params, structured_outputs=StructuredOutputs(regex="[a-f]{4,9}x")), params]
    wanted = single.generate([PROMPT, "import"], wishes)
    got = pair.generate([PROMPT, "import"], wishes)
    assert tokens_of(got) == tokens_of(wanted)
    assert re.fullmatch("[a-f]{4,9}x", got[0].text)


def test_scores_are_those_of_one_device(single, pair):
    [wanted], [got] = single.score([PROMPT]), pair.score([PROMPT])
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_each_device_has_its_part_of_parameters_and_cache_alone(folder, single, pair):
    whole = load_params(folder, pair.model.whole, dtype="float32", progress=False)
    chex.assert_trees_all_equal(pair.params, pair.model.divided(whole))
    layer = pair.params["layers"][0]
    for name in ("qkv", "o", "gate_up", "down"):
        assert layer[name].addressable_shards[0].data.size * 2 == layer[name].size
    assert layer["norms"].sharding.is_fully_replicated
    runner = pair.engine.runner
    named = runner.layout.arrays(runner.counts)
    for array, one in zip(runner.cache.arrays, named, strict=True):
        assert [shard.data.nbytes for shard in array.addressable_shards] == [one.nbytes] * 2
    pages = {group.name: group.bytes_per_unit for group in runner.layout.groups}
    alone = {group.name: group.bytes_per_unit for group in single.layout.groups}
    assert pages["gqa"] * 2 == alone["gqa"]
    assert pages["sampling"] == alone["sampling"]


def test_programs_update_each_devices_part_in_its_memory(pair):
    pair.generate([PROMPT], GREEDY)
    runner = pair.engine.runner
    per_device = sum(array.nbytes for array in runner.layout.arrays(runner.counts))
    programs = list(runner.programs.manifest())
    assert {program.spec.kind for program in programs} >= {"prefill", "decode"}
    for program in programs:
        report = program.report
        assert report.alias_bytes == report.cache_bytes
        # A sampler that other tests compiled updates the counts of tokens alone.
        assert report.cache_bytes == per_device or program.spec.kind not in ("prefill", "decode")
        assert not report.problems


# What is declared does not depend on the devices: tests/engine/test_engine.py has it for one.
@pytest.mark.slow
def test_a_warmed_up_strict_llm_compiles_nothing(folder, single):
    with few_programs(LLM(folder, tensor_parallel_size=2, strict=True, **SMALL)) as llm:
        llm.warm_up(batch=2, prompt_tokens=40, sampling=GREEDY)
        known = len(list(llm.engine.runner.programs.manifest()))
        got = llm.generate([PROMPT, "x"], GREEDY)
        assert len(list(llm.engine.runner.programs.manifest())) == known
    assert tokens_of(got) == tokens_of(single.generate([PROMPT, "x"], GREEDY))


def test_a_lost_cache_and_a_sleep_cost_no_token(single, pair):
    wanted = tokens_of(single.generate([PROMPT], GREEDY))
    pair.engine.runner.owner.poison("a test")
    assert tokens_of(pair.generate([PROMPT], GREEDY)) == wanted
    pair.sleep()
    pair.wake_up()
    assert tokens_of(pair.generate([PROMPT], GREEDY)) == wanted


def test_saved_prefixes_come_back_for_as_many_devices_alone(folder, pair, tmp_path):
    file = tmp_path / "prefixes.safetensors"
    wanted = tokens_of(pair.generate([PROMPT], GREEDY))
    saved = pair.save_prefixes(file)
    assert saved.pages > 0
    with few_programs(LLM(folder, tensor_parallel_size=2, **SMALL)) as other:
        assert other.load_prefixes(file).pages == saved.pages
        [output] = other.generate([PROMPT], GREEDY)
        assert output.usage.cached_tokens >= 16
        assert tokens_of([output]) == wanted
    with (
        few_programs(LLM(folder, tensor_parallel_size=4, **SMALL)) as other,
        pytest.raises(BadCheckpoint, match="another model"),
    ):
        other.load_prefixes(file)


def test_prefixes_on_the_host_come_back_in_parts(folder, single):
    """Few pages on the devices, so that each prompt evicts the one before."""
    prompts = [f"{number}{number}" + PROMPT for number in range(6)]
    cache = CacheConfig(budget_bytes=190_000, host_bytes=2**22, page_size=16, max_sequences=4)
    options = {name: SMALL[name] for name in ("dtype", "progress")} | {"max_model_len": 96}
    with few_programs(LLM(folder, tensor_parallel_size=2, cache=cache, **options)) as llm:
        first = [tokens_of(llm.generate([one], GREEDY)) for one in prompts]
        again = [llm.generate([one], GREEDY) for one in prompts]
        host = llm.stats().host
    assert [tokens_of(one) for one in again] == first
    assert first == [tokens_of(single.generate([one], GREEDY)) for one in prompts]
    assert host.written > 0
    assert host.read > 0
    assert sum(one[0].usage.cached_tokens for one in again) > 0


def test_new_weights_are_divided_by_their_owner(folder, single, pair):
    new = jax.tree.map(lambda leaf: leaf * 1.5, single.params)
    wanted = None
    with few_programs(LLM.from_parts(single.model, new, tokenizer=folder, **SMALL)) as llm:
        wanted = tokens_of(llm.generate([PROMPT], GREEDY))
    before = pair.params
    for whole in (new, jax.tree.map(np.asarray, new)):
        with pytest.raises(ValueError, match=r"are not divided among the 2 devices, embed for one"):
            pair.update_weights(whole)
    assert pair.params is before
    assert wanted != tokens_of(pair.generate([PROMPT], GREEDY))
    pair.update_weights(pair.model.divided(new))
    assert tokens_of(pair.generate([PROMPT], GREEDY)) == wanted
    pair.update_weights(before)


def test_new_weights_under_a_checkpoints_names_are_divided(folder, tmp_path):
    """The second update takes the memory of the first one's parameters, and an adapter is added to what is in files."""
    tensors = load_file(folder / "model.safetensors")
    save_adapter(tmp_path / "a", {"model.layers.0.mlp.down_proj": (256, 576)}, seed=1, size=0.3)
    found = []
    for devices in (1, 2):
        with few_programs(LLM(folder, tensor_parallel_size=devices, **SMALL)) as llm:
            types = jax.tree.map(lambda leaf: leaf.sharding, llm.params)
            told = []
            for factor in (1.25, 1.5):
                llm.update_weights([(name, factor * array) for name, array in tensors.items()])
                told += tokens_of(llm.generate([PROMPT], GREEDY))
            llm.load_lora(tmp_path / "a")
            told += tokens_of(llm.generate([PROMPT], GREEDY))
            for leaf, place in zip(
                jax.tree.leaves(llm.params), jax.tree.leaves(types), strict=True
            ):
                assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
            found.append(told)
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3


# test_new_weights_under_a_checkpoints_names_are_divided has the parts.
@pytest.mark.slow
def test_no_device_has_all_new_weights_under_a_checkpoints_names():
    """Neither when they come from the host, nor while they are divided: one leaf at a time is whole."""
    tensors = load_file(default_model.path() / "model.safetensors")
    whole = build_model(load_config(default_model.path()))
    model = TensorParallel(whole, tensor_mesh(4))
    before = {id(array) for array in jax.live_arrays()}

    def arrays():
        yield from tensors.items()
        new = [array for array in jax.live_arrays() if id(array) not in before]
        assert all(len(array.devices()) == 4 for array in new)

    types = model.param_shapes("float32")
    rules = rules_for(whole.config)
    named = NamedWeights(arrays(), whole, rules, types, "float32", divide=model.divide)
    programs = named.compile()
    size = sum(4 * tensor.size for tensor in tensors.values())
    for program in (programs.make, programs.make_in_place):
        assert program.memory_analysis().temp_size_in_bytes < size / 4


def test_parts_in_memory_are_served_without_a_copy(folder, single):
    model = TensorParallel(single.model, tensor_mesh(2))
    params = model.divided(single.params)
    with few_programs(LLM.from_parts(model, params, tokenizer=folder, **SMALL)) as llm:
        assert llm.params["embed"] is params["embed"]
        assert llm.eos_ids == single.eos_ids
        wanted = tokens_of(single.generate([PROMPT], GREEDY))
        assert tokens_of(llm.generate([PROMPT], GREEDY)) == wanted


def test_undivided_parameters_are_refused(folder, single):
    model = TensorParallel(single.model, tensor_mesh(2))
    with pytest.raises(ValueError, match=r"give model\.divided\(params\)"):
        LLM.from_parts(model, single.params, tokenizer=folder, **SMALL)
    with pytest.raises(ValueError, match=r"give model\.divided\(params\)"):
        jaxkv.generate(single.params, model, [[1, 2, 3]], sampling=GREEDY)


def test_a_mesh_of_two_axes_is_refused(single):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    with pytest.raises(ValueError, match="along one axis, got a mesh of the axes"):
        TensorParallel(single.model, mesh)


def test_a_plan_has_the_bytes_of_each_device(folder, pair):
    def planned(devices, **options):
        cache = CacheConfig(max_sequences=4, page_size=16, host_bytes=2**20)
        return explain_plan(
            folder,
            dtype="float32",
            max_model_len=128,
            cache=cache,
            free_bytes=None,
            tensor_parallel_size=devices,
            **options,
        )

    bytes_of = {
        name: int(re.search(rf"{name}: ([\d,]+)", planned(2))[1].replace(",", ""))
        for name in ("weights",)
    }
    device = jax.devices()[0]
    parts = [
        shard.data.nbytes
        for leaf in jax.tree.leaves(pair.params)
        for shard in leaf.addressable_shards
        if shard.device == device
    ]
    assert bytes_of["weights"] == sum(parts)
    # Half of the host's bytes for half of each token's.
    tokens = [re.search(r"at most ([\d,]+) tokens", planned(devices))[1] for devices in (1, 2)]
    assert tokens[0] == tokens[1]
    with pytest.raises(Unsupported, match="mosaic_gpu"):
        planned(2, implementation="mosaic_gpu")
    assert repr(pair.engine.runner.model).endswith("devices=2)")


# The logits of divided models are those of Transformers in tests/models/families/test_tensor_parallel.py;
# the loop around a model is in tests/test_generation.py.
@pytest.mark.slow
def test_generate_in_a_program_of_ones_own_gives_the_tokens_of_one_device(single):
    model = TensorParallel(single.model, tensor_mesh(2))
    prompts = [list(range(40, 60)), [7, 8, 9]]
    options = {"sampling": SamplingParams(temperature=0.0, max_tokens=8)}
    wanted = jaxkv.generate(single.params, single.model, prompts, **options)
    got = jaxkv.generate(model.divided(single.params), model, prompts, **options)
    assert np.array_equal(got.tokens, wanted.tokens)


# test_a_vocabulary_that_the_devices_cannot_divide_stays_whole draws them too.
@pytest.mark.slow
def test_random_weights_are_those_of_one_device(folder):
    drawn = {}
    for devices in (1, 2):
        options = SMALL | {"load_format": "dummy", "seed": 3, "tensor_parallel_size": devices}
        with few_programs(LLM(folder, **options)) as llm:
            drawn[devices] = tokens_of(llm.generate([PROMPT], GREEDY))
    assert drawn[1] == drawn[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "must be an int in [1, "),
        ({"tensor_parallel_size": 16}, "the number of devices here, 8, got 16"),
        ({"tensor_parallel_size": 3}, "which has heads = 8, kv_heads = 2"),
        ({"batch_invariant": True}, "batch_invariant is supported on one device only"),
        (
            {"quantization": "int4", "tensor_parallel_size": 4},
            "4 devices would have 144 columns each of a weight with a scale for 64",
        ),
    ],
)
def test_what_several_devices_cannot_do_is_refused(folder, options, message):
    options = {"tensor_parallel_size": 2} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(folder, progress=False, max_model_len=64, **options)


@pytest.mark.parametrize(
    ("quantization", "devices"),
    [("int4", 2), pytest.param("int8", 4, marks=pytest.mark.slow)],
)
def test_weights_in_few_bits_are_divided_with_their_scales(folder, quantization, devices):
    """Two devices have 288 columns each of a weight with a scale for 64, so these are cut into halves."""
    found, sizes = [], []
    for count in (1, devices):
        options = SMALL | {"quantization": quantization, "tensor_parallel_size": count}
        with few_programs(LLM(folder, **options)) as llm:
            outputs = llm.generate([PROMPT, "import"], CHOSEN)
            found.append([sample for one in outputs for sample in one.outputs])
            forms = llm.stats().weights.items()
            sizes.append(sum(size for form, size in forms if form.startswith(quantization)))
            codes = [leaf for leaf in jax.tree.leaves(llm.params) if leaf.dtype.itemsize == 1]
            assert codes
            assert all(leaf.is_fully_replicated == (count == 1) for leaf in codes)
            llm.engine.runner.update_params(llm.params, llm.engine.runner.weight_version)
    for wanted, got in zip(*found, strict=True):
        assert got.token_ids == wanted.token_ids
        np.testing.assert_allclose(chosen_of(got)[1], chosen_of(wanted)[1], atol=1e-4)
    assert sizes[0] / devices <= sizes[1] < 1.2 * sizes[0] / devices


# The texts of the test above are those of int4.
@pytest.mark.parametrize("quantization", [pytest.param("int4", marks=pytest.mark.slow), "fp8"])
def test_parts_in_few_bits_stand_for_the_parts_of_the_weight(folder, quantization):
    """Each device's arrays mean its part of the weight that all arrays mean."""
    whole = build_model(load_config(folder))
    types = expected_params(folder, whole, dtype="float32", quantization=quantization)
    params = whole.init_params_like(jax.random.key(1), types)
    model = TensorParallel(whole, tensor_mesh(2))
    divided = model.divided(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(divided, model.divided_types(types))
    meant = jax.tree.map(
        lambda leaf: leaf.widened() if is_few_bits(leaf) else leaf, params, is_leaf=is_few_bits
    )
    wanted = model.divided(meant)
    assert is_few_bits(divided["layers"][0]["down"])
    assert divided["layers"][0]["down"].rounds_rows == (quantization == "fp8")
    for (path, leaf), plain in zip(
        jax.tree_util.tree_leaves_with_path(divided, is_leaf=is_few_bits),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        if is_few_bits(leaf):
            for device in range(2):
                own = jax.tree.map(lambda array: array.addressable_shards[device].data, leaf)  # noqa: B023
                part = plain.addressable_shards[device].data
                assert np.array_equal(own.widened(), part), path
    model.refuse_undivided(divided)
    with pytest.raises(ValueError, match="are not divided among the 2 devices"):
        model.refuse_undivided(params)


def test_each_row_has_the_tokens_of_its_adapter_on_one_device(folder, tmp_path):
    """Adapters of projections into blocks and out of them, whose rows and whose columns the devices divide."""
    shapes = {
        "model.layers.0.self_attn.q_proj": (256, 256),
        "model.layers.0.self_attn.v_proj": (64, 256),
        "model.layers.0.self_attn.o_proj": (256, 256),
        "model.layers.0.mlp.gate_proj": (576, 256),
        "model.layers.0.mlp.down_proj": (256, 576),
    }
    for seed, name in enumerate("ab"):
        save_adapter(tmp_path / name, shapes, seed=seed, size=0.2)
    requests = [replace(CHOSEN, lora=name) for name in (None, "a", "b")]
    found = []
    for devices in (1, 2):
        lora = LoraConfig(max_adapters=2, max_rank=4)
        with few_programs(LLM(folder, tensor_parallel_size=devices, lora=lora, **SMALL)) as llm:
            for name in "ab":
                llm.add_lora(name, tmp_path / name)
            outputs = llm.generate([PROMPT] * 3, requests)
            found.append([chosen_of(one.outputs[0]) for one in outputs])
            stacks = llm.engine.runner.stacks
            divided = [leaf for leaf in jax.tree.leaves(stacks) if not leaf.is_fully_replicated]
            assert len(divided) == (devices > 1) * len(stacks)
            assert stack_bytes(llm.model, lora, "float32") == sum(
                shard.data.nbytes
                for leaf in jax.tree.leaves(stacks)
                for shard in leaf.addressable_shards
                if shard.device == jax.devices()[0]
            )
    assert len({tuple(tokens) for tokens, _ in found[0]}) == 3
    for (tokens, chosen), (others, values) in zip(*found, strict=True):
        assert tokens == others
        np.testing.assert_allclose(chosen, values, atol=1e-4)


def test_columns_in_an_order_of_their_own_are_refused(folder):
    """GPTQ's act-order."""
    whole = build_model(load_config(folder))
    types = expected_params(folder, whole, dtype="float32", quantization="int4")
    layer = types["layers"][0]
    for name in ("down", "qkv"):
        order = jax.ShapeDtypeStruct(layer[name].shape[-1:], np.int32)
        changed = layer | {name: replace(layer[name], order=order)}
        sorted_types = types | {"layers": (changed, *types["layers"][1:])}
        if name == "qkv":
            divided = TensorParallel(whole, tensor_mesh(2)).divided_types(sorted_types)
            assert divided["layers"][0]["qkv"].order.shape == order.shape
        else:
            with pytest.raises(ValueError, match="sorted by importance"):
                over_devices(whole, 2, sorted_types)


def test_a_vocabulary_that_the_devices_cannot_divide_stays_whole(folder, tmp_path):
    config = json.loads((default_model.path() / "config.json").read_text())
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(
        json.dumps(config | {"vocab_size": 4097, "num_hidden_layers": 1})
    )
    options = SMALL | {"load_format": "dummy", "seed": 1}
    found = {}
    for devices in (1, 2):
        with few_programs(LLM(odd, tensor_parallel_size=devices, **options)) as llm:
            # A prompt of one token has no program of its own.
            found[devices] = tokens_of(llm.generate([[4096]], GREEDY))
            embed = llm.params["embed"]
            assert embed.sharding.is_fully_replicated
    assert found[1] == found[2]


def test_types_are_those_of_the_arrays(folder):
    model = TensorParallel(build_model(load_config(folder)), tensor_mesh(4))
    types = model.param_shapes("float32")
    params = model.init_params(jax.random.key(0), "float32")
    chex.assert_trees_all_equal_shapes_and_dtypes(params, types)
    for leaf, kind in zip(jax.tree.leaves(params), jax.tree.leaves(types), strict=True):
        assert leaf.sharding.is_equivalent_to(kind.sharding, leaf.ndim)


def test_a_device_has_whole_heads_and_rows_of_every_part(folder):
    """Rows of the fused projection on device 1 of 4: its queries, then the key and value heads that they use."""
    whole = build_model(load_config(folder))
    model = TensorParallel(whole, tensor_mesh(4))
    config = whole.config
    queries, keys = (heads * config.head_dim for heads in (config.heads, config.kv_heads))
    rows = np.arange(queries + 2 * keys, dtype=np.float32)[:, None]
    divided = model.divide("layers.0.qkv", jax.numpy.asarray(rows))
    own = np.asarray(divided.addressable_shards[1].data)[:, 0]
    # Devices 0 and 1 share the first of the two heads of keys and values.
    wanted = [
        *range(queries // 4, queries // 2),
        *range(queries, queries + config.head_dim),
        *range(queries + keys, queries + keys + config.head_dim),
    ]
    assert own.tolist() == wanted
    assert divided.sharding.mesh.axis_names == (AXIS,)
    assert math.prod(divided.shape) == 4 * own.size
