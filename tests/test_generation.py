"""`generate`: one executable, the tokens of Transformers, and usable inside somebody else's jitted function."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config import SamplingParams
from jaxkv.generation import ERROR, LENGTH, STOP, generate
from jaxkv.model_config import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder

CONFIG = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=256,
    rope=RopeConfig(rotary_dim=8),
    windows=(None, 5),
)
MODEL = Decoder(CONFIG)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


@pytest.fixture(scope="module")
def params():
    drawn = MODEL.init_params(jax.random.key(7), jnp.float32)
    # Larger weights make some tokens clearly more likely than others.
    return jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim == 2 and leaf.shape[0] > 2 else leaf, drawn
    )


@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2", "qwen3-bias-window-tied"])
def test_tokens_of_unequal_prompts_equal_transformers(name, tmp_path):
    """S1-19, B4: greedy tokens of a batch equal those of each prompt alone in Transformers."""
    families = pytest.importorskip("tests.models.families")
    from jaxkv.models.registry import build_model, load_config
    from jaxkv.weights.load import load_params

    case = families.CASES[name]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path))
    params = load_params(tmp_path, model, dtype="float32", progress=False)
    prompts, wanted = [], []
    for length in (3, 17, 30):
        # Where two tokens are as good as equal, float32 may choose either: take a prompt with clear winners.
        drawn = (case.prompt(length, offset=offset) for offset in range(length, length + 20))
        told = ((prompt, *families.greedy(theirs, prompt, 24)) for prompt in drawn)
        prompt, tokens, _ = next(item for item in told if item[2] > 1e-3)
        prompts.append(prompt)
        wanted.append(tokens)
    out = generate(params, model, prompts, sampling=SamplingParams(temperature=0.0, max_tokens=24))
    assert out.tokens.tolist() == wanted


def test_a_row_does_not_see_its_neighbours(params):
    """S1-06: alone or in company, a row generates the same tokens; draws depend on seed and position alone."""
    wishes = [SamplingParams(temperature=0.9, seed=row, max_tokens=12) for row in range(3)]
    together = generate(params, MODEL, PROMPTS, sampling=wishes)
    for row in range(3):
        alone = generate(params, MODEL, [PROMPTS[row]], sampling=wishes[row])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_lengths_and_ids_are_data(params):
    """T-01, T-14: other lengths, ids, seeds and limits of stop ids run in the executable that is there."""
    from jaxkv import generation

    jax.clear_caches()
    before = generation._generate._cache_size()
    for lens in ([1, 5, 3], [5, 5, 1], [2, 4, 5]):
        prompts = jnp.arange(15, dtype=jnp.int32).reshape(3, 5)
        wish = SamplingParams(
            temperature=0.5, seed=lens[0], max_tokens=6, stop_token_ids=(lens[1],)
        )
        generate(params, MODEL, prompts, prompt_lens=jnp.asarray(lens, jnp.int32), sampling=wish)
    assert generation._generate._cache_size() == before + 1


def test_a_trainer_can_call_it_inside_its_own_program(params):
    """The trainer's arrays are tracers here, and nothing is compiled twice."""
    prompts = jnp.asarray([[3, 1, 4], [1, 5, 9]], jnp.int32)

    @jax.jit
    @partial(chex.assert_max_traces, n=1)
    def rollout(params, prompts):
        out = generate(params, MODEL, prompts, sampling=GREEDY)
        return out.tokens, out.lengths.sum()

    tokens, total = rollout(params, prompts)
    rollout(jax.tree.map(lambda leaf: leaf * 1.1, params), prompts + 1)
    np.testing.assert_array_equal(tokens, generate(params, MODEL, prompts, sampling=GREEDY).tokens)
    assert int(total) == 24


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
    free = generate(params, MODEL, PROMPTS[:1], sampling=GREEDY).tokens[0].tolist()
    eos = free[2]
    ended = generate(params, MODEL, PROMPTS[:1], sampling=GREEDY, eos_ids=(eos,))
    assert ended.tokens[0, : int(ended.lengths[0])].tolist() == free[: free.index(eos) + 1]
    ignoring = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert (
        generate(params, MODEL, PROMPTS[:1], sampling=ignoring, eos_ids=(eos,)).tokens[0].tolist()
        == free
    )
    patient = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8)
    out = generate(params, MODEL, PROMPTS[:1], sampling=patient, eos_ids=(eos,))
    assert eos not in out.tokens[0, :8].tolist()


def test_a_row_of_nan_fails_alone(params):
    """Reliability row 8: the broken row says so; the others have the tokens they would have had."""
    embed = params["embed"].at[60].set(jnp.nan)
    broken = {**params, "embed": embed}
    out = generate(broken, MODEL, [[1, 2, 3], [1, 60]], sampling=GREEDY)
    assert out.reasons.tolist() == [LENGTH, ERROR]
    assert int(out.lengths[1]) == 0
    np.testing.assert_array_equal(
        out.tokens[0], generate(params, MODEL, [[1, 2, 3]], sampling=GREEDY).tokens[0]
    )


def test_penalties_and_bias_act_from_the_prompt_on(params):
    pushed = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={11: 100.0})
    assert generate(params, MODEL, PROMPTS[:1], sampling=pushed).tokens[0].tolist() == [11] * 5
    # Each occurrence costs more than the bias gives, so no token comes twice.
    spread = SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=100.0)
    tokens = generate(params, MODEL, PROMPTS[:1], sampling=spread).tokens[0].tolist()
    assert len(set(tokens)) == 20
    shy = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=100.0)
    tokens = generate(params, MODEL, PROMPTS, sampling=shy).tokens[:, 0].tolist()
    assert all(token not in prompt for token, prompt in zip(tokens, PROMPTS, strict=True))


def test_logprobs_are_those_of_the_raw_logits(params):
    wish = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=4, logprobs=3)
    out = generate(params, MODEL, PROMPTS[:1], sampling=wish)
    text = PROMPTS[0] + out.tokens[0].tolist()
    for column in range(4):
        again = generate(
            params,
            MODEL,
            [text[: len(PROMPTS[0]) + column]],
            sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=20),
        )
        table = dict(
            zip(again.top_ids[0, 0].tolist(), again.top_logprobs[0, 0].tolist(), strict=True)
        )
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
        ([[1]], {"sampling": SamplingParams(n=2)}, "n=2"),
        ([[1]], {"sampling": [GREEDY, GREEDY]}, "2 SamplingParams"),
        ([[1]], {"sampling": SamplingParams(stop_token_ids=(61,))}, "61"),
        ([[1]], {"prompt_lens": jnp.ones(1, jnp.int32)}, "prompt_lens"),
        ([[1]], {"eos_ids": (-1,)}, "eos_ids"),
        ([[1]], {"eos_ids": (61,)}, "eos_ids"),
        ([[1]], {"eos_ids": tuple(range(60)) * 2}, "stop ids"),
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
        (np.ones((1, 3), np.int64), {}, "int32"),
        (jnp.ones((2, 3), jnp.int32), {"prompt_lens": jnp.ones(3, jnp.int32)}, "prompt_lens"),
    ],
)
def test_bad_input_is_refused_with_a_reason(params, prompts, options, message):
    """S1-11: int64 is an error, not a second trace."""
    with pytest.raises(ValueError, match=message):
        generate(params, MODEL, prompts, **options)
