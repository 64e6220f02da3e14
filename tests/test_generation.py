"""`generate`: one executable, the tokens of Transformers, and use inside a caller's jitted function."""

import inspect
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.generation import ERROR, LENGTH, STOP, generate
from jaxkv.models.decoder import Decoder

CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    num_layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=256,
    rope=RopeConfig(rotary_dim=8),
    windows=(5,),
)
MODEL = Decoder(CONFIG)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWS = SamplingParams(temperature=1.0, max_tokens=12)
# Each number of rows, longest prompt and max_tokens is a program, so most tests have three rows, seven and twelve.
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@pytest.fixture(scope="module")
def params():
    drawn = MODEL.init_params(jax.random.key(7), jnp.float32)
    # Larger weights make some tokens clearly more likely than others.
    return jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim == 2 and leaf.shape[0] > 2 else leaf, drawn
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        # The loop does not depend on the family: tests/models/families/test_parity.py has the logits of each.
        "mistral-window",
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("llama3", marks=pytest.mark.slow),
        pytest.param("qwen3-bias-window-tied", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_unequal_prompts_equal_transformers(name, tmp_path):
    """The greedy tokens of a batch are those of each prompt alone in Transformers."""
    cases = pytest.importorskip("tests.models.families.cases")
    from jaxkv.models.registry import build_model, load_config, load_params

    case = cases.CASES[name]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path))
    params = load_params(tmp_path, model, dtype="float32", progress=False)
    prompts, wanted = [], []
    for length in (3, 17, 30):
        # Where two tokens are as good as equal, float32 may choose either: take a prompt with clear winners.
        drawn = (case.prompt(length, offset=offset) for offset in range(length, length + 20))
        told = ((prompt, *cases.greedy(theirs, prompt, 24)) for prompt in drawn)
        prompt, tokens, _ = next(item for item in told if item[2] > 1e-3)
        prompts.append(prompt)
        wanted.append(tokens)
    out = generate(params, model, prompts, sampling=SamplingParams(temperature=0.0, max_tokens=24))
    assert out.tokens.tolist() == wanted


def test_a_row_does_not_see_its_neighbours(params):
    """Alone or in a batch, a row generates the same tokens; draws depend on seed and position alone."""
    wishes = [SamplingParams(temperature=0.9, seed=row, max_tokens=12) for row in range(3)]
    together = generate(params, MODEL, PROMPTS, sampling=wishes)
    padded = jnp.asarray([prompt + [0] * (7 - len(prompt)) for prompt in PROMPTS], jnp.int32)
    for row in range(3):
        lens = jnp.asarray([len(PROMPTS[row])], jnp.int32)
        one = partial(generate, params, MODEL, padded[row : row + 1], prompt_lens=lens)
        alone = one(sampling=wishes[row])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_repeated_prompts_without_a_seed_give_rows_that_differ(params):
    rows = generate(params, MODEL, PROMPTS[2:] * 3, sampling=DRAWS).tokens.tolist()
    assert len({tuple(row) for row in rows}) == 3


def test_the_next_call_without_a_seed_gives_other_tokens(params):
    first, second = (generate(params, MODEL, PROMPTS, sampling=DRAWS) for _ in range(2))
    assert all((first.tokens != second.tokens).any(axis=1))


def test_a_key_gives_rows_that_differ_and_the_same_key_the_same_rows(params):
    run = partial(generate, params, MODEL, PROMPTS[2:] * 3, sampling=DRAWS)
    first, again, other = (run(key=jax.random.key(number)).tokens.tolist() for number in (1, 1, 2))
    assert len({tuple(row) for row in first + other}) == 6
    assert first == again


