"""`jaxkv.score`: given tokens in one step against plain code, and in the program of `generate` bit for bit."""

import inspect
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import SamplingParams, default_model, generation, score
from jaxkv.examples.small_llama import SmallLlama, forward, init_params, save_hf

SIZES = SmallLlama(
    vocab_size=97,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    max_positions=128,
)
PROMPTS = np.asarray([[5, 6, 7, 8], [9, 10, 11, 0]], np.int32)
LENS = np.asarray([4, 3], np.int32)
SAMPLING = SamplingParams(
    n=2,
    temperature=0.9,
    top_k=40,
    min_tokens=2,
    max_tokens=10,
    logprobs=0,
    logprobs_mode="truncated",
)
ENDS = tuple(range(12))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Weights under their names in the checkpoint, the same as our parameters, and our model."""
    folder = tmp_path_factory.mktemp("model")
    named = init_params(SIZES, jax.random.key(3))
    named = {name: leaf * (4 if leaf.ndim > 1 else 1) for name, leaf in named.items()}
    save_hf(SIZES, named, folder, dtype="float32")
    shutil.copy(default_model.path() / "tokenizer.json", folder)
    return named, *jaxkv.load_model(folder, dtype="float32")


def sampled(params, model, sampling=SAMPLING):
    return jaxkv.generate(
        params,
        model,
        PROMPTS,
        prompt_lens=LENS,
        sampling=sampling,
        key=jax.random.key(1),
        eos_ids=ENDS,
    )


def replayed(params, model, prompts, lens, out, out_lens, sampling=SAMPLING):
    return score(
        params,
        model,
        prompts,
        out,
        prompt_lens=lens,
        output_lens=out_lens,
        sampling=sampling,
        eos_ids=ENDS,
    )


def traced(traces, loop, *args, **options):
    traces.append(args)
    return loop(*args, **options)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_tokens_of_generate_have_its_log_probabilities_bit_for_bit(parts, dtype, monkeypatch):
    _, params, model = parts
    loop, traces = generation.generate_loop, []
    counted = lambda *args, **options: traced(traces, loop, *args, **options)  # noqa: E731
    monkeypatch.setattr(generation, "generate_loop", counted)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    out = sampled(params, model)
    assert len(set(out.lengths.tolist())) > 1
    assert (np.asarray(out.logprobs) < 0).any()
    programs = len(traces)
    given = (PROMPTS, LENS, out.tokens, out.lengths)
    np.testing.assert_array_equal(replayed(params, model, *given), out.logprobs)
    # It is not only an equal program but the same one.
    assert len(traces) == programs

    @jax.jit
    def inside(params, prompts, lens, tokens, lengths):
        return replayed(params, model, prompts, lens, tokens, lengths) * 2

    np.testing.assert_array_equal(inside(params, *given), out.logprobs * 2)


def dense_logprobs(named, ids):
    logits = forward(SIZES, named, ids)
    told = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return jnp.take_along_axis(told, ids[:, 1:, None], axis=2)[:, :, 0]


def test_whole_texts_have_the_log_probabilities_and_gradients_of_plain_code(parts):
    """The other code is the training example's forward pass, without a cache."""
    named, params, model = parts
    texts = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 9)), jnp.int32)
    lens = jnp.asarray([9, 1, 6])
    real = jnp.arange(1, 9)[None, :] < lens[:, None]

    def dense(named):
        told = jnp.where(real, dense_logprobs(named, texts), 0)
        return told.sum(), told

    def total(params):
        told = score(params, model, texts, prompt_lens=lens)
        return told.sum(), told

    (_, told), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    (_, wanted), theirs = jax.jit(jax.value_and_grad(dense, has_aux=True))(named)
    np.testing.assert_allclose(told[:, 1:], wanted, atol=1e-5)
    assert not told[:, 0].any()
    np.testing.assert_allclose(
        gradients["embed"], theirs["model.embed_tokens.weight"], rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_decode_steps_and_one_step_differ_by_rounding(parts):
    _, params, model = parts
    raw = replace(SAMPLING, logprobs_mode="raw", ignore_eos=True)
    out = sampled(params, model, raw)
    tokens = np.asarray(out.tokens)
    for row, (prompt, length) in enumerate(zip(PROMPTS.repeat(2, 0), LENS.repeat(2), strict=True)):
        text = [*prompt[:length].tolist(), *tokens[row].tolist()]
        told = score(params, model, [text])[0, length : len(text)]
        np.testing.assert_allclose(told, out.logprobs[row], atol=1e-5)


def foreign():
    """Tokens that nobody sampled, all of them end ids."""
    return jnp.asarray(np.random.default_rng(1).integers(0, 12, (4, 10)), jnp.int32)


def test_tokens_that_were_not_sampled_do_not_end_a_row_and_may_be_outside_of_the_filters(parts):
    _, params, model = parts
    told = replayed(params, model, PROMPTS, LENS, foreign(), None, replace(SAMPLING, top_k=1))
    assert (np.asarray(told) <= 0).all()
    assert np.isneginf(told).any(axis=1).all()


@pytest.mark.slow
def test_without_sampling_each_prompt_has_one_sample_under_the_models_distribution(parts):
    _, params, model = parts
    raw = replace(SAMPLING, logprobs_mode="raw")
    told = replayed(params, model, PROMPTS, LENS, foreign(), None, raw)
    assert np.isfinite(told).all()
    plain = score(params, model, PROMPTS, foreign()[::2], prompt_lens=LENS)
    np.testing.assert_allclose(plain, told[::2], atol=1e-5)


def test_logits_that_are_not_finite_give_nan_and_not_0(parts):
    _, params, model = parts
    broken = params | {"embed": params["embed"].at[60].set(jnp.nan)}
    given = jnp.asarray([[1, 60, 2, 3], [1, 2, 3, 4]], jnp.int32)
    told = score(broken, model, PROMPTS, given, prompt_lens=LENS)
    assert np.isnan(told).any(axis=1).all()
    # The NaN is in the embedding, which is also the output projection.
    assert np.isnan(score(broken, model, [[1, 2, 3]])[0, 1:3]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SAMPLING}, "sampling describe decode steps"),
        ({"output_lens": LENS}, "output_lens describe"),
        ({"prompts": [[97]]}, "outside"),
        ({"prompts": jnp.zeros((1, 200), jnp.int32)}, "exceeds the model's 128 positions"),
        ({"outputs": [[1, 2]]}, "outputs must be an array of ints"),
        ({"outputs": np.zeros((3, 2), np.int32)}, "shape .2, output_len., one row per sample"),
        ({"outputs": np.zeros((2, 2), np.float32)}, "got float32"),
        ({"outputs": np.full((2, 2), 97)}, "outputs must lie in"),
        ({"outputs": np.zeros((2, 2), int), "output_lens": np.asarray([1, 3])}, "output_lens"),
        ({"outputs": np.zeros((4, 12), int), "sampling": SAMPLING}, "12 columns, and the largest"),
        ({"outputs": np.zeros((2, 0), int)}, "0 columns"),
        ({"model": "path"}, "see jaxkv.load_model"),
        ({"eos_ids": 2}, "eos_ids must be a sequence of token ids, got 2"),
    ],
    ids=lambda value: None,
)
def test_what_does_not_fit_is_refused_with_a_reason(parts, options, message):
    _, params, model = parts
    given = {"model": model, "prompts": PROMPTS} | options
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(score)(params, **given)
