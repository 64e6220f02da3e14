"""Logits processors in the engine: in every schedule a request has the tokens that it has alone, by a NumPy reference.

The processor `digest` makes each token a number computed from all tokens before it, so a single wrong, missing or
shifted id in a row's history changes its text.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.warm_up import compile_all, declare_served
from jaxkv.generation import generate
from jaxkv.programs.manifest import Programs, compile_count
from jaxkv.runner.packer import Packer
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.features import Features
from jaxkv.sampling.sample import gumbel_noise
from jaxkv.step import step as step_module
from tests.defects import Defects, wrap
from tests.engine.engines import (
    LONGEST,
    OTHER_HOLDER,
    PAGE,
    ROWS,
    VOCAB,
    assert_idle,
    engine_for,
    model_of,
    request_of,
)
from tests.engine.steps.test_multi_step import watch
from tests.models.driver import Driver
from tests.sampling import oracle
from tests.sampling.processors import FUNCTIONS, processed, registered
from tests.sampling.rows import DRAWS, batch_of

KNOWN = registered(VOCAB, LONGEST)
STEM = [5, 9, 5, 1, 7, 7, 2, 30, 4, 4, 11, 60, 3, 8, 8, 8, 19, 2, 6, 33]
WISHES = (
    {"logits_processors": {"digest": {}}},
    {},
    {"logits_processors": {"digest": {"factor": 3}}, "temperature": 0.9},
    {"logits_processors": {"no_repeat_ngram": {"size": 2}, "scaled": {"scale": 0.5}}},
    {"logits_processors": {"allowed_range": {"low": 20, "high": 40}}, "repetition_penalty": 1.3},
    {
        "logits_processors": {"digest": {"factor": 1}, "min_new_tokens": {"least": 4}},
        "logit_bias": {7: 3.0},
        "temperature": 1.1,
        "logprobs": 2,
    },
    {"temperature": 0.8, "presence_penalty": 0.5},
)


def requests(wishes=WISHES, number=16):
    """Prompts that share beginnings, with every wish."""
    made = []
    for at in range(number):
        prompt = [*STEM[: (0, 8, 16, 20)[at % 4]], at, *STEM[: at % 5]]
        most = 6 + 3 * at % 17
        wish = wishes[at % len(wishes)]
        made.append(request_of(prompt, seed=at, max_tokens=most, stop_ids=(13, 19 + at), **wish))
    return made


@cache
def alone(request):
    """The tokens of one request by our float32 forward over its whole text at each step, and NumPy."""
    params, tokens = request.params, list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        driver = Driver(*model_of("plain"), rows=1, max_tokens=LONGEST)
        [logits] = driver.prefill([tokens])
        output = tokens[len(request.prompt) :]
        values = oracle.adjusted(logits[-1], params, prompt=request.prompt, output=output)
        values = processed(values, params.logits_processors, tokens, len(request.prompt))
        noise = 0.0
        if params.temperature:
            batch = batch_of([SamplingParams(seed=request.seed)], DRAWS)
            noise = _noise(batch, len(tokens))
        tokens.append(oracle.choose(values, params, noise))
        if tokens[-1] in request.stop_ids:
            break
    return tuple(tokens[len(request.prompt) :])


@jax.jit
def _noise_of(batch, position):
    return gumbel_noise(batch, position[None], VOCAB)[0]


def _noise(batch, position):
    return np.asarray(_noise_of(batch, jnp.int32(position)), np.float64)


SEEN = Counter()


def play(engine, draw, pool):
    """Serves requests that come one by one or as samples of one prompt, with pages and caches taken away."""
    allocator, steps, made = engine.sequence_runner.allocator, count(), []
    allocator.open(OTHER_HOLDER)
    allocator.reserve(OTHER_HOLDER, draw.choice([0, ROWS * LONGEST // PAGE - 10]) * PAGE)
    lost = draw.choice([None, 3, 9])

    def step():
        if next(steps) == lost:
            engine.runner.owner.poison("injected")
            SEEN["lost"] += 1
        engine.step()

    for _ in range(draw.randrange(2, 7)):
        request = draw.choice(pool)
        samples = [replace(request, seed=request.seed + at) for at in range(draw.choice([1, 1, 3]))]
        SEEN["forked"] += len(samples) > 1
        made += (begun := engine.add(samples))
        for _ in range(draw.randrange(4)):
            step()
        if draw.random() < 0.2:
            engine.abort(begun[0])
    while any(sequence.status != FINISHED for sequence in made):
        step()
    for sequence in made:
        wanted, got = alone(sequence.request), tuple(sequence.token_ids)
        if sequence.reason == "abort":
            wanted = wanted[: len(got)]
        assert got == wanted, f"{got} were generated for {sequence.request}, alone it has {wanted}"
        SEEN["cached"] += bool(sequence.cached)
        SEEN["preempted"] += sequence.preemptions > 0
    SEEN["reused"] += len(made) > ROWS
    assert_idle(engine)


def play_all(options, games, *, pool=None, programs=None):
    """Plays several games on one engine, so that entries, pages and prefixes of earlier ones are found."""
    options = {"most_rebuilds": 10**9, "idle_checks": False, "programs": programs} | options
    engine = engine_for(processors=KNOWN, **options)
    sent = watch(engine)
    for game in range(games):
        play(engine, random.Random(game), pool or requests())
    SEEN["several"] += max(sent) > 1


def test_every_schedule_gives_a_request_the_tokens_that_it_has_alone():
    """Chunks, hits, forks, preemptions, aborts, lost caches, neighbours and reused entries, in one program."""
    SEEN.clear()
    play_all({"pinned_shapes": True}, 4)
    assert SEEN.keys() >= {"cached", "preempted", "forked", "lost", "reused"}, SEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wishes"),
    [
        ({"pinned_shapes": True}, WISHES),
        ({"steps_per_launch": 4}, WISHES),
        ({"steps_per_launch": 4}, WISHES[:1]),
        ({"overlap": False}, WISHES),
        ({}, WISHES),
    ],
    ids=["one program", "several steps", "several greedy steps", "in turn", "as served"],
)
def test_many_schedules_give_a_request_the_tokens_that_it_has_alone(options, wishes):
    SEEN.clear()
    play_all(options, 40, pool=requests(wishes))
    assert min(SEEN[name] for name in ("cached", "preempted", "forked", "lost", "reused")) > 5, SEEN
    if "steps_per_launch" in options:
        assert SEEN["several"]


DEFECTS = Defects()
WRONG = r"alone it has"


@DEFECTS(AssertionError, WRONG)
def an_entry_keeps_the_history_of_its_former_owner(patch):
    patch.setattr(Features, "needs_admission", property(lambda self: self.penalties))


@DEFECTS(AssertionError, WRONG)
def a_returning_request_is_admitted_without_what_it_generated(patch):
    wrap(
        patch,
        SequenceRunner,
        "admit",
        lambda admit: lambda self, rows, generated=(): admit(self, rows, [()] * len(generated)),
    )


@DEFECTS(AssertionError, WRONG)
def every_row_is_marked_as_one_with_processors(patch):
    """So rows without any take those of an entry's former owner."""

    def make(fill):
        def filled(self, fields, rows, entries):
            fill(self, fields, rows, entries)
            fields["processed"][:] = 1

        return filled

    wrap(patch, Packer, "_fill_sampling", make)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_seeded_defect_changes_a_token(monkeypatch, name):
    DEFECTS[name].assert_found(monkeypatch, lambda: play_all({"pinned_shapes": True}, 30))


