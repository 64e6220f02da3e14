"""Kernels inside the engine on a GPU: in place, with the tokens of XLA alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.generation import generate
from jaxkv.models.decoder import Decoder
from jaxkv.models.implementation import Choice
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs, compile_count
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.scoring import prompt_logprobs
from jaxkv.runner.sequence_runner import SequenceRunner
from pallas_kernels import page_write, paged_attention
from pallas_kernels.dispatch import Unsupported

pytestmark = pytest.mark.gpu

MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=256,
        num_layers=3,
        heads=8,
        kv_heads=2,
        head_dim=64,
        ffn_size=512,
        max_positions=512,
        rope=RopeConfig(rotary_dim=64),
        windows=(None, 48, None),
    )
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def params():
    drawn = MODEL.init_params(jax.random.key(1), jnp.bfloat16)
    return jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim == 2 and leaf.shape[0] > 2 else leaf, drawn
    )


def sequence_runner_of(model, params, page_size=16, dtype="bfloat16"):
    layout, budget = plan_cache(
        model,
        CacheConfig(max_sequences=4, page_size=page_size),
        dtype=dtype,
        max_model_len=256,
        free_bytes=None,
    )
    return SequenceRunner(
        ModelRunner(model, params, layout, budget.counts, Programs()), max_tokens=256, max_rows=4
    )


def requests():
    draw = np.random.default_rng(0)
    return [
        Request(
            prompt=tuple(draw.integers(0, 512, length).tolist()), params=GREEDY, seed=0, stop_ids=()
        )
        for length in (1, 15, 64, 130)
    ]


def tokens_of(sequence_runner, asked=None):
    """Returns what an engine without kept pages generates for these requests, all at once."""
    engine = Engine(sequence_runner, config=EngineConfig(prefix_cache=False))
    sequences = [engine.add([request])[0] for request in asked or requests()]
    engine.run(sequences)
    return [sequence.token_ids for sequence in sequences]


def test_the_decode_program_uses_the_kernel(params):
    """On this card the best implementation is the kernel, and the step runs it."""
    sequence_runner = sequence_runner_of(MODEL, params)
    widths = tuple(group.pages_for(256) for group in sequence_runner.runner.layout.paged_groups)
    shape = StepSpec(4, 4, widths, decode=True)
    program = sequence_runner.runner.program(shape)
    assert sequence_runner.runner.implementation == Choice("mosaic_gpu")
    assert program.report.problems == ()
    assert "mosaic_gpu" in program.compiled.as_text()


def test_cudnn_that_was_asked_for_attends_in_decode_steps(params):
    """It is chosen by name alone, for models without windows. Only the order of its sums differs from the kernel's."""
    with pytest.raises(Unsupported, match="paged_attention in layer 1: does not support window"):
        sequence_runner_of(MODEL.running("cudnn"), params)
    model = replace(MODEL, config=replace(MODEL.config, windows=(None,) * 3))
    sequence_runner = sequence_runner_of(model.running("cudnn"), params)
    assert sequence_runner.runner.implementation == Choice("cudnn")
    both = [tokens_of(each) for each in (sequence_runner, sequence_runner_of(model, params))]
    agreed = [a == b for x, y in zip(*both, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(agreed) > 0.5
    programs = sequence_runner.runner.programs.manifest()
    assert any("cudnn$fmha" in program.compiled.as_text() for program in programs)


def losses(params, made):
    """Returns how much less likely in float32 each token of answers is than the best one, given those before it."""
    wide = jax.tree.map(lambda leaf: leaf.astype("float32"), params)
    exact = sequence_runner_of(replace(MODEL, implementation="xla"), wide, dtype="float32")
    found = []
    for request, tokens in zip(requests(), made, strict=True):
        text = (*request.prompt, *tokens)
        tables = prompt_logprobs(exact, text, 1)
        generated = zip(text, tables, strict=True)
        found += [max(table.values()) - table[token] for token, table in list(generated)[-40:]]
    return np.array(found)


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_engine_and_generate_choose_tokens_as_near_to_the_best_as_xla_does(params, page_size):
    """The yardstick is what rounding to bfloat16 costs in XLA; in one batch, alone, and in one program."""
    sequence_runner = sequence_runner_of(MODEL, params, page_size)
    together = tokens_of(sequence_runner)
    out = generate(params, MODEL, [one.prompt for one in requests()], sampling=GREEDY)
    looped = [row.tolist() for row in np.asarray(out.tokens)]
    alone = [tokens_of(sequence_runner, [request])[0] for request in requests()]
    for other in (looped, alone):
        for tokens, wanted in zip(other, together, strict=True):
            pairs = enumerate(zip(tokens, wanted, strict=True))
            same = next((at for at, (a, b) in pairs if a != b), 40)
            assert same >= 5, "the forms part at once; that is no rounding"
    xla = tokens_of(sequence_runner_of(replace(MODEL, implementation="xla"), params, page_size))
    by_xla = losses(params, xla)
    for made in (together, looped, alone):
        lost = losses(params, made)
        # A token that follows from a wrong key is worse by whole units.
        assert lost.max() < 2 * by_xla.max()
        assert lost.mean() < 2 * by_xla.mean()
    wrong = [[(token + 1) % 512 for token in tokens] for tokens in together]
    assert losses(params, wrong).mean() > 100 * by_xla.mean()


def test_float32_on_the_card_equals_float32_on_the_processor():
    """Products in TF32 would exceed the tolerance by far."""
    params = MODEL.init_params(jax.random.key(2), jnp.float32)
    prompts = [list(range(20)), [5] * 7]
    wish = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    card = generate(params, MODEL, prompts, sampling=wish)
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.device_put(params, jax.devices("cpu")[0])
        processor = generate(there, MODEL, prompts, sampling=wish)
    np.testing.assert_allclose(card.top_logprobs[:, 0], processor.top_logprobs[:, 0], atol=1e-4)
    np.testing.assert_array_equal(card.tokens, processor.tokens)


def prompt_scores(model, params, dtype, prompts):
    """Returns the log-probabilities of the prompts' tokens behind the first, [prompts, tokens]."""
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    sequence_runner = sequence_runner_of(model, cast, dtype=dtype)
    # Leaves the free pages out of order.
    tokens_of(sequence_runner)
    tables = [prompt_logprobs(sequence_runner, prompt, 0) for prompt in prompts]
    return np.array(
        [
            [table[token] for token, table in zip(prompt[1:], found[1:], strict=True)]
            for prompt, found in zip(prompts, tables, strict=True)
        ]
    )


def test_prompt_logprobs_of_kernels_are_as_near_to_float32_as_those_of_xla(params):
    """The yardstick is what rounding to bfloat16 costs in XLA; a wrong page in the prompt costs far more."""
    draw, size = np.random.default_rng(3), 16
    prompts = [tuple(draw.integers(0, 512, 250).tolist()) for _ in range(3)]
    wrong = list(prompts[0])
    wrong[size : 2 * size], wrong[8 * size : 9 * size] = (
        wrong[8 * size : 9 * size],
        wrong[size : 2 * size],
    )
    xla = replace(MODEL, implementation="xla")
    *wanted, exchanged = prompt_scores(xla, params, "float32", [*prompts, tuple(wrong)])

    def error(found):
        return float(np.sqrt(np.mean((found - np.array(wanted)) ** 2)))

    by_xla = error(prompt_scores(xla, params, "bfloat16", prompts))
    by_kernels = error(prompt_scores(MODEL, params, "bfloat16", prompts))
    behind = slice(9 * size, None)
    by_wrong_page = float(np.sqrt(np.mean((exchanged - wanted[0])[behind] ** 2)))
    # Two computations with the same roundings differ from float32 by as much, but for the order of sums.
    assert by_kernels < 1.5 * by_xla
    assert by_wrong_page > 10 * by_xla


def test_the_same_programs_give_the_same_bits_again_and_compile_nothing(params):
    sequence_runner = sequence_runner_of(MODEL, params)
    first = tokens_of(sequence_runner)
    before = compile_count()
    for _ in range(3):
        assert tokens_of(sequence_runner) == first
    assert compile_count() == before


def test_a_pool_of_more_than_two_to_the_31_elements_reaches_its_last_page():
    """The top pages of an 8.6 GB pool hold the values that were written to them."""
    heads, dim, page_size = 8, 128, 64
    pages = 2**32 // (heads * dim * page_size) + 5
    draw = np.random.default_rng(0)
    k = jnp.asarray(draw.standard_normal((96, heads, dim)), jnp.bfloat16)
    v = jnp.asarray(draw.standard_normal((96, heads, dim)), jnp.bfloat16)
    q = jnp.asarray(draw.standard_normal((1, 32, dim)), jnp.bfloat16)

    def run(num_pages, table):
        pools = tuple(jnp.zeros((num_pages, page_size, heads, dim), jnp.bfloat16) for _ in range(2))
        position = np.arange(96)
        slots = np.asarray(table)[position // page_size] * page_size + position % page_size
        write = jax.jit(page_write, donate_argnums=0)
        pools = write(pools, (k, v), jnp.asarray(slots, jnp.int32))
        table = jnp.asarray([table], jnp.int32)
        return paged_attention(q, *pools, table, jnp.asarray([96], jnp.int32), scale=dim**-0.5)

    small = run(4, [1, 3])
    large = run(pages, [pages - 1, pages - 2])
    np.testing.assert_array_equal(np.asarray(small, np.float32), np.asarray(large, np.float32))
