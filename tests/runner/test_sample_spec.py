"""A step in two programs: the tokens, the cache and the reports of the same step in one."""

import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import CachePoisoned
from jaxkv.programs.manifest import Programs
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sample_spec import SampleSpec, sampling_arrays
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import features_of
from jaxkv.sampling.token_mask import mask_of, num_words
from tests.engine.engines import VOCAB, sequence_runner_for

WORDS = num_words(VOCAB)
DRAWN = SamplingParams(
    temperature=0.8, top_k=20, presence_penalty=0.5, logit_bias={3: 2.0}, min_tokens=4, logprobs=3
)
MASKS = [mask_of(range(20, 40), WORDS), None, mask_of([7], WORDS)]
PROGRAMS = Programs()


def opened(rows, programs=PROGRAMS):
    """Returns a runner that has the sequences of some rows, in a new cache with junk in it."""
    runner = sequence_runner_for(programs=programs)
    for row in rows:
        runner.allocator.open(row.sequence)
        runner.allocator.reserve(row.sequence, row.start + len(row.tokens))
        runner.admit([replace(row, tokens=(5, 6))])
    return runner


def three_rows(params, lens):
    return [
        Row(number, [4 + number] * length, 0, params, seed=9 * number, stop_ids=(50, 60))
        for number, length in enumerate(lens, 1)
    ]


# A prompt that draws is fast. The test of the fixed order below has the programs of a decode step.
@pytest.mark.parametrize(
    ("lens", "params"),
    [
        *(
            pytest.param(*given, marks=pytest.mark.slow, id=name)
            for name, given in {
                "decode-greedy": ((1, 1, 1), SamplingParams(temperature=0.0)),
                "decode-drawn": ((1, 1, 1), DRAWN),
                "prefill-greedy": ((3, 1, 9), SamplingParams(temperature=0.0)),
            }.items()
        ),
        pytest.param((3, 1, 9), DRAWN, id="prefill-drawn"),
    ],
)
def test_two_programs_do_the_same_as_one(params, lens):
    rows = three_rows(params, lens)
    features = replace(features_of(rows), grammar=True)
    decode = max(lens) == 1
    shape = StepSpec(4 if decode else 16, 4, (2, 2), decode=decode)
    step_rows = StepRows.of(rows)
    one = opened(rows)
    whole = replace(shape, features=features, masks=4)
    told = one.runner.read(one.step(whole, step_rows._replace(masks=MASKS)))
    two = opened(rows)
    sampler = SampleSpec(4, features, 4)
    _, arrays = two.forward(replace(shape, forward_only=True), sampler, step_rows)
    found = two.runner.read(two.sample(sampler, arrays, MASKS))
    np.testing.assert_array_equal(found[:3, :2], told[:3, :2])
    np.testing.assert_allclose(
        found[:3].view(np.float32)[:, 2:], told[:3].view(np.float32)[:, 2:], rtol=1e-5
    )
    assert 20 <= found[0, 0] < 40
    assert found[2, 0] == 7
    for theirs, ours in zip(one.runner.cache.arrays, two.runner.cache.arrays, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# Filters and penalties are in the test above.
def test_two_programs_have_the_bits_of_one_under_the_fixed_order_of_sums():
    rows = three_rows(SamplingParams(temperature=0.8, logprobs=3), (1, 1, 1))
    programs = Programs()
    features = replace(features_of(rows), grammar=True)
    shape = StepSpec(4, 4, (2, 2), decode=True)
    one, two = opened(rows, programs), opened(rows, programs)
    for made in (one, two):
        made.runner.model = replace(made.runner.model, batch_invariant=True)
    step_rows = StepRows.of(rows)
    whole = replace(shape, features=features, masks=4)
    told = one.runner.read(one.step(whole, step_rows._replace(masks=MASKS)))
    sampler = SampleSpec(4, features, 4)
    _, arrays = two.forward(replace(shape, forward_only=True), sampler, step_rows)
    found = two.runner.read(two.sample(sampler, arrays, MASKS))
    np.testing.assert_array_equal(found[:3], told[:3])
    assert 20 <= found[0, 0] < 40
    assert found[2, 0] == 7
    for theirs, ours in zip(one.runner.cache.arrays, two.runner.cache.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def sent(runner, rows):
    """Returns a sampler, and the arguments of `SequenceRunner.sample` after the first program ran."""
    sampler = SampleSpec(4, Features(grammar=True), 4)
    shape = StepSpec(4, 4, (2, 2), decode=True, forward_only=True)
    _, arrays = runner.forward(shape, sampler, StepRows.of(rows))
    return sampler, arrays, MASKS


def test_a_sampler_donates_the_sampling_group_and_touches_no_other_array():
    rows = three_rows(SamplingParams(temperature=0.0), (1, 1, 1))
    runner = opened(rows)
    arguments = sent(runner, rows)
    before, layout = runner.runner.cache, runner.runner.layout
    runner.sample(*arguments)
    choices = sampling_arrays(layout, before)
    assert "output_counts" in choices
    gone = {id(array) for array in choices.values()}
    for old, new in zip(before.arrays, runner.runner.cache.arrays, strict=True):
        assert (old is new) == (id(old) not in gone) == (not old.is_deleted())
    report = runner.runner.program(arguments[0]).report
    assert report.alias_bytes == sum(array.nbytes for array in choices.values())


def test_hidden_states_are_freed_once_they_are_sampled():
    """Else the next step's memory would be elsewhere, and XLA would set every node of its CUDA graph anew."""
    rows = three_rows(SamplingParams(temperature=0.0), (1, 1, 1))
    runner = opened(rows)
    arguments = sent(runner, rows)
    hidden = weakref.ref(runner.runner._hidden)
    assert hidden() is not None
    runner.sample(*arguments)
    assert hidden() is None


def test_a_sampler_that_fails_before_the_donation_leaves_the_cache_and_can_run_again(monkeypatch):
    rows = three_rows(SamplingParams(temperature=0.0), (1, 1, 1))
    runner = opened(rows)
    arguments = sent(runner, rows)
    wanted = opened(rows)
    tokens = wanted.runner.read(wanted.sample(*sent(wanted, rows)))
    program = runner.runner.program(arguments[0])

    def fail(*_):
        raise RuntimeError("no memory for the output")

    with monkeypatch.context() as patch:
        patch.setattr(program, "compiled", fail)
        with pytest.raises(RuntimeError, match="no memory for the output"):
            runner.sample(*arguments)
    assert not runner.runner.owner.poisoned
    np.testing.assert_array_equal(runner.runner.read(runner.sample(*arguments)), tokens)


def test_a_sampler_that_fails_after_the_donation_poisons_the_cache(monkeypatch):
    rows = three_rows(SamplingParams(temperature=0.0), (1, 1, 1))
    runner = opened(rows)
    arguments = sent(runner, rows)
    program = runner.runner.program(arguments[0])
    run = program.compiled

    def fail(*given):
        run(*given)
        raise RuntimeError("lost")

    monkeypatch.setattr(program, "compiled", fail)
    with pytest.raises(CachePoisoned):
        runner.sample(*arguments)
    assert runner.runner.owner.poisoned


def test_the_hidden_type_is_that_of_the_first_program():
    rows = three_rows(SamplingParams(temperature=0.0), (1, 1, 1))
    runner = opened(rows)
    sent(runner, rows)
    hidden = runner.runner._hidden
    kind = runner.runner.hidden_type
    assert (hidden.shape[1:], hidden.dtype) == (kind.shape[1:], kind.dtype)
    assert isinstance(hidden, jax.Array)
