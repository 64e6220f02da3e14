"""On two GPUs or more: our kernels over several devices give the tokens of one, up to close calls."""

import jax
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from jaxkv.bench.shapes import SHAPES
from jaxkv.models.registry import build_model
from jaxkv.models.tensor_parallel import TensorParallel, tensor_mesh
from jaxkv.programs import compile as compilation
from tests.devices import needs_devices

pytestmark = [pytest.mark.gpu, needs_devices(2)]

on_several = pytest.mark.parametrize(
    "devices", [pytest.param(count, marks=needs_devices(count)) for count in (2, 4, 8)]
)

WIDE = {"max_model_len": 512, "max_num_seqs": 8, "progress": False, "eos_ids": ()}


@pytest.fixture(scope="module")
def whole():
    """A model of four layers of the 0.6B shape, in bfloat16, and its parameters."""
    shape = SHAPES["qwen3-0.6b"]
    layers = {"num_layers": 4, "windows": (None,) * 4, "pattern": shape.pattern[:4]}
    model = build_model(type(shape)(**(vars(shape) | layers)))
    return model, model.init_params(jax.random.key(0), "bfloat16")


@on_several
def test_log_probabilities_are_those_of_one_gpu_within_rounding(whole, devices):
    model, params = whole
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, model.vocab_size, 40 * (at + 1)).tolist() for at in range(4)]
    told = []
    for count in (1, devices):
        split = model if count == 1 else TensorParallel(model, tensor_mesh(count))
        own = params if count == 1 else split.divided(params)
        with LLM.from_parts(split, own, **WIDE) as llm:
            assert llm.stats().implementation == "mosaic_gpu"
            sampled = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
            assert all(len(one.token_ids) == 24 for one in sampled)
            told.append(np.concatenate(llm.score(prompts)))
    np.testing.assert_allclose(told[1], told[0], atol=0.1)


def test_a_later_start_loads_the_programs_of_both_gpus_and_lowers_none(whole, monkeypatch):
    model, params = whole
    split = TensorParallel(model, tensor_mesh(2))
    divided = split.divided(params)

    def start():
        """Runs as a process of its own would, which has traced nothing yet."""
        jax.clear_caches()
        with LLM.from_parts(split, divided, **WIDE) as llm:
            [sampled] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=24))
            return sampled.token_ids, llm.engine.runner.programs.manifest()

    monkeypatch.setattr(compilation, "MIN_COMPILE_SECONDS", 0.0)
    expected, _ = start()

    def lower(*_, **__):
        raise AssertionError("a stored program was lowered")

    monkeypatch.setattr(compilation.Build, "lower", lower)
    tokens, programs = start()
    assert tokens == expected
    assert all(program.loaded for program in programs)


def test_a_bundle_has_the_programs_of_both_gpus(tmp_path):
    options = {"tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 2, "strict": True}
    greedy, folder = SamplingParams(temperature=0.0, max_tokens=8), tmp_path / "bundle"
    with LLM(progress=False, **options) as llm:
        llm.warm_up(batch=1, prompt_tokens=8, sampling=greedy)
        [expected] = llm.generate("def ", greedy)
        count = llm.save_programs(folder)
    with LLM(progress=False, programs=folder, **options) as llm:
        programs = llm.engine.runner.programs.manifest()
        [output] = llm.generate("def ", greedy)
    assert len(programs) == count
    assert all(program.loaded for program in programs)
    assert output.token_ids == expected.token_ids


@on_several
def test_many_steps_leave_all_gpus_with_the_same_states_and_end(whole, devices):
    model, params = whole
    split = TensorParallel(model, tensor_mesh(devices))
    with LLM.from_parts(split, split.divided(params), **WIDE) as llm:
        sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=400)
        outputs = llm.generate([[at + 1] * 8 for at in range(8)], sampling)
        assert all(len(one.token_ids) == 400 for one in outputs)
        last = llm.engine.runner.cache.layer(model.num_layers)["last_token"]
        mine, *others = (np.asarray(shard.data) for shard in last.addressable_shards)
        assert len(others) == devices - 1
        assert all(np.array_equal(mine, other) for other in others)