# A key inside a program is in test_traced_prompts_may_have_several_samples, and that keys and seeds are data is in
# test_lengths_ids_and_seeds_are_data.
@pytest.mark.slow
def test_other_seeds_and_keys_compile_nothing_inside_a_trainers_program(params):
    prompts = jnp.asarray(PROMPTS[2], jnp.int32)[None, :].repeat(3, axis=0)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def rollout(params, key, seeds):
        by_key = generate(params, MODEL, prompts, sampling=DRAWS, key=key)
        by_seed = generate(params, MODEL, prompts, sampling=DRAWS, seeds=seeds)
        return by_key.tokens, by_seed.tokens

    made = []
    for number in range(3):
        key, seeds = (
            jax.random.key(number),
            jnp.asarray([number, number - 3, 7 + number], jnp.int32),
        )
        by_key, by_seed = rollout(params, key, seeds)
        own = [replace(DRAWS, seed=seed) for seed in seeds.tolist()]
        outside = generate(params, MODEL, prompts, sampling=DRAWS, key=key).tokens
        np.testing.assert_array_equal(by_key, outside)
        np.testing.assert_array_equal(
            by_seed, generate(params, MODEL, prompts, sampling=own).tokens
        )
        made += by_key.tolist()
    assert len({tuple(row) for row in made}) == 9


@pytest.mark.parametrize("wrap", ["jit of params", "jit of nothing", "scan", "grad"])
def test_a_traced_function_that_draws_must_pass_a_key_or_seeds(params, wrap):
    """A fresh seed would be a constant of the compiled function: each call would give the same tokens."""

    def run(params, *_):
        return generate(params, MODEL, PROMPTS, sampling=DRAWS).tokens.sum().astype(jnp.float32)

    calls = {
        "jit of params": lambda: jax.jit(run)(params),
        "jit of nothing": lambda: jax.jit(lambda: run(params))(),
        "scan": lambda: jax.lax.scan(lambda carry, _: (carry, run(params)), 0, length=2),
        "grad": lambda: jax.grad(run)(params),
    }
    with pytest.raises(ValueError, match=r"pass key= .* or seeds="):
        calls[wrap]()


def test_samples_of_a_prompt_are_rows_one_after_the_other(params):
    """Sample `s` has the seed of its prompt plus `s`, as in the engine; prompts may differ in `n`."""
    sampling = [replace(DRAWS, seed=-1, n=2), replace(DRAWS, seed=8, n=1)]
    out = generate(params, MODEL, PROMPTS[1:], sampling=sampling)
    prompts = [PROMPTS[at] for at in (1, 1, 2)]
    alone = [replace(DRAWS, seed=seed) for seed in (-1, 0, 8)]
    wanted = generate(params, MODEL, prompts, sampling=alone)
    np.testing.assert_array_equal(out.tokens, wanted.tokens)
    np.testing.assert_array_equal(out.lengths, wanted.lengths)


def test_traced_prompts_may_have_several_samples(params):
    """Two of one and one of the other, as many rows as the program of other tests has."""
    prompts = jnp.asarray([PROMPTS[1] + [4] * 5, PROMPTS[2]], jnp.int32)
    sampling = [replace(DRAWS, n=2), DRAWS]

    @jax.jit
    def rollout(params, prompts, lens, key):
        return generate(params, MODEL, prompts, prompt_lens=lens, sampling=sampling, key=key).tokens

    key = jax.random.key(0)
    made = rollout(params, prompts, jnp.asarray([2, 7], jnp.int32), key)
    wanted = generate(params, MODEL, PROMPTS[1:], sampling=sampling, key=key).tokens
    np.testing.assert_array_equal(made, wanted)
    assert (made[0] != made[1]).any()


def test_a_trainer_can_call_it_inside_its_own_program(params):
    """The trainer's arrays are tracers here, and nothing is compiled twice."""
    prompts = jnp.asarray([PROMPTS[2], PROMPTS[2][::-1], [1] * 7], jnp.int32)

    @jax.jit
    @partial(chex.assert_max_traces, n=1)
    def rollout(params, prompts):
        out = generate(params, MODEL, prompts, sampling=GREEDY)
        return out.tokens, out.lengths.sum()

    tokens, total = rollout(params, prompts)
    rollout(jax.tree.map(lambda leaf: leaf * 1.1, params), prompts + 1)
    np.testing.assert_array_equal(tokens, generate(params, MODEL, prompts, sampling=GREEDY).tokens)
    assert int(total) == 36


