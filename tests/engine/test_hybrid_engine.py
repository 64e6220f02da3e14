"""Models with recurrent layers in the engine: a state per sequence, prefill cut at chunk ends, no false prefix hits."""

import logging
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import SamplingParams, generate
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.cache.prefix.report import NO_CHECKPOINT
from jaxkv.config.blocks import MambaConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.request_state import FINISHED, RequestState
from jaxkv.engine.steps.step_plan import align
from jaxkv.models.decoder import Decoder
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from tests.engine import engines
from tests.engine.engines import (
    LONGEST,
    PAGE,
    ROWS,
    VOCAB,
    assert_idle,
    engine_for,
    fill_free,
    request_of,
)

CHUNK = 4


def tiny():
    """Returns a model of two layers, one of which has both ways of remembering side by side."""
    model = Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=48,
            max_positions=LONGEST,
            rope=RopeConfig(rotary_dim=4),
            windows=(None, None),
            pattern=(("mamba2",), ("mamba2+attention", "gated")),
            mamba=MambaConfig(heads=4, head_dim=8, d_state=8, d_conv=4, groups=2, chunk_size=CHUNK),
        )
    )
    params = model.init_params(jax.random.key(5), jnp.float32)
    return model, jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim > 1 and len(leaf) > 2 else leaf, params
    )


@pytest.fixture(scope="module", autouse=True)
def hybrid():
    engines._MODELS["hybrid"] = tiny()
    return engines._MODELS["hybrid"]


def hybrid_engine(**options):
    """Returns an engine of two programs, since compiling them is what takes time here."""
    engine = engine_for(rope="hybrid", **options)
    engine.shapes.decode_rows, engine.shapes.token_buckets = (ROWS,), (16,)
    return engine


def test_pinned_shapes_do_not_repeat_the_bits_of_recurrent_layers():
    """What is stepped in one case is scanned in another, so `score` empties the prefix cache first."""
    assert engine_for(pinned_shapes=True).repeats_bits
    assert not hybrid_engine(pinned_shapes=True).repeats_bits


def prompts(count, seed=3):
    draw = random.Random(seed)
    stem = [draw.randrange(VOCAB) for _ in range(30)]
    lengths = [draw.choice([0, 8, 23, 30]) for _ in range(count)]
    return [
        stem[:length] + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9))]
        for length in lengths
    ]


def oracle(model, params, requests):
    """Returns the tokens of one executable over all prompts, which are cut nowhere."""
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=request.params.max_tokens)
        for request in requests
    ]
    out = generate(params, model, [request.prompt for request in requests], sampling=wishes)
    lengths = np.asarray(out.lengths)
    return [np.asarray(out.tokens)[row, : lengths[row]].tolist() for row in range(len(requests))]


def watched(engine):
    """Notes the parts of every plan, which it returns as a list that grows."""
    plans, plan = [], engine.scheduler.plan

    def noting():
        made = plan()
        plans.append(made)
        return made

    engine.scheduler.plan = noting
    return plans


@pytest.fixture(scope="module")
def wanted(hybrid):
    requests = [
        request_of(prompt, max_tokens=6 + number % 5) for number, prompt in enumerate(prompts(9))
    ]
    return requests, oracle(*hybrid, requests)


@pytest.mark.parametrize(
    ("free", "several"),
    [(None, 1), (8, 1), (None, 3)],
    ids=["roomy", "tight", "multi-step"],
)
def test_arrivals_chunks_and_preemptions_have_the_tokens_of_the_oracle(wanted, free, several):
    # Continuing chunks, fresh prompts and rows that generate share steps; every free state holds junk.
    requests, truth = wanted
    engine = hybrid_engine(free_pages=free, steps_per_launch=several)
    plans, sequences, waiting, draw = watched(engine), [], list(requests), random.Random(1)
    while waiting or any(one.status != FINISHED for one in sequences):
        for _ in range(draw.choice([0, 1, 2]) if waiting else 0):
            if waiting:
                sequences += engine.add([waiting.pop(0)])
        engine.step()
        if draw.random() < 0.3:
            fill_free(engine.sequence_runner)
        engine.sequence_runner.allocator.check()
    assert [one.token_ids for one in sequences] == truth
    assert (free is None) == all(one.preemptions == 0 for one in sequences)
    assert max(plan.steps for plan in plans) == several
    parts = [part for plan in plans if plan.steps == 1 for part in plan.parts if part.count > 1]
    assert any(not part.emits for part in parts)
    # Cuts lie on the grid of the scan, counted from token 0.
    assert all(part.emits or (part.start + part.count) % CHUNK == 0 for part in parts)
    assert_idle(engine)


def test_a_state_is_held_by_whoever_runs_and_by_nobody_else():
    engine = hybrid_engine()
    allocator, total = (
        engine.sequence_runner.allocator,
        engine.sequence_runner.allocator.num_free("mamba2"),
    )
    made = [engine.add([request_of(prompt, max_tokens=25)])[0] for prompt in prompts(4)]
    while not all(one.generated for one in made):
        engine.step()
    assert allocator.num_free("mamba2") == total - len(made)
    engine.abort(made[0])
    assert allocator.num_free("mamba2") == total - len(made) + 1
    engine.run(made)
    assert_idle(engine)


