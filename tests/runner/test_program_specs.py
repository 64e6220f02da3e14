"""Program specs: no request is truncated, and a program replaces another only where it serves the same step."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, sampling
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.programs.manifest import Programs
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.program_specs import ScoreSpec, StepSpec
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import Features
from pallas_kernels.formats.few_bits import FewBits
from tests.engine.engines import sequence_runner_for

LAYOUT = group_layers(
    (
        LayerSpec(0, gqa(1, 8, dtype="float32", page_size=16)),
        LayerSpec(1, sampling(50, penalties=True, bias_entries=4)),
    )
)
SHAPES = StepShapes(LAYOUT, max_tokens=4096, max_rows=128, token_budget=1000, whole_prompts=False)


def request(prompt_tokens, max_tokens=8, **wish):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **wish)
    return Request(prompt=(1,) * prompt_tokens, params=params, seed=0, stop_ids=())


@given(st.integers(1, 900), st.integers(1, 100))
@settings(max_examples=100)
def test_a_table_holds_every_token_that_will_be_written(prompt, new):
    """The program is at least as wide as the sequence, and never wider than the longest one."""
    one = request(prompt, new)
    spec = SHAPES.declare([one.row(0)], total_tokens=one.tokens_held)
    assert spec.table_widths[0] * 16 >= one.tokens_held
    assert spec.table_widths[0] <= 4096 // 16


def test_few_programs_serve_all_numbers_of_logprobs():
    rows = [request(4, logprobs=number).row(0) for number in range(21)]
    assert len({SHAPES.declare([row], total_tokens=8).features for row in rows}) == 3


def test_only_a_program_that_is_larger_and_abler_in_everything_stands_in_for_another():
    def prefill(prompt, new=8, **wish):
        one = request(prompt, new, **wish)
        return SHAPES.declare([one.row(0)], total_tokens=one.tokens_held)

    small, large = prefill(10), prefill(300, 700)
    assert large.serves(small)
    assert not small.serves(large)
    assert not prefill(300, 700, presence_penalty=1.0).serves(small)
    assert prefill(300, 700, logprobs=5).serves(small)
    assert not large.serves(prefill(10, logprobs=0))


def test_programs_of_different_kinds_never_stand_in_for_each_other():
    step = SHAPES.declare([request(10).row(0)], total_tokens=20)
    kinds = [step, ScoreSpec(step), AdmitSpec(1, 16), AdmitSpec(1, 16, returning=True), CopySpec()]
    for one in kinds:
        assert [one.serves(other) for other in kinds] == [one is other for other in kinds]
        assert all(
            one is other or not one.costs_like(other) or one.kind[-5:] == "admit" for other in kinds
        )
    assert len({one.name for one in kinds}) == len({str(one) for one in kinds}) == len(kinds)
    assert [one.kind for one in sorted(kinds)] == ["admit", "copy", "prefill", "readmit", "score"]


def test_without_strict_mode_only_a_few_more_rows_are_better_than_a_compilation():
    def step(count, total=100, **wish):
        rows = [request(1, **wish).row(0)] * count
        return SHAPES.declare(rows, total_tokens=total)

    assert step(8).serves(step(1))
    assert step(8).costs_like(step(1))
    assert step(64).costs_like(step(8))
    # Each of these serves as well, but takes longer.
    for able, needed in (
        (step(16), step(1)),
        (step(128), step(64)),
        (step(1, 3000), step(1)),
        (step(1, logprobs=5), step(1)),
    ):
        assert able.serves(needed)
        assert not able.costs_like(needed)


def test_a_sampler_serves_steps_of_fewer_masks_and_16_cost_little():
    def sampler(rows, masks, **features):
        features = Features(grammar=True, **features)
        step = SHAPES.choose(rows, rows, features, total_tokens=100)
        return SHAPES.sampler(step, features, masks)

    few, many = sampler(128, 3), sampler(128, 40)
    assert many.serves(few)
    assert not few.serves(many)
    assert not many.costs_like(few)
    assert sampler(16, 16).costs_like(sampler(16, 2))
    assert few.order_of_cost < many.order_of_cost
    assert len({few.name, many.name}) == len({str(few), str(many)}) == 2
    # The hidden states have as many rows as the first program.
    assert not sampler(128, 3).serves(sampler(64, 3))
    drawn = sampler(128, 3, draws=True)
    assert drawn.serves(few)
    assert not drawn.costs_like(few)


def test_whole_steps_and_first_programs_do_not_serve_for_each_other():
    whole, first = (
        SHAPES.choose(8, 8, Features(grammar=grammar), total_tokens=100)
        for grammar in (False, True)
    )
    assert not whole.serves(first)
    assert not first.serves(whole)
    assert len({whole.name, first.name}) == len({str(whole), str(first)}) == 2


LIBRARIES = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


def options(tokens, *, score=False, params=None, **changes):
    """Returns XLA's options of a step, or of the program that scores its tokens; `changes` are fields of the model."""
    runner = sequence_runner_for(programs=Programs()).runner
    runner.model = replace(runner.model, **changes)
    runner.params = runner.params if params is None else params
    widths = (4,) * len(runner.layout.paged_groups)
    step = StepSpec(tokens=tokens, rows=8, table_widths=widths)
    spec = ScoreSpec(step, 0) if score else step
    return spec.lowering(runner).compiler_options


@pytest.mark.parametrize("score", [False, True])
def test_products_of_long_steps_are_those_of_libraries(score):
    found = {tokens: options(tokens, score=score) for tokens in (64, 80, 2048)}
    assert found == {64: None, 80: LIBRARIES, 2048: LIBRARIES}


def test_products_have_one_kernel_where_sums_have_a_fixed_order():
    assert options(2048, batch_invariant=True) is None


def test_weights_of_few_bits_are_widened_in_their_products_where_our_kernels_do_not_run():
    codes, scales = jnp.zeros((64, 64), jnp.int8), jnp.ones((64, 1))
    params = {"w": FewBits(codes, scales, None, None, "int8")}
    assert options(2048, params=params) is None
    assert options(2048, params=params, implementation="mosaic_gpu") == LIBRARIES
