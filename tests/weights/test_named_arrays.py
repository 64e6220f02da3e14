"""Parameters made of arrays under checkpoint names are, bit for bit, those that the loader reads from a file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, CacheConfig, SamplingParams, default_model
from jaxkv.errors import BadCheckpoint, ProgramRefused
from jaxkv.models.registry import build_model, load_config, load_params, rules_for
from jaxkv.programs.manifest import compile_count
from jaxkv.weights.named_arrays import NamedWeights
from jaxkv.weights.safetensors import open_checkpoint


@pytest.fixture(scope="module")
def small():
    folder = default_model.path()
    model = build_model(load_config(folder))
    with open_checkpoint(folder) as stored:
        arrays = {}
        for name, tensor in stored.items():
            buffer = np.empty(int(np.prod(tensor.shape)), np.float32)
            tensor.read(buffer)
            arrays[name] = jnp.asarray(buffer.reshape(tensor.shape))
    return folder, model, arrays


def named(model, arrays, dtype="float32"):
    return NamedWeights(
        arrays.items(), model, rules_for(model.config), model.param_shapes(dtype), dtype
    )


def made(model, arrays, dtype="float32", donated=None):
    weights = named(model, arrays, dtype)
    return weights.params(weights.compile(), donated)


def assert_same(params, wanted):
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_own_tensors_make_its_parameters(small, dtype):
    folder, model, arrays = small
    wanted = load_params(folder, model, dtype=dtype, progress=False)
    assert_same(made(model, arrays, dtype), wanted)


def test_the_memory_of_given_parameters_is_taken(small):
    folder, model, arrays = small
    old = load_params(folder, model, dtype="float32", progress=False)
    zeros = jax.tree.map(jnp.zeros_like, old)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(zeros)]
    new = made(model, arrays, donated=zeros)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(zeros))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)] == places
    assert_same(new, old)


def test_no_parameter_shares_the_memory_of_a_given_array(small):
    _, model, arrays = small
    given = {array.unsafe_buffer_pointer() for array in arrays.values()}
    leaves = jax.tree.leaves(made(model, arrays))
    assert not given & {leaf.unsafe_buffer_pointer() for leaf in leaves}


def test_arrays_of_other_libraries_and_dtypes_are_taken(small):
    torch = pytest.importorskip("torch")
    folder, model, arrays = small
    wanted = load_params(folder, model, dtype="float32", progress=False)
    as_torch = {
        name: torch.nn.Parameter(torch.from_numpy(np.array(array)))
        for name, array in arrays.items()
    }
    params = made(model, as_torch)
    for parameter in as_torch.values():
        parameter.data.zero_()
    assert_same(params, wanted)
    assert_same(made(model, {name: np.asarray(one) for name, one in arrays.items()}), wanted)
    first = next(iter(as_torch))
    with pytest.raises(BadCheckpoint, match="cannot be shared with JAX"):
        named(model, as_torch | {first: as_torch[first].to_sparse()})


def without_one(arrays):
    return dict(list(arrays.items())[1:])


def ended_half_way(arrays):
    yield from list(arrays.items())[: len(arrays) // 2]
    raise RuntimeError("the trainer has died")


def with_one(change):
    def changed(arrays):
        name = next(iter(arrays))
        return arrays | {name: change(arrays[name])}

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, "lacks"),
        (with_one(lambda array: array[:-1]), "wanted"),
        (with_one(lambda array: array.astype(jnp.int32)), "floating-point"),
        (with_one(lambda array: "text"), "is of type str"),
        (lambda arrays: arrays | {"model.extra": jnp.zeros(3)}, "no use for"),
    ],
    ids=["missing", "shape", "dtype", "type", "extra"],
)
def test_what_does_not_fit_is_refused_by_name(small, change, message):
    _, model, arrays = small
    with pytest.raises(BadCheckpoint, match=message):
        named(model, change(arrays))


def test_a_name_that_comes_twice_is_refused(small):
    _, model, arrays = small
    pairs = [*arrays.items(), next(iter(arrays.items()))]
    with pytest.raises(BadCheckpoint, match="comes twice"):
        NamedWeights(
            pairs, model, rules_for(model.config), model.param_shapes("float32"), "float32"
        )


@pytest.mark.slow
def test_an_llm_takes_a_trainers_named_tensors_and_compiles_once(small):
    folder, model, arrays = small
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    options = {"dtype": "float32", "max_model_len": 64, "progress": False}
    cache = CacheConfig(max_sequences=1, page_size=16)
    llm = LLM(folder, cache=cache, strict=True, **options)
    ids = llm.tokenizer.encode("def add(")
    louder = {name: array * 1.5 if array.ndim > 1 else array for name, array in arrays.items()}
    llm.update_weights(iter(louder.items()))
    llm.warm_up(batch=1, prompt_tokens=16, sampling=greedy)
    with pytest.raises(ProgramRefused, match="before the warm-up"):
        llm.update_weights((name, array.astype(jnp.bfloat16)) for name, array in arrays.items())
    wanted = []
    for tensors in (arrays, louder):
        params = made(model, tensors)
        out = jaxkv.generate(params, model, [ids], sampling=greedy, eos_ids=llm.eos_ids)
        wanted.append(out.tokens[0].tolist())
    assert wanted[0] != wanted[1]
    compiled = compile_count()
    for version, tensors in ((2, arrays), (3, louder), (4, arrays)):
        assert llm.update_weights(iter(tensors.items())) == version
        assert llm.generate([ids], greedy)[0].token_ids == wanted[version % 2]
    assert compile_count() == compiled
    before = llm.params
    with pytest.raises(BadCheckpoint, match="lacks"):
        llm.update_weights(iter(without_one(arrays).items()))
    assert llm.params is before
    assert llm.weight_version == 4
    with pytest.raises(RuntimeError, match="has died"):
        llm.update_weights(ended_half_way(louder), requests="recompute")
    assert llm.params is before
    assert llm.generate([ids], greedy)[0].token_ids == wanted[0]
    # Neither without parameters nor with deleted ones is another program needed.
    llm.sleep(level=2)
    llm.update_weights(iter(louder.items()))
    llm.wake_up()
    jax.tree.leaves(llm.params)[0].delete()
    llm.update_weights(iter(arrays.items()))
    assert llm.generate([ids], greedy)[0].token_ids == wanted[0]
    assert compile_count() == compiled