def test_each_row_ends_for_its_own_reason(params):
    free = generate(params, MODEL, PROMPTS, sampling=GREEDY)
    stop = int(free.tokens[0, 4])
    first = free.tokens[0].tolist().index(stop)
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)),
        SamplingParams(temperature=0.0, max_tokens=3),
        GREEDY,
    ]
    out = generate(params, MODEL, PROMPTS, sampling=wishes)
    assert out.reasons.tolist() == [STOP, LENGTH, LENGTH]
    assert out.lengths.tolist() == [first + 1, 3, 12]
    np.testing.assert_array_equal(out.tokens[1, 3:], 0)
    np.testing.assert_array_equal(out.tokens[2], free.tokens[2])


def test_eos_ends_a_row_unless_it_is_ignored_or_too_early(params):
    free = generate(params, MODEL, PROMPTS, sampling=GREEDY).tokens[0].tolist()
    eos = free[2]
    ended = generate(params, MODEL, PROMPTS, sampling=GREEDY, eos_ids=(eos,))
    assert ended.tokens[0, : int(ended.lengths[0])].tolist() == free[: free.index(eos) + 1]
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert (
        generate(params, MODEL, PROMPTS, sampling=ignoring, eos_ids=(eos,)).tokens[0].tolist()
        == free
    )
    patient = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8)
    out = generate(params, MODEL, PROMPTS, sampling=patient, eos_ids=(eos,))
    assert eos not in out.tokens[0, :8].tolist()


def test_a_row_of_nan_fails_alone(params):
    """The broken row reports an error; the others have the tokens of a run without it."""
    embed = params["embed"].at[60].set(jnp.nan)
    broken = {**params, "embed": embed}
    out = generate(broken, MODEL, [PROMPTS[0], [1, 60], PROMPTS[2]], sampling=GREEDY)
    assert out.reasons.tolist() == [LENGTH, ERROR, LENGTH]
    assert int(out.lengths[1]) == 0
    wanted = generate(params, MODEL, PROMPTS, sampling=GREEDY).tokens
    np.testing.assert_array_equal(out.tokens[np.asarray([0, 2])], wanted[np.asarray([0, 2])])


# tests/engine/test_engine.py has penalties and a bias in `generate` and in an engine; tests/sampling has their effect.
@pytest.mark.slow
def test_penalties_and_bias_act_from_the_prompt_on(params):
    pushed = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={11: 100.0})
    # Each occurrence costs more than the bias gives, so no token comes twice.
    spread = SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=100.0)
    shy = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=100.0)
    wishes = [pushed, spread, *[shy] * len(PROMPTS)]
    tokens = generate(params, MODEL, [*PROMPTS[:1] * 2, *PROMPTS], sampling=wishes).tokens
    assert tokens[0, :5].tolist() == [11] * 5
    assert len(set(tokens[1].tolist())) == 20
    firsts = tokens[2:, 0].tolist()
    assert all(token not in prompt for token, prompt in zip(firsts, PROMPTS, strict=True))


