"""`LLM` with weights in 8 and 4 bits: its tokens are those of the weights that the codes mean, in every feature."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams, generate, load_model
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model, rules_for
from jaxkv.weights.load import expected_shapes
from jaxkv.weights.quantised.weight_forms import is_few_bits
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model
from tests.weights.adapter_files import save_adapter

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [300, 301, 302, 303]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, ignore_eos=True)
SMALL = {"max_num_seqs": 4, "max_model_len": 64, "progress": False}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def int4(one_layer):
    with few_programs(LLM(one_layer, quantization="int4", dtype="float32", **SMALL)) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(int4):
    """The same weights in float32."""
    meant = jax.tree.map(
        lambda leaf: leaf.widened(jnp.float32) if is_few_bits(leaf) else leaf,
        int4.params,
        is_leaf=is_few_bits,
    )
    with few_programs(LLM.from_parts(int4.model, meant, eos_ids=(), **SMALL)) as llm:
        yield llm


def test_tokens_and_log_probabilities_are_those_of_the_same_weights_in_float32(int4, plain):
    got, wanted = int4.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
    for ours, theirs in zip(int4.score(PROMPTS), plain.score(PROMPTS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_stats_tell_what_runs(int4, plain):
    assert set(int4.stats().weights) == {"float32", "int4 in groups of 128", "int4 in groups of 64"}
    assert set(plain.stats().weights) == {"float32"}
    leaves = jax.tree.leaves(int4.params)
    assert sum(int4.stats().weights.values()) == sum(leaf.nbytes for leaf in leaves)


@pytest.mark.slow
def test_generate_without_an_engine_gives_the_same_tokens(one_layer, int4):
    params, model = load_model(one_layer, quantization="int4", dtype="float32")
    out = generate(params, model, PROMPTS, sampling=GREEDY)
    wanted = [list(one.token_ids) for one in int4.generate(PROMPTS, GREEDY)]
    assert np.asarray(out.tokens).tolist() == wanted


def test_parameters_in_memory_are_served_and_replaced_as_a_tree(int4):
    with few_programs(LLM.from_parts(int4.model, int4.params, eos_ids=(), **SMALL)) as llm:
        wanted = [one.token_ids for one in int4.generate(PROMPTS, GREEDY)]
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == wanted
        llm.update_weights(jax.tree.map(jnp.copy, int4.params))
        assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == wanted
        with pytest.raises(ValueError, match=r"are in 8 or 4 bits.*tree such as LLM\.params"):
            llm.update_weights(iter([("model.norm.weight", np.ones(256, np.float32))]))


@pytest.mark.slow
def test_adapters_are_added_to_requests_and_not_merged_into_the_weights(tmp_path, one_layer, int4):
    shapes = {f"model.layers.0.self_attn.{name}": (256, 256) for name in ("q_proj", "o_proj")}
    save_adapter(tmp_path / "adapter", shapes)
    with LLM(one_layer, quantization="int4", dtype="float32", lora=True, **SMALL) as llm:
        llm.add_lora("mine", tmp_path / "adapter")
        own = replace(GREEDY, lora="mine")
        got = [one.token_ids for one in llm.generate(PROMPTS, [own, GREEDY, GREEDY])]
        wanted = [one.token_ids for one in int4.generate(PROMPTS, GREEDY)]
        assert got[1:] == wanted[1:]
        assert got[0] != wanted[0]
        with pytest.raises(ValueError, match="name adapters with add_lora"):
            llm.load_lora(tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"batch_invariant": True}, {"kv_cache_dtype": "int8"}])
def test_other_options_run_with_it(one_layer, option):
    with LLM(one_layer, quantization="int8", dtype="float32", **SMALL, **option) as llm:
        alone = llm.generate(PROMPTS[:1], GREEDY)[0]
        among = llm.generate(PROMPTS, GREEDY)[0]
    assert alone.token_ids == among.token_ids


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantization": "int3"}, "quantization must be one of fp8, int8, int4, or None"),
        ({"quantization": "awq"}, "got 'awq'"),
    ],
)
def test_another_form_is_refused_by_name(options, told):
    with pytest.raises(ValueError, match=told):
        LLM(**options, **SMALL)


def wide_model():
    """A Qwen3 of two layers, of sizes that our kernels run."""
    shape = SHAPES["qwen3-0.6b"]
    sizes = {"num_layers": 2, "windows": (None,) * 2, "vocab_size": 4096, "max_positions": 512}
    return build_model(replace(shape, **sizes, pattern=()))


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_our_kernels_give_the_log_probabilities_of_xla(quantization):
    model = wide_model()
    types = expected_shapes(
        model, rules_for(model.config), dtype="bfloat16", scheme=None, quantization=quantization
    )
    params = model.init_params_like(jax.random.key(1), types)
    prompts = [list(range(1, 40)), list(range(50, 60))]
    told = {}
    for name in ("mosaic_gpu", "xla"):
        with LLM.from_parts(model, params, eos_ids=(), implementation=name, **SMALL) as llm:
            sampled = [list(one.token_ids) for one in llm.generate(prompts, GREEDY)]
            outputs = told.setdefault("outputs", [[tokens] for tokens in sampled])
            # Decode steps run the products of few rows, prompts those of many.
            told[name] = np.concatenate([*llm.score(prompts), *llm.score(prompts, outputs)])
            assert llm.stats().implementation == name
    np.testing.assert_allclose(told["mosaic_gpu"], told["xla"], atol=0.1)