@pytest.mark.slow
def test_a_token_written_one_place_late_by_several_steps_is_found(monkeypatch):
    wrap(
        monkeypatch,
        step_module,
        "write_choices",
        lambda write: lambda choices, batch, tokens, at: write(choices, batch, tokens, at + 1),
    )
    with pytest.raises(AssertionError, match=WRONG):
        play_all({"steps_per_launch": 4}, 20, programs=Programs())


@pytest.mark.slow
def test_rows_without_processors_keep_every_bit_beside_rows_with_them():
    plain = request_of(STEM[:9], seed=3, max_tokens=12, temperature=0.9, logprobs=2)
    engine = engine_for(processors=KNOWN, pinned_shapes=True, prefix_cache=False)
    engine.run(first := engine.add([plain]))
    others = [sequence for one in requests()[:3] for sequence in engine.add([one])]
    engine.run([*(again := engine.add([plain])), *others])
    without = engine_for(pinned_shapes=True, prefix_cache=False)
    without.run(bare := without.add([plain]))
    assert first[0].logprobs == again[0].logprobs
    assert first[0].token_ids == again[0].token_ids == bare[0].token_ids


def test_a_request_whose_processor_makes_infinities_fails_alone():
    engine = engine_for(processors=KNOWN, pinned_shapes=True)
    endless = {"logits_processors": {"scaled": {"scale": float("inf")}}}
    [bad] = engine.add([request_of([1, 2, 3], **endless)])
    [good] = engine.add([requests()[0]])
    engine.run([bad, good])
    assert bad.reason == "error"
    assert tuple(good.token_ids) == alone(good.request)
    assert_idle(engine)


@pytest.mark.slow
def test_a_strict_engine_serves_other_names_arguments_and_mixtures_without_compiling():
    engine = engine_for(processors=KNOWN, pinned_shapes=True, programs=Programs(strict=True))
    example = request_of(range(12), max_tokens=8, **WISHES[0])
    compile_all(engine.runner, declare_served(engine, example, 3))
    before = compile_count()
    for wish in WISHES:
        engine.run(served := engine.add([request_of([4, 1, 4], max_tokens=5, **wish)]))
        assert tuple(served[0].token_ids) == alone(served[0].request)
    engine.run([one for wish in WISHES for one in engine.add([request_of([4], **wish)])])
    assert compile_count() == before
    with pytest.raises(ValueError, match="'other', which is not registered"):
        engine.add([request_of([1], logits_processors={"other": {}})])
    assert_idle(engine)


@pytest.mark.slow
def test_generate_has_the_tokens_of_the_reference_and_compiles_once_for_all_arguments():
    model, params = model_of("plain")
    pool = requests(WISHES[:2] * 2, number=4)

    def run(pool):
        wishes = [
            replace(one.params, seed=one.seed, stop_token_ids=one.stop_ids, max_tokens=20)
            for one in pool
        ]
        prompts = [one.prompt for one in pool]
        out = generate(params, model, prompts, sampling=wishes, logits_processors=FUNCTIONS)
        return [
            tuple(row[:length])
            for row, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)
        ]

    def wanted(pool):
        return [alone(replace(one, params=replace(one.params, max_tokens=20))) for one in pool]

    assert run(pool) == wanted(pool)
    before = compile_count()
    other = {"no_repeat_ngram": {"size": 1}, "allowed_range": {"low": 3}}
    pool = [replace(one, params=replace(one.params, logits_processors=other)) for one in pool]
    assert run(pool) == wanted(pool)
    assert compile_count() == before
    with pytest.raises(ValueError, match="'digests', which is not registered"):
        generate(
            params,
            model,
            [[1]],
            sampling=SamplingParams(logits_processors={"digests": {}}),
            logits_processors=FUNCTIONS,
        )