# Those of the sampler are in tests/sampling/test_sample.py; tests/test_scoring.py has bits of `generate` and a score.
@pytest.mark.slow
def test_logprobs_are_those_of_the_raw_logits(params):
    wish = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=4, logprobs=3)
    out = generate(params, MODEL, PROMPTS[:1], sampling=wish)
    text = PROMPTS[0] + out.tokens[0].tolist()
    again = generate(
        params,
        MODEL,
        [text[: len(PROMPTS[0]) + column] for column in range(4)],
        sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=20),
    )
    for column in range(4):
        ids, logprobs = again.top_ids[column, 0].tolist(), again.top_logprobs[column, 0].tolist()
        table = dict(zip(ids, logprobs, strict=True))
        for token, value in zip(
            [*out.top_ids[0, column].tolist(), int(out.tokens[0, column])],
            [*out.top_logprobs[0, column].tolist(), float(out.logprobs[0, column])],
            strict=True,
        ):
            assert table[token] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one prompt"),
        ([[]], {}, "at least one token"),
        ([[61]], {}, "outside"),
        ([[-1]], {}, "outside"),
        ([[1]], {"sampling": SamplingParams(max_tokens=256)}, "positions"),
        ([[1]], {"sampling": [GREEDY, GREEDY]}, "2 SamplingParams"),
        ([[1]], {"sampling": SamplingParams(stop_token_ids=(61,))}, "61"),
        ([[1]], {"sampling": SamplingParams(stop="x")}, "use stop_token_ids and logit_bias"),
        ([[1]], {"sampling": SamplingParams(bad_words="x")}, "use stop_token_ids and logit_bias"),
        ([[1]], {"prompt_lens": jnp.ones(1, jnp.int32)}, "prompt_lens"),
        ([[1]], {"eos_ids": (-1,)}, "eos_ids"),
        ([[1]], {"eos_ids": (61,)}, "eos_ids"),
        ([[1]], {"eos_ids": tuple(range(60)) * 3}, "stop ids"),
        (
            [[1]],
            {"sampling": SamplingParams(max_tokens=None)},
            "max_tokens must be a number for jaxkv.generate",
        ),
        (jnp.asarray([[1, 99]], jnp.int32), {}, "prompts"),
        (jnp.asarray([[1, -2]], jnp.int32), {}, "prompts"),
        (
            jnp.ones((2, 3), jnp.int32),
            {"prompt_lens": jnp.asarray([3, 0], jnp.int32)},
            "prompt_lens",
        ),
        (
            jnp.ones((2, 3), jnp.int32),
            {"prompt_lens": jnp.asarray([9, 3], jnp.int32)},
            "prompt_lens",
        ),
        (jnp.ones((2, 3), jnp.int32), {"prompt_lens": jnp.ones(3, jnp.int32)}, "prompt_lens"),
    ],
)
def test_bad_input_is_refused_with_a_reason(params, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(params, MODEL, prompts, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda call: call | {"params": MODEL, "model": call["params"]},
            "params and model are swapped",
        ),
        (lambda call: call | {"model": "path/to/model"}, "see jaxkv.load_model.* got str"),
        (lambda call: call | {"model": Decoder}, "got the class Decoder"),
        (lambda call: call | {"params": {}}, "pytree of the model's arrays, got none"),
        (lambda call: call | {"params": "path/to/model"}, "arrays, got str in it"),
        (
            lambda call: call | {"prompts": "def add("},
            "got a text; encode it first, or use jaxkv.LLM",
        ),
        (
            lambda call: call | {"prompts": ["def add("]},
            "prompt 0 must be .* got a text; encode it",
        ),
        (
            lambda call: call | {"prompts": [1, [2, 3]]},
            "prompt 0 must be .* got a value of type int",
        ),
        (lambda call: call | {"prompts": {1: 2}}, "got a value of type dict"),
        (lambda call: call | {"prompts": 3}, "got a value of type int"),
        (lambda call: call | {"eos_ids": 2}, "eos_ids must be a sequence of token ids, got 2"),
        (lambda call: call | {"eos_ids": ["</s>"]}, "eos_ids must be a sequence of token ids, got"),
    ],
)
def test_arguments_of_another_kind_are_refused_with_a_reason(params, change, message):
    # Without the shape checker of the tests, which refuses them too, in its own way.
    call = inspect.unwrap(generate)
    with pytest.raises(ValueError, match=message):
        call(**change({"params": params, "model": MODEL, "prompts": PROMPTS}))


@pytest.fixture
def traces(monkeypatch):
    """One entry for each time a whole program is traced that no other test has."""
    from jaxkv import generation

    loop, traced = generation.generate_loop, []
    counted = lambda *args, **options: traced.append(args) or loop(*args, **options)  # noqa: E731
    monkeypatch.setattr(generation, "generate_loop", counted)
    return traced


def test_lengths_ids_and_seeds_are_data(params, traces):
    """Other lengths, ids, limits, stop ids, and seeds of every source run in the existing program."""
    for lens in ([1, 5, 3], [5, 5, 1], [2, 4, 5]):
        prompts = jnp.arange(15, dtype=jnp.int32).reshape(3, 5)
        draws = SamplingParams(temperature=0.5, max_tokens=6, stop_token_ids=(lens[1],))
        run = partial(generate, params, MODEL, prompts, prompt_lens=lens)
        run(sampling=draws)
        run(sampling=replace(draws, seed=lens[0]))
        run(sampling=draws, key=jax.random.key(lens[0]))
        run(sampling=draws, seeds=lens)
        run(sampling=draws, seeds=jnp.asarray(lens, jnp.int32))
        generate(params, MODEL, np.asarray(prompts, np.int64), prompt_lens=lens, sampling=draws)
    assert len(traces) == 1