def test_samples_of_one_prompt_go_on_from_its_one_state(wanted):
    # The other samples read the first one's state and write states of their own.
    engine = hybrid_engine()
    requests, truth = wanted
    made = engine.add([requests[1]] * 3)
    engine.run(made)
    assert [one.token_ids for one in made] == [truth[1]] * 3
    assert_idle(engine)


def test_a_lost_cache_is_computed_again_states_and_all(wanted):
    requests, truth = wanted
    engine = hybrid_engine()
    made = [engine.add([request])[0] for request in requests[:3]]
    for _ in range(4):
        engine.step()
    engine.runner.owner.poison("the test says so")
    engine.run(made)
    assert [one.token_ids for one in made] == truth[:3]
    assert engine.recoveries == 1
    assert_idle(engine)


def test_no_prefix_is_hit_and_everybody_is_told_why(wanted, caplog):
    # Pages without the state at their end are no hit.
    requests, truth = wanted
    with caplog.at_level(logging.INFO):
        engine = hybrid_engine()
    why = NO_CHECKPOINT.format("mamba2")
    assert any(why in record.getMessage() for record in caplog.records)
    assert isinstance(engine.prefix, PrefixIndex)
    for _ in range(2):
        made = engine.add([requests[0]])
        engine.run(made)
        assert made[0].token_ids == truth[0]
    assert engine.prefix.stats.tokens_reused == 0
    told = engine.prefix.explain(requests[0].prompt)
    assert told.num_reused == 0
    assert why in str(told)


def test_a_step_of_a_single_row_updates_its_states_in_place():
    # XLA sees one row as one slice, and would copy the pool rather than read before it writes.
    sequence_runner = hybrid_engine().sequence_runner
    shape = StepSpec(1, 1, (LONGEST // PAGE,), decode=True)
    report = sequence_runner.runner.program(shape).report
    assert report.problems == ()
    assert report.alias_bytes == report.cache_bytes


def test_a_row_may_not_read_what_another_row_writes(monkeypatch):
    # The order of reads and writes within a step is not defined.
    sequence_runner = hybrid_engine().sequence_runner
    for number in range(2):
        sequence_runner.allocator.open(number)
        sequence_runner.allocator.reserve(number, 4)
    rows = [Row(number, [5], 3, SamplingParams(temperature=0.0)) for number in range(2)]
    shape = StepSpec(2, 2, (LONGEST // PAGE,), decode=True)
    sequence_runner.packer.pack(shape, rows, sequence_runner.allocator)
    states = sequence_runner.allocator.states
    first, second = (states(number, "mamba2")[1] for number in range(2))

    def give(*pairs):
        """Lets the rows read and write these states of the recurrent group."""
        monkeypatch.setattr(
            sequence_runner.allocator,
            "states",
            lambda number, group: pairs[number] if group == "mamba2" else states(number, group),
        )

    give((second, first), (second, second))
    with pytest.raises(ValueError, match=r"mamba2.*read the states"):
        sequence_runner.packer.pack(shape, rows, sequence_runner.allocator)
    give((first, second), (second, second))
    with pytest.raises(ValueError, match=r"write a state twice"):
        sequence_runner.packer.pack(shape, rows, sequence_runner.allocator)


@pytest.mark.parametrize(
    ("given", "trimmed", "left"),
    [
        # (computed, goal, count before), count after trimming, what aligning leaves.
        ([(0, 30, 30)], [30], [30]),
        ([(0, 30, 22)], [22], [16]),
        ([(16, 30, 14)], [13], [8]),
        # The first gets on: to the next multiple if the budget allows, else as far as it does.
        ([(0, 30, 20)], [7], [8]),
        ([(0, 30, 5)], [5], [5]),
        ([(3, 30, 20)], [2], [5]),
        # The others wait rather than be cut elsewhere.
        ([(0, 9, 9), (0, 30, 21)], [9, 7], [9]),
        ([(0, 9, 9), (0, 30, 21)], [9, 15], [9, 8]),
    ],
)
def test_a_prompt_that_goes_on_later_ends_on_the_grid(given, trimmed, left):
    sequences = [
        RequestState(request=request_of([1]), number=number, tokens=[1] * goal)
        for number, (_, goal, _) in enumerate(given)
    ]
    for sequence, (computed, *_) in zip(sequences, given, strict=True):
        sequence.pages = SimpleNamespace(computed=computed)
    before = [(one, count) for one, (_, _, count) in zip(sequences, given, strict=True)]
    wanted = list(zip(sequences, trimmed, strict=True))
    align(wanted, before, 8)
    assert [count for _, count in wanted] == left
    align(wanted, before, 1)
    assert [count for _, count in wanted] == left
